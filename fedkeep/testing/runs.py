"""What the checks run and compare: a federation so small that a round takes milliseconds, and simulations on it.

Also a method's undisturbed run, what its clients did, and expectations that tell.
"""

import functools
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_origin

import torch
from torch import Tensor, nn

from fedkeep._utils.seeds import temporary_seed
from fedkeep._utils.type_hints import annotations_of
from fedkeep.data import DataSet, Federation, Tasks, TaskStream
from fedkeep.data.partition import Dirichlet, Partition
from fedkeep.errors import DataError
from fedkeep.generation.generator import Generator, NoiseSchedule, Sampler
from fedkeep.interface import Algorithm, Training
from fedkeep.interface.algorithm import client_steps
from fedkeep.interface.codec import encode
from fedkeep.interface.pytree import keystr, tree_leaves_with_path
from fedkeep.losses import Batch
from fedkeep.models import Weights, get_architecture
from fedkeep.rounds.executor import Executor, Future
from fedkeep.rounds.messages import Fault, StepRequest, StepResult
from fedkeep.rounds.run_settings import RunSettings
from fedkeep.rounds.state import Settings, SimulationState
from fedkeep.training.local_training import BatchStream
from fedkeep.training.party import LocalClient, LocalParty
from fedkeep.trials.callbacks import Callback, OnRoundEnd
from fedkeep.trials.simulation import Simulation

AnyAlgorithm = Algorithm[Any, Any]
Step = Callable[..., Any]
CLASSES = 3
SHAPE = (1, 4, 4)
SIZES = (7, 9, 12, 5, 17, 10)
"""How many examples the clients hold."""
TRAINING = Training(epochs=2, batch_size=6, lr=0.1, momentum=0.5, weight_decay=1e-3)
SHORT = replace(TRAINING, epochs=1, batch_size=8)
"""A step or two, for what does not depend on how long a client trains."""


def dataset(train: int = sum(SIZES), test: int = 31, seed: int = 0) -> DataSet:
    """Return noisy images of three classes, each bright in another place; labels in blocks of uneven length."""
    rng = torch.Generator().manual_seed(seed)

    def draw(count: int) -> dict[str, Tensor]:
        label = torch.arange(count) * CLASSES // count
        image = torch.randint(0, 120, (count, *SHAPE), generator=rng, dtype=torch.int64)
        for number, c in enumerate(label.tolist()):
            image[number, 0, c] += 90
        return {"input": image.to(torch.uint8), "label": label}

    return DataSet("tiny", draw(train), draw(test), tuple("abc"[:CLASSES]), (0.3,), (0.2,))


def by_hand(data: DataSet, clients: Sequence[Sequence[int]]) -> Federation:
    """Return a federation whose clients hold exactly these rows."""
    rows = torch.tensor([row for rows in clients for row in rows], dtype=torch.int64)
    offsets = torch.tensor([0, *(len(rows) for rows in clients)], dtype=torch.int64).cumsum(0)
    server = dataset(6, seed=3).train  # two images of each class, for methods whose server needs some
    return Federation(data, Partition("by hand", {}, 0, 1, rows, offsets), server)


