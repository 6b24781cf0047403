"""pfl-research: ``with_pfl.py WORK``, alone or under torchrun with several processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import count

import numpy as np
import torch
from networks import build, by_name
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from turns import Turns
from work import Work


class Learner(nn.Module):
    """A network with the two methods that pfl's model asks for."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return nn.functional.cross_entropy(self.network(images), labels)

    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Weighted]:
        """Return nothing worth having; nobody evaluates."""
        return {"examples": Weighted(len(labels), 1)}


class WaitForTurn(TrainingProcessCallback):
    """Stops between rounds until it is this peer's turn; the other processes wait for the first."""

    def __init__(self, show: Callable[[], dict[str, np.ndarray]] = dict) -> None:
        self.distributed = torch.distributed.is_initialized()
        self.first = not self.distributed or torch.distributed.get_rank() == 0
        self.turns = Turns(lambda: (show(), self.rounds)) if self.first else None
        self.rounds = 0

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """Wait for the first turn."""
        self._together(self.turns and self.turns.begin("pfl", "torch"))
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """End the round and wait for the next turn."""
        self.rounds += 1
        return not self._together(self.turns and self.turns.done()), Metrics()

    def _together(self, going: bool | None) -> bool:
        if not self.distributed:
            return bool(going)
        shared = torch.tensor(int(bool(going)))
        torch.distributed.broadcast(shared, 0)
        return bool(shared)


def main() -> None:
    """Play rounds when asked."""
    work = Work(sys.argv[1])
    torch.set_num_threads(1)
    set_framework_module(pytorch_ops)
    visits = count()  # a "user" is a visit: a round and a place in its cohort, in the order of the work

    def examples_of(visit: int) -> Dataset:
        images, labels = work.one_epoch(visit // work.cohort + 1, visit % work.cohort)
        return Dataset(raw_data=[torch.from_numpy(images), torch.from_numpy(labels)])

    learner = Learner(build(work))
    optimiser = partial(torch.optim.SGD, momentum=work.momentum, weight_decay=work.weight_decay)
    model = PyTorchModel(learner, optimiser, torch.optim.SGD(learner.parameters(), lr=1.0))
    training = FederatedDataset(examples_of, lambda: next(visits))
    turn = WaitForTurn(lambda: by_name(learner.network, work))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=work.rounds,
            evaluation_frequency=work.rounds + 1,
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=training, val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch_size
        ),
        callbacks=[turn],
    )


if __name__ == "__main__":
    main()
