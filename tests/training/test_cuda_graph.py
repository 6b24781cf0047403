"""Steps that are captured and replayed: equal to those that are not, with a capture that this machine can have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedkeep.algorithms.incremental.fedlwf import FedLwF
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.fedcad import FedCAD
from fedkeep.algorithms.parallel.fedprox import FedProx
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.data import Augmentation
from fedkeep.interface import Algorithm, Training, algorithms
from fedkeep.losses import Batch, CrossEntropy, Distillation, FullKL, Loss, ModelView, WeightRule
from fedkeep.losses.classification import LabelLoss
from fedkeep.models import Network, Weights
from fedkeep.training import local_training
from fedkeep.training.cuda_graph import CapturedSteps, CudaGraphCapture, can_capture
from fedkeep.trials.simulation import Simulation

TRAINING = replace(tiny.SHORT, epochs=6, batch_size=2)
MOVING = Augmentation(crop_padding=1, horizontal_flip=True)
CAPTURED = [
    pytest.param(tiny.configured(cls), id=cls.name(), marks=() if cls is FedCAD else pytest.mark.slow)
    for cls in (FedAvg, FedProx, FedCAD, SFedKD)
]


def every_method() -> Iterator[Any]:
    """Yield every package's method with and without augmentation; the first of one method of each family is quick."""
    for cls in algorithms().values():
        for augmentation in (Augmentation(), MOVING) if cls.__module__.startswith("fedkeep.") else ():
            marks = () if cls.name() in tiny.FAMILIES and not augmentation else pytest.mark.slow
            name = f"{cls.name()}{'-augmented' * bool(augmentation)}"
            yield pytest.param(tiny.configured(cls), augmentation, id=name, marks=marks)


class Again:
    """What a captured step is here: the function, called again."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.replay = function


class Counted:
    """Captures with `Again`, and counts."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, function: Callable[[], None]) -> Again:
        self.captured += 1
        return Again(function)


def refuse(function: Callable[[], None]) -> Again:
    raise RuntimeError("operation not permitted when stream is capturing")


def run(
    method: Algorithm[Any, Any], capture: Any, device: str = "cpu", training: Training = TRAINING, rounds: int = 2
) -> tuple[list[dict[str, Any]], Weights]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_training, "capture_on", lambda device: capture)
        simulation = tiny.simulation(method, rounds=rounds, training=training, device=torch.device(device))
        return tiny.run_rounds(simulation), simulation.server.model


@pytest.mark.parametrize("method", [FedAvg(), SFedKD()], ids=["fedavg", "sfedkd"])
@pytest.mark.parametrize("capture", [Counted(), refuse], ids=["captured", "refused"])
def test_captured_steps_train_the_same_model(method: Algorithm[Any, Any], capture: Any) -> None:
    records, model = run(method, None)
    again, other = run(method, capture)
    assert again == records
    assert all(torch.equal(model[name], other[name]) for name in model)
    assert capture is refuse or capture.captured, "steps were captured"


@pytest.mark.parametrize("method", CAPTURED)
@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_what_one_client_captured_is_replayed_for_the_next(method: Algorithm[Any, Any], momentum: float) -> None:
    """Clients of one to many examples, a learning rate a round: each must read its own numbers and nobody else's."""
    training = replace(TRAINING, momentum=momentum, lr_decay=0.5)
    capture = Counted()
    records, model = run(method, None, training=training, rounds=4)
    again, other = run(method, capture, training=training, rounds=4)
    assert again == records
    assert all(torch.equal(model[name], other[name]) for name in model)
    assert 0 < capture.captured < 4 * len(tiny.SIZES), "most clients' steps were captured for others"


class Recorded:
    """A stepper that notes which images and which rows of a loss it was given."""

    def __init__(self) -> None:
        self.taken: list[tuple[list[float], list[float]]] = []
        self.restarts = 0

    def restart(self) -> None:
        self.restarts += 1

    def step(self, loss: Loss, batches: list[Batch]) -> None:
        assert isinstance(loss, Rows)
        self.taken.append((batches[0].data["input"][:, 0].tolist(), loss.rows[batches[0].index].tolist()))


