"""The recipe's network: how it lies in memory while it trains, and what batch norm asks of the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import tiny
import torch
from torch import Tensor, nn

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.data import Augmentation
from fedkeep.errors import ConfigError
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.interface import Training
from fedkeep.losses import CrossEntropy, LinearTerm
from fedkeep.models import Network, Shape, Weights
from fedkeep.models.networks import CNN4, LeNet5, Norm, Residual
from fedkeep.training import model_runner
from fedkeep.training.local_training import BatchStream, TrainJob, autocast, fit
from fedkeep.training.model_runner import ModelRunner, has_batch_norm

CPU = torch.device("cpu")
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def residual(norm: Norm) -> nn.Module:
    """Return one block of a ResNet, of as few maps as group norm takes, with a projection that halves the side."""
    block = Residual((1, 32, 64), (3, 3), (2, 1), norm)
    return Network(nn.Sequential(block, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 64, 3)


NETWORKS: dict[str, tuple[Shape, Callable[[], nn.Module]]] = {
    "lenet5": ((1, 16, 16), lambda: LeNet5().build((1, 16, 16), 3)),
    "cnn4": ((3, 9, 8), lambda: CNN4().build((3, 9, 8), 3)),
    "batch norm": ((1, 8, 8), lambda: residual("batch")),
    "group norm": ((1, 8, 8), lambda: residual("group")),
}


def trained(
    name: str, layout: torch.memory_format, dtype: torch.dtype, sloping: bool = False
) -> tuple[Weights, Weights]:
    """Return a model as it begins, and after two steps with momentum in a layout; on a slope that lies plainly too."""
    shape, factory = NETWORKS[name]
    networks = ModelRunner(lambda: factory().to(dtype), 0, CPU)
    assert networks.layout == torch.channels_last, "what the engine chooses for convolutions"
    networks.layout = layout
    networks.train_network.to(memory_format=layout)  # type: ignore[call-overload]
    noise = torch.Generator().manual_seed(0)
    data = {"input": torch.randn(9, *shape, generator=noise).to(dtype), "label": torch.arange(9) % 3}
    source = BatchStream(data, lambda images: images, Augmentation(), torch.Generator().manual_seed(1), noise, layout)
    training = Training(batch_size=4, lr=0.01, momentum=0.9)
    slope = {key: torch.randn(networks.initial[key].shape, generator=noise).to(dtype) for key in networks.parameters}
    objective = CrossEntropy() + LinearTerm(slope) if sloping else CrossEntropy()
    result = fit(networks, TrainJob(networks.initial, objective, [source], epochs=1, round=1, seed=0), training)
    assert all(tensor.is_contiguous() for tensor in result.model.values()), (
        "a model is in plain layout, whatever fit is"
    )
    return networks.initial, result.model


def length(weights: Mapping[str, Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in weights.values()) ** 0.5


# In float32 a number within rounding of zero may be rectified in one layout and not in the other; through batch norm's
# many layers that can grow to a visible difference. In float64 none comes as near to zero, and none may be seen.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-2), (torch.float64, 1e-9)], ids=["float32", "float64"]
)
@pytest.mark.parametrize("sloping", [False, True], ids=["labels", "a slope too"])
@pytest.mark.parametrize("name", NETWORKS)
def test_training_with_channels_last_is_training_in_plain_layout(
    name: str, sloping: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """A slope, as SCAFFOLD's, lies otherwise in memory than the weights whose gradient it is."""
    (initial, plain), (_, last) = (trained(name, layout, dtype, sloping) for layout in LAYOUTS)
    moved = {label: plain[label] - initial[label] for label in plain if label.endswith(("weight", "bias"))}
    apart = {label: plain[label] - last[label] for label in plain}
    assert length(apart) <= tolerance * length(moved)
    assert length(moved) > 0


def test_only_convolutions_are_laid_out_otherwise() -> None:
    assert ModelRunner(tiny.network, 0, CPU).layout == torch.contiguous_format


