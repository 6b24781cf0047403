"""Weight rules, penalties, the contrast and weighted cross-entropy, each against its formula written out naively."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedkeep.losses import (
    Batch,
    CrossEntropy,
    Distillation,
    FullKL,
    FullKLByClass,
    FullKLByConfidence,
    FullKLByEntropy,
    LinearTerm,
    Loss,
    ModelContrastive,
    PerTeacher,
    QuadraticPenalty,
    WeightedCrossEntropy,
    WeightRule,
)
from fedkeep.losses.decoupled import decoupled_loss, merge

CLASSES, EXAMPLES = 5, 8
LABELS = torch.arange(EXAMPLES) * 3 % CLASSES
EXACT: dict[str, float] = {"rtol": 1e-9, "atol": 1e-11}  # float64 on both sides


def logits(count: int, seed: int = 0, size: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(count, EXAMPLES, CLASSES, generator=generator, dtype=torch.float64)


def softmax(row: Tensor, tau: float = 1.0) -> list[float]:
    powers = [math.exp(value / tau) for value in row.tolist()]
    return [power / sum(powers) for power in powers]


def divergence(teacher: Tensor, student: Tensor, tau: float) -> float:
    """Return KL(p^T || p^S) of one example."""
    return sum(t * math.log(t / s) for t, s in zip(softmax(teacher, tau), softmax(student, tau), strict=True))


def naive(weights: list[list[float]], teachers: Tensor, student: Tensor, tau: float) -> Tensor:
    """Return sum_k w_ki KL_ki for each example i, from weights [k][i]."""
    return torch.tensor(
        [
            sum(w[i] * divergence(teacher[i], student[i], tau) for w, teacher in zip(weights, teachers, strict=True))
            for i in range(EXAMPLES)
        ],
        dtype=torch.float64,
    )


def entropy_weights(teachers: Tensor) -> list[list[float]]:
    """Return EBKD's omega_ki / K."""
    count = len(teachers)
    h = [[-sum(p * math.log(p) for p in softmax(teachers[k, i])) for i in range(EXAMPLES)] for k in range(count)]
    return [[(1 - h[k][i] / sum(row[i] for row in h)) / count for i in range(EXAMPLES)] for k in range(count)]


def confidence_weights(teachers: Tensor) -> list[list[float]]:
    """Return CA-MKD's omega_ki: (1 - softmax over teachers of their cross-entropies) / (K - 1)."""
    count = len(teachers)
    ce = [[-math.log(softmax(teachers[k, i])[LABELS[i]]) for i in range(EXAMPLES)] for k in range(count)]
    total = [sum(math.exp(ce[k][i]) for k in range(count)) for i in range(EXAMPLES)]
    return [[(1 - math.exp(ce[k][i]) / total[i]) / (count - 1) for i in range(EXAMPLES)] for k in range(count)]


def distillation(rule: WeightRule, teachers: Tensor, student: Tensor, tau: float) -> Tensor:
    return decoupled_loss(student, LABELS, merge(teachers, LABELS, *rule(teachers, LABELS, tau), tau), tau)


TRUST = torch.tensor([0.1, 0.7, 0.0, 1.0, 0.4], dtype=torch.float64)


