"""A network of one's own: by function, by name only when allowed, checked before training, split if it says how."""

from __future__ import annotations

import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep.errors import ConfigError
from fedkeep.models import Shape, architectures
from fedkeep.models.custom import Custom, SplitNetwork, custom, from_path, split_classifier
from fedkeep.options import as_table

SHAPE = (1, 4, 4)


def linear(shape: Shape, classes: int) -> nn.Module:
    channels, height, width = shape
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, classes))


class Splittable(nn.Module):
    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 5))
        self.classifier = nn.Linear(5, classes)

    def features(self, images: Tensor) -> Tensor:
        features: Tensor = self.body(images).relu()
        return features

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


class Maps(Splittable):
    """Like DenseNet: what its ``features`` gives is not yet what its classifier reads."""

    def features(self, images: Tensor) -> Tensor:
        return super().features(images)[:, :, None, None]

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


class Rectified(Splittable):
    """Its classifier reads something else than what its ``features`` gives."""

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).relu())
        return logits


def test_a_function_or_a_class_builds_a_network_that_trains() -> None:
    for factory in (linear, Splittable, lambda shape, classes: linear(shape, classes), partial(linear)):
        network = custom(factory).build(SHAPE, 3)
        network(torch.ones(2, *SHAPE)).sum().backward()
        assert all(parameter.grad is not None for parameter in network.parameters())
        assert network(torch.ones(2, *SHAPE)).shape == (2, 3)


def test_its_name_finds_it_again() -> None:
    architecture = custom(linear)
    assert architecture.name == f"{__name__}:linear"
    assert from_path(architecture.name, allow_code=True) == architecture
    assert custom(linear, "mine").name == "mine"
    assert as_table(architecture) == {}


@pytest.mark.parametrize("factory", [lambda shape, classes: linear(shape, classes), partial(linear)])
def test_what_has_no_name_is_not_importable_by_it(factory: Any) -> None:
    with pytest.raises(ConfigError, match=r"write package\.module:function"):
        from_path(custom(factory).name, allow_code=True)


