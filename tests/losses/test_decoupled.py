"""The decoupled kernel against printed numbers and against the formulas written naively in float64.

Sources: decoupled distillation, Zhao et al. (DKD, CVPR 2022); not-true distillation, Lee et al. (FedNTD, NeurIPS 2022);
FedADKD; FedCAD; SFedKD. The one-sample numbers were worked out from the formulas, independently of this code.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fedkeep.losses.decoupled import decoupled_loss, log_split, merge

STUDENT = [1.0, 0.5, -0.5, 2.0]
TEACHER = [2.0, -1.0, 0.3, 0.7]
CROSS_ENTROPY = 1.514675
# tau: KL of the whole distributions, target part, non-target part, p_y of the teacher,
# non-target part with the target's logit zeroed instead of removed, target part without the q_y term
GOLDEN = {
    1.0: (0.582408, 0.451707, 0.389513, 0.664451, 0.369104, 0.734803),
    2.0: (0.160646, 0.096334, 0.119158, 0.460280, 0.104580, 0.269276),
    4.0: (0.041258, 0.020440, 0.032080, 0.351042, 0.027211, 0.106089),
}
GOLDEN_GRADIENTS = {
    1.0: ((-0.444571, 0.076001, 0.027959, 0.340611), (0.0, 0.072365, -0.298858, 0.226493)),
    2.0: ((-0.101931, 0.027375, 0.016604, 0.057953), (0.0, 0.039137, -0.100807, 0.061670)),
}
# The numbers are printed to six decimals: half a digit (5e-7) in float64, and four times that with float32 rounding
# (about 1e-7 of terms of size 1 to 4, added up).
PRINTED = {torch.float64: 6e-7, torch.float32: 2e-6}
DTYPES = [torch.float64, torch.float32]
# Float64 against float64: some hundred roundings of 1e-16, of terms up to 10, and a division by q_y down to 1e-2.
EXACT = 1e-11


def softmax(logits: list[float], tau: float) -> list[float]:
    powers = [math.exp(value / tau) for value in logits]
    return [power / sum(powers) for power in powers]


def kullback_leibler(first: list[float], second: list[float]) -> float:
    return sum(p * math.log(p / s) for p, s in zip(first, second, strict=True))


def without(values: list[float], label: int) -> list[float]:
    return [value for index, value in enumerate(values) if index != label]


def naive(teacher: list[float], student: list[float], label: int, tau: float) -> tuple[float, float, float]:
    """Return the target part, the non-target part and the KL divergence of the whole, straight from the definitions."""
    p, s = softmax(teacher, tau), softmax(student, tau)
    target = kullback_leibler([p[label], sum(without(p, label))], [s[label], sum(without(s, label))])
    nontarget = kullback_leibler(softmax(without(teacher, label), tau), softmax(without(student, label), tau))
    return target, nontarget, kullback_leibler(p, s)


def naive_gradients(
    teacher: list[float], student: list[float], label: int, tau: float
) -> tuple[list[float], list[float]]:
    """Return the gradients of both parts with respect to the student's logits, derived by hand."""
    p, s = softmax(teacher, tau), softmax(student, tau)
    others_p, others_s = softmax(without(teacher, label), tau), softmax(without(student, label), tau)
    gap = (s[label] - p[label]) / tau
    target = [-gap * share for share in others_s]
    nontarget = [(mine - theirs) / tau for mine, theirs in zip(others_s, others_p, strict=True)]
    target.insert(label, gap)
    nontarget.insert(label, 0.0)
    return target, nontarget


def kernel(teachers: Tensor, student: Tensor, labels: Tensor, target: Tensor, nontarget: Tensor, tau: float) -> Tensor:
    return decoupled_loss(student, labels, merge(teachers, labels, target, nontarget, tau), tau)


def one_teacher(
    teacher: Tensor, student: Tensor, labels: Tensor, tau: float, target: float = 0.0, nontarget: float = 0.0
) -> Tensor:
    """Return the loss [b] of one teacher [b, C] with the same two weights for every example."""
    ones = torch.ones(1, len(labels), dtype=teacher.dtype)
    return kernel(teacher[None], student, labels, target * ones, nontarget * ones, tau)