def federation(sizes: Sequence[int] = SIZES) -> Federation:
    """Return clients with these numbers of examples, dealt from a fixed shuffle, so that their classes differ."""
    data = dataset(max(sum(sizes), CLASSES))
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(5)).tolist()
    # Half sorted: clients lean towards one class without holding only it.
    order = sorted(order[: len(order) // 2]) + order[len(order) // 2 :]
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return by_hand(data, [order[a:b] for a, b in itertools.pairwise(starts)])


def stream(sizes: Sequence[int] = (1, 1, 1), clients: int = 5, absent: int = 2) -> TaskStream:
    """Return tasks with these numbers of new classes, in each of which some clients hold nothing."""
    tasks = Tasks(num_tasks=len(sizes), classes_per_task=tuple(sizes), absent_clients=absent)
    return tasks.stream(dataset(), Dirichlet(num_clients=clients, alpha=0.5, min_size=1), 0)


def network() -> nn.Module:
    """Return an untrained network with one hidden layer."""
    return get_architecture("mlp")(hidden=(8,)).build(SHAPE, CLASSES)  # type: ignore[call-arg]


class ToyGenerator(Generator):
    """A generator of images that was never trained: noise is what differs from a prototype, itself an image."""

    shape = SHAPE
    noise_schedule = NoiseSchedule(num_timesteps=10)
    regime = "paper"
    sample_shape = SHAPE
    prototype_shapes = (SHAPE,)
    sampler = Sampler(steps=2)

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008 — a constant
        self.device = device

    def initial_prototypes(self, num_classes: int) -> Tensor:
        return torch.zeros(num_classes, *SHAPE).to(self.device)

    def conditioning(self, prototypes: Tensor, rng: torch.Generator | None = None) -> Tensor:
        return prototypes.flatten(2)

    def null_conditioning(self) -> Tensor:
        return torch.zeros(1, 1, 16).to(self.device)

    def predict_noise(self, noisy: Tensor, timesteps: Tensor, conditioning: Tensor) -> Tensor:
        return noisy - conditioning.view_as(noisy)

    def encode(self, images: Tensor, rng: torch.Generator) -> Tensor:
        self.check_images(images)
        return images.float() / 127.5 - 1

    def decode(self, samples: Tensor) -> Tensor:
        return ((samples.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)

    def hash(self) -> str:
        return "toy"


def simulation(algorithm: AnyAlgorithm, *, rounds: int = 4, cohort_size: int = 3, **changes: Any) -> Simulation:
    """Return a simulation at round 0 on the tiny federation.

    ``rounds``, ``cohort_size``: How many rounds, and how many clients in each.
    ``**changes``: Other arguments of `Simulation`, or fields of its `Settings` or `RunSettings`.
    """
    run = RunSettings(rounds=rounds, cohort_size=cohort_size, evaluation_models=("last",))
    run = replace(run, **{field.name: changes.pop(field.name) for field in fields(run) if field.name in changes})
    given = {field.name: changes.pop(field.name) for field in fields(Settings) if field.name in changes}
    networks: dict[str, Any] = {"federation": federation(), "factory": network}
    networks["load_generator"] = ToyGenerator
    return Simulation(algorithm, settings=Settings(**{"training": TRAINING, "run": run, **given}), **networks | changes)


def simulation_with_tasks(algorithm: AnyAlgorithm, tasks: TaskStream | None = None, **changes: Any) -> Simulation:
    """Return a simulation at round 0 in which classes arrive in tasks, of two rounds each.

    ``tasks``: By default three of one class each.
    ``**changes``: As of `simulation`.
    """
    first = Federation.from_stream(tasks or stream(), 1, dataset(6, seed=3).train)
    hidden = get_architecture("mlp")(hidden=(8,))  # type: ignore[call-arg]
    networks = {"federation": first, "factory": lambda: hidden.build(SHAPE, first.cumulative_classes[0])}
    return simulation(algorithm, **{"rounds": 2, **networks, **changes})


def run_rounds(simulation: Simulation, rounds: int | None = None) -> list[dict[str, Any]]:
    """Run a simulation to its end, or so many rounds, and return their records."""
    until = simulation.rounds if rounds is None else simulation.finished + rounds
    records = []
    while simulation.finished < until:
        records.append(simulation.run_round().record)
    return records


def equal(a: Weights, b: Weights) -> bool:
    """Tell whether two models are equal bit for bit, names in any order."""
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and bits(a[name]) == bits(b[name]) for name in a)


def bits(tensor: Tensor) -> bytes:
    """Return a tensor's bytes."""
    return bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).tolist()) if tensor.numel() else b""


def finite(model: Weights) -> bool:
    """Tell whether all numbers of a model are finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in model.values())


ROUNDS = 4
GLOBAL_SEED = 11
"""Of the generators that nobody may read, in undisturbed runs."""


def expect(condition: bool, expected: str) -> None:
    """Raise AssertionError with what is expected of a method, unless the condition holds."""
    if not condition:
        raise AssertionError(expected)


def expect_equal(found: object, wanted: object, expected: str) -> None:
    """Raise AssertionError that also says what was found instead, unless two values are equal."""
    if found != wanted:
        raise AssertionError(f"{expected}; {_difference(found, wanted)}")


def _difference(found: object, wanted: object) -> str:
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        found, wanted = next((a, b) for a, b in zip(found, wanted, strict=True) if a != b)
    if isinstance(found, dict) and isinstance(wanted, dict):
        names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
        found, wanted = ({name: value.get(name) for name in names} for value in (found, wanted))
    return f"found {_short(found)} instead of {_short(wanted)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 500 else f"{text[:500]}…"


@dataclass(frozen=True)
class UndisturbedRun:
    """What a run left that nothing disturbed.

    ``records``: Of all rounds.
    ``calls``: Round, client and step of everything that was asked, in order.
    ``initial``, ``model``: The server's model before and after.
    ``server``: The server's state.
    ``clients``: The clients' states.
    """

    records: list[dict[str, Any]]
    calls: list[tuple[int, str, str]]
    initial: Weights
    model: Weights
    server: Any
    clients: dict[str, Any]


@functools.lru_cache(maxsize=256)
def undisturbed(
    algorithm: AnyAlgorithm, build: Callable[..., Simulation] = simulation, **changes: Any
) -> UndisturbedRun:
    """Run a method with nobody disturbing it, once for all checks.

    ``build``: `simulation`, or the one with tasks.
    ``**changes``: What ``build`` is given besides.
    """
    calls: list[tuple[int, str, str]] = []
    simulation = build(algorithm, fault_injector=lambda *call: calls.append(call), **changes)
    initial = simulation.server.model
    with temporary_seed(GLOBAL_SEED):
        records = run_rounds(simulation)
    server = simulation.server
    return UndisturbedRun(records, calls, initial, server.model, server.state, simulation.client_states)


def expect_json(record: dict[str, Any]) -> None:
    """Check that a record is strict JSON."""
    advice = "what `server.log` is given should be finite numbers, or lists of them"
    try:
        text = json.dumps(record, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{advice}; {error}") from error
    expect_equal(json.loads(text), record, advice)


def asked_steps(algorithm: AnyAlgorithm) -> set[str]:
    """Return the names of the client steps that a method asks for in an undisturbed run."""
    return {step for _, _, step in undisturbed(algorithm).calls}


def last_step(algorithm: AnyAlgorithm) -> str:
    """Return the step that a round asks for last; not a task's first or last round, which may ask everybody too."""
    return [step for number, _, step in undisturbed(algorithm).calls if number == 2][-1]