def test_custom_networks_are_not_architectures_of_the_list() -> None:
    assert not any(issubclass(cls, Custom) for cls in architectures().values())


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("package.module:function", "not a str"),
        (lambda shape: nn.Identity(), "cannot be called as function"),
        (lambda shape, classes, extra: nn.Identity(), "cannot be called as function.*'extra'"),
    ],
)
def test_custom_refuses_what_cannot_be_called(factory: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        custom(factory)


class Labels(nn.Linear):
    def forward(self, images: Tensor) -> Any:
        return {"logits": images}


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda s, c: None, "returned None instead of a torch.nn.Module"),
        (lambda s, c: linear, "returned a function instead of a torch.nn.Module"),
        (
            lambda s, c: linear(s, c + 1),
            r"outputs of shape \[2, 4\] for 2 inputs of 1x4x4 and 3 classes. Expected \[2, 3\]",
        ),
        (lambda s, c: nn.Conv2d(2, c, 1), "fails on inputs of 1x4x4: .*channels"),
        (lambda s, c: Labels(4, c), r"outputs of shape \[2, 1, 4, 4\]"),
        (lambda s, c: nn.Sequential(nn.Flatten(), nn.MaxPool1d(5)), "without parameters: nothing to train"),
        (nn.Linear, r"mine builds no network for inputs of shape \(1, 4, 4\) and 3 classes: .* Give a func"),
        (nn.Linear(16, 3, device="meta"), "'weight' has no numbers: build it without device='meta'"),
        (nn.BatchNorm2d(1, affine=False, device="meta"), "without parameters"),
        (nn.BatchNorm2d(1, device="meta"), "'weight' has no numbers"),
    ],
)
def test_a_factorys_network_is_checked_when_built(factory: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        custom(factory, "mine").build(SHAPE, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_other_types_than_float32_are_refused(dtype: torch.dtype) -> None:
    def factory(shape: Shape, classes: int) -> nn.Module:
        network = linear(shape, classes)
        network.register_buffer("extra", torch.zeros(1, dtype=dtype))
        return network

    with pytest.raises(ConfigError, match=f"'extra' is {str(dtype).removeprefix('torch.')}"):
        custom(factory).build(SHAPE, 3)


def test_integer_buffers_and_frozen_layers_pass_and_modes_stay() -> None:
    def factory(shape: Shape, classes: int) -> nn.Module:
        frozen = nn.BatchNorm2d(1).eval()
        return nn.Sequential(frozen, nn.BatchNorm2d(1), linear(shape, classes))

    built: Any = custom(factory).build(SHAPE, 3)
    network = built.body
    assert [module.training for module in network] == [False, True, True]
    assert network[1].num_batches_tracked == 0  # the check has left no trace in the statistics
    assert network[1].running_var.item() == 1.0


def test_lazy_layers_have_their_shape_when_built() -> None:
    architecture = custom(lambda shape, classes: nn.Sequential(nn.Flatten(), nn.LazyLinear(classes)))
    network: Any = architecture.build(SHAPE, 3)
    assert network.classifier.weight.shape == (3, 16)


class Fixed(nn.Module):
    """As most people write a network: no arguments, and a last layer of any name."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.hidden = nn.Linear(16, width)
        self.fc = nn.Linear(width, 3)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.hidden(images.flatten(1)).relu())
        return logits


def test_a_class_without_arguments_and_a_network_build_networks_too() -> None:
    for given in (Fixed, lambda: Fixed(7), partial(Fixed, width=2)):
        assert custom(given).build(SHAPE, 3)(torch.ones(2, *SHAPE)).shape == (2, 3)
    trained = Fixed()
    first, second = (custom(trained).build(SHAPE, 3) for _ in range(2))
    images = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first(images), trained(images))
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert torch.equal(second(images), trained(images)), "copies, which do not share their weights"
    assert custom(trained).name == f"{__name__}:Fixed()"


def test_a_network_is_split_at_the_linear_layer_that_gives_its_logits() -> None:
    plain = Fixed()
    split = custom(plain).build(SHAPE, 3)
    features, classifier = split_classifier(split)
    images = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    assert torch.equal(features(images), plain.hidden(images.flatten(1)).relu())
    assert torch.equal(classifier.weight, plain.fc.weight)
    assert torch.equal(split(images), plain(images))
    assert {"classifier.weight", "classifier.bias"} <= split.state_dict().keys()
    assert isinstance(split, SplitNetwork)
    own = {split.own_name(name): tensor for name, tensor in split.state_dict().items()}
    assert {name: tuple(t.shape) for name, t in own.items()} == {
        name: tuple(t.shape) for name, t in plain.state_dict().items()
    }


class Reads(Fixed):
    """Uses the weights of its last layer for something else too."""

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.hidden(images.flatten(1)) * self.fc.weight.abs().sum())


class Scaled(Fixed):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) / 2


class ScaledInTraining(Fixed):
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = super().forward(images)
        return logits / 2 if self.training else logits


class ScaledInPlace(Fixed):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = super().forward(images)
        logits *= self.scale
        return logits


class ReadsInTraining(Fixed):
    def forward(self, images: Tensor) -> Tensor:
        features = self.hidden(images.flatten(1))
        return self.fc(features * self.fc.weight.abs().sum() if self.training else features)


@pytest.mark.parametrize("kind", [Reads, Scaled, ScaledInTraining, ScaledInPlace, ReadsInTraining])
def test_a_network_that_cannot_be_split_stays_as_it_is(kind: type[Fixed]) -> None:
    network = custom(kind).build(SHAPE, 3)
    assert type(network) is kind
    assert isinstance(network.fc, nn.Linear)
    with pytest.raises(ConfigError, match=r"End the network in a torch\.nn\.Linear whose output is the logits"):
        split_classifier(network)


def test_split_of_a_module_that_offers_both_parts() -> None:
    network = custom(Splittable).build(SHAPE, 3)
    features, classifier = split_classifier(network)
    images = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    assert classifier is network.classifier
    assert torch.equal(classifier(features(images)), network(images))


@pytest.mark.parametrize(
    ("network", "lack"),
    [
        (linear(SHAPE, 3), r"Sequential has no features\(images\)"),
        (
            nn.Sequential(OrderedDict(features=nn.Flatten(), classifier=nn.Sequential(nn.Linear(16, 3)))),
            "no classifier",
        ),
    ],
)
def test_split_says_what_is_lacking_and_what_to_offer(network: nn.Module, lack: str) -> None:
    with pytest.raises(ConfigError, match=lack) as error:
        split_classifier(network)
    assert "forward(images) = classifier(features(images))" in str(error.value)


def test_a_network_that_does_more_than_its_parts_is_split_where_its_logits_begin() -> None:
    for factory in (Maps, Rectified):
        network = custom(factory).build(SHAPE, 3)
        features, classifier = split_classifier(network)
        images = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
        assert torch.equal(classifier(features(images)), network(images))


def test_features_that_the_classifier_cannot_read_are_refused() -> None:
    features, _ = split_classifier(Maps(SHAPE, 3))
    with pytest.raises(ConfigError, match=r"Maps gives shape \[2, 5, 1, 1\] for 2 images.*reads \[2, 5\]"):
        features(torch.zeros(2, *SHAPE))


MODULE = """
from torch import nn
imported = True
SIZE = 3
def make_net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))
def one(shape):
    return None
