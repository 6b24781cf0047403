"""SFedKD: models left behind in the previous round teach the current one, each part weighted by label discrepancy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedkeep.algorithms.sequential.taught_sequence import TaughtSequence
from fedkeep.losses import PerTeacher, WeightRule
from fedkeep.losses.discrepancy import Smoothing, discrepancies, teacher_weights
from fedkeep.options import option


@dataclass(frozen=True)
class SFedKD(TaughtSequence):
    """Sequential federated learning with discrepancy-aware multi-teacher knowledge distillation.

    The loss of student S with teachers k (eqs. 3 to 5, written with the two parts of `fedkeep.losses.decoupled`):

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

    w_nontarget: float = option(1.0, "weight of the non-target part (gamma in the paper)", low=0.0)
    w_target: float = option(3.0, "weight of the target part (beta in the paper)", low=0.0)
    g: Literal["far", "uniform"] = option("far", "non-target weights: by discrepancy, or 1/K (ablation)")
    h: Literal["near", "uniform"] = option("near", "target weights: by inverse discrepancy, or 1/K (ablation)")
    kl_dir: Literal["teacher_first", "student_first"] = option("teacher_first", "order of the metric's arguments")
    smoothing: Smoothing = option("both", "what is smoothed before a KL divergence")
    smoothing_amount: float = option(1e-4, "how much (for count_laplace: examples per class)", low=1e-12)
    epsilon: float = option(1e-4, "added to distances before they are inverted", low=1e-12)
    g_zero: Literal["uniform", "off"] = option("uniform", "non-target weights when all distances are zero")

    def rule(self, student: str, teachers: list[str], counts: dict[str, Tensor]) -> WeightRule:
        distances = discrepancies(
            torch.stack([counts[name] for name in teachers]),
            counts[student],
            self.metric,
            self.smoothing,
            self.smoothing_amount,
            self.kl_dir == "student_first",
        )
        g, h = teacher_weights(distances, self.epsilon, self.g_zero)
        uniform = torch.full_like(g, 1 / len(teachers))
        target = self.w_target * (h if self.h == "near" else uniform)
        nontarget = self.w_nontarget * (g if self.g == "far" else uniform)
        return PerTeacher(target.float(), nontarget.float())
