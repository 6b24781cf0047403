"""FedAvg and FedNTD against the numbers that the official program of FedNTD computed (tests/references/README.md).

The file holds its results. The inputs are made here and compared with it first, so that other images, weights or
batches than the program had are not taken for another method.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.fedntd import FedNTD
from fedkeep.data import DataSet
from fedkeep.interface import Algorithm, Training
from fedkeep.losses import Batch
from fedkeep.models import Weights
from fedkeep.models.networks import CNN4
from fedkeep.training.local_training import BatchStream
from fedkeep.trials.simulation import Simulation

CLASSES = 10
SHAPE = (3, 32, 32)
SIZES = (13, 20, 6, 17, 10, 14)  # last batches of 3, 5, 1, 2, 5 and 4
ROUNDS = 3
SHOWN = 4  # test images whose logits are compared
TRAINING = Training(epochs=2, batch_size=5, lr=0.01, lr_decay=0.99, momentum=0.9, weight_decay=1e-5)
METHODS: dict[str, Algorithm[Any, Any]] = {"fedavg": FedAvg(), "fedntd": FedNTD()}
REFERENCE = json.loads((Path(__file__).parents[1] / "references" / "fedntd.json").read_text())

RTOL, ATOL = 1e-4, 1e-5  # of weights and logits
MOVED = 1e-4  # relative, of how far a tensor has come from its initial weights


@dataclass
class Play:
    """What one method drew and left in three rounds."""

    initial: Weights
    cohorts: list[list[str]] = field(default_factory=list)
    passes: list[list[list[int]]] = field(default_factory=list)  # rows by batch, one list a pass, in order of work
    models: list[Weights] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


def dataset() -> DataSet:
    """Return noisy pictures, each class with a pattern of its own; three classes a client."""
    # With this seed no number is so near a corner of a ReLU or a maximum that rounding pushes it over; see the README.
    generator = torch.Generator().manual_seed(5)
    patterns = torch.randint(64, (CLASSES, *SHAPE), generator=generator)

    def draw(labels: list[int]) -> dict[str, Tensor]:
        noise = torch.randint(64, (len(labels), *SHAPE), generator=generator)
        return {"input": (64 + patterns[labels] + noise).to(torch.uint8), "label": torch.tensor(labels)}

    train = [(2 * client + (0, 0, 1, 1, 4)[row % 5]) % CLASSES for client, n in enumerate(SIZES) for row in range(n)]
    test = [row % CLASSES for row in range(2 * CLASSES)]
    names = tuple(map(str, range(CLASSES)))
    return DataSet("patterns", draw(train), draw(test), names, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def simulation(method: Algorithm[Any, Any]) -> Simulation:
    ends = list(itertools.accumulate(SIZES))
    federation = tiny.by_hand(dataset(), [range(end - n, end) for end, n in zip(ends, SIZES, strict=True)])
    factory = partial(CNN4().build, SHAPE, CLASSES)
    return tiny.simulation(method, rounds=ROUNDS, federation=federation, factory=factory, training=TRAINING)


def run_once(method: Algorithm[Any, Any]) -> Play:
    """Run the three rounds and note what was drawn."""
    running = simulation(method)
    seen = Play(running.context.runner.initial)
    batches = BatchStream.batches

    def noted(self: BatchStream, size: int, merge_last: bool) -> Iterator[Batch]:
        sampled = list(batches(self, size, merge_last))
        seen.passes.append([batch.index.tolist() for batch in sampled])
        return iter(sampled)

    test = running.federation.dataset
    images = test.normalise(test.test["input"][:SHOWN])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchStream, "batches", noted)
        for _ in range(ROUNDS):
            seen.cohorts.append(running.run_round().record["cohort"])
            seen.models.append(running.server.model)
            seen.logits.append(running.context.runner.logits(running.server.model, images))
    return seen


def digest(data: DataSet) -> str:
    """Return the fingerprint of all images and labels."""
    content = hashlib.blake2b(digest_size=16)
    for column in (data.train["input"], data.train["label"], data.test["input"], data.test["label"]):
        content.update(tiny.bits(column))
    return content.hexdigest()


def digest_of_passes(passes: list[list[list[int]]]) -> str:
    return hashlib.blake2b(json.dumps(passes).encode(), digest_size=16).hexdigest()


def entries(model: Weights) -> Weights:
    """Return the entries of each tensor that the file holds."""
    return {name: model[name].flatten()[indices] for name, indices in REFERENCE["entries"].items()}


def excess(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference in units of the tolerance."""
    return float(((got - expected).abs() / (ATOL + RTOL * expected.abs())).max())


def moved(model: Weights, initial: Weights) -> dict[str, float]:
    return {name: float((tensor.double() - initial[name].double()).norm()) for name, tensor in model.items()}


def close(got: Weights, expected: Mapping[str, Any], *, rtol: float = RTOL, atol: float = ATOL) -> None:
    """Assert that a model has the entries, norms and means of the file."""
    assert got.keys() == expected.keys()
    for name, values in entries(got).items():
        torch.testing.assert_close(values, torch.tensor(expected[name]["values"]), rtol=rtol, atol=atol)
        assert float(got[name].double().norm()) == pytest.approx(expected[name]["norm"], rel=rtol), name
        assert float(got[name].double().mean()) == pytest.approx(expected[name]["mean"], rel=rtol, abs=atol / 100), name


@pytest.fixture(scope="module")
def recorded_runs() -> dict[str, Play]:
    """Run both methods once, and make sure that they had what the official program had."""
    inputs = REFERENCE["inputs"]
    redo = "not what the official program was given, so nothing can be compared: see tests/references/README.md"
    assert digest(dataset()) == inputs["data"], f"the images or labels are {redo}"
    both = {name: run_once(method) for name, method in METHODS.items()}
    for one in both.values():
        try:
            close(one.initial, inputs["initial"], rtol=1e-6, atol=1e-7)
        except AssertionError as error:
            raise AssertionError(f"the initial weights are {redo}") from error
        assert one.cohorts == inputs["cohorts"], f"the cohorts are {redo}"
        assert digest_of_passes(one.passes) == inputs["passes"], f"the batches are {redo}"
    return both


@pytest.mark.parametrize("name", METHODS)
def test_three_rounds_are_the_official_programs(name: str, recorded_runs: dict[str, Play]) -> None:
    one = recorded_runs[name]
    for model, logits, expected in zip(one.models, one.logits, REFERENCE["rounds"][name], strict=True):
        close(model, expected["model"])
        torch.testing.assert_close(logits, torch.tensor(expected["logits"]), rtol=RTOL, atol=ATOL)
        for tensor, distance in moved(model, one.initial).items():
            assert distance == pytest.approx(expected["model"][tensor]["moved"], rel=MOVED), tensor


def test_the_two_methods_are_told_apart(recorded_runs: dict[str, Play]) -> None:
    """In every round and every tensor each is far from the other's numbers, or agreeing with its own means little."""
    for name, other in itertools.permutations(METHODS):
        one = recorded_runs[name]
        for model, logits, expected in zip(one.models, one.logits, REFERENCE["rounds"][other], strict=True):
            for tensor, values in entries(model).items():
                assert excess(values, torch.tensor(expected["model"][tensor]["values"])) > 10, tensor
            assert max(excess(v, torch.tensor(expected["model"][n]["values"])) for n, v in entries(model).items()) > 100
            assert excess(logits, torch.tensor(expected["logits"])) > 100
            for tensor, distance in moved(model, one.initial).items():
                assert distance != pytest.approx(expected["model"][tensor]["moved"], rel=10 * MOVED), tensor