@pytest.mark.parametrize("tau", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("name", ["whole", "class", "entropy", "confidence"])
def test_rules_are_their_formulas(name: str, count: int, tau: float) -> None:
    teachers, student = logits(count), logits(1, seed=9)[0]
    confident = confidence_weights(teachers)
    rule, weights = {
        "whole": (FullKL(1.7), [[1.7 / count] * EXAMPLES] * count),
        "class": (FullKLByClass(TRUST), [TRUST[LABELS].tolist()] * count),
        "entropy": (FullKLByEntropy(1.7), [[1.7 * w for w in row] for row in entropy_weights(teachers)]),
        "confidence": (FullKLByConfidence(1.7), [[1.7 * w for w in row] for row in confident]),
    }[name]
    got = distillation(rule, teachers, student, tau)
    torch.testing.assert_close(got, naive(weights, teachers, student, tau), **EXACT)


@pytest.mark.parametrize("tau", [0.5, 1.0, 4.0])
def test_whole_is_the_divergence_itself(tau: float) -> None:
    """By PyTorch's own divergence, value and gradient."""
    teacher, student = logits(1), logits(1, seed=9)[0].requires_grad_()
    got = distillation(FullKL(1.0), teacher, student, tau).mean()
    log_s, log_t = (student / tau).log_softmax(-1), (teacher[0] / tau).log_softmax(-1)
    expected = torch.nn.functional.kl_div(log_s, log_t, log_target=True, reduction="batchmean")
    torch.testing.assert_close(got, expected, **EXACT)
    gradients = [torch.autograd.grad(loss, student, retain_graph=True)[0] for loss in (got, expected)]
    torch.testing.assert_close(*gradients, **EXACT)


def test_weights_add_up_to_what_the_papers_say() -> None:
    teachers = logits(4)
    entropy = FullKLByEntropy(1.0)(teachers, LABELS, 4.0)[0]
    confidence = FullKLByConfidence(1.0)(teachers, LABELS, 4.0)[0]
    ones = torch.ones(EXAMPLES, dtype=torch.float64)
    torch.testing.assert_close(entropy.sum(0), ones * 3 / 4, **EXACT)
    torch.testing.assert_close(confidence.sum(0), ones, **EXACT)


def test_who_counts_more() -> None:
    """EBKD: who is sure, right or wrong. CA-MKD: who is right."""
    sure_and_wrong, unsure = torch.tensor([9.0, 0, 0]), torch.tensor([0.5, 1.0, 0.3])
    teachers, labels = torch.stack([sure_and_wrong, unsure]).unsqueeze(1), torch.tensor([1])
    first, second = FullKLByEntropy(1.0)(teachers, labels, 1.0)[0].flatten().tolist()
    assert first > 2 * second
    first, second = FullKLByConfidence(1.0)(teachers, labels, 1.0)[0].flatten().tolist()
    assert second > 2 * first


def test_entropies_are_at_temperature_one() -> None:
    teachers = logits(3)
    for rule in (FullKLByEntropy(1.0), FullKLByConfidence(1.0)):
        warm, cold = (rule(teachers, LABELS, tau)[0] for tau in (8.0, 0.5))
        assert torch.equal(warm, cold)


@pytest.mark.parametrize("rule", [FullKLByEntropy(1.7), FullKLByConfidence(1.7)])
def test_one_teacher_counts_as_one(rule: WeightRule) -> None:
    teachers = logits(1)
    for got, expected in zip(rule(teachers, LABELS, 2.0), FullKL(1.7)(teachers, LABELS, 2.0), strict=True):
        assert torch.equal(got, expected)


def test_teachers_without_any_entropy_count_alike() -> None:
    certain = torch.full((3, EXAMPLES, CLASSES), -1e4)
    certain[:, :, 2] = 1e4
    target, nontarget = FullKLByEntropy(1.0)(certain, LABELS, 1.0)
    torch.testing.assert_close(target, torch.full_like(target, 2 / 3 / 3))
    assert torch.isfinite(nontarget).all()


@pytest.mark.parametrize(
    "rule", [FullKL(1.0), FullKLByClass(TRUST.float()), FullKLByEntropy(1.0), FullKLByConfidence(1.0)], ids=repr
)
@pytest.mark.parametrize("size", [1e4, 1e-4, 0.0])
def test_extreme_teachers_leave_finite_weights_and_gradients(rule: WeightRule, size: float) -> None:
    teachers = logits(3, size=size).float()
    student = logits(1, seed=4, size=size)[0].float().requires_grad_()
    loss = distillation(rule, teachers, student, 1.0).sum()
    (slope,) = torch.autograd.grad(loss, student)
    assert torch.isfinite(loss)
    assert torch.isfinite(slope).all()


def test_per_teacher_is_the_same_for_every_example() -> None:
    target, nontarget = PerTeacher(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))(logits(2), LABELS, 1.0)
    assert target.tolist() == [[1.0] * EXAMPLES, [2.0] * EXAMPLES]
    assert nontarget.tolist() == [[3.0] * EXAMPLES, [4.0] * EXAMPLES]


