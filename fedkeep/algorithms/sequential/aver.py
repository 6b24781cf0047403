"""AVER, EBKD and CA-MKD: what SFedKD's teachers say as a whole, weighted alike, by entropy, or by being right.

"FedSeq + X" of SFedKD's table 2: teachers, their number, selection and schedule are SFedKD's; only the loss differs.
The paper gives neither weight nor temperature: 1 and 4, as in the code of CA-MKD.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedkeep.algorithms.sequential.taught_sequence import TaughtSequence
from fedkeep.losses import WeightRule, Whole, WholeByConfidence, WholeByEntropy
from fedkeep.options import option


@dataclass(frozen=True)
class AVER(TaughtSequence):
    """Averaged distillation: CE + w_full * 1/K sum_k tau^2 KL(p^k || p^S)."""

    paper = "You et al., 2017: Learning from multiple teacher networks"

    w_full: float = option(1.0, "weight of the distillation", low=0.0)

    def rule(self, student: str, teachers: list[str], counts: dict[str, Tensor]) -> WeightRule:
        return Whole(self.w_full)


@dataclass(frozen=True)
class EBKD(AVER):
    """Entropy-based distillation: teachers that are sure of an example count more (see `WholeByEntropy`)."""

    paper = "Kwon et al., 2020: Adaptive knowledge distillation based on entropy"

    def rule(self, student: str, teachers: list[str], counts: dict[str, Tensor]) -> WeightRule:
        return WholeByEntropy(self.w_full)


@dataclass(frozen=True)
class CAMKD(AVER):
    """Confidence-aware distillation: teachers that are right about an example count more (see `WholeByConfidence`).

    The part on logits, which is all that its table-2 use can mean for clients that see other classes.
    """

    title = "CA-MKD"
    paper = "Zhang et al., 2022: Confidence-aware multi-teacher knowledge distillation"

    extra_division: bool = option(False, "divide by the number of teachers once more, as the published code does")

    def rule(self, student: str, teachers: list[str], counts: dict[str, Tensor]) -> WeightRule:
        return WholeByConfidence(self.w_full, self.extra_division)
