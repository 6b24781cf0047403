"""SFedKD: models left behind in the previous round teach the current one, each part weighted by label discrepancy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, each, on_client
from fedkeep.interface.steps import label_counts
from fedkeep.models import Weights
from fedkeep.objectives import NOTHING, CrossEntropy, Distillation, Objective, PerTeacher
from fedkeep.objectives.discrepancy import (
    Metric,
    Smoothing,
    discrepancies,
    proportions,
    select_complementary,
    teacher_weights,
)
from fedkeep.objectives.distillation import Scale
from fedkeep.options import option


@dataclass
class Kept:
    """What the server keeps: the last round's graduates, in the order they trained, and everybody's label counts."""

    graduates: dict[str, Weights] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Prepared:
    """What a client keeps from `prepare` to `train`."""

    lesson: Objective = NOTHING


@dataclass(frozen=True)
class SFedKD(Algorithm[Kept, Prepared]):
    """Sequential federated learning with discrepancy-aware multi-teacher knowledge distillation.

    The loss of student S with teachers k (eqs. 3 to 5, written with the two parts of `fedkeep.objectives.decoupled`):

        CE + s * (w_nontarget * sum_k g_k NT_k + w_target * sum_k h_k TC_k)
        d_k = d(D_k, D_S)
        g_k = d_k / sum_j d_j
        h_k = (d_k + epsilon)^-1 / sum_j (d_j + epsilon)^-1

    Teachers are models of the previous round, each caught right after its client had trained, chosen by greedy
    complementary selection (algorithm 1). The first round has none. With ``teachers=0`` this is FedSeq, bit for bit.

    What the paper leaves open, and what is done here:

    - the temperature has no value and tau^2 is not printed: 4 with tau^2, the setting of decoupled distillation;
    - KL(D_k || D_S) is infinite where the student lacks a class: both are smoothed by 1e-4;
    - the direction of d is not said: teacher first, as written in d(D^T, D^S);
    - the sum of selected distributions is compared with a distribution: it is normalised first (no effect for KL);
    - all distances zero leave g undefined: uniform;
    - nobody is said to hold D: each client uploads its label counts once, and the server learns them.
    """

    title = "SFedKD"
    paper = "Xu et al., 2025: SFedKD, arXiv 2507.08508"
    schedule = "sequential"

    teachers: int = option(5, "models of the previous round that teach; 0 is FedSeq", low=0)
    w_nontarget: float = option(1.0, "weight of the non-target part (gamma in the paper)", low=0.0)
    w_target: float = option(3.0, "weight of the target part (beta in the paper)", low=0.0)
    tau: float = option(4.0, "softmax temperature; the paper gives none", low=1e-3)
    kd_scale: Scale = option("tau2", "whether the distillation is multiplied by tau squared")
    g: Literal["far", "uniform"] = option("far", "non-target weights: by discrepancy, or 1/K (ablation)")
    h: Literal["near", "uniform"] = option("near", "target weights: by inverse discrepancy, or 1/K (ablation)")
    metric: Metric = option("kl", "discrepancy of label distributions")
    kl_dir: Literal["teacher_first", "student_first"] = option("teacher_first", "order of the arguments of the metric")
    smoothing: Smoothing = option("both", "what is smoothed before a KL divergence")
    smoothing_amount: float = option(1e-4, "how much (for count_laplace: examples per class)", low=1e-12)
    epsilon: float = option(1e-4, "added to distances before they are inverted", low=1e-12)
    g_zero: Literal["uniform", "off"] = option("uniform", "non-target weights when all distances are zero")
    selection: Literal["greedy", "random"] = option("greedy", "how teachers are chosen among the last round's clients")
    agg: Literal["normalised", "sum"] = option(
        "normalised", "what greedy selection compares with the uniform distribution"
    )
    exclude_self: bool = option(False, "leave a client's own earlier model out of its teachers")

    label_counts = label_counts

    def round(self, server: Server[Kept], cohort: Cohort) -> None:
        kept = server.state
        if self.teachers:
            kept.counts |= cohort.without(kept.counts).ask(self.label_counts)
            chosen = self.select(kept, server)
            plans = {client.id: self.plan(client.id, chosen, kept) for client in cohort if client.id in kept.counts}
            cohort.start(self.prepare, each(plans))
        graduates: dict[str, Weights] = {}
        for client in cohort:
            if reply := client.ask(self.train, server.model):
                server.model = reply.model
                if self.teachers and reply.examples:
                    graduates[client.id] = reply.model
        kept.graduates = graduates  # only now: this round's teachers are the last round's graduates throughout

    def select(self, kept: Kept, server: Server[Kept]) -> list[str]:
        """Choose the round's teachers (algorithm 1, or the random baseline of table 3)."""
        candidates = list(kept.graduates)
        if self.selection == "random":
            order = torch.randperm(len(candidates), generator=server.rng("teachers")).tolist()
            return [candidates[i] for i in order[: self.teachers]]
        shares = {name: proportions(kept.counts[name]) for name in candidates}
        return select_complementary(candidates, shares, self.teachers, self.metric, self.agg)

    def plan(self, student: str, chosen: list[str], kept: Kept) -> tuple[list[Weights], Tensor, Tensor]:
        """Return a student's teachers and their weights (target, nontarget), each [k]."""
        names = [name for name in chosen if not (self.exclude_self and name == student)]
        if not names:
            return [], torch.zeros(0), torch.zeros(0)
        distances = discrepancies(
            torch.stack([kept.counts[name] for name in names]),
            kept.counts[student],
            self.metric,
            self.smoothing,
            self.smoothing_amount,
            self.kl_dir == "student_first",
        )
        g, h = teacher_weights(distances, self.epsilon, self.g_zero)
        uniform = torch.full_like(g, 1 / len(names))
        target = self.w_target * (h if self.h == "near" else uniform)
        nontarget = self.w_nontarget * (g if self.g == "far" else uniform)
        return [kept.graduates[name] for name in names], target.float(), nontarget.float()

    @on_client
    def prepare(self, client: Client[Prepared], plan: tuple[list[Weights], Tensor, Tensor]) -> None:
        """Hear the teachers, while waiting for the model."""
        teachers, target, nontarget = plan
        lesson = Distillation(tuple(teachers), PerTeacher(target, nontarget), self.tau, self.kd_scale)
        client.state.lesson = client.settle(lesson)

    @on_client
    def train(self, client: Client[Prepared], model: Weights) -> Fit:
        """Train the model that the previous client left, on labels and on what the teachers said."""
        lesson, client.state.lesson = client.state.lesson, NOTHING
        return client.fit(model, CrossEntropy() + lesson)