# Objectives that need a student


class WeightsView:
    """A student that is two numbers and whose answers and features are linear in them; frozen ones likewise."""

    def __init__(self, slope: list[float]) -> None:
        self.slope = torch.tensor(slope, dtype=torch.float64, requires_grad=True)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return {"slope": self.slope}

    def features(self, batch: Batch) -> Tensor:
        return read(self.slope, batch.data["input"])

    def logits(self, batch: Batch) -> Tensor:
        return self.features(batch)

    def teacher_features(self, model: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return read(model["slope"], batch.data["input"])

    def teacher_logits(self, model: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return self.teacher_features(model, batch)


class Mute(WeightsView):
    """Who asks it for another model's answer has not settled."""

    def teacher_features(self, model: Mapping[str, Tensor], batch: Batch) -> Tensor:
        raise AssertionError("asked a model that has already spoken")


class Answers:
    """Frozen models asked about all of the data."""

    def __init__(self, data: Mapping[str, Tensor]) -> None:
        self.data = data

    def __call__(self, model: Mapping[str, Tensor]) -> Tensor:
        return self.features(model)

    def features(self, model: Mapping[str, Tensor]) -> Tensor:
        return read(model["slope"], self.data["input"])


def read(slope: Tensor, images: Tensor) -> Tensor:
    """Return three features of images [b, 2]."""
    return torch.stack([images[:, 0] * slope[0], images[:, 1] * slope[1], images.sum(-1) * slope.sum()], -1)


def data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(EXAMPLES, 2, generator=generator, dtype=torch.float64)
    return {"input": images, "label": torch.arange(EXAMPLES) % 3}


def batch(rows: list[int]) -> Batch:
    index = torch.tensor(rows)
    return Batch({name: column[index] for name, column in data().items()}, index)


def evaluated(objective: Loss, view: Any, rows: list[int] = [3, 0, 6]) -> tuple[float, list[float]]:  # noqa: B006
    loss = objective(view, [batch(rows)])
    (slope,) = torch.autograd.grad(loss, view.slope)
    return loss.item(), slope.tolist()


def test_quadratic() -> None:
    anchor = {"slope": torch.tensor([1.0, -1.0]), "buffer": torch.tensor([7])}
    loss, slope = evaluated(QuadraticPenalty(anchor, 0.5), WeightsView([3.0, 2.0]))
    assert loss == pytest.approx(0.5 * (4 + 9))
    assert slope == pytest.approx([2.0, 3.0])
    curved = QuadraticPenalty(anchor, 0.5, {"slope": torch.tensor([10.0, 0.0])})
    loss, slope = evaluated(curved, WeightsView([3.0, 2.0]))
    assert loss == pytest.approx(0.5 * 10 * 4)
    assert slope == pytest.approx([20.0, 0.0])
    assert evaluated(QuadraticPenalty(anchor, 0.5), WeightsView([1.0, -1.0])) == (0.0, [0.0, 0.0])


def test_gradient() -> None:
    given = {"slope": torch.tensor([5.0, -0.5]), "buffer": torch.tensor([7])}
    loss, slope = evaluated(LinearTerm(given), WeightsView([3.0, 2.0]))
    assert loss == pytest.approx(5 * 3 - 0.5 * 2)
    assert slope == pytest.approx([5.0, -0.5])


TOWARDS = {"slope": torch.tensor([1.0, -2.0], dtype=torch.float64)}
AWAY = {"slope": torch.tensor([-0.5, 0.3], dtype=torch.float64)}


def naive_contrast(slope: list[float], rows: list[int], weight: float, tau: float) -> float:
    own = torch.tensor(slope, dtype=torch.float64)
    total = 0.0
    for row in rows:
        image = data()["input"][row : row + 1]
        z, near, far = (read(model, image)[0].tolist() for model in (own, TOWARDS["slope"], AWAY["slope"]))

        def cosine(a: list[float], b: list[float]) -> float:
            return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)

        towards, away = math.exp(cosine(z, near) / tau), math.exp(cosine(z, far) / tau)
        total -= math.log(towards / (towards + away))
    return weight * total / len(rows)


@pytest.mark.parametrize("tau", [0.1, 0.5, 2.0])
def test_contrast_is_its_formula_settled_or_not(tau: float) -> None:
    rows, slope = [5, 1, 1, 7], [0.8, 0.4]
    objective = ModelContrastive(TOWARDS, AWAY, 0.7, tau)
    settled = objective.cache_teachers(Answers(data()), data(), 0)
    loss, gradient = evaluated(objective, WeightsView(slope), rows)
    assert loss == pytest.approx(naive_contrast(slope, rows, 0.7, tau), rel=1e-9)
    for i, step in enumerate(((1e-6, 0.0), (0.0, 1e-6))):
        up, down = (
            naive_contrast([s + sign * d for s, d in zip(slope, step, strict=True)], rows, 0.7, tau) for sign in (1, -1)
        )
        assert gradient[i] == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-8)
    assert evaluated(settled, Mute(slope), rows) == (loss, gradient)
    assert objective.cache_teachers(Answers(data()), data(), 1) is objective, "it reads the first data set only"