@pytest.mark.parametrize(("images", "layout"), [(2, torch.contiguous_format), (3, torch.channels_last)])
def test_many_weights_and_few_images_keep_the_plain_layout(
    images: int, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = NETWORKS["cnn4"][1]
    weights = sum(weight.numel() for weight in factory().parameters())
    monkeypatch.setattr(model_runner, "WEIGHTS_PER_IMAGE", weights / 3)
    assert ModelRunner(factory, 0, CPU, batch_size=images).layout == layout


def test_several_rows_for_each_class_and_the_first_is_everybodys() -> None:
    """PASS's head, whose classes are four by rotation: it grows by as many rows for each class."""
    plain, wide = ModelRunner(tiny.network, 0, CPU), ModelRunner(tiny.network, 0, CPU, rows_per_class=4)
    assert tiny.equal({n: t[::4] if "classifier" in n else t for n, t in wide.initial.items()}, plain.initial)
    assert wide.parameters == plain.parameters
    images = torch.randn(2, *tiny.SHAPE, generator=torch.Generator().manual_seed(0))
    expected = plain.logits(plain.initial, images)
    torch.testing.assert_close(wide.logits(wide.initial, images)[:, ::4], expected)
    assert dict(wide.build().named_parameters())["classifier.weight"].shape == (12, 8)
    first = wide.initial
    wide.set_task([3, 5])
    assert wide.initial["classifier.weight"].shape == (20, 8)
    assert torch.equal(wide.initial["classifier.weight"][:12], first["classifier.weight"])
    assert wide.logits(first, images).shape == (2, 12), "an older model answers as it did"


# Batch norm


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), norm, nn.Linear(8, tiny.CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        answer: Tensor = self.layers(images)
        return answer


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (nn.BatchNorm1d(8), True),
        (nn.BatchNorm1d(8, affine=False, track_running_stats=False), True),
        (nn.GroupNorm(4, 8), False),
        (nn.LayerNorm(8), False),
        (nn.InstanceNorm1d(8), False),
    ],
    ids=repr,
)
def test_only_batch_norm_counts_as_batch_norm(norm: nn.Module, expected: bool) -> None:
    assert has_batch_norm(Normed(norm)) is expected
    assert ModelRunner(lambda: Normed(norm), 0, CPU).has_batch_norm is expected


def test_batches_of_one_are_refused_before_batch_norm_meets_them() -> None:
    ones = replace(tiny.TRAINING, batch_size=1, lr=0.01)
    with pytest.raises(ConfigError, match=r"batch norm needs at least two .*training\.batch_size is 1\. Set it to 2"):
        tiny.simulation(FedAvg(), factory=lambda: Normed(nn.BatchNorm1d(8)), training=ones)
    settings = ["model.name=mean-cnn", "fedseq.training.batch_size=1"]
    with pytest.raises(ConfigError, match=r"and training\.batch_size of FedSeq is 1"):
        Experiment(load_recipe("demo", settings=settings)).check()
    simulation = tiny.simulation(FedAvg(), factory=lambda: Normed(nn.GroupNorm(4, 8)), training=ones)
    assert not any(record["lost"] for record in tiny.run_rounds(simulation))


@pytest.mark.parametrize(("factory", "rows"), [(NETWORKS["cnn4"][1], 128), (tiny.network, 1024)])
def test_frozen_models_answer_in_parts(factory: Callable[[], nn.Module], rows: int) -> None:
    """Parts bound memory and, with convolutions, keep within the cache; nobody's answer depends on who is beside it."""
    networks = ModelRunner(factory, 0, CPU)
    seen: list[int] = []
    networks.eval_network.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    shape = NETWORKS["cnn4"][0] if rows == 128 else (1, 4, 4)
    images = torch.randn(rows + 3, *shape, generator=torch.Generator().manual_seed(0))
    logits = networks.logits(networks.initial, images)
    assert seen == [rows, 3]
    alone = [networks.logits(networks.initial, image[None]) for image in images]
    torch.testing.assert_close(logits, torch.cat(alone))


def test_teachers_in_a_step_are_as_coarse_as_the_step() -> None:
    networks = ModelRunner(NETWORKS["cnn4"][1], 0, CPU)
    images = torch.randn(4, 3, 9, 8, generator=torch.Generator().manual_seed(0))
    fine = networks.logits(networks.initial, images)
    with autocast("bfloat16", CPU):
        coarse = networks.logits(networks.initial, images)
    assert coarse.dtype == torch.float32, "softmaxes need the digits"
    assert not torch.equal(coarse, fine)
    torch.testing.assert_close(coarse, fine, rtol=0.1, atol=0.02)
