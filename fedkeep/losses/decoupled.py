"""The one distillation kernel: target part and non-target part, several teachers folded into one.

With a label y, temperature tau and p = softmax(z / tau), split a distribution into p_y, q_y = 1 - p_y, and p~, the
softmax over the other classes. The Kullback-Leibler divergence from teacher T to student S then falls apart (Zhao et
al., 2022, "Decoupled knowledge distillation", eq. 5):

    KL(p^T || p^S) = TC + q_y^T NT,   TC = p_y^T ln(p_y^T / p_y^S) + q_y^T ln(q_y^T / q_y^S)
                                      NT = sum_{c != y} p~_c^T ln(p~_c^T / p~_c^S)

and every distillation loss of this library is  s * sum_k (a_k TC_k + b_k NT_k)  for teachers k, with weights per
example. Since TC and NT are linear in the student's log-probabilities, teachers fold into sums of their probabilities:
three columns hold everything that any number of teachers has to say, with the same gradient and the same value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def raised(logits: Tensor) -> Tensor:
    """Return logits of half precision in float32, and others as they are: softmaxes need the digits."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


@dataclass(frozen=True, eq=False)
class LogSplit:
    """Log-probabilities of a decoupled distribution: ``target`` ln p_y and ``rest`` ln q_y, [..., b]; ``others`` ln p~,
    [..., b, classes], with 0 at the target."""

    target: Tensor
    rest: Tensor
    others: Tensor


def log_split(logits: Tensor, labels: Tensor, tau: float) -> LogSplit:
    """Split logits [..., b, classes] at labels [b], at temperature tau.

    Everything stays in log space: 1 - p_y or the logarithm of a summed probability would give infinities once p_y
    underflows. The target is removed before the log-sum-exp, not masked by a large number. Half precision is raised to
    float32.

    Raises
    ------
    ValueError
        With fewer than two classes: there is nothing but the target then.
    """
    if logits.shape[-1] < 2:
        raise ValueError("decoupled distillation needs at least two classes")
    scaled = raised(logits) / tau
    is_target = torch.arange(scaled.shape[-1], device=labels.device) == labels.unsqueeze(-1)
    everything = scaled.logsumexp(-1)
    rest = scaled.masked_fill(is_target, -torch.inf).logsumexp(-1)
    target = scaled.gather(-1, labels.expand(scaled.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    others = (scaled - rest.unsqueeze(-1)).masked_fill(is_target, 0.0)
    return LogSplit(target - everything, rest - everything, others)


@dataclass(frozen=True, eq=False)
class Folded:
    """What weighted teachers say about n examples.

    Attributes
    ----------
    target : [n, 2], sum over teachers of a_k (p_y, q_y).
    others : [n, classes], sum over teachers of b_k p~, with 0 at the target.
    constant : [n], the teachers' own (negative) entropies, so that the loss keeps its exact value.
    """

    target: Tensor
    others: Tensor
    constant: Tensor


@torch.no_grad()
def fold(teachers: Tensor, labels: Tensor, target: Tensor, nontarget: Tensor, tau: float) -> Folded:
    """Fold teachers' logits [k, n, classes] with weights a = ``target`` and b = ``nontarget``, both [k, n].

    Teachers are frozen: no gradient flows into their logits or weights. Folding is exact: sum_k b_k NT_k differs from
    (sum_k b_k) KL(mean_b p~^T || p~^S) by a constant of the student.
    """
    said = log_split(teachers, labels, tau)
    p, q = said.target.exp(), said.rest.exp()
    spread = said.others.exp().scatter(-1, labels.expand(said.target.shape).unsqueeze(-1), 0.0)
    entropies = target * (p * said.target + q * said.rest) + nontarget * (spread * said.others).sum(-1)
    return Folded(
        target=torch.stack(((target * p).sum(0), (target * q).sum(0)), dim=-1),
        others=(nontarget.unsqueeze(-1) * spread).sum(0),
        constant=entropies.sum(0),
    )


def decoupled_loss(student: Tensor, labels: Tensor, folded: Folded, tau: float) -> Tensor:
    """Return sum_k (a_k TC_k + b_k NT_k) for each example, [b], from the student's logits [b, classes]."""
    own = log_split(student, labels, tau)
    target = folded.target[:, 0] * own.target + folded.target[:, 1] * own.rest
    return folded.constant - target - (folded.others * own.others).sum(-1)
