"""Growing heads: old rows and logits stay as they are, new ones follow Kaiming's rule and are everybody's."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

from fedkeep._utils import seeds
from fedkeep.errors import ConfigError
from fedkeep.models import Architecture, Shape, Weights
from fedkeep.models.custom import custom
from fedkeep.models.heads import add_views, classifier_tensors, expand_rows, truncate
from fedkeep.models.networks import LeNet5, MeanCNN, ResNet32
from fedkeep.models.weights import load_weights, state_dict_copy

GREY: Shape = (1, 28, 28)


class Own(nn.Module):
    """A network of a user's, whose classifier has no bias."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(math.prod(shape), classes, bias=False)

    def features(self, images: Tensor) -> Tensor:
        return images.flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


ARCHITECTURES = [LeNet5(), MeanCNN(), ResNet32(), custom(Own)]


def rows_of(task: int) -> torch.Generator:
    return seeds.rng(3, "head", task=task)


def logits(architecture: Architecture, model: Weights, images: Tensor) -> Tensor:
    network = architecture.build(GREY, len(model["classifier.weight"])).eval()
    with torch.no_grad():
        answer: Tensor = functional_call(network, dict(model), (images,))
    return answer


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (10, 20), (1, 30)])
def test_old_rows_are_kept_bit_for_bit_and_the_network_of_more_classes_takes_them(
    architecture: Architecture, before: int, after: int
) -> None:
    old = state_dict_copy(architecture.build(GREY, before))
    new = expand_rows(old, after, rows_of(2))
    assert list(new) == list(old)
    load_weights(architecture.build(GREY, after), new)
    for name, tensor in old.items():
        if name.startswith("classifier."):
            assert len(new[name]) == after
            assert torch.equal(new[name][:before], tensor)
        else:
            assert new[name] is tensor


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 6), (10, 20), (20, 30), (6, 24), (50, 100)])
@pytest.mark.parametrize("batch", [1, 7, 128])
def test_old_logits_are_unchanged_bit_for_bit(before: int, after: int, batch: int) -> None:
    """A matrix product may add up in another order when it has more columns, so numbers are such that none rounds."""
    noise = torch.Generator().manual_seed(1)

    def eighths(*shape: int) -> Tensor:
        return torch.randint(-64, 64, shape, generator=noise) / 8

    old = {"classifier.weight": eighths(before, 84), "classifier.bias": eighths(before)}
    new = expand_rows(old, after, rows_of(2))
    new["classifier.weight"][before:] = eighths(after - before, 84)
    features = eighths(batch, 84)
    answers = [linear(features, head["classifier.weight"], head["classifier.bias"]) for head in (old, new)]
    assert tiny.bits(answers[1][:, :before]) == tiny.bits(answers[0])


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (6, 24), (50, 100)])
def test_old_logits_of_real_networks(architecture: Architecture, before: int, after: int) -> None:
    old = state_dict_copy(architecture.build(GREY, before))
    new = expand_rows(old, after, rows_of(2))
    images = torch.randn(7, *GREY, generator=torch.Generator().manual_seed(1))
    expected = logits(architecture, old, images)
    torch.testing.assert_close(logits(architecture, new, images)[:, :before], expected, rtol=1e-5, atol=1e-6)
    assert tiny.bits(logits(architecture, truncate(new, before), images)) == tiny.bits(expected), "the old model's view"


def test_new_rows_are_kaimings_with_no_bias_and_the_same_for_everybody() -> None:
    old = state_dict_copy(ResNet32().build(GREY, 10))
    new = expand_rows(old, 1010, rows_of(2))
    rows, limit = new["classifier.weight"][10:], math.sqrt(3 / 64)
    assert float(rows.abs().max()) <= limit
    assert float(rows.abs().max()) > 0.99 * limit
    assert abs(float(rows.mean())) < 0.002  # 64,000 of them: a standard error of 0.0005
    assert float(rows.var()) == pytest.approx(1 / 64, rel=0.02)  # of a uniform distribution: limit^2 / 3
    assert not new["classifier.bias"][10:].any()
    other = state_dict_copy(ResNet32().build(GREY, 10))  # another party, whose own rows differ
    assert torch.equal(expand_rows(other, 1010, rows_of(2))["classifier.weight"][10:], rows)
    assert not torch.equal(expand_rows(other, 1010, rows_of(3))["classifier.weight"][10:], rows)


def test_growing_by_four_rows_a_class_keeps_the_old_classes_first() -> None:
    old = expand_rows(state_dict_copy(LeNet5().build(GREY, 3)), 4 * 3, rows_of(1))
    new = expand_rows(old, 4 * 5, rows_of(2))
    assert torch.equal(new["classifier.weight"][:12], old["classifier.weight"])
    assert len(new["classifier.weight"]) == len(new["classifier.bias"]) == 20


def test_a_row_for_each_class_becomes_the_first_of_several() -> None:
    old = state_dict_copy(LeNet5().build(GREY, 3))
    wide = add_views(old, 4, rows_of(1))
    assert list(wide) == list(old)
    for name in ("classifier.weight", "classifier.bias"):
        assert len(wide[name]) == 12
        assert torch.equal(wide[name][::4], old[name])
    others = wide["classifier.weight"].unflatten(0, (3, 4))[:, 1:]
    assert others.flatten(0, 1).unique(dim=0).shape == (9, 84), "all different"
    assert 0.9 * math.sqrt(3 / 84) < float(others.abs().max()) <= math.sqrt(3 / 84)
    assert not wide["classifier.bias"].unflatten(0, (3, 4))[:, 1:].any()
    assert tiny.equal(add_views(old, 1, rows_of(1)), old)
    assert tiny.equal(wide, add_views(old, 4, rows_of(1)))


def test_growing_to_the_same_size_changes_nothing_and_the_argument_is_never_changed() -> None:
    old = state_dict_copy(LeNet5().build(GREY, 3))
    before = {name: tensor.clone() for name, tensor in old.items()}
    assert tiny.equal(expand_rows(old, 3, rows_of(2)), old)
    expand_rows(old, 6, rows_of(2))["classifier.weight"].zero_()
    assert tiny.equal(old, before)


def test_the_older_view_shares_memory_and_undoes_growth() -> None:
    old = state_dict_copy(LeNet5().build(GREY, 3))
    new = expand_rows(old, 6, rows_of(2))
    view = truncate(new, 3)
    assert tiny.equal(view, old)
    assert view["classifier.weight"].data_ptr() == new["classifier.weight"].data_ptr()
    assert classifier_tensors(new).keys() == {"classifier.weight", "classifier.bias"}
    assert classifier_tensors(state_dict_copy(Own(GREY, 3))).keys() == {"classifier.weight"}


def test_errors_say_what_is_there() -> None:
    model = state_dict_copy(LeNet5().build(GREY, 3))
    with pytest.raises(ConfigError, match="3 rows already and cannot grow to 2"):
        expand_rows(model, 2, rows_of(2))
    for rows in (0, 4):
        with pytest.raises(ConfigError, match=f"has 3 rows, so it cannot be cut to {rows}"):
            truncate(model, rows)
    plain = state_dict_copy(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    for function in (
        lambda: expand_rows(plain, 4, rows_of(2)),
        lambda: truncate(plain, 2),
        lambda: classifier_tensors(plain),
    ):
        with pytest.raises(ConfigError, match=r"torch\.nn\.Linear named classifier"):
            function()