def replies_with(algorithm: AnyAlgorithm, kind: type[Any]) -> set[str]:
    """Return the names of a method's steps whose annotated reply is of a kind."""
    replies = {name: annotations_of(step)["return"] for name, step in client_steps(type(algorithm)).items()}
    return {name for name, reply in replies.items() if issubclass(get_origin(reply) or reply, kind)}


def condition(simulation: Simulation) -> dict[str, Any]:
    """Return all that a later round can depend on, comparable."""
    empty = encode(simulation.client_states.type())
    states = {client: encode(state) for client, state in simulation.client_states.items()}
    return {
        "finished": simulation.finished,
        "model": encode(simulation.server.model),
        "server": encode(simulation.server.state),
        "clients": {client: state for client, state in sorted(states.items()) if state != empty},
    }


def contents(value: Any) -> list[tuple[str, Any]]:
    """Return all that is in a value, comparable; unlike its bytes, whichever tensors happen to be the same object."""
    leaves = tree_leaves_with_path(value)
    return [(keystr(path), bits(leaf) if isinstance(leaf, Tensor) else leaf) for path, leaf in leaves]


def expect_same_run(one: UndisturbedRun, records: list[dict[str, Any]], other: Simulation, why: str) -> None:
    """Check that a simulation left what an undisturbed run left, bit for bit."""
    expect_equal(records, one.records, f"records should be the same {why}")
    expect(equal(one.model, other.server.model), f"the model should be the same {why}")
    states = {"server's state": (one.server, other.server.state), "clients' states": (one.clients, other.client_states)}
    for what, (before, now) in states.items():
        expect(contents(before) == contents(now), f"the {what} should be the same {why}")


def expect_close_run(looped: UndisturbedRun, records: list[dict[str, Any]], other: Simulation) -> None:
    """Check that a simulation of stacked models left what an undisturbed run left, but for rounding."""
    for one, two in zip(looped.records, records, strict=True):
        for name in ("cohort", "lost", "examples"):
            expect_equal(two[name], one[name], f"{name!r} should not depend on the stack")
        losses = one["loss"], two["loss"]
        is_close = losses[0] == losses[1] or (None not in losses and math.isclose(*losses, rel_tol=1e-4))
        expect(is_close, f"the loss should be {losses[0]} up to rounding, not {losses[1]}")
    for name, tensor in looped.model.items():
        is_close = torch.allclose(other.server.model[name], tensor, rtol=1e-3, atol=1e-5)
        expect(is_close, f"{name} should be the same up to rounding when clients are trained as a stack")


def run_settled(simulation: Simulation, rounds: int | None = None) -> list[dict[str, Any]]:
    """Run to the end, or so many rounds, and check what is left."""
    records = run_rounds(simulation, rounds)
    expect_settled(records, simulation.server.model)
    return records


def expect_settled(records: list[dict[str, Any]], model: Weights) -> None:
    """Check that no client was lost, no round rolled back, and that the model is finite."""
    for record in records:
        expect_equal(record["lost"], {}, f"no client should be lost in round {record['round']}")
        expect(not record["rolled_back"], f"round {record['round']} should not be rolled back")
    expect_finite(model)


def expect_finite(model: Weights) -> None:
    """Check that all numbers of a model are finite."""
    expect(finite(model), "all numbers of the model should be finite")