def gradient(loss: Tensor, student: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), student)[0]


def sample(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    student = torch.tensor([STUDENT], dtype=dtype, requires_grad=True)
    return torch.tensor([TEACHER], dtype=dtype), student, torch.tensor([0])


def random_logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- printed numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tau", GOLDEN)
def test_golden_values(tau: float, dtype: torch.dtype) -> None:
    teacher, student, labels = sample(dtype)
    whole, target, nontarget, probability, _, _ = GOLDEN[tau]
    rest = log_split(teacher, labels, tau).rest.exp().item()
    tolerance = PRINTED[dtype]
    assert one_teacher(teacher, student, labels, tau, target=1).item() == pytest.approx(target, abs=tolerance)
    assert one_teacher(teacher, student, labels, tau, nontarget=1).item() == pytest.approx(nontarget, abs=tolerance)
    assert one_teacher(teacher, student, labels, tau, 1, rest).item() == pytest.approx(whole, abs=tolerance)
    assert log_split(teacher, labels, tau).target.exp().item() == pytest.approx(probability, abs=tolerance)
    assert naive(TEACHER, STUDENT, 0, tau) == pytest.approx((target, nontarget, whole), abs=PRINTED[torch.float64])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tau", GOLDEN)
def test_golden_values_of_variants_that_the_kernel_is_not(tau: float, dtype: torch.dtype) -> None:
    teacher, student, labels = sample(dtype)
    *_, zeroed, single = GOLDEN[tau]
    theirs, mine = log_split(teacher, labels, tau), log_split(student, labels, tau)
    single_term = (theirs.target.exp() * (theirs.target - mine.target)).item()
    assert single_term == pytest.approx(single, abs=PRINTED[dtype])
    with_zero = kullback_leibler(softmax([0.0, *TEACHER[1:]], tau), softmax([0.0, *STUDENT[1:]], tau))
    assert with_zero == pytest.approx(zeroed, abs=PRINTED[torch.float64])
    # A kernel that zeroes the logit or drops the q_y term misses the right numbers by more than 100 tolerances.
    assert abs(one_teacher(teacher, student, labels, tau, nontarget=1).item() - zeroed) > 1e-3
    assert abs(one_teacher(teacher, student, labels, tau, target=1).item() - single) > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tau", GOLDEN_GRADIENTS)
def test_golden_gradients(tau: float, dtype: torch.dtype) -> None:
    teacher, student, labels = sample(dtype)
    for part, printed, derived in zip(
        ("target", "nontarget"), GOLDEN_GRADIENTS[tau], naive_gradients(TEACHER, STUDENT, 0, tau), strict=True
    ):
        found = gradient(one_teacher(teacher, student, labels, tau, **{part: 1}), student)[0].tolist()
        assert found == pytest.approx(printed, abs=PRINTED[dtype])
        assert derived == pytest.approx(printed, abs=PRINTED[torch.float64])


@pytest.mark.parametrize(
    ("method", "ce", "target", "nontarget", "tau", "golden"),
    [
        ("FedNTD, beta 1", 1.0, 0.0, 1.0, 1.0, 1.904188),
        ("FedADKD, alpha 1, phi 0.5, beta 1", 1.0, 0.5, 1.0, 1.0, 2.130041),
        ("SFedKD, one teacher, target 3, non-target 1", 1.0, 3.0, 1.0, 1.0, 3.259309),
        ("FedCAD, alpha_y 0.4, T 2", 0.6, 0.4, 0.4 * (1 - softmax(TEACHER, 2.0)[0]), 2.0, 0.973063),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_whole_losses(
    method: str, ce: float, target: float, nontarget: float, tau: float, golden: float, dtype: torch.dtype
) -> None:
    teacher, student, labels = sample(dtype)
    cross_entropy = torch.nn.functional.cross_entropy(student, labels)
    assert cross_entropy.item() == pytest.approx(CROSS_ENTROPY, abs=PRINTED[dtype])
    loss = ce * cross_entropy + one_teacher(teacher, student, labels, tau, target, nontarget)[0]
    assert loss.item() == pytest.approx(golden, abs=PRINTED[dtype]), method
    parts = naive(TEACHER, STUDENT, 0, tau)
    formula = -ce * math.log(softmax(STUDENT, 1.0)[0]) + target * parts[0] + nontarget * parts[1]
    assert loss.item() == pytest.approx(formula, abs=2e-6 if dtype == torch.float32 else EXACT), method


# --- random logits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 100])
@pytest.mark.parametrize("tau", [0.5, 1.0, 4.0])
def test_parts_add_up_to_the_divergence_of_the_whole(tau: float, classes: int) -> None:
    teacher, student = random_logits(40, classes, seed=1), random_logits(40, classes, seed=2).requires_grad_()
    labels = torch.arange(40) % classes
    rest = log_split(teacher, labels, tau).rest.exp()
    loss = kernel(teacher[None], student, labels, torch.ones(1, 40, dtype=torch.float64), rest[None], tau)
    p, log_s = torch.softmax(teacher / tau, -1), torch.log_softmax(student / tau, -1)
    whole = (p * (torch.log_softmax(teacher / tau, -1) - log_s)).sum(-1)
    torch.testing.assert_close(loss, whole, rtol=0, atol=EXACT)
    # The gradient of KL(p || s) with respect to the logits is (s - p) / tau.
    torch.testing.assert_close(gradient(loss, student), (log_s.exp() - p).detach() / tau, rtol=0, atol=EXACT)


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
@pytest.mark.parametrize("tau", [0.5, 1.0, 4.0])
def test_each_part_is_the_formula(tau: float, classes: int) -> None:
    teacher, student = random_logits(12, classes, seed=3), random_logits(12, classes, seed=4).requires_grad_()
    labels = torch.arange(12) * 7 % classes
    rows = [
        (first, second, label)
        for first, second, label in zip(teacher.tolist(), student.tolist(), labels.tolist(), strict=True)
    ]
    for index, part in enumerate(("target", "nontarget")):
        loss = one_teacher(teacher, student, labels, tau, **{part: 1})
        values = torch.tensor([naive(*row, tau)[index] for row in rows], dtype=torch.float64)
        gradients = torch.tensor([naive_gradients(*row, tau)[index] for row in rows], dtype=torch.float64)
        torch.testing.assert_close(loss.detach(), values, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(gradient(loss, student), gradients, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("shape", [(6, 5), (3, 6, 5), (2, 3, 6, 5)])
def test_log_split_is_the_split_distribution(shape: tuple[int, ...]) -> None:
    logits, labels, tau = random_logits(*shape), torch.tensor([0, 1, 2, 3, 4, 0]), 2.0
    split = log_split(logits, labels, tau)
    assert split.target.shape == split.rest.shape == shape[:-1]
    assert split.others.shape == shape
    probabilities = torch.softmax(logits / tau, -1)
    at_label = torch.nn.functional.one_hot(labels, 5).bool().expand(shape)
    expected = probabilities[at_label].reshape(shape[:-1])
    torch.testing.assert_close(split.target.exp(), expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(split.rest.exp(), 1 - expected, rtol=0, atol=1e-14)
    assert torch.all(split.others[at_label] == 0)
    shares = split.others.exp().masked_fill(at_label, 0)
    wanted = (probabilities / (1 - expected)[..., None]).masked_fill(at_label, 0)
    torch.testing.assert_close(shares, wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("classes", [3, 10, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nontarget_part_leaves_the_target_logit_alone(classes: int, dtype: torch.dtype) -> None:
    teachers = random_logits(3, 20, classes, seed=5, dtype=dtype)
    student = random_logits(20, classes, seed=6, dtype=dtype).requires_grad_()
    labels, weights = torch.arange(20) % classes, torch.linspace(0.2, 1.0, 60, dtype=dtype).view(3, 20)
    slope = gradient(kernel(teachers, student, labels, torch.zeros_like(weights), weights, 1.0), student)
    assert torch.all(slope[torch.arange(20), labels] == 0)  # exactly: the logit is removed, not masked
    assert torch.all(slope.abs().sum(-1) > 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_two_classes_have_no_nontarget_part(dtype: torch.dtype, size: float) -> None:
    teachers, student = random_logits(3, 8, 2, dtype=dtype) * size, random_logits(8, 2, seed=1, dtype=dtype) * size
    student.requires_grad_()
    weights = torch.rand(3, 8, dtype=dtype)
    loss = kernel(teachers, student, torch.arange(8) % 2, torch.zeros_like(weights), weights, 1.0)
    assert torch.all(loss == 0)
    assert torch.all(gradient(loss, student) == 0)


def test_one_class_is_an_error() -> None:
    labels, weights = torch.zeros(3, dtype=torch.int64), torch.ones(1, 3)
    with pytest.raises(ValueError):
        log_split(torch.zeros(3, 1), labels, 1.0)
    with pytest.raises(ValueError):
        merge(torch.zeros(1, 3, 1), labels, weights, weights, 1.0)


# --- several teachers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1.0, 4.0])
def test_teachers_fold_to_their_sum_and_to_the_gradient_of_their_mixture(tau: float) -> None:
    teachers, student = random_logits(4, 9, 6, seed=7), random_logits(9, 6, seed=8).requires_grad_()
    labels = torch.arange(9) % 6
    generator = torch.Generator().manual_seed(9)
    target, nontarget = (torch.rand(4, 9, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    loss = kernel(teachers, student, labels, target, nontarget, tau)
    slope = gradient(loss, student)

    single = [
        kernel(teachers[k : k + 1], student, labels, target[k : k + 1], nontarget[k : k + 1], tau) for k in range(4)
    ]
    torch.testing.assert_close(loss, sum(single), rtol=0, atol=EXACT)
    for row in range(9):
        parts = [naive(teachers[k, row].tolist(), student[row].tolist(), int(labels[row]), tau) for k in range(4)]
        formula = sum(float(target[k, row]) * parts[k][0] + float(nontarget[k, row]) * parts[k][1] for k in range(4))
        assert loss[row].item() == pytest.approx(formula, abs=EXACT)

    # The mixture: (sum a) binary KL(mean_a p_y) + (sum b) KL(mean_b p~), as one teacher whose logits say both.
    probabilities = torch.softmax(teachers / tau, -1)
    at_label = torch.nn.functional.one_hot(labels, 6).bool()
    target_share = (target * probabilities[:, at_label]).sum(0) / target.sum(0)
    others = probabilities.masked_fill(at_label, 0)
    others = (nontarget[..., None] * others / others.sum(-1, keepdim=True)).sum(0) / nontarget.sum(0)[:, None]
    mixture = torch.where(at_label, target_share[:, None], others * (1 - target_share)[:, None])
    mixed = kernel(tau * mixture.log()[None], student, labels, target.sum(0)[None], nontarget.sum(0)[None], tau)
    torch.testing.assert_close(slope, gradient(mixed, student), rtol=0, atol=EXACT)
    assert torch.all(loss > mixed)  # Jensen: the divergences to the teachers exceed the one to their mean


def test_teachers_get_no_gradient() -> None:
    teachers = random_logits(2, 5, 4).requires_grad_()
    weights = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
    student = random_logits(5, 4, seed=1).requires_grad_()
    kernel(teachers, student, torch.arange(5) % 4, weights, weights, 1.0).sum().backward()
    assert student.grad is not None
    assert teachers.grad is None
    assert weights.grad is None


# --- numbers at the edge ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tau", [0.5, 1.0, 4.0])
def test_extreme_logits_have_the_exact_limit(tau: float, dtype: torch.dtype) -> None:
    # Every exponential is 0 or 1 here: the teacher is sure of the label, the student of another class.
    teacher = torch.tensor([[1e4, -1e4, 0.0]], dtype=dtype)
    student = torch.tensor([[-1e4, 1e4, 0.0]], dtype=dtype, requires_grad=True)
    labels = torch.tensor([0])
    target = one_teacher(teacher, student, labels, tau, target=1)
    nontarget = one_teacher(teacher, student, labels, tau, nontarget=1)
    assert target.item() == pytest.approx(2e4 / tau, rel=1e-6)  # float32 resolves 6e-8 of it
    assert nontarget.item() == pytest.approx(1e4 / tau, rel=1e-6)
    assert gradient(target, student)[0].tolist() == pytest.approx([-1 / tau, 1 / tau, 0.0], abs=1e-6)
    assert gradient(nontarget, student)[0].tolist() == pytest.approx([0.0, 1 / tau, -1 / tau], abs=1e-6)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("classes", [2, 3])
def test_extreme_logits_stay_finite(classes: int, dtype: torch.dtype) -> None:
    corners = torch.tensor(list(itertools.product((-1e4, 0.0, 1e4), repeat=classes)), dtype=dtype)
    pairs = torch.cartesian_prod(torch.arange(len(corners)), torch.arange(len(corners)))
    teacher, student = corners[pairs[:, 0]], corners[pairs[:, 1]].clone().requires_grad_()
    for label in range(classes):
        labels = torch.full((len(pairs),), label)
        split = log_split(teacher, labels, 0.5)
        assert all(torch.isfinite(part).all() for part in (split.target, split.rest, split.others))
        for part in ("target", "nontarget"):
            loss = one_teacher(teacher, student, labels, 0.5, **{part: 1})
            slope = gradient(loss, student)
            assert torch.isfinite(loss).all()
            assert torch.isfinite(slope).all()
            # A divergence is not negative; what is folded comes back from sums of size 4e4, so half of 4e4 * 1.2e-7.
            assert loss.min() >= -5e-3
            # Probabilities differ by at most 1, over tau.
            assert slope.abs().max() <= 2 + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_raised(dtype: torch.dtype) -> None:
    teachers, student = random_logits(2, 6, 5).to(dtype), random_logits(6, 5, seed=1).to(dtype)
    labels, weights = torch.arange(6) % 5, torch.ones(2, 6)
    for part in log_split(student, labels, 4.0).__dict__.values():
        assert part.dtype == torch.float32
    folded = merge(teachers, labels, weights, weights, 4.0)
    loss = decoupled_loss(student, labels, folded, 4.0)
    assert loss.dtype == torch.float32
    # Raising is exact, so the same numbers as from float32 logits, bit for bit.
    wide = kernel(teachers.float(), student.float(), labels, weights, weights, 4.0)
    assert torch.equal(loss, wide)


def test_a_student_like_its_teacher_loses_nothing() -> None:
    logits = random_logits(10, 7).requires_grad_()
    loss = one_teacher(logits.detach(), logits, torch.arange(10) % 7, 4.0, 3, 1)
    assert loss.abs().max() < 1e-14  # some roundings of 1e-16
    assert gradient(loss, logits).abs().max() < 1e-15


@pytest.mark.parametrize(("confidence", "cosine"), [(0.9, -1.0), (0.3, 1.0)])
def test_the_target_part_acts_against_the_cross_entropy(confidence: float, cosine: float) -> None:
    """Where the student trusts the label more than the teacher (0.5) does; at tau 1 both act along one line."""
    rest = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    label = torch.tensor([0])

    def logits(probability: float, others: Tensor) -> Tensor:
        return torch.cat([torch.tensor([probability], dtype=torch.float64), (1 - probability) * others]).log()[None]

    student = logits(confidence, rest).requires_grad_()
    teachers = logits(0.5, rest.flip(0))[None]  # it knows the other classes differently
    weights = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    target_part = decoupled_loss(student, label, merge(teachers, label, *weights, 1.0), 1.0).mean()
    entropy = torch.nn.functional.cross_entropy(student, label)
    (pull,), (push,) = torch.autograd.grad(target_part, student), torch.autograd.grad(entropy, student)
    assert torch.cosine_similarity(pull, push).item() == pytest.approx(cosine, abs=EXACT)