@dataclass(frozen=True, eq=False)
class Rows(Loss):
    """A loss with a number for each example."""

    per_example_fields = ("rows",)
    rows: Tensor

    def __call__(self, model: ModelView, batches: list[Batch]) -> Tensor:
        raise AssertionError


def test_each_shape_of_a_batch_has_its_own_capture_which_reads_that_batch_and_that_clients_rows() -> None:
    recorded, capture = Recorded(), Counted()
    steps = CapturedSteps(recorded, capture)
    for client, count in enumerate([2, 2, 4, 5, 3]):  # twice as many rows as the first has fit, five do not
        rows = 100.0 * client + torch.arange(count)
        steps.restart(Rows(rows))
        for start in (0, 1, 0, 1):
            index = torch.arange(start, 2)
            images = rows[index].unsqueeze(1).expand(-1, 3)
            steps([Batch({"input": images}, index)])
            assert recorded.taken[-1] == (rows[index].tolist(), rows[index].tolist())
    assert recorded.restarts == 5
    assert capture.captured == 4, "two shapes, once for the first clients and once from the one with five rows on"


def test_a_captured_step_reads_weights_that_are_trained_now() -> None:
    """A new task brings new rows of the classifier, and with them other tensors."""
    capture = Counted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_training, "capture_on", lambda device: capture)
        simulation = tiny.simulation_with_tasks(tiny.configured(FedLwF), rounds=2, training=TRAINING)
        again = tiny.run_rounds(simulation)
    plain = tiny.simulation_with_tasks(tiny.configured(FedLwF), rounds=2, training=TRAINING)
    assert again == tiny.run_rounds(plain)
    assert capture.captured
    assert all(torch.equal(plain.server.model[name], weight) for name, weight in simulation.server.model.items())


class Operations(TorchDispatchMode):
    """Notes what a CUDA graph has baked in: each operation, its numbers, and where it reads what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []
        self.outside: dict[int, Tensor] = {}
        self._made: dict[int, tuple[int, Tensor]] = {}  # tensors are kept, so that no address is used twice

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is not torch.ops.aten.lift_fresh.default:  # a constant, just made
            self.noted.append((operation, [self._place(leaf) for leaf in tree_leaves((args, kwargs))]))
        made = operation(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(made)):
            address = tensor.untyped_storage().data_ptr()
            if address not in self.outside:
                self._made.setdefault(address, (len(self._made), tensor))
        return made

    def _place(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        address = leaf.untyped_storage().data_ptr()
        if address in self._made:
            address = self._made[address][0]
        else:
            self.outside[address] = leaf
        return address, leaf.dtype, leaf.shape, leaf.stride(), leaf.storage_offset()


class Exact(Counted):
    """Calls a captured step again, and fails where a CUDA graph, which cannot look again, would do something else."""

    def __call__(self, function: Callable[[], None]) -> Again:
        def replay() -> None:
            with Operations() as now:
                function()
            first.append(now)
            assert now.noted == first[0].noted

        first: list[Operations] = []
        return super().__call__(replay)


def check_exact(build: Callable[[], Simulation]) -> None:
    """Check that a run whose steps are captured exactly is the same as one without."""
    capture, plain = Exact(), build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_training, "capture_on", lambda device: capture)
        captured = build()
        records = tiny.run_rounds(captured)
    assert records == tiny.run_rounds(plain)
    assert tiny.equal(captured.server.model, plain.server.model)
    computes_weights = captured.algorithm.name() == "fedweit"  # from the tensors that it trains: called, not captured
    assert bool(capture.captured) != computes_weights


@pytest.mark.parametrize(("method", "augmentation"), list(every_method()))
def test_a_replayed_step_reads_the_same_places_with_the_same_numbers(
    method: Algorithm[Any, Any], augmentation: Augmentation
) -> None:
    in_tasks = method.handles_tasks and "auxiliary" not in method.needs
    build = tiny.simulation_with_tasks if in_tasks else tiny.simulation
    training = replace(TRAINING, epochs=1)
    check_exact(lambda: build(method, rounds=2, training=training, augmentation=augmentation))


def test_batch_norm_dropout_and_clipping_are_replayed_exactly() -> None:
    layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.3))
    training = replace(TRAINING, epochs=1, max_grad_norm=0.1)
    build = partial(tiny.simulation, FedAvg(), rounds=2, training=training)
    check_exact(lambda: build(factory=lambda: Network(copy.deepcopy(layers), 4, tiny.CLASSES)))


def test_what_a_graph_would_not_see_is_noticed() -> None:
    numbers, places = [1.0, 1.0, 2.0], [torch.zeros(1), torch.zeros(1)]
    number = Exact()(lambda: torch.mul(places[0], numbers.pop(0)))
    place = Exact()(lambda: torch.mul(places.pop(), 1.0))
    for step in (number, number, place):
        step.replay()
    for step in (number, place):
        with pytest.raises(AssertionError):
            step.replay()


class Own(Loss):
    """A loss of the user's, which may do something else in each step."""

    def __call__(self, model: ModelView, batches: list[Batch]) -> Tensor:
        return model.logits(batches[0]).square().mean()


