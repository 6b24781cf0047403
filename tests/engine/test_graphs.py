"""Recorded steps against those taken one by one: the same numbers, from graphs that do not know what Python decides.

There is no GPU where tests run. What records here (`taped`) keeps the rules of CUDA graphs on the CPU: that local steps
can be recorded, and replayed for other clients, rounds and tasks, shows here; that a GPU is quicker so does not.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny
import torch
from taped import TapeRecorder
from torch import Tensor, nn

from fedkeep.algorithms.fedavg import FedAvg
from fedkeep.algorithms.fedntd import FedNTD
from fedkeep.data import Augmentation
from fedkeep.engine import graphs
from fedkeep.engine.embedded import Embedded
from fedkeep.engine.graphs import Graphs
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, Client, Fit, Training, algorithms, on_client
from fedkeep.interface.algorithm import knows_tasks
from fedkeep.models import Network, Weights
from fedkeep.objectives import Batch, CrossEntropy, Objective, Student

METHODS = [tiny.configured(cls) for cls in algorithms().values() if cls.__module__.startswith("fedkeep.")]
# A rate that float32 holds: graphs read it from memory, in float32, and the loop's is Python's.
TRAINING = Training(epochs=4, batch_size=3, lr=0.125, momentum=0.5, weight_decay=2**-10)
COMPOSED = {"fedweit"}  # the network's weights are computed in the method's own code


def recording(engine: Embedded) -> list[TapeRecorder]:
    """Let an engine's steps be recorded."""
    recorders = [TapeRecorder() for _ in engine.places]
    for place, recorder in zip(engine.places, recorders, strict=True):
        place.networks.graphs = Graphs(place.networks, recorder)
    return recorders


def engine(method: Algorithm[Any, Any], **changes: Any) -> Embedded:
    in_tasks = knows_tasks(type(method)) and "auxiliary" not in method.needs
    play = tiny.engine_with_tasks if in_tasks else tiny.engine
    return play(method, **({"rounds": 2, "training": TRAINING} | changes))


def compared(method: Algorithm[Any, Any], **changes: Any) -> tuple[Embedded, list[TapeRecorder]]:
    """Play with and without graphs, and require equal records and models."""
    plain, other = engine(method, **changes), engine(method, **changes)
    recorders = recording(other)
    assert tiny.played(other) == tiny.played(plain)
    assert tiny.equal(other.server.model, plain.server.model)
    return other, recorders


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name())
def test_recorded_steps_are_the_steps_of_the_loop(method: Algorithm[Any, Any]) -> None:
    _, recorders = compared(method)
    replayed = sum(recorder.replayed for recorder in recorders)
    assert bool(replayed) == (method.name() not in COMPOSED), "else nothing was compared"


@pytest.mark.parametrize("name", ["fedavg", "fedntd", "sfedkd", "fedlsd"])
def test_augmented_images_and_their_teachers(name: str) -> None:
    """Teachers of augmented images answer inside of the step, so that they are recorded with it."""
    moving = Augmentation(crop=1, flip=True)
    _, recorders = compared(algorithms()[name](), augmentation=moving)
    assert recorders[0].replayed


def test_clients_share_graphs_by_the_shapes_of_their_batches() -> None:
    training = replace(TRAINING, batch_size=5)
    played, (recorder,) = compared(FedAvg(), training=training, rounds=4, cohort=6)
    lengths = {min(5, size - start) for size in tiny.SIZES for start in range(0, size, 5)}
    steps = 4 * 4 * sum(-(-size // 5) for size in tiny.SIZES)
    assert recorder.recorded == len(lengths) == 3, "batches of 5, of 2 and of 4"
    assert recorder.plain == graphs.WARM * recorder.recorded
    assert recorder.replayed + recorder.plain == steps
    assert played.finished == 4


def test_what_objectives_hold_may_grow() -> None:
    """A teacher's answers are a row for each example: a client with more of them needs more room."""
    federation = tiny.federation((4, 9, 20, 33))
    _, (recorder,) = compared(FedNTD(), federation=federation, cohort=4, rounds=3)
    assert recorder.replayed


def test_dropout_draws_what_the_loop_draws() -> None:
    def factory() -> nn.Module:
        return Network(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.5)), 8, tiny.CLASSES)

    _, (recorder,) = compared(FedAvg(), factory=factory)
    assert recorder.replayed


def test_batch_norm_clipping_and_a_falling_rate() -> None:
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten())
    training = replace(TRAINING, clip=0.5, lr_decay=0.5)
    _, (recorder,) = compared(
        FedAvg(),
        factory=lambda: Network(copy.deepcopy(layers), 8, tiny.CLASSES),
        training=training,
        rounds=3,
    )
    assert recorder.replayed


def test_bfloat16_is_recorded() -> None:
    _, (recorder,) = compared(FedAvg(), training=replace(TRAINING, precision="bfloat16"))
    assert recorder.replayed


@dataclass(frozen=True)
class Unlike(FedAvg):
    """Every client learns with an objective of its own."""

    def objective(self, client: Client[Any], model: Weights) -> Objective:
        return CrossEntropy(tau=1.0 + int(client.id) / 8)


def test_a_number_of_the_objective_is_part_of_what_is_recorded() -> None:
    _, (recorder,) = compared(Unlike())
    assert recorder.replayed


def test_kinds_that_are_never_seen_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "KINDS", 1)
    _, (recorder,) = compared(Unlike(), rounds=3)
    assert recorder.replayed


@dataclass(frozen=True, eq=False)
class Branching(Objective):
    """A loss that looks at its value."""

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        loss = CrossEntropy()(student, batches)
        return loss if loss.item() > 0 else 2 * loss


@dataclass(frozen=True)
class Looking(FedAvg):
    def objective(self, client: Client[Any], model: Weights) -> Objective:
        return Branching()


def test_an_objective_that_asks_for_a_number_cannot_be_recorded() -> None:
    other = engine(Looking())
    recording(other)
    with pytest.raises(RuntimeError, match="no number can be told") as caught:
        tiny.played(other)
    assert "A step with Branching was being recorded" in "".join(caught.value.__notes__)
    assert "without --graphs" in "".join(caught.value.__notes__)


@dataclass(frozen=True)
class Watching(FedAvg):
    """Method code sees every step."""

    @on_client
    def train(self, client: Client[Any], model: Weights) -> Fit:
        seen = []
        fit = client.fit(model, CrossEntropy(), watch=lambda weights: seen.append(len(weights)))
        assert len(seen) == fit.steps
        return fit


def test_steps_that_are_watched_are_taken_one_by_one() -> None:
    _, (recorder,) = compared(Watching())
    assert not recorder.recorded


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"need a GPU, and the device is cpu\. Add --device cuda, or omit --graphs"):
        tiny.engine(FedAvg(), graphs=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name())
def test_on_a_gpu(method: Algorithm[Any, Any]) -> None:
    gpu = torch.device("cuda")
    changes: dict[str, Any] = {"device": gpu, "load_generator": lambda task: tiny.ToyGenerator(gpu)}
    plain, other = (engine(method, graphs=graphs, **changes) for graphs in (False, True))
    for one, another in zip(tiny.played(plain), tiny.played(other), strict=True):
        assert one["loss"] == pytest.approx(another["loss"], rel=1e-4)
    for name, tensor in plain.server.model.items():
        torch.testing.assert_close(other.server.model[name], tensor, rtol=1e-3, atol=1e-5)
