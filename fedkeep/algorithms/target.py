"""TARGET: the server inverts its old model into images, on which that model teaches the old classes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from fedkeep.algorithms.incremental import CESlice, cross_entropy, old_classes
from fedkeep.algorithms.synthetic import Made, WithSynthetic
from fedkeep.interface import Client, Data, Server
from fedkeep.losses import Objective
from fedkeep.options import option
from fedkeep.generation.inversion import LatentInverter

RELEASED = 10  # batches that the released code makes for CIFAR-100, all within its warm-up


@dataclass(frozen=True)
class TARGET(WithSynthetic[Made]):
    """Exemplar-free distillation: CE[new, own examples] + kd * KD[old, synthetic images], taught by the last global
    model of the task before, from which the server has made the images (see `fedkeep.generation.LatentInverter`).

    KD is the cross-entropy with the teacher's probabilities among the old classes, at temperature 2 and without tau^2.
    The first task is FedAvg's, bit for bit. What clients get once a task are ``nums`` images and, unless images are
    augmented at random, the teacher's answers in place of the teacher.

    As in the code, a pass over the examples ends with the shorter of two: the client's examples in batches of the
    recipe's size, and the images in batches such that an average client would come to the end of ``nums`` at the same
    time. Here that average is over the clients of the task before's last round.

    The paper makes images until there are ``nums``, challenged by a student that learns from them. The released code,
    with 10 batches and a warm-up of 20, never trains that student and has 2,560 images, but sizes batches as if it had
    all: ``compat=repo``. That code keeps a cosine schedule for the student's learning rate, which is left out: it would
    fall by 6 % here. Its options ``act``, ``reset_bn`` and ``reset_l0`` do nothing as it is released, and are left out
    too. For other data sets than CIFAR-100 it has g_steps=50, lr_g=2e-4, bn=0.1, oh=0.1, T=5 and is_maml=false.
    """

    title = "TARGET"
    paper = "Zhang et al., 2023: TARGET, federated class-continual learning via exemplar-free distillation"

    pass_ends = "shortest"

    kd: float = option(25.0, "weight of what the old model says about synthetic images", low=0.0)
    compat: Literal["paper", "repo"] = option("paper", "nums images after a warm-up, or ten batches and no student")
    ce_slice: CESlice = option("new", "labels among the task's classes, or among all that were seen")
    lr_z: float = option(0.01, "learning rate of the latent vectors (Adam)", low=0.0)
    is_maml: bool = option(True, "meta update of the generator: by gradients (MAML), or towards its copy (Reptile)")

    def images(self, server: Server[Made]) -> Data:
        inverter = LatentInverter(self, self.problem(server), self.lr_z, self.is_maml)
        if self.compat == "repo":
            return inverter.make(RELEASED, spared=0)
        return inverter.make(self.batches, spared=self.warmup)

    def lesson(self, server: Server[Made]) -> Objective:
        return old_classes(server.model if server.old else {}, self.kd, self.tau, on=1)

    def batch(self, server: Server[Made]) -> int:
        steps = ceil(server.state.examples / server.training.batch_size)
        return max(2, self.nums // max(1, steps))  # batch norm cannot learn from one

    def labels(self, client: Client[Any]) -> Objective:
        return cross_entropy(client, self.ce_slice)