class OwnLayer(nn.Linear):
    """A layer of the user's, likewise."""


def hooked(register: str) -> nn.Module:
    """A layer of PyTorch's with code of the user's beside it."""
    layer = nn.Linear(2, 2)
    getattr(layer.weight if register == "register_hook" else layer, register)(lambda *given: None)
    return layer


def with_forward() -> nn.Module:
    """A layer of PyTorch's that does what the user says."""
    layer = nn.Linear(2, 2)
    layer.forward = lambda inputs: inputs  # type: ignore[method-assign]
    return layer


@dataclass(frozen=True)
class OwnRule(WeightRule):
    """A weight rule of the user's, in a loss of the package."""

    def __call__(self, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        return FullKL(1.0)(teachers, labels, tau)


@pytest.mark.parametrize(
    ("network", "loss"),
    [
        (nn.Sequential(OwnLayer(2, 2)), CrossEntropy()),
        (hooked("register_forward_hook"), CrossEntropy()),
        (hooked("register_forward_pre_hook"), CrossEntropy()),
        (hooked("register_full_backward_hook"), CrossEntropy()),
        (hooked("register_hook"), CrossEntropy()),
        (nn.Sequential(with_forward()), CrossEntropy()),
        (nn.Linear(2, 2), CrossEntropy() + Own()),
        (nn.Linear(2, 2), LabelLoss(nn.functional.cross_entropy, None)),
        (nn.Linear(2, 2), LabelLoss(nn.CrossEntropyLoss(), None)),
        (nn.Linear(2, 2), Distillation((), OwnRule(), 1.0, "none")),
    ],
)
def test_code_of_the_users_is_not_captured(network: nn.Module, loss: Loss) -> None:
    assert can_capture(tiny.simulation(FedAvg()).context.runner.train_network, CrossEntropy())
    assert can_capture(nn.Linear(2, 2), LabelLoss(None, torch.ones(3)))
    assert can_capture(nn.Linear(2, 2), Distillation(({"weight": torch.ones(2, 2)},), FullKL(1.0), 1.0, "none"))
    assert not can_capture(network, loss)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("method", [FedAvg(), SFedKD()], ids=["fedavg", "sfedkd"])
def test_a_gpu_replays_the_same_steps(method: Algorithm[Any, Any]) -> None:
    models = [run(method, capture, "cuda")[1] for capture in (None, CudaGraphCapture(torch.device("cuda")))]
    for name, weight in models[0].items():
        torch.testing.assert_close(models[1][name], weight, rtol=0, atol=0)
