"""A federation so small that a round takes milliseconds, and simulations on it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep.data import DataSet, Federation, Tasks, TaskStream
from fedkeep.data.partition import Dirichlet, Partition
from fedkeep.generation.diffusion.generator import Generator, NoiseSchedule, Sampler
from fedkeep.interface import Algorithm, Training
from fedkeep.models import Weights, get_architecture
from fedkeep.rounds.run_settings import RunSettings
from fedkeep.rounds.state import Settings
from fedkeep.trials.simulation import Simulation

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


def simulation(algorithm: Algorithm[Any, Any], *, rounds: int = 4, cohort_size: int = 3, **changes: Any) -> Simulation:
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


def simulation_with_tasks(
    algorithm: Algorithm[Any, Any],
    tasks: TaskStream | None = None,
    *,
    rounds: int = 2,
    cohort_size: int = 3,
    **changes: Any,
) -> Simulation:
    """Return a simulation at round 0 in which classes arrive in tasks.

    ``tasks``: By default three of one class each.
    ``rounds``, ``cohort_size``: How many rounds in each task, and how many clients in each round.
    """
    first = Federation.from_stream(tasks or stream(), 1, dataset(6, seed=3).train)
    hidden = get_architecture("mlp")(hidden=(8,))  # type: ignore[call-arg]
    settings = {"federation": first, "factory": lambda: hidden.build(SHAPE, first.cumulative_classes[0])} | changes
    return simulation(algorithm, rounds=rounds, cohort_size=cohort_size, **settings)


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
