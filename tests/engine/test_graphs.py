"""Recorded steps against those taken one by one: the same numbers, from graphs that do not know what Python decides.

There is no GPU where tests run. What records here (`taped`) keeps the rules of CUDA graphs on the CPU: that local steps
can be recorded, and replayed for other clients, rounds and tasks, shows here; that a GPU is quicker so does not.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny
import torch
from taped import Counted, TapeRecorder
from torch import Tensor, nn

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.fedntd import FedNTD
from fedkeep.data import Augmentation
from fedkeep.engine import graphs
from fedkeep.engine.embedded import Embedded
from fedkeep.engine.graphs import Graphs
from fedkeep.engine.recording import CudaRecorder
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, Client, Fit, Training, algorithms, on_client
from fedkeep.interface.algorithm import knows_tasks
from fedkeep.losses import Batch, CrossEntropy, Objective, Student
from fedkeep.models import Network, Weights

METHODS = [tiny.configured(cls) for cls in algorithms().values() if cls.__module__.startswith("fedkeep.")]
# A rate that float32 holds: graphs read it from memory, in float32, and the loop's is Python's.
TRAINING = Training(epochs=4, batch_size=3, lr=0.125, momentum=0.5, weight_decay=2**-10)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Compare = Callable[..., list[Counted]]
COMPOSED = {"fedweit"}  # the network's weights are computed in the method's own code


def recording(engine: Embedded) -> list[Counted]:
    """Let an engine's steps be recorded: on the CPU, or by its GPU."""
    on_cpu = engine.device.type == "cpu"
    recorders = [Counted(TapeRecorder() if on_cpu else CudaRecorder(engine.device)) for _ in engine.places]
    for place, recorder in zip(engine.places, recorders, strict=True):
        place.networks.graphs = Graphs(place.networks, recorder)
    return recorders


def engine(method: Algorithm[Any, Any], **changes: Any) -> Embedded:
    in_tasks = knows_tasks(type(method)) and "auxiliary" not in method.needs
    play = tiny.engine_with_tasks if in_tasks else tiny.engine
    return play(method, **({"rounds": 2, "training": TRAINING} | changes))


@pytest.fixture(params=["tape", pytest.param("cuda", marks=GPU)])
def compared(request: pytest.FixtureRequest) -> Compare:
    """Return what plays a method with and without graphs, requires equal results, and returns the recorders."""

    def with_tape(method: Algorithm[Any, Any], **changes: Any) -> list[Counted]:
        plain, other = engine(method, **changes), engine(method, **changes)
        recorders = recording(other)
        assert tiny.played(other) == tiny.played(plain)
        assert tiny.equal(other.server.model, plain.server.model)
        return recorders

    def with_gpu(method: Algorithm[Any, Any], **changes: Any) -> list[Counted]:
        gpu = torch.device("cuda")
        there: dict[str, Any] = {"device": gpu, "load_generator": lambda task: tiny.ToyGenerator(gpu)}
        plain, other = engine(method, **there, **changes), engine(method, **there, **changes)
        recorders = recording(other)
        for one, another in zip(tiny.played(plain), tiny.played(other), strict=True):
            assert one["loss"] == pytest.approx(another["loss"], rel=1e-4)
        for name, tensor in plain.server.model.items():
            torch.testing.assert_close(other.server.model[name], tensor, rtol=1e-3, atol=1e-5)
        return recorders

    return with_tape if request.param == "tape" else with_gpu


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name())
def test_recorded_steps_are_the_steps_of_the_loop(method: Algorithm[Any, Any], compared: Compare) -> None:
    replayed = sum(recorder.replayed for recorder in compared(method))
    assert bool(replayed) == (method.name() not in COMPOSED), "else nothing was compared"


@pytest.mark.parametrize("name", ["fedavg", "fedntd", "sfedkd", "fedlsd"])
def test_augmented_images_and_their_teachers(name: str, compared: Compare) -> None:
    """Teachers of augmented images answer inside of the step, so that they are recorded with it."""
    moving = Augmentation(crop=1, flip=True)
    recorders = compared(algorithms()[name](), augmentation=moving)
    assert recorders[0].replayed


