"""Inversion: statistics and losses by hand, generators of any size, and images of which a teacher is sure."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep._utils import seeds
from fedkeep.data import ImageFormat
from fedkeep.errors import RunError
from fedkeep.generation.inversion import (
    IMAGES_PER_LAYER,
    BatchNormStatistics,
    InversionConfig,
    InversionProblem,
    LatentDecoder,
    LatentInverter,
    TextDecoder,
    TextInverter,
    agreed_divergence,
    kl_divergence,
)
from fedkeep.losses.features import bounding_loss
from fedkeep.models import Network

SHAPE = (1, 12, 12)
FORMAT = ImageFormat(SHAPE, (0.4,), (0.2,))
SMALL = {
    "num_images": 20,
    "synthesis_batch_size": 8,
    "generator_steps": 3,
    "warmup": 1,
    "generator_channels": 3,
    "student_steps": 2,
}


def network(seed: int = 0, classes: int = 3, norm: bool = False) -> Network:
    with seeds.temporary_seed(seed):
        norms = [nn.BatchNorm2d(4)] if norm else []
        body = nn.Sequential(nn.Conv2d(1, 4, 3), *norms, nn.ReLU(), nn.Flatten(), nn.Linear(400, 6))
        return Network(body, 6, classes)


def problem(seed: int = 0, **of_network: Any) -> InversionProblem:
    rng = torch.Generator().manual_seed(seed)
    return InversionProblem(network(0, **of_network), network(1, **of_network), 3, FORMAT, rng)


def latent(given: InversionProblem | None = None, anchors: Any = None, **changes: Any) -> LatentInverter:
    return LatentInverter(InversionConfig(**(SMALL | changes)), given or problem())


def text(given: InversionProblem | None = None, anchors: Tensor | None = None, **changes: Any) -> TextInverter:
    anchors = torch.randn(4, 6, generator=torch.Generator().manual_seed(3)) if anchors is None else anchors
    return TextInverter(InversionConfig(**(SMALL | changes)), given or problem(), anchors, w_bounding=5.0, radius=0.015)


@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 64, 64), (1, 28, 28), (1, 4, 4), (3, 5, 7)])
def test_a_decoder_makes_images_of_any_size(shape: tuple[int, int, int]) -> None:
    images = LatentDecoder(5, 2, shape)(torch.randn(2, 5)).detach()
    assert images.shape == (2, *shape)
    assert 0 <= float(images.min()) < float(images.max()) <= 1


def test_neighbours_share_a_noisy_layer_and_layers_are_drawn_anew() -> None:
    decoder = TextDecoder(torch.randn(3, 6), 2 * IMAGES_PER_LAYER, 5, 2, SHAPE)
    decoder.reset_noisy_layers(torch.Generator().manual_seed(0))
    labels = torch.arange(3).repeat(5)[: IMAGES_PER_LAYER + 4]
    images = decoder(labels)
    assert torch.equal(images[0], images[3]), "one class, one layer"
    assert not torch.equal(images[0], images[12]), "another layer"
    assert not torch.equal(images[0], images[1]), "another class"
    decoder.reset_noisy_layers(torch.Generator().manual_seed(1))
    assert not torch.equal(decoder(labels), images)
    before = decoder.weight.detach().clone()
    decoder.reset_noisy_layers(torch.Generator().manual_seed(0))
    assert not torch.equal(decoder.weight, before)
    assert float(decoder.weight.detach().std()) == pytest.approx(1, abs=0.1)


def test_statistics_by_hand() -> None:
    model = network(norm=True).eval()
    norm = model.body[1]
    assert isinstance(norm, nn.BatchNorm2d)
    norm.running_mean, norm.running_var = torch.tensor([0.1, -0.2, 0.3, 0.0]), torch.tensor([1.0, 2.0, 0.5, 0.1])
    statistics = BatchNormStatistics(model, momentum=0.75)
    batches = torch.rand(3, 5, *SHAPE)

    def moments(batch: Tensor) -> tuple[Tensor, Tensor]:
        maps = model.body[0](batch).transpose(0, 1).flatten(1)
        return maps.mean(1), ((maps - maps.mean(1, keepdim=True)) ** 2).mean(1)

    def distance(mean: Tensor, variance: Tensor) -> Tensor:
        squares = ((mean - norm.running_mean) ** 2).sum(), ((variance - norm.running_var) ** 2).sum()
        return squares[0].sqrt() + squares[1].sqrt()

    kept: tuple[Tensor, Tensor] | None = None
    for batch in batches:
        model(batch)
        now = moments(batch)
        if kept is not None:
            now = 0.25 * now[0] + 0.75 * kept[0], 0.25 * now[1] + 0.75 * kept[1]
        torch.testing.assert_close(torch.as_tensor(statistics.distance()), distance(*now))
        statistics.update()
        kept = now


def test_without_batch_norm_there_is_no_distance() -> None:
    model = network()
    statistics = BatchNormStatistics(model, 0.9)
    model(torch.rand(2, *SHAPE))
    statistics.update()
    assert statistics.distance() == 0.0


def test_what_a_student_has_not_learned_by_hand() -> None:
    teacher = torch.tensor([[2.0, 0.0], [0.0, 1.0]]).log_softmax(-1)
    student = torch.tensor([[1.0, 0.0], [3.0, 0.0]]).log_softmax(-1)
    p, q = teacher.exp(), student.exp()
    first = float((p[0] * (p[0] / q[0]).log()).sum())
    assert kl_divergence(teacher, student)[0].item() == pytest.approx(first, rel=1e-5)
    assert agreed_divergence(teacher, student).item() == pytest.approx(first / 2, rel=1e-5), (
        "they disagree about the second"
    )
    torch.testing.assert_close(kl_divergence(2 * teacher, 2 * student, tau=2.0), kl_divergence(teacher, student))


@pytest.mark.parametrize("make", [latent, text])
@pytest.mark.parametrize("norm", [False, True])
def test_images_are_what_the_teacher_takes_for_their_classes(make: Any, norm: bool) -> None:
    """Here the classes are red, green and blue."""
    colours = ImageFormat((3, 8, 8), (0.4, 0.4, 0.4), (0.2, 0.2, 0.2))
    body = nn.Sequential(nn.BatchNorm2d(3) if norm else nn.Identity(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    teacher = Network(body, 3, 3)
    with torch.no_grad():
        teacher.classifier.weight.copy_(5 * torch.eye(3))
        teacher.classifier.bias.zero_()
    given = InversionProblem(teacher, deepcopy(teacher), 3, colours, torch.Generator().manual_seed(0))
    settings = {
        "num_images": 32,
        "synthesis_batch_size": 16,
        "generator_steps": 30,
        "generator_lr": 0.02,
        "w_adversarial": 0.0,
        "generator_channels": 8,
        "w_batch_norm": 0.1,
    }
    result = make(given=given, **settings, anchors=torch.eye(3)).synthesize(num_batches=2, num_discarded=0)
    assert result["input"].dtype == torch.uint8
    assert result["input"].shape == (32, 3, 8, 8)
    brightest = result["input"].float().mean((2, 3)).argmax(1)
    assert float((brightest == result["label"]).float().mean()) > 0.8


@pytest.mark.parametrize("make", [latent, text])
def test_images_depend_on_the_generator_alone(make: Any) -> None:
    torch.manual_seed(11)
    parts = problem(0), problem(0), problem(1)
    before = torch.get_rng_state()
    one, same, other = (make(given=given).synthesize(3, num_discarded=1) for given in parts)
    assert torch.equal(torch.get_rng_state(), before)
    assert equal(one, same)
    assert not equal(one, other)
    assert len(one["label"]) == len(one["input"]) == 16, "two batches after the warm-up's"
    assert len(make(given=problem()).synthesize(4, num_discarded=0)["label"]) == 20, "nums at most"


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(column, other[name]) for name, column in one.items())


@pytest.mark.parametrize("make", [latent, text])
def test_the_student_is_asked_and_taught_after_the_warm_up_only(make: Any) -> None:
    given = problem()
    before = deepcopy(given.student.state_dict())
    changed = deepcopy(given)
    with torch.no_grad():
        for weight in changed.student.parameters():
            weight.neg_()
    early, others = (
        make(given=given, warmup=2).synthesize(2, num_discarded=0),
        make(given=changed, warmup=2).synthesize(2, num_discarded=0),
    )
    assert equal(early, others), "nobody asked the student"
    assert equal(given.student.state_dict(), before)
    given, changed = problem(), deepcopy(problem())
    with torch.no_grad():
        changed.student.classifier.weight.neg_()
    late, others = make(given=given).synthesize(3, num_discarded=1), make(given=changed).synthesize(3, num_discarded=1)
    assert not equal(late, others)
    assert not equal(given.student.state_dict(), before)


def test_the_teacher_stays_as_it_is() -> None:
    given = problem(norm=True)
    before = deepcopy(given.teacher.state_dict())
    latent(given=given).synthesize(3, num_discarded=1)
    assert equal(given.teacher.state_dict(), before)


def test_the_generator_learns_from_the_sum_of_its_copys_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    inverter = latent()
    before = [weight.detach().clone() for weight in inverter.generator.parameters()]
    total = [torch.zeros_like(weight) for weight in before]
    step = torch.optim.Adam.step

    def spy(self: torch.optim.Adam, *args: Any) -> Any:
        if self is not inverter.meta_optimizer:
            for sum_, copied in zip(total, inverter.copy.parameters(), strict=True):
                assert copied.grad is not None
                sum_ += copied.grad
        return step(self, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    inverter.synthesize(1, num_discarded=0)
    for sum_, own, start in zip(total, inverter.generator.parameters(), before, strict=True):
        torch.testing.assert_close(own.grad, sum_)
        moved = sum_.abs() > 1e-6  # the first step of Adam goes lr_g * g_steps against the sign
        torch.testing.assert_close((own.detach() - start)[moved], -0.006 * sum_.sign()[moved], rtol=0.02, atol=0)


def test_text_has_all_classes_in_turn_and_learns_its_normalisation() -> None:
    inverter = text()
    result = inverter.synthesize(2, num_discarded=1)
    assert result["label"][:6].tolist() == [0, 1, 2, 0, 1, 2]
    assert not torch.equal(inverter.mean, torch.full_like(inverter.mean, 0.5))
    assert not torch.equal(inverter.std, torch.full_like(inverter.std, 0.2))


def test_features_are_bound_with_slack() -> None:
    features, anchors = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[0.0, 2.0], [0.0, 1.0]])
    assert bounding_loss(features, anchors, 0.1).item() == pytest.approx(0.4)
    assert bounding_loss(features, anchors, 0.6).item() == 0


def test_a_generator_that_diverges_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RunError, match="Take fewer generator_steps"):
        latent(generator_lr=1e38).synthesize(1, num_discarded=0)
