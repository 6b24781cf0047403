"""A federation so small that a round takes milliseconds, and how to play on it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep.data import DataSet, Federation, Tasks, TaskStream
from fedkeep.data.partition import ClasswiseDirichlet, Partition
from fedkeep.engine.embedded import Embedded
from fedkeep.engine.plan import Plan
from fedkeep.generation.diffusion.generator import Generator
from fedkeep.generation.diffusion.schedules import NoiseSchedule
from fedkeep.interface import Algorithm, Training
from fedkeep.models import Weights, architecture

CLASSES = 3
SHAPE = (1, 4, 4)
SIZES = (7, 9, 12, 5, 17, 10)
RECIPE = """
title = "tiny"
seeds = [0]

[data]
name = "digits"

[partition]
scheme = "exdir"
clients = 8
classes = 2
alpha = 0.5

[model]
name = "mlp"
hidden = [8]

[training]
epochs = 1
batch_size = 64
lr = 0.05

[run]
rounds = 2
cohort = 2

[[methods]]
algorithm = "fedavg"

[[methods]]
algorithm = "fedseq"

[[methods]]
algorithm = "sfedkd"
teachers = 2
"""


def dataset(train: int = sum(SIZES), test: int = 31, seed: int = 0) -> DataSet:
    """Return noisy pictures of three classes, each bright in rows of its own; labels in blocks of uneven length."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> dict[str, Tensor]:
        label = torch.arange(count) * CLASSES // count
        image = torch.randint(0, 120, (count, *SHAPE), generator=generator, dtype=torch.int64)
        for number, c in enumerate(label.tolist()):
            image[number, 0, c] += 90
        return {"image": image.to(torch.uint8), "label": label}

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


def network() -> nn.Module:
    return architecture("mlp")(hidden=(8,)).build(SHAPE, CLASSES)  # type: ignore[call-arg]


INVERSION = {"nums": 6, "synthesis_batch_size": 4, "g_steps": 2, "warmup": 1, "ngf": 2, "kd_steps": 2}
PROTOTYPES = {"proto_rounds": 2, "proto_steps": 2, "proto_batch": 4, "sampler_steps": 2}
REPLAY = {"cur": 2, "pre": 2, **PROTOTYPES}
TOYS: dict[str, dict[str, Any]] = {
    "target": INVERSION,
    "feddcl": {**REPLAY, "server_cur": 3, "server_pre": 2},
    "dddr": REPLAY,
    **{f"{name}-kd-on-generated-images": {**PROTOTYPES, "server_cur": 3} for name in ("ft", "ewc", "lwf")},
    "lander": {**INVERSION, "anchors": str(Path(__file__).parent / "anchors.csv"), "syn_batch_size": 3},
}
"""Options without which a method cannot run here: as it comes it is too large, or lacks a file."""


def configured(cls: type[Algorithm[Any, Any]]) -> Algorithm[Any, Any]:
    """Return a method as it comes, or small."""
    return cls(**TOYS.get(cls.name(), {}))


class ToyGenerator(Generator):
    """Sees noise in what differs from its prototype, a picture; nothing is learned."""

    shape = SHAPE
    schedule = NoiseSchedule(num_timesteps=10)
    regime = "paper"
    sample_shape = SHAPE
    prototype_shapes = (SHAPE,)

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


TRAINING = Training(epochs=2, batch_size=6, lr=0.1, momentum=0.5, weight_decay=1e-3)
SHORT = replace(TRAINING, epochs=1, batch_size=8)
"""A step or two, for what does not depend on how long a client trains."""


def engine(algorithm: Algorithm[Any, Any], *, rounds: int = 4, cohort: int = 3, **changes: Any) -> Embedded:
    """Return an engine at round 0. ``plan`` fields may be given by name."""
    plan = Plan(rounds=rounds, cohort=cohort)
    named = {name: changes.pop(name) for name in list(changes) if name in plan.__dataclass_fields__}
    settings: dict[str, Any] = {"federation": federation(), "factory": network, "training": TRAINING}
    settings["load_generator"] = lambda task: ToyGenerator()
    return Embedded(algorithm=algorithm, plan=replace(plan, **named), **(settings | changes))


def played(engine: Embedded, rounds: int | None = None) -> list[dict[str, Any]]:
    """Play an engine to its end, or some rounds, and return the records."""
    until = engine.rounds if rounds is None else engine.finished + rounds
    records = []
    while engine.finished < until:
        records.append(engine.advance().record)
    return records


def equal(a: Weights, b: Weights) -> bool:
    """Tell whether two models are equal bit for bit, names in any order."""
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and bits(a[name]) == bits(b[name]) for name in a)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).tolist()) if tensor.numel() else b""


def finite(model: Weights) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in model.values())


def write_recipe(folder: Path, text: str = RECIPE, name: str = "recipe.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def stream(sizes: Sequence[int] = (1, 1, 1), clients: int = 5, absent: int = 2) -> TaskStream:
    """Return tasks with these numbers of new classes, in each of which some clients hold nothing."""
    tasks = Tasks(tasks=len(sizes), sizes=tuple(sizes), absent=absent)
    return tasks.stream(dataset(), ClasswiseDirichlet(clients, alpha=0.5, min_size=1), 0)


def engine_with_tasks(
    algorithm: Algorithm[Any, Any], tasks: TaskStream | None = None, *, rounds: int = 2, cohort: int = 3, **changes: Any
) -> Embedded:
    """Return an engine at round 0, with ``rounds`` in each task."""
    first = (tasks or stream()).federation(1, dataset(6, seed=3).train)
    hidden = architecture("mlp")(hidden=(8,))  # type: ignore[call-arg]
    settings = {"federation": first, "factory": lambda: hidden.build(SHAPE, first.seen[0])} | changes
    return engine(algorithm, rounds=rounds, cohort=cohort, **settings)
