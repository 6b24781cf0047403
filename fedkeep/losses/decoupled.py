"""The one distillation kernel: target part and non-target part, with several teachers merged into one.

With a label y, temperature tau and p = softmax(z / tau), split a distribution into p_y, q_y = 1 - p_y, and p~, the
softmax over the other classes. The Kullback-Leibler divergence from teacher T to student S then splits into two parts
(Zhao et al., 2022, "Decoupled knowledge distillation", eq. 5):

    KL(p^T || p^S) = TC + q_y^T NT,   TC = p_y^T ln(p_y^T / p_y^S) + q_y^T ln(q_y^T / q_y^S)
                                      NT = sum_{c != y} p~_c^T ln(p~_c^T / p~_c^S)

and every distillation loss of this library is  s * sum_k (a_k TC_k + b_k NT_k)  for teachers k, with weights per
example. Since TC and NT are linear in the student's log-probabilities, the teachers can be merged into sums of their
probabilities: three numbers of an example replace any number of teachers, with the same gradient and the same value.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def upcast(logits: Tensor) -> Tensor:
    """Return logits of half precision in float32, and others unchanged: softmaxes need the digits.

    Parameters
    ----------
    logits : Tensor
        Of any shape, such as those of a network under ``training.precision = "bfloat16"``.

    Returns
    -------
    Tensor
        The same numbers in float32 or float64.
    """
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


@dataclass(frozen=True, eq=False)
class LogSplit:
    """Log-probabilities of a decoupled distribution.

    ``target``: [..., b], ln p_y.
    ``rest``: [..., b], ln q_y.
    ``others``: [..., b, classes], ln p~, with 0 at the target.
    """

    target: Tensor
    rest: Tensor
    others: Tensor


def log_split(logits: Tensor, labels: Tensor, tau: float) -> LogSplit:
    """Split distributions at the label.

    Everything stays in log space: 1 - p_y or the logarithm of a summed probability would give infinities once p_y
    underflows. The target is removed before the log-sum-exp, not masked by a large number. Half precision is raised to
    float32.

    ``logits``: [..., b, classes].
    ``labels``: int64 [b].
    """
    if logits.shape[-1] < 2:
        raise ValueError("decoupled distillation needs at least two classes")
    scaled = upcast(logits) / tau
    is_target = torch.arange(scaled.shape[-1], device=labels.device) == labels.unsqueeze(-1)
    everything = scaled.logsumexp(-1)
    rest = scaled.masked_fill(is_target, -torch.inf).logsumexp(-1)
    target = scaled.gather(-1, labels.expand(scaled.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    others = (scaled - rest.unsqueeze(-1)).masked_fill(is_target, 0.0)
    return LogSplit(target - everything, rest - everything, others)


@dataclass(frozen=True, eq=False)
class MergedTeachers:
    """The weighted predictions of teachers on n examples, summed over teachers.

    ``target``: [n, 2], sum_k a_k (p_y, q_y).
    ``others``: [n, classes], sum_k b_k p~, with 0 at the target.
    ``constant``: [n], the teachers' own (negative) entropies, so that the loss keeps its exact value.
    """

    target: Tensor
    others: Tensor
    constant: Tensor


@torch.no_grad()
def merge(teachers: Tensor, labels: Tensor, target: Tensor, nontarget: Tensor, tau: float) -> MergedTeachers:
    """Merge weighted teachers.

    Teachers are frozen: no gradient flows into their logits or weights. Merging is exact: sum_k b_k NT_k differs from
    (sum_k b_k) KL(mean_b p~^T || p~^S) by a constant of the student.

    ``teachers``: [k, n, classes], their logits.
    ``labels``: int64 [n].
    ``target``, ``nontarget``: [k, n], the weights a and b.
    """
    split = log_split(teachers, labels, tau)
    p, q = split.target.exp(), split.rest.exp()
    others = split.others.exp().scatter(-1, labels.expand(split.target.shape).unsqueeze(-1), 0.0)
    entropies = target * (p * split.target + q * split.rest) + nontarget * (others * split.others).sum(-1)
    return MergedTeachers(
        target=torch.stack(((target * p).sum(0), (target * q).sum(0)), dim=-1),
        others=(nontarget.unsqueeze(-1) * others).sum(0),
        constant=entropies.sum(0),
    )


def decoupled_loss(student: Tensor, labels: Tensor, teachers: MergedTeachers, tau: float) -> Tensor:
    """Compute sum_k (a_k TC_k + b_k NT_k) for each example.

    ``student``: [b, classes], logits.
    ``labels``: int64 [b].
    Returns: [b].
    """
    split = log_split(student, labels, tau)
    target = teachers.target[:, 0] * split.target + teachers.target[:, 1] * split.rest
    return teachers.constant - target - (teachers.others * split.others).sum(-1)
