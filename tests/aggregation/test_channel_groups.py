"""Which layers share channels: by hand for small networks, and the groups of a ResNet as the paper on fusion needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from permuting import lively, permuted
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import adaptive_avg_pool2d, max_pool2d, relu

from fedkeep.aggregation.transport import ChannelLayer, channel_groups
from fedkeep.errors import ConfigError
from fedkeep.models import Shape
from fedkeep.models.networks import MLP, VGG16, LeNet5, MeanCNN, ResNet18, ResNet32, ResNet50


def test_a_chain_reads_what_the_layer_before_writes() -> None:
    assert channel_groups(LeNet5().build((1, 28, 28), 10)) == (
        ChannelLayer("body.conv1", None, "body.conv1"),
        ChannelLayer("body.conv2", "body.conv1", "body.conv2"),
        ChannelLayer("body.full3", "body.conv2", "body.full3"),
        ChannelLayer("body.full4", "body.full3", "body.full4"),
        ChannelLayer("classifier", "body.full4", None),
    )


def test_a_batch_norm_belongs_to_the_layer_before_it() -> None:
    layers = channel_groups(VGG16(batch_norm=True).build((3, 32, 32), 4))
    assert [layer.norms for layer in layers] == [(f"body.norm{n}",) for n in range(1, 14)] + [(), (), ()]
    assert [layer.norms for layer in channel_groups(MeanCNN(channels=(2, 3)).build((1, 4, 4), 2))] == [
        ("body.norm1",),
        ("body.norm2",),
        (),
    ]


def test_a_resnet18_has_four_shared_groups_and_eight_private_ones() -> None:
    layers = channel_groups(ResNet18().build((3, 8, 8), 10))
    assert len(layers) == 21
    members: dict[str, list[str]] = {}
    for layer in layers:
        if layer.writes is not None:
            members.setdefault(layer.writes, []).append(layer.name)
    shared = {group: names for group, names in members.items() if len(names) > 1}
    assert shared == {
        "body.conv": ["body.conv", "body.stage1.0.branch.conv2", "body.stage1.1.branch.conv2"],
        **{
            f"body.stage{s}.0.branch.conv2": [
                f"body.stage{s}.0.branch.conv2",
                f"body.stage{s}.0.shortcut.conv",
                f"body.stage{s}.1.branch.conv2",
            ]
            for s in (2, 3, 4)
        },
    }
    assert len(members) == 12
    assert layers[-1] == ChannelLayer("classifier", "body.stage4.0.branch.conv2", None)
    reads = {layer.name: layer.reads for layer in layers}
    assert reads["body.conv"] is None
    assert reads["body.stage2.0.shortcut.conv"] == reads["body.stage2.0.branch.conv1"] == "body.conv"
    assert all(len(layer.norms) == 1 for layer in layers[:-1])


class Own(nn.Module):
    """A network of a user's, of functions as well as modules; ``odd`` names what cannot be followed in it."""

    def __init__(self, odd: str = "") -> None:
        super().__init__()
        self.odd = odd
        self.rows = nn.Linear(8, 8)
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2 if odd == "groups" else 1)
        self.norm = nn.BatchNorm2d(4)
        self.classifier = nn.Linear(8 * 8 if odd == "rows" else 4 * 5 * 5, 3)
        if odd == "tied":
            self.second.weight = self.first.weight

    def forward(self, images: Tensor) -> Tensor:
        if self.odd == "rows":
            return self.classifier(self.rows(images).flatten(1))
        x = relu(self.first(images))
        y = max_pool2d(self.second(x), 3, 1, 1)
        if self.odd == "decides" and images.sum() > 0:
            y = -y
        y = self.norm(x + y if self.odd == "norm of sum" else y).relu()
        y = self.second(y) if self.odd == "twice" else y
        y = self.norm(relu(self.first(y[:, :1]))) if self.odd == "norm twice" else y
        y = self.rows(y.flatten(2)) if self.odd == "pixels" else y
        y = torch.cat((x, y), 1)[:, :4] if self.odd == "cat" else torch.add(x, y)
        logits: Tensor = self.classifier(torch.flatten(adaptive_avg_pool2d(y, 5), 1))
        return logits