class Zoo:
    @staticmethod
    def small(shape, classes):
        return make_net(shape, classes)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put a package of one module where Python finds it."""
    folder = tmp_path / f"pkg_{tmp_path.name}"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "nets.py").write_text(MODULE)
    (folder / "broken.py").write_text("raise RuntimeError('no licence')")
    (folder / "needy.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder.name


def test_from_path_imports_when_allowed(package: str) -> None:
    for name in ("make_net", "Zoo.small"):
        architecture = from_path(f"{package}.nets:{name}", allow_code=True)
        assert architecture.name == f"{package}.nets:{name}"
        assert architecture.build(SHAPE, 3)(torch.zeros(5, *SHAPE)).shape == (5, 3)


def test_from_path_imports_nothing_unless_allowed(package: str) -> None:
    with pytest.raises(ConfigError, match="--allow-code on the command line"):
        from_path(f"{package}.broken:make_net", allow_code=False)
    assert f"{package}.broken" not in sys.modules
    assert package not in sys.modules


@pytest.mark.parametrize(
    "path", ["nets", "nets:", ":make", "a b:c", "..nets:make", "nets:make()", "nets:a:b", "nets:f\n"]
)
def test_from_path_refuses_what_is_no_path(path: str) -> None:
    with pytest.raises(ConfigError, match=r"write package\.module:function"):
        from_path(path, allow_code=True)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}.nest:make_net", "there is no module '{}.nest'.*PYTHONPATH"),
        ("no_such_package_at_all.nets:make_net", "there is no module 'no_such_package_at_all'"),
        ("{}.needy:make_net", "{}.needy itself needs 'a_package_that_is_not_there'"),
        ("{}.broken:make_net", "RuntimeError: no licence"),
        ("{}.nets:make_nets", "has no 'make_nets'. Did you mean 'make_net'"),
        ("{}.nets:Zoo.smal", "has no 'smal'. Did you mean 'small'"),
        ("{}.nets:SIZE", "is a int"),
        ("{}.nets:one", "cannot be called as function"),
    ],
)
def test_from_path_says_what_is_wrong(package: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.format(package)):
        from_path(path.format(package), allow_code=True)


class WithParts(nn.Module):
    """It has features and a classifier, so that it is not split and stays the object that it is."""

    def __init__(self, body: nn.Linear | None = None) -> None:
        super().__init__()
        self.body = body or nn.Linear(4, 3)
        self.classifier = nn.Linear(3, 2)

    def features(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.body(inputs)
        return features

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(inputs))
        return logits


def test_a_function_that_returns_the_same_network_again_is_refused() -> None:
    """It would be trained and evaluated at once, and a seed would begin where the last one ended."""
    network, body = WithParts(), nn.Linear(4, 3)
    for factory in (lambda: network, lambda: WithParts(body)):
        architecture = custom(factory, "mine")
        kept = architecture.build((4,), 2)
        with pytest.raises(ConfigError, match="mine returned a WithParts that it has returned before"):
            architecture.build((4,), 2)
        assert kept is not None
    new = custom(WithParts, "mine")
    assert new.build((4,), 2) is not new.build((4,), 2)
    copied = custom(network)
    assert copied.build((4,), 2) is not copied.build((4,), 2)
    body.requires_grad_(False)  # what is not trained may be shared
    shared = custom(lambda: WithParts(body), "mine")
    assert shared.build((4,), 2) is not shared.build((4,), 2)
