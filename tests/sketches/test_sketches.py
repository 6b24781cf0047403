"""The sketches run: methods to come, on the interface as it is, without a special case in the engine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeep.algorithms.fedavg import FedAvg
from fedkeep.data import DataSet, Federation, load
from fedkeep.data.partition import schemes
from fedkeep.engine.checkpoint import Checkpoint
from fedkeep.engine.embedded import Embedded
from fedkeep.engine.plan import Plan
from fedkeep.experiment.plugins import use
from fedkeep.interface import Algorithm, Training, algorithm
from fedkeep.interface.codec import decode, encode
from fedkeep.models.mlp import MLP

HERE = Path(__file__).parent
SKETCHES = ("fedcad", "feddcl")
FILES = [str(HERE / f"{name}.py") for name in SKETCHES]
CLIENTS, ROUNDS = 6, 3


class Played(Embedded):
    """An engine that remembers its last records."""

    records: list[dict[str, Any]]


def sketch(name: str, **options: Any) -> Algorithm[Any, Any]:
    # As a user's own file would be, and only when a test runs: other tests list all methods when they are collected.
    use([str(HERE / f"{name}.py")])
    return algorithm(f"sketch-{name}")(**options)


@cache
def digits() -> DataSet:
    return load("digits")


@cache
def federation(classes: range = range(10)) -> Federation:
    """Give six clients unequal shares of the digits of some classes."""
    dataset = digits()
    chosen = (dataset.train["label"] >= classes.start) & (dataset.train["label"] < classes.stop)
    dataset = replace(dataset, train={name: column[chosen] for name, column in dataset.train.items()})
    scheme = schemes()["dirichlet"](clients=CLIENTS)
    return Federation(dataset, scheme.split(dataset.train, dataset.classes, seed=3))


def engine(method: Algorithm[Any, Any], classes: range = range(10), **settings: Any) -> Played:
    built = Played(
        method,
        federation(classes),
        lambda: MLP(hidden=(16,)).build((1, 8, 8), 10),
        Training(epochs=1, batch_size=32, lr=0.1, momentum=0.5),
        settings.pop("plan", Plan(rounds=ROUNDS, cohort=4)),
        **settings,
    )
    # As a growing classifier would have it; this one has all its rows from the start.
    built.place.classes = built.server.classes = classes.stop
    if "auxiliary" in method.needs:
        rows = torch.cat([(digits().test["label"] == label).nonzero()[:4, 0] for label in range(10)])
        built.server.data = {name: column[rows] for name, column in digits().test.items()}
    return built


def play(played: Played, rounds: int = ROUNDS) -> Played:
    played.records = [played.advance().record for _ in range(rounds)]
    return played


def same(first: Any, second: Any) -> bool:
    """Tell whether two values are equal bit for bit."""
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if is_dataclass(first):
        names = [field.name for field in fields(first)]
        return type(first) is type(second) and all(same(getattr(first, n), getattr(second, n)) for n in names)
    return bool(first == second)


def moved(played: Played) -> bool:
    return not same(played.server.model, played.place.networks.initial)


@pytest.mark.parametrize("name", SKETCHES)
def test_codec_changes_no_bit(name: str) -> None:
    direct, coded = (play(engine(sketch(name), through_codec=through)) for through in (False, True))
    assert moved(direct)
    assert direct.records == coded.records
    assert same(direct.server.model, coded.server.model)
    assert same(direct.server.state, coded.server.state)
    assert same(direct.states, coded.states)
    for state in direct.states.values():
        assert same(decode(encode(state), direct.client_state), state)


@pytest.mark.parametrize("name", SKETCHES)
def test_resume_changes_no_bit(name: str, tmp_path: Path) -> None:
    whole = play(engine(sketch(name)))
    first = play(engine(sketch(name)), ROUNDS - 1)
    Checkpoint(tmp_path).save(first, {})
    second = engine(sketch(name))
    Checkpoint(tmp_path).restore(second)
    play(second, 1)
    assert second.records == whole.records[-1:]
    assert same(second.server.model, whole.server.model)
    assert same(second.states, whole.states)


@pytest.mark.parametrize("name", SKETCHES)
def test_lost_clients_are_survived(name: str) -> None:
    def lose(round: int, client: str, step: str) -> str | None:
        return "too late" if round == 2 and client in ("1", "4") else None

    played = play(engine(sketch(name), lose=lose, plan=Plan(rounds=ROUNDS, cohort=CLIENTS)))
    assert [len(record["lost"]) for record in played.records] == [0, 2, 0]
    assert not any(record["undone"] for record in played.records)


def test_fedcad_that_trusts_nothing_is_fedavg() -> None:
    plain = play(engine(FedAvg()))
    assert same(play(engine(sketch("fedcad", low=0.0, high=0.0))).server.model, plain.server.model)
    assert not same(play(engine(sketch("fedcad"))).server.model, plain.server.model)


def test_fedcad_trusts_between_its_bounds() -> None:
    trust = torch.tensor(play(engine(sketch("fedcad"))).records[-1]["log"]["trust"])
    assert trust.shape == (10,)
    assert 0.3 < trust.min() < trust.max() < 0.7


def test_second_task_remembers_the_first() -> None:
    """Tasks do not exist yet: a second engine takes over what the first left, on the other classes."""
    plan = Plan(rounds=ROUNDS, cohort=CLIENTS)
    first = play(engine(sketch("feddcl", images=100), range(5), plan=plan))
    remembering, forgetful = (engine(sketch("feddcl", images=100), range(5, 10), plan=plan) for _ in range(2))
    remembering.server.model = forgetful.server.model = first.server.model
    remembering.server.state, remembering.states = first.server.state, first.states
    old = [sum(play(second).records[-1]["correct"][:5]) for second in (remembering, forgetful)]
    assert old[0] > old[1] + 30


def test_models_of_feddcl_stay_at_home() -> None:
    played = play(engine(sketch("feddcl")))
    answers = [4 * (40 * 10) * 4] * ROUNDS  # four clients say ten numbers, of four bytes, of forty images
    prototypes = CLIENTS * (10 * 64) * 4
    assert [record["up"] for record in played.records] == [answers[0] + prototypes, *answers[1:]]
    assert sum(state.model is not None for state in played.states.values()) == len(played.server.state.welcomed)


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_sketches_are_typed_and_mistakes_are_found(tmp_path: Path) -> None:
    """Check the files strictly, together with one that is wrong, so that silence means something."""
    wrong = tmp_path / "wrong_sketch.py"
    wrong.write_text(WRONG)
    root = HERE.parents[1]
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file",
        str(root / "pyproject.toml"),
        *FILES,
        str(wrong),
    ]
    found = subprocess.run(command, cwd=root, env={**os.environ}, capture_output=True, text=True, check=False)
    lines = [line for line in found.stdout.splitlines() if ": error:" in line]
    assert not [line for line in lines if "tests/sketches" in line]
    expected = [number for number, line in enumerate(WRONG.splitlines(), start=1) if "# wrong" in line]
    assert [int(line.split(":")[1]) for line in lines if "wrong_sketch" in line] == expected, (
        found.stdout + found.stderr
    )


WRONG = """\
from dataclasses import dataclass, field

from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, each, on_client
from fedkeep.objectives import CrossEntropy


@dataclass
class Kept:
    seen: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Wrong(Algorithm[Kept]):
    def round(self, server: Server[Kept], cohort: Cohort) -> None:
        cohort.ask(self.train, server.model)  # wrong: an argument is missing
        cohort.ask(self.train, server.model, each({"0": "half"}))  # wrong: a text for a number
        server.state.seen = cohort.ask(self.train, server.model, 1.0)  # wrong: fits for numbers
        server.state.unseen = {}  # wrong: the state has no such field
        for client in cohort:
            server.model = client.ask(self.train, server.model, 1.0).model  # wrong: a lost client

    @on_client
    def train(self, client: Client, model: Weights, share: float) -> Fit:
        client.state.seen = {}  # wrong: that is the server's
        return client.fit(model, CrossEntropy() + share)  # wrong: a number is no objective
"""
