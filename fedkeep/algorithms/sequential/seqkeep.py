"""SeqKeep (ours): a sequence whose moving average is what is served, and what teaches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from fedkeep.aggregation.mean import moved
from fedkeep.algorithms.sequential.taught import Taught
from fedkeep.interface import Cohort, Server
from fedkeep.losses import PerTeacher
from fedkeep.models import Weights
from fedkeep.models.weights import mean
from fedkeep.options import option


@dataclass
class Average:
    """What the server keeps: the moving average; empty before the first round has ended."""

    model: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class SeqKeep(Taught[Average]):
    """Sequential federated learning that keeps, serves and is taught by the moving average of its graduates.

    The model that the last client of a round leaves has forgotten part of what the clients before it taught, so it
    swings from round to round. The mean of a round's graduates (the models that its clients sent on) does not, and the
    server has seen them all: A <- decay A + (1 - decay) mean. A is what is evaluated and exported. It also is the only
    teacher of the next round, CE + s (w_nontarget NT + w_target TC), for two models sent down per hop instead of one.

    In none of the papers; docs/averaged-sequences.md shows what was tried.
    """

    title = "SeqKeep"
    paper = "FedKeep, 2026: docs/averaged-sequences.md"

    decay: float = option(0.8, "what the average keeps of itself each round", low=0.0, high=1.0)
    w_nontarget: float = option(3.0, "weight of the non-target part of what the average says", low=0.0)
    w_target: float = option(0.0, "weight of the target part", low=0.0)
    tau: float = option(1.0, "softmax temperature", low=1e-3)
    start: Literal["last", "average"] = option("last", "where a round's chain starts: the last model, or the average")
    serve: Literal["average", "last"] = option("average", "what is evaluated and exported")

    def round(self, server: Server[Average], cohort: Cohort) -> None:
        kept = server.state.model
        if kept and (self.w_nontarget or self.w_target):
            rule = PerTeacher(torch.tensor([self.w_target]), torch.tensor([self.w_nontarget]))
            cohort.start(self.prepare, [kept], rule)
        if kept and self.start == "average":
            server.model = kept
        graduates = []
        for client in cohort:
            if reply := client.ask(self.train, server.model):
                server.model = reply.model
                graduates += [reply.model] * bool(reply.steps)
        if graduates:
            server.state.model = moved(kept, mean(graduates), self.decay)
        if self.serve == "average" and server.state.model:
            server.served = server.state.model
