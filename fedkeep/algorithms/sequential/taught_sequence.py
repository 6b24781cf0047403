"""A sequence that is taught: models left behind in the previous round teach the current one.

SFedKD and the distillation baselines of its ablation share everything but the rule that weighs the teachers.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedkeep.algorithms.sequential.taught import Taught
from fedkeep.interface import Cohort, Server, each
from fedkeep.interface.steps import label_counts
from fedkeep.losses import WeightRule
from fedkeep.losses.discrepancy import Metric, proportions, select_complementary
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass
class Kept:
    """What the server keeps: the last round's graduates, in the order they trained, and everybody's label counts."""

    graduates: dict[str, Weights] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TaughtSequence(Taught[Kept]):
    """Sequential federated learning with teachers (SFedKD's algorithms 1 and 2); `rule` weighs them.

    Teachers are models of the previous round, each caught right after its client had trained, chosen by greedy
    complementary selection. The first round has none. With ``teachers=0`` this is FedSeq, bit for bit.
    """

    teachers: int = option(5, "models of the previous round that teach; 0 is FedSeq", low=0)
    metric: Metric = option("kl", "discrepancy of label distributions")
    selection: Literal["greedy", "random"] = option("greedy", "how teachers are chosen among the last round's clients")
    agg: Literal["normalised", "sum"] = option("normalised", "what greedy selection compares with uniform shares")
    exclude_self: bool = option(False, "leave a client's own earlier model out of its teachers")

    label_counts = label_counts

    @abstractmethod
    def rule(self, student: str, teachers: list[str], counts: dict[str, Tensor]) -> WeightRule:
        """Return how a student weighs its teachers (at least one), from everybody's label counts [classes]."""

    def round(self, server: Server[Kept], cohort: Cohort) -> None:
        kept = server.state
        if self.teachers:
            kept.counts |= cohort.without(kept.counts).ask(self.label_counts)
            chosen = self.select(kept, server)
            models: dict[str, list[Weights]] = {}
            rules: dict[str, WeightRule | None] = {}
            for student in (client.id for client in cohort if client.id in kept.counts):
                names = [name for name in chosen if not (self.exclude_self and name == student)]
                models[student] = [kept.graduates[name] for name in names]
                rules[student] = self.rule(student, names, kept.counts) if names else None
            cohort.start(self.prepare, each(models), each(rules))
        graduates: dict[str, Weights] = {}
        for client in cohort:
            if reply := client.ask(self.train, server.model):
                server.model = reply.model
                if self.teachers and reply.examples:
                    graduates[client.id] = reply.model
        kept.graduates = graduates  # only now: this round's teachers are the last round's graduates throughout

    def select(self, kept: Kept, server: Server[Kept]) -> list[str]:
        """Choose the round's teachers (SFedKD's algorithm 1, or the random baseline of its table 3)."""
        candidates = list(kept.graduates)
        if self.selection == "random":
            order = torch.randperm(len(candidates), generator=server.rng("teachers")).tolist()
            return [candidates[i] for i in order[: self.teachers]]
        shares = {name: proportions(kept.counts[name]) for name in candidates}
        return select_complementary(candidates, shares, self.teachers, self.metric, self.agg)
