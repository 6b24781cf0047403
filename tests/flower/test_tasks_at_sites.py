"""Classes that arrive in tasks, at sites: the same models as on one machine, restarts within a task, who is away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from local_transport import LocalTransport, node_configs
from trial import Killed, config, embedded_once, killing, model, records

from fedkeep.data import DataSet
from fedkeep.errors import ConfigError
from fedkeep.experiment.build import build_federation
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.flower.config import NodeConfig
from fedkeep.flower.server import serve
from fedkeep.flower.state_store import StateStore
from fedkeep.flower.transport import Envelope, MessageKind

ROUNDS = 2  # of each task
SETTINGS = (
    "tasks.num_tasks=2",
    "tasks.absent_clients=1",
    "run.cohort_size=4",
    "public.name=digits",
    "public.num_images=20",
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    methods = '[[methods]]\nalgorithm = "fedskf"\nlevel = "icarl"\nexemplars_per_class = 3\n'
    return tiny.write_recipe(tmp_path_factory.mktemp("recipe"), tiny.RECIPE + methods)


@pytest.fixture(scope="module")
def alone(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return embedded_once(recipe, tmp_path_factory, ROUNDS, SETTINGS)


def at_sites(recipe: str, out: Path, local_transport: LocalTransport, method: str, **changes: Any) -> None:
    serve(local_transport, config(recipe, out, SETTINGS, methods=method, rounds=ROUNDS, **changes))


def same(one: Path, other: Path) -> bool:
    return tiny.equal(model(one), model(other)) and records(one) == records(other)


@pytest.mark.parametrize(
    "method",
    [
        "fedskf",
        "fedweit",
        "ft-kd",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("fedavg", "fedlwf", "scaffold")),
    ],
)
def test_sites_give_the_same_as_one_machine(
    method: str, recipe: str, alone: Callable[[str], Path], tmp_path: Path
) -> None:
    at_sites(recipe, tmp_path / "sites", LocalTransport(node_configs(tmp_path / "states")), method)
    assert same(alone(method), tmp_path / "sites")
    found = records(tmp_path / "sites")
    assert [(record["task"], record["round"], len(record["correct"])) for record in found] == [
        (1, 1, 5),
        (1, 2, 5),
        (2, 3, 10),
        (2, 4, 10),
    ]
    assert "examples" in (tmp_path / "sites" / "server.log").read_text()


def as_held(recipe: Recipe, site: str) -> DataSet:
    """Return what a client of the recipe holds, in any task, as a data set with no more classes than these."""
    first = build_federation(recipe, recipe.seeds[0])
    stream = first.stream
    assert stream is not None
    rows = torch.cat([task.partition[int(site)] for task in stream.tasks])
    train = {name: column[rows] for name, column in stream.dataset.train.items()}
    held = train["label"].unique().flip(0)  # numbered in another order than anybody else's
    train["label"] = torch.stack([(held == label).nonzero()[0, 0] for label in train["label"]])
    names = tuple(stream.dataset.label_names[label] for label in held.tolist())
    test = {name: column[:1] for name, column in train.items()}
    return replace(stream.dataset, name=f"site {site}", train=train, test=test, label_names=names)


def test_sites_with_data_of_their_own_take_the_rows_of_each_task(
    recipe: str, alone: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_recipe(recipe, settings=SETTINGS, rounds=ROUNDS)
    one = alone("fedskf")
    monkeypatch.setattr("fedkeep.flower.client_handler.load_data", lambda name, *_: as_held(whole, name))
    own = {node: NodeConfig(site=str(node), data=str(node), state_dir=str(tmp_path / "states")) for node in range(8)}
    local_transport = LocalTransport(own)
    at_sites(recipe, tmp_path / "sites", local_transport, "fedskf")
    assert same(one, tmp_path / "sites")
    assert all(node_config.partition_id < 0 for node_config in local_transport.node_configs.values())


@pytest.mark.parametrize(
    ("method", "after"),
    [
        ("fedskf", 10),
        *(pytest.param("fedskf", after, marks=pytest.mark.slow) for after in (17, 22)),
        ("scaffold", 9),
    ],
)
def test_a_server_that_was_killed_in_a_task_continues_there(
    method: str,
    after: int,
    recipe: str,
    alone: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FedSKF is killed as the first task ends, and in both rounds of the second; SCAFFOLD right after it has begun."""
    performed: list[str] = []
    store = StateStore.store

    def watch(self: StateStore, call: str, state: Any, found: Any) -> None:
        performed.append(f"{self.folder.name} {call}")
        store(self, call, state, found)

    monkeypatch.setattr(StateStore, "store", watch)
    with pytest.raises(Killed):
        at_sites(recipe, tmp_path / "sites", LocalTransport(node_configs(tmp_path / "states"), killing(after)), method)
    at_sites(recipe, tmp_path / "sites", LocalTransport(node_configs(tmp_path / "states")), method)
    assert same(alone(method), tmp_path / "sites")
    assert len(performed) == len(set(performed))