def test_contrast_pulls_towards_one_and_away_from_the_other() -> None:
    near, _ = evaluated(ModelContrastive(TOWARDS, AWAY, 1.0, 0.5), WeightsView(TOWARDS["slope"].tolist()))
    far, _ = evaluated(ModelContrastive(TOWARDS, AWAY, 1.0, 0.5), WeightsView(AWAY["slope"].tolist()))
    assert near < math.log(2) < far
    same, slope = evaluated(ModelContrastive(AWAY, AWAY, 1.0, 0.5), WeightsView([0.8, 0.4]))
    assert same == pytest.approx(math.log(2))
    assert slope == pytest.approx([0.0, 0.0])


def test_contrast_of_dead_features_is_finite() -> None:
    loss, slope = evaluated(ModelContrastive(TOWARDS, AWAY, 1.0, 0.5), WeightsView([0.0, 0.0]))
    assert loss == pytest.approx(math.log(2))
    assert all(map(math.isfinite, slope))


def test_weighted_cross_entropy() -> None:
    rows, weight = [3, 0, 6, 4], torch.tensor([0.2, 0.0, 3.0], dtype=torch.float64)
    view = WeightsView([0.8, 0.4])
    output, labels = view.logits(batch(rows)).detach(), batch(rows).data["label"]
    assert set(labels.tolist()) == {0, 1}
    each = [-weight[y].item() * math.log(softmax(z)[y]) for z, y in zip(output, labels.tolist(), strict=True)]
    loss, slope = evaluated(WeightedCrossEntropy(weight), view, rows)
    assert loss == pytest.approx(sum(each) / len(rows)), "divided by the examples, not by their weights"
    divided = cross_entropy(output, labels, weight=weight).item()
    assert loss != pytest.approx(divided, rel=0.1)
    plain = evaluated(CrossEntropy(), view, rows)
    ones = evaluated(WeightedCrossEntropy(torch.ones(3, dtype=torch.float64)), view, rows)
    assert ones[0] == pytest.approx(plain[0])
    assert ones[1] == pytest.approx(plain[1])
    assert slope != pytest.approx(plain[1])


def test_golden_fedcad_and_fedlsd() -> None:
    """(1 - a) CE + a KL at temperature 2 without tau squared, on the example whose value is known."""

    class Table(WeightsView):
        def logits(self, batch: Batch) -> Tensor:
            return torch.tensor([[1.0, 0.5, -0.5, 2.0]]) + 0 * self.slope.sum()

        def teacher_logits(self, model: Mapping[str, Tensor], batch: Batch) -> Tensor:
            return model["said"]

    trust = torch.tensor([0.4, 0.9, 0.9, 0.9])
    teacher = {"said": torch.tensor([[2.0, -1.0, 0.3, 0.7]])}
    objective = WeightedCrossEntropy(1 - trust) + Distillation((teacher,), FullKLByClass(trust), 2.0, "none")
    one = Batch({"input": torch.zeros(1, 2), "label": torch.tensor([0])}, torch.tensor([0]))
    assert objective(Table([0.0, 0.0]), [one]).item() == pytest.approx(0.973063, abs=2e-6)