def test_clients_share_graphs_by_the_shapes_of_their_batches(compared: Compare) -> None:
    training = replace(TRAINING, batch_size=5)
    (recorder,) = compared(FedAvg(), training=training, rounds=4, cohort=6)
    steps = Counter(min(5, size - start) for size in tiny.SIZES for start in range(0, size, 5))
    assert recorder.recorded == len(steps) == 3, "batches of 5, of 2 and of 4"
    assert recorder.replayed + recorder.plain == 4 * 4 * steps.total()
    first = tiny.SIZES[int(engine(FedAvg(), cohort=6).draw_cohort(1)[0])]
    alone = Counter(min(5, first - start) for start in range(0, first, 5))
    assert recorder.plain == sum(max(graphs.WARM, 4 * alone[length]) for length in steps)


def test_what_objectives_hold_may_grow(compared: Compare) -> None:
    """A teacher's answers are a row for each example: a client with more of them needs more room."""
    federation = tiny.federation((4, 9, 20, 33))
    (recorder,) = compared(FedNTD(), federation=federation, cohort=4, rounds=3)
    assert recorder.replayed


def test_dropout_draws_what_the_loop_draws(compared: Compare) -> None:
    def factory() -> nn.Module:
        return Network(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.5)), 8, tiny.CLASSES)

    (recorder,) = compared(FedAvg(), factory=factory)
    assert recorder.replayed


def test_batch_norm_clipping_and_a_falling_rate(compared: Compare) -> None:
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten())
    training = replace(TRAINING, clip=0.5, lr_decay=0.5)
    (recorder,) = compared(
        FedAvg(),
        factory=lambda: Network(copy.deepcopy(layers), 8, tiny.CLASSES),
        training=training,
        rounds=3,
    )
    assert recorder.replayed


def test_bfloat16_is_recorded(compared: Compare) -> None:
    (recorder,) = compared(FedAvg(), training=replace(TRAINING, precision="bfloat16"))
    assert recorder.replayed


@dataclass(frozen=True)
class Unlike(FedAvg):
    """Every client learns with an objective of its own."""

    def objective(self, client: Client[Any], model: Weights) -> Objective:
        return CrossEntropy(tau=1.0 + int(client.id) / 8)


def test_a_number_of_the_objective_is_part_of_what_is_recorded(compared: Compare) -> None:
    (recorder,) = compared(Unlike())
    assert recorder.replayed


def test_kinds_that_are_never_seen_again_are_forgotten(monkeypatch: pytest.MonkeyPatch, compared: Compare) -> None:
    (remembering,) = compared(Unlike(), rounds=4)
    monkeypatch.setattr(graphs, "KINDS", 2)
    (forgetting,) = compared(Unlike(), rounds=4)
    assert forgetting.recorded < remembering.recorded


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


def test_steps_that_are_watched_are_taken_one_by_one(compared: Compare) -> None:
    (recorder,) = compared(Watching())
    assert not recorder.recorded


@dataclass(frozen=True)
class WatchingFirst(FedAvg):
    """A training that is watched, then one that is not, of the same network."""

    @on_client
    def train(self, client: Client[Any], model: Weights) -> Fit:
        watched = client.fit(model, CrossEntropy(), watch=lambda weights: None)
        return client.fit(watched.model, CrossEntropy())


def test_a_watched_training_leaves_nothing_to_the_next(compared: Compare) -> None:
    """Such as what autograd kept of its last step, which names the stream that it was on."""
    (recorder,) = compared(WatchingFirst())
    assert recorder.replayed
    other = engine(WatchingFirst())
    tiny.played(other, 1)
    assert other.place.networks.read is None


def test_only_networks_that_are_known_to_keep_nothing_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeep.engine.embedded.checked_graphs", lambda device: None)
    own = nn.Sequential(nn.Flatten(), nn.Linear(16, tiny.CLASSES))
    with pytest.raises(ConfigError, match="steps of Sequential are not recorded, only those of FedKeep's models"):
        tiny.engine(FedAvg(), factory=lambda: copy.deepcopy(own), graphs=True)


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"need a GPU, and the device is cpu\. Add --device cuda, or omit --graphs"):
        tiny.engine(FedAvg(), graphs=True)