def test_a_site_that_is_away_as_a_task_ends_is_told_of_and_undoes_nothing(recipe: str, tmp_path: Path) -> None:
    def tamper(node_config: NodeConfig, kind: MessageKind, asked: Envelope, reply: Envelope) -> Envelope:
        step = asked.head.get("request", {}).get("step")
        return Envelope({"error": "away"}) if step == "remember" and node_config.site == "5" else reply

    at_sites(recipe, tmp_path / "sites", LocalTransport(node_configs(tmp_path / "states"), tamper), "fedskf")
    found = records(tmp_path / "sites")
    assert [list(record["lost"]) for record in found] == [[], ["5"], [], ["5"]]
    assert not any(record["rolled_back"] for record in found)


def test_a_site_tells_its_examples_of_every_task(recipe: str, tmp_path: Path) -> None:
    def tamper(node_config: NodeConfig, kind: MessageKind, asked: Envelope, reply: Envelope) -> Envelope:
        short = kind == "introduce" and node_config.site == "5"
        return Envelope({**reply.head, "examples": reply.head["examples"][:1]}) if short else reply

    at_sites(recipe, tmp_path / "sites", LocalTransport(node_configs(tmp_path / "states"), tamper), "fedavg")
    assert not any("5" in record["cohort"] for record in records(tmp_path / "sites"))
    assert "its number of examples in each task" in (tmp_path / "sites" / "server.log").read_text()


def test_states_are_kept_over_a_tasks_end(recipe: str, tmp_path: Path) -> None:
    at_sites(recipe, tmp_path / "sites", LocalTransport(node_configs(tmp_path / "states")), "fedskf")
    for site in (folder for run in (tmp_path / "states").iterdir() for folder in run.iterdir()):
        rounds = {file.name[:6] for file in site.glob("*.state")}
        assert "000004" in rounds, "the call that ended the last task"
        assert len(rounds) <= 3, "this round's, and those of the two checkpoints that are kept"


def test_the_file_that_a_method_names_is_read_by_the_server_alone(recipe: str, tmp_path: Path) -> None:
    """Before the run, for the classes of all tasks; a site would tell the server what stands in a file of its own."""
    told: list[Envelope] = []

    def listen(_: NodeConfig, kind: MessageKind, sent: Envelope, answer: Envelope) -> Envelope:
        told.append(answer)
        return answer

    anchors = tmp_path / "anchors.csv"
    anchors.write_text("".join(f"{digit},0.5,0.25\n" for digit in range(9)))
    settings = (*SETTINGS, f"lander.anchors={anchors}")
    wanted = config(recipe, tmp_path / "run" / "out", settings, methods="lander", rounds=1)
    with pytest.raises(ConfigError, match="no anchor for class '9'"):
        serve(LocalTransport(node_configs(tmp_path / "states"), listen), wanted)
    assert told
    assert not [answer.head for answer in told if "error" in answer.head]
