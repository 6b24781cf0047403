"""Every architecture has the published size, takes other image sizes, splits, and says when an image is too small."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedkeep._utils import seeds
from fedkeep.errors import ConfigError
from fedkeep.models import Architecture, Network, Shape, architectures, get_architecture
from fedkeep.models.custom import split_classifier
from fedkeep.models.networks import (
    MLP,
    VGG16,
    AlexNet8,
    Convolution,
    LeNet5,
    MaxPool2,
    MeanCNN,
    flattened_side,
)
from fedkeep.models.weights import parameter_count
from fedkeep.options import as_table, build, full_name

GREY, COLOUR, DIGITS = (1, 28, 28), (3, 32, 32), (1, 8, 8)
NAMES = (
    *("alexnet8", "alexnet8-usfc", "cnn-ll", "cnn4", "lenet5", "mean-cnn", "mlp"),
    *("resnet18", "resnet32", "resnet34", "resnet50", "simple-cnn", "vgg16"),
)


@cache
def network(name: str, shape: Shape, classes: int) -> Network:
    """Return a network in evaluation mode, made once; the tests only read it."""
    with seeds.temporary_seed(0):  # VGG-16's first logits hardly tell images apart: with some weights not within 1e-7
        built = get_architecture(name)().build(shape, classes)
    assert isinstance(built, Network)
    return built.eval()


def images(shape: Shape, count: int = 3) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(5))


def test_the_registry_holds_every_file_of_the_package() -> None:
    built_in = [name for name, cls in architectures().items() if cls.__module__.startswith("fedkeep.")]
    # "pretrained" needs a folder (see test_pretrained), and one reads token ids (see test_text).
    assert built_in == sorted((*NAMES, "embedding-bag", "pretrained"))


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("lenet5", GREY, 10, 44_426),
        ("lenet5", COLOUR, 10, 62_006),
        ("simple-cnn", COLOUR, 10, 62_006),
        ("cnn4", COLOUR, 10, 2_156_490),
        ("cnn4", COLOUR, 100, 2_202_660),
        ("cnn-ll", COLOUR, 10, 797_962),
        ("cnn-ll", COLOUR, 100, 815_332),
        ("alexnet8", COLOUR, 10, 23_272_266),
        ("alexnet8-usfc", COLOUR, 10, 30_600_586),
        ("resnet18", COLOUR, 10, 11_173_962),
        ("resnet18", COLOUR, 100, 11_220_132),
        ("resnet32", COLOUR, 10, 464_154),
        ("resnet32", COLOUR, 100, 470_004),
        ("resnet34", COLOUR, 10, 21_282_122),
        ("resnet34", COLOUR, 100, 21_328_292),
        ("resnet50", COLOUR, 10, 23_520_842),
        ("resnet50", COLOUR, 100, 23_705_252),
        ("mlp", DIGITS, 10, 64 * 64 + 64 + 64 * 10 + 10),
        ("mean-cnn", GREY, 10, 320 + 64 + 18_496 + 128 + 73_856 + 256 + 147_584 + 256 + 1_290),
        ("vgg16", (3, 64, 64), 200, 40_708_104),
    ],
)
def test_parameter_counts(name: str, shape: Shape, classes: int, parameters: int) -> None:
    with torch.device("meta"):  # no weight is drawn
        assert parameter_count(get_architecture(name)().build(shape, classes)) == parameters


@pytest.mark.parametrize(
    ("name", "kernels"),
    [("lenet5", [5, 5]), ("cnn4", [5, 5]), ("alexnet8", [3, 3, 3, 3, 3]), ("alexnet8-usfc", [11, 7, 3, 3, 3])],
)
def test_kernels(name: str, kernels: list[int]) -> None:
    convolutions = [m for m in network(name, COLOUR, 10).modules() if isinstance(m, nn.Conv2d)]
    assert [layer.kernel_size for layer in convolutions] == [(k, k) for k in kernels]


@pytest.mark.parametrize("name", NAMES)
def test_forward_is_the_classifier_after_the_features(name: str) -> None:
    model = network(name, COLOUR, 10)
    x = images(COLOUR)
    with torch.no_grad():
        logits, features = model(x), model.features(x)
        assert logits.shape == (3, 10)
        assert features.shape == (3, model.classifier.in_features)
        assert torch.equal(logits, model.classifier(features))
        function, classifier = split_classifier(model)
        assert classifier is model.classifier
        assert torch.equal(function(x), features)


@pytest.mark.parametrize("name", NAMES)
def test_different_images_have_different_logits(name: str) -> None:
    with torch.no_grad():
        logits = network(name, COLOUR, 10)(images(COLOUR))
    assert torch.isfinite(logits).all()
    assert not torch.allclose(logits[0], logits[1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_state_is_float32_and_batch_norms_counters_are_integers(name: str) -> None:
    model = network(name, COLOUR, 10)
    counters = {label: buffer for label, buffer in model.named_buffers() if label.endswith("num_batches_tracked")}
    others = [tensor for label, tensor in model.state_dict().items() if label not in counters]
    assert {tensor.dtype for tensor in others} == {torch.float32}
    assert all(counter.dtype == torch.int64 for counter in counters.values())
    assert bool(counters) == name.startswith(("resnet", "mean-cnn")), "only those have batch norm"


def test_weights_have_names_that_tell_the_layer() -> None:
    names = list(network("lenet5", GREY, 10).state_dict())
    assert names[::2] == [
        *(f"body.{layer}.weight" for layer in ("conv1", "conv2", "full3", "full4")),
        "classifier.weight",
    ]


def test_initialisation_is_pytorchs() -> None:
    torch.manual_seed(3)  # what a factory does with the default generator is what is under test
    ours = LeNet5().build(GREY, 10).state_dict().values()
    torch.manual_seed(3)
    plain = nn.ModuleList(
        [nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5), nn.Linear(256, 120), nn.Linear(120, 84), nn.Linear(84, 10)]
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, plain.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        ("lenet5", 16),
        ("simple-cnn", 16),
        ("cnn-ll", 16),
        ("cnn4", 4),
        ("alexnet8", 15),
        ("mean-cnn", 4),
        ("resnet18", 8),
        ("resnet32", 8),
        ("resnet34", 8),
        ("resnet50", 8),
        ("vgg16", 32),
    ],
)
def test_the_smallest_image_works_and_a_smaller_one_says_so(name: str, smallest: int) -> None:
    model = get_architecture(name)().build((1, smallest, smallest + 1), 4).eval()
    with torch.no_grad():
        assert model(images((1, smallest, smallest + 1))).shape == (3, 4)
    for shape in ((1, smallest - 1, 40), (1, 40, smallest - 1)):
        with pytest.raises(
            ConfigError, match=f"^{name} needs images of at least {smallest}x{smallest} pixels"
        ) as error:
            get_architecture(name)().build(shape, 4)
        assert f"{shape[1]}x{shape[2]}" in str(error.value)


def test_usfc_says_its_smallest_image() -> None:
    with pytest.raises(ConfigError, match="at least 15x15 pixels"):
        get_architecture("alexnet8-usfc")().build((3, 14, 32), 10)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.builds(
            Convolution,
            maps=st.integers(1, 3),
            kernel=st.integers(1, 5),
            stride=st.integers(1, 3),
            padding=st.integers(0, 2),
            pool=st.none() | st.sampled_from([(2, 2), (3, 2)]),
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 30),
    st.integers(1, 30),
)
def test_computed_sizes_are_pytorchs(layers: list[Convolution], height: int, width: int) -> None:
    mine = type("Mine", (LeNet5,), {"convolutions": layers, "hidden": (4,)})()
    if min(flattened_side(layers, height), flattened_side(layers, width)) < 1:
        with pytest.raises(ConfigError, match="at least"):
            mine.build((2, height, width), 3)
        return
    model = mine.build((2, height, width), 3)
    assert model(images((2, height, width))).shape == (3, 3)


def test_padding_makes_nothing_of_nothing() -> None:
    layers = [Convolution(1, 2, pool=None), Convolution(1, 1, padding=1, pool=None)]
    assert [flattened_side(layers, side) for side in (1, 2, 3)] == [0, 3, 4]


@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 7, 9), (3, 2, 5)])
def test_fast_pooling_is_pytorchs(shape: Shape) -> None:
    x = images(shape)
    x[0, 0, 0, 0] = torch.nan
    expected = nn.MaxPool2d(2)(x)
    with torch.no_grad():
        assert torch.equal(MaxPool2()(x).nan_to_num(7.0), expected.nan_to_num(7.0))
    x.requires_grad_()
    MaxPool2()(x).nansum().backward()
    assert x.grad is not None
    assert int((x.grad != 0).sum()) == int(expected.isfinite().sum())


def test_dropout_is_an_option_and_works_in_training_only() -> None:
    wet, dry = AlexNet8(), AlexNet8(dropout=0.0)
    assert as_table(wet) == as_table(get_architecture("alexnet8-usfc")()) == {"dropout": 0.5}
    model = wet.build((1, 15, 15), 2)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]
    x = images((1, 15, 15))
    with torch.no_grad():
        assert not torch.equal(model(x), model(x))
        model.eval()
        assert torch.equal(model(x), model(x))
        plain = dry.build((1, 15, 15), 2)
        plain.load_state_dict(model.state_dict())  # the same names with dropout and without
        assert torch.equal(plain.train()(x), model(x))
    with pytest.raises(ConfigError, match="dropout must be 0 to 1"):
        AlexNet8(dropout=1.5)


def vgg_by_hand(channels: int, side: int, classes: int) -> int:
    """Return the parameters of VGG-16 (configuration D), layer by layer, for square images."""
    maps = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    convolutions = sum(9 * before * after + after for before, after in pairwise([channels, *maps]))
    widths = [512 * (side // 32) ** 2, 4096, 4096, classes]
    return convolutions + sum(before * after + after for before, after in pairwise(widths))


def test_vgg_is_configuration_d_and_only_its_last_layer_is_the_classifier() -> None:
    model = VGG16().build((3, 64, 64), 200)
    assert parameter_count(model) == vgg_by_hand(3, 64, 200) == 40_708_104
    assert [m.in_features for m in model.modules() if isinstance(m, nn.Linear)] == [2048, 4096, 4096]
    assert (model.classifier.in_features, model.classifier.out_features) == (4096, 200)
    layers = [type(layer).__name__ for layer in model.body]
    assert [i for i, pool in enumerate(pool_after(layers), start=1) if pool] == [2, 4, 7, 10, 13]
    assert layers[-7:] == ["Flatten", "Linear", "ReLU", "Dropout", "Linear", "ReLU", "Dropout"]
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]


def pool_after(layers: list[str]) -> list[bool]:
    """Return for each convolution, in order, whether a pooling comes before the next."""
    text = "".join({"Conv2d": "c", "MaxPool2": "p"}.get(layer, "") for layer in layers)
    return ["p" in part for part in text.split("c")[1:]]


def test_vgg_with_batch_norm_has_one_behind_every_convolution() -> None:
    plain, normed = (VGG16(batch_norm=bn).build((1, 32, 32), 3) for bn in (False, True))
    norms = [m for m in normed.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [m.num_features for m in norms] == [m.out_channels for m in plain.modules() if isinstance(m, nn.Conv2d)]
    assert parameter_count(normed) - parameter_count(plain) == 2 * 4224
    kinds = [type(layer).__name__ for layer in normed.body][:-7]
    assert all(kinds[i + 1] == "BatchNorm2d" for i, kind in enumerate(kinds) if kind == "Conv2d")


@pytest.mark.parametrize("maps", [(32, 64, 128, 128), (32, 64), (16, 32)])
def test_mean_cnn_pools_after_every_second_convolution_and_reads_the_mean(maps: tuple[int, ...]) -> None:
    model = MeanCNN(channels=maps).build(GREY, 10).eval()
    layers = [type(layer).__name__ for layer in model.body]
    assert pool_after(layers) == [number % 2 == 0 for number in range(1, len(maps) + 1)]
    expected = sum(9 * a * b + b + 2 * b for a, b in pairwise([1, *maps])) + maps[-1] * 10 + 10
    assert parameter_count(model) == expected
    x = images(GREY)
    with torch.no_grad():
        assert torch.allclose(model.features(x), model.body[:-2](x).mean((2, 3)), atol=1e-6)
    with pytest.raises(ConfigError, match="at least one convolution"):
        MeanCNN(channels=())


def test_mlp_takes_hidden_layers_and_any_shape() -> None:
    mlp = build(get_architecture("mlp"), {"hidden": [7, 5]}, "[model]")
    model = mlp.build((2, 3, 4), 6)
    assert [tuple(p.shape) for p in model.parameters() if p.ndim == 2] == [(7, 24), (5, 7), (6, 5)]
    assert model(images((2, 3, 4))).shape == (3, 6)
    with pytest.raises(ConfigError, match="hidden must be at least 1"):
        MLP(hidden=(8, 0))


def test_mlp_without_hidden_layers_is_linear() -> None:
    model = MLP(hidden=()).build((1, 2, 2), 3)
    x = images((1, 2, 2))
    assert torch.allclose(model(x), x.flatten(1) @ model.classifier.weight.T + model.classifier.bias)


def test_networks_of_one_architecture_share_nothing() -> None:
    first, second = LeNet5().build(GREY, 10), LeNet5().build(GREY, 10)
    before = copy.deepcopy(second.state_dict())
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    assert all(torch.equal(second.state_dict()[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("wrong", "right"), [("lenet", "lenet5"), ("alexnet8_usfc", "alexnet8-usfc"), ("CNN5", "cnn4")]
)
def test_an_unknown_name_gets_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=f"no model '{wrong}'. Did you mean '{right}'") as error:
        get_architecture(wrong)
    assert "package.module:function" in str(error.value)


def test_names_are_found_in_any_case() -> None:
    assert get_architecture("LeNet5") is LeNet5


def test_a_class_of_ones_own_is_found_and_cannot_take_a_name() -> None:
    @dataclass(frozen=True)
    class Base(Architecture):
        def build(self, shape: Shape, classes: int) -> nn.Module:
            return nn.Identity()

    @dataclass(frozen=True)
    class Mine(Base):
        name: ClassVar[str] = "test-of-the-registry"

    assert get_architecture("test-of-the-registry") is Mine
    assert Base not in architectures().values()

    def again() -> type[Architecture]:
        return dataclass(frozen=True)(type("Mine", (Base,), {"name": Mine.name, "__qualname__": Mine.__qualname__}))

    newer = again()
    newer.__module__ = Mine.__module__
    assert full_name(newer) == full_name(Mine)
    assert get_architecture("test-of-the-registry") is newer
    try:
        newer.name = Mine.name = "lenet5"
        with pytest.raises(ConfigError, match=r"fedkeep\.models\.networks\.LeNet5 and .*Mine are both named 'lenet5'"):
            architectures()
    finally:
        del newer.name, Mine.name