GREY = (1, 8, 8)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda shape: LeNet5().build(shape, 5), (1, 28, 28)),
        (lambda shape: MLP(hidden=(7, 5)).build(shape, 3), GREY),
        (lambda shape: MeanCNN(channels=(6, 5)).build(shape, 3), GREY),
        (lambda shape: VGG16(batch_norm=True).build(shape, 3), (1, 32, 64)),
        (lambda shape: ResNet18().build(shape, 3), GREY),
        (lambda shape: ResNet50().build(shape, 3), GREY),
        (lambda shape: ResNet32(shortcut="projection").build(shape, 3), GREY),
        (lambda shape: Own(), GREY),
    ],
    ids=["lenet5", "mlp", "mean-cnn", "vgg16", "resnet18", "resnet50", "resnet32", "own"],
)
def test_permuting_all_groups_changes_no_logit(build: Callable[[Shape], nn.Module], shape: Shape) -> None:
    """If a layer were missing, or read another group than is said, the permuted network would compute nonsense."""
    noise = torch.Generator().manual_seed(0)
    network = build(shape)
    model = lively(network, noise)
    images = torch.randn(3, *shape, generator=noise)
    moved = permuted(model, channel_groups(network), noise)
    assert not torch.equal(moved["classifier.weight"], model["classifier.weight"])
    expected, got = (functional_call(network.eval(), dict(weights), (images,)) for weights in (model, moved))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ("groups", "the grouped convolution second"),
        ("decides", "symbolically traced"),
        ("norm of sum", "the batch norm norm, which normalises an image or a sum"),
        ("twice", "second, which is used twice"),
        ("cat", "function cat, which is not known"),
        ("pixels", "a flatten that does not make one row of each image"),
        ("rows", "rows, which reads a part of each image"),
        ("tied", "second.weight stands at several places, and has one order"),
    ],
)
def test_what_cannot_be_followed_is_named_with_what_to_do(odd: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"{what}.*Use such a network, or the plain mean"):
        channel_groups(Own(odd))


@pytest.mark.parametrize(
    "flatten",
    [
        lambda x: torch.flatten(input=x, start_dim=1),
        lambda x: x.flatten(1, 3),
        lambda x: x.flatten(-3),
        nn.Flatten(1, 3),
        nn.Flatten(),
        lambda x: x.view(x.size(0), -1),
        lambda x: x.reshape(x.shape[0], -1),
        lambda x: torch.reshape(x, (x.size()[0], 256)),
        lambda x: x.view(-1, 256),
    ],
)
def test_every_flatten_that_makes_rows_is_followed(flatten: Callable[[Tensor], Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.flatten, self.out = nn.Conv2d(1, 4, 3, padding=1), flatten, nn.Linear(256, 3)

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.out(self.flatten(relu(self.first(images))))
            return logits

    assert [layer.name for layer in channel_groups(Net())] == ["first", "out"]


@pytest.mark.parametrize(
    "flatten",
    [
        lambda x: x.view(x.size(1), -1),
        lambda x: x.view(-1, x.size(0)),
        lambda x: x.reshape(x.shape[0], 4, 64),
        lambda x: x.view(-1, 64).flatten(1),
        lambda x: x[:, 0],
    ],
)
def test_other_reshaping_is_refused(flatten: Callable[[Tensor], Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(256, 3)

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.out(flatten(self.first(images)))
            return logits

    with pytest.raises(ConfigError, match="cannot follow the channels of Net through"):
        channel_groups(Net())


def test_a_mean_over_what_was_made_of_rows_of_maps_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(8, 3), nn.Linear(3, 5)

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.out(relu(self.first(images)).mean((2, 3)))
            return logits

    with pytest.raises(ConfigError, match="a mean over what first makes of a part of each image"):
        channel_groups(Net())


def test_a_mean_over_maps_and_an_empty_shortcut_are_followed() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.shortcut, self.out = nn.Sequential(), nn.Linear(4, 3)

        def forward(self, images: Tensor) -> Tensor:
            x = self.first(images)
            logits: Tensor = self.out((self.second(x) + self.shortcut(x)).mean([2, 3]))
            return logits

    assert [(layer.reads, layer.writes) for layer in channel_groups(Block())] == [
        (None, "first"),
        ("first", "first"),
        ("first", None),
    ]


def test_group_norm_and_shortcuts_without_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"through body\.norm, a GroupNorm\."):
        channel_groups(ResNet18(norm="group").build(GREY, 3))
    with pytest.raises(ConfigError, match=r"through body\.stage2\.0\.shortcut, a PaddedShortcut\."):
        channel_groups(ResNet32().build(GREY, 3))


def test_what_is_added_to_the_image_or_the_logits_stays_in_place() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.classifier, self.side = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, images: Tensor) -> Tensor:
            x = images.flatten(1)
            x = x + self.inner(x)
            logits: Tensor = self.classifier(x) + self.side(x)
            return logits

    assert [(layer.reads, layer.writes) for layer in channel_groups(Around())] == [(None, None)] * 3