def expect_data_error(simulation: Simulation) -> None:
    """Check that a run is refused since nobody holds an example of a class."""
    words = "no client holds an example of"
    try:
        run_rounds(simulation)
    except DataError as error:
        expect(words in str(error), f"the error should say that {words} a class, not {error}")
    else:
        expect(False, f"a run should be refused with a DataError that says {words} a class")


def expect_same_files(folder: Path, whole: Path, why: str) -> None:
    """Check that two trials left the same bytes."""
    for name in ("rounds.jsonl", "model.safetensors", "result.json"):
        same = (folder / name).read_bytes() == (whole / name).read_bytes()
        expect(same, f"{name} should hold the same bytes {why}; all that is kept belongs into a state")


class Stopped(BaseException):
    """Stands for whatever stops a process."""


def stop_after(number: int) -> Callback:
    """Return a callback that stops the trial after a round."""

    def stop(state: Any, result: Any) -> None:
        if result.record["round"] == number:
            raise Stopped

    return OnRoundEnd(stop)


class WrappedSteps(Executor):
    """Carries out other steps than it is given.

    ``wrap``: Returns what is called in the place of a request's step.
    """

    def __init__(self, inner: Executor, wrap: Callable[[StepRequest], Step]) -> None:
        self.inner = inner
        self.wrap = wrap
        self.prefetch = inner.prefetch

    def begin_round(self, round: int, cohort: Sequence[str]) -> None:
        self.inner.begin_round(round, cohort)

    def submit(self, *requests: StepRequest) -> list[Future]:
        return self.inner.submit(*(replace(request, step=self.wrap(request)) for request in requests))

    def wait(self, future: Future) -> StepResult | Fault:
        return self.inner.wait(future)

    def cancel_all(self) -> None:
        self.inner.cancel_all()

    def stop(self) -> None:
        self.inner.stop()


class BackwardExecutor(WrappedSteps):
    """Carries out all that it was given, the latest first, as soon as one result is waited for."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner, lambda request: request.step)
        self.prefetch = 64
        self.pending: list[tuple[int, Future]] = []
        self.results: dict[int, StepResult | Fault] = {}
        self.numbers = itertools.count()

    def submit(self, *requests: StepRequest) -> list[Future]:
        numbers = [next(self.numbers) for _ in requests]
        self.pending += zip(numbers, self.inner.submit(*requests), strict=True)
        return numbers

    def wait(self, future: Future) -> StepResult | Fault:
        while self.pending:
            number, inner = self.pending.pop()
            self.results[number] = self.inner.wait(inner)
        return self.results.pop(future)

    def cancel_all(self) -> None:
        self.pending.clear()
        self.results.clear()
        super().cancel_all()


def wrap_steps(simulation: SimulationState, wrap: Callable[[StepRequest], Step]) -> None:
    """Let a simulation carry out other steps than the method's own (see `WrappedSteps`)."""
    simulation.executor = WrappedSteps(simulation.executor, wrap)


def watch_clients(simulation: SimulationState, watch: Callable[[LocalParty], None]) -> None:
    """Call a function with every client before its step."""

    def wrap(request: StepRequest) -> Step:
        @functools.wraps(request.step)
        def wrapped(client: LocalClient, *args: Any, **kwargs: Any) -> Any:
            watch(client)
            return request.step(client, *args, **kwargs)

        return wrapped

    wrap_steps(simulation, wrap)


@dataclass
class RecordedBatches:
    """What clients saw.

    ``labels``: Of each client's examples.
    ``orders``: The rows of each pass over the first data set, in their order, by round and client.
    """

    labels: dict[str, list[int]]
    orders: dict[tuple[int, str], list[list[int]]]


def record_batches(simulation: Simulation) -> RecordedBatches:
    """Return what will hold what clients see, once the simulation has run."""
    seen = RecordedBatches({}, defaultdict(list))

    def watch(client: LocalParty) -> None:
        seen.labels[client.name] = client.data["label"].tolist()
        make = client.train_job

        def train_job(*args: Any, **kwargs: Any) -> Any:
            job = make(*args, **kwargs)
            orders = seen.orders[client.round, client.name]
            first, *others = job.streams  # a memory is the method's own, and may change from round to round
            return replace(job, streams=[_RecordedStream(**vars(first), orders=orders), *others])

        client.train_job = train_job  # type: ignore[method-assign]

    watch_clients(simulation, watch)
    return seen


@dataclass(frozen=True, eq=False)
class _RecordedStream(BatchStream):
    """A data set that writes down in which order its rows are drawn."""

    orders: list[list[int]] | None = None

    def batches(self, size: int, merge_last: bool) -> Iterator[Batch]:
        drawn = list(super().batches(size, merge_last))
        if self.orders is not None:
            self.orders.append([row for batch in drawn for row in batch.index.tolist()])
        return iter(drawn)
