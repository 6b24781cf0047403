"""A Ray cluster: the same results as one process, also when a node is lost in the middle of a round."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

import fedkeep
from fedkeep._utils.digests import digest_of
from fedkeep.data.dataset import DataSet
from fedkeep.errors import ConfigError, FedKeepError, MissingExtra, RunError
from fedkeep.executors.process_executor import STEPS
from fedkeep.executors.workers import FAILED, REFUSED, pack, unpack
from fedkeep.experiment import ray_cluster
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.ray_cluster import (
    RayExecutor,
    _describe,
    _read_data,
    _versions,
    carry_out_on_node,
    cluster_workers,
)
from fedkeep.experiment.runtime import Machine
from fedkeep.interface.codec import encode
from fedkeep.rounds.executor import Executor, Future
from fedkeep.rounds.messages import StepRequest
from fedkeep.rounds.state import SimulationState

SLEEPY = '''
import time
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.interface import Client, Fit, on_client
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights

class Sleepy(FedAvg):
    """FedAvg whose clients take their time."""
    title = "Sleepy"

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        time.sleep(0.5)
        return client.fit(model, CrossEntropy())
'''


def outputs(run: Any) -> dict[str, bytes]:
    paths = [*run.path.glob("trials/*/rounds.jsonl"), *run.path.glob("trials/*/model.safetensors")]
    return {str(path.relative_to(run.path)): path.read_bytes() for path in paths}


# Without a cluster


def test_without_ray_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install '(ray|\.\[ray\])"):
        cluster_workers(Machine(executor="ray"))


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1:{closed}", "no Ray cluster answers"), ("ray://here:10001", "no address"), ("here", "no address")],
)
def test_an_address_where_no_cluster_is(address: str, expected: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
        machine = Machine(executor="ray", address=address.format(closed=unused.getsockname()[1]))
        with pytest.raises(FedKeepError, match=expected):
            cluster_workers(machine)


def test_an_address_needs_the_executor() -> None:
    with pytest.raises(ConfigError, match="set executor to ray"):
        Machine(address="10.0.0.5:6379")


def test_data_come_back_as_they_were(tmp_path: Path) -> None:
    dataset, server = tiny.dataset(), {"input": torch.zeros(2, 3), "label": torch.tensor([1, 0])}
    (tmp_path / "data").write_bytes(encode((dataset, server, {})))
    read, columns, _ = _read_data(tmp_path / "data")
    assert isinstance(read, DataSet)
    assert (read.name, read.label_names, read.mean, read.std) == (
        dataset.name,
        dataset.label_names,
        dataset.mean,
        dataset.std,
    )
    assert tiny.equal(dict(read.train), dict(dataset.train))
    assert tiny.equal(dict(read.test), dict(dataset.test))
    assert tiny.equal(dict(columns), server)


def test_a_node_names_its_other_versions_and_asks_for_data_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path))
    threads, asked = torch.get_num_threads(), []
    cluster = SimpleNamespace(get=lambda reference: asked.append(reference) or b"data")
    monkeypatch.setattr(ray_cluster, "require_optional", lambda *_: cluster)

    def ask(**changes: Any) -> Any:
        digest = vars(digest_of(b"data"))
        content = {"versions": _versions(), "machine": {}, "data": digest, "code": {"a.py": "0"}} | changes
        return unpack(carry_out_on_node(json.dumps(content), ["reference"]))[0]

    for _ in range(2):
        status, text = ask()
        assert status == REFUSED
        assert "has another a.py" in text
        assert asked == ["reference"]
    status, text = ask(versions="fedkeep 0.0.1, torch 2.0")
    assert status == REFUSED
    assert "Install the same versions on all nodes" in text
    assert ask(machine=None)[0] == FAILED
    torch.set_num_threads(threads)


# With a Ray that answers as it is told


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class FakeRay:
    """Answers are numbered; `ready` has what they are, or the error that Ray raises."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self) -> None:
        self.ready: dict[int, Any] = {}
        self.asked: list[Any] = []

    def remote(self, **options: Any) -> Any:
        def ask(*request: Any) -> int:
            self.asked.append(request)
            return len(self.asked) - 1

        return lambda function: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=ask))

    def wait(self, answers: list[int], **options: Any) -> tuple[list[int], list[int]]:
        return [a for a in answers if a in self.ready], [a for a in answers if a not in self.ready]

    def get(self, answer: int) -> Any:
        if isinstance(self.ready[answer], Exception):
            raise self.ready[answer]
        return self.ready[answer]

    def put(self, value: Any) -> Any:
        return "stored"

    def nodes(self) -> list[Any]:
        return []

    def available_resources(self) -> dict[str, float]:
        return {}


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> RayExecutor:
    monkeypatch.setattr(ray_cluster, "_describe", lambda trial, data: {})
    monkeypatch.setattr(ray_cluster, "_data", lambda trial: b"data")
    trial: Any = SimpleNamespace(experiment=SimpleNamespace(machine=Machine(executor="ray")))
    state: Any = SimpleNamespace()
    return RayExecutor(FakeRay(), trial, 2, state)


def test_a_task_gets_all_that_it_may_read(executor: RayExecutor) -> None:
    worker, tensor = executor.workers[0], torch.ones(2)
    worker.send(STEPS, [["step"], ["0"], None], {"0": tensor, "1": tensor})
    worker.send(STEPS, [["step"], ["0"], None], {})  # sent before: any process may carry it out
    for (_, _, own, *shared), names in zip(executor.ray.asked[1:], (["1"], []), strict=True):
        assert shared == ["stored"]
        assert list(unpack(own)[1]) == names
        assert unpack(own)[0] == [["step"], [], None]


def test_a_trial_does_not_wait_for_ever(executor: RayExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "START_SECONDS", 2)
    executor._receive()
    executor._receive()
    with pytest.raises(RunError, match="no worker on the Ray cluster has started within 2 s: 0 CPUs are free"):
        executor._receive()
    monkeypatch.setattr(ray_cluster, "START_SECONDS", 600)
    monkeypatch.setattr(ray_cluster, "LOOK_SECONDS", 4)
    with pytest.raises(RunError, match="no node is left"):
        executor._receive()


def test_what_cannot_prepare_and_what_is_lost_ends_the_trial(executor: RayExecutor) -> None:
    ready = executor.ray.ready
    ready[0] = pack([REFUSED, "another version"], {})
    with pytest.raises(RunError, match="could not prepare for the trial: another version"):
        executor._receive()
    worker = executor.workers[0]
    worker.send(STEPS, [[], [], None])
    ready[worker.answer] = RayTaskError(KeyError("steps"))
    assert worker.receive() == (FAILED, "KeyError: 'steps'", {})
    ready[worker.answer] = RayError("the node died")
    with pytest.raises(RunError, match=r"was lost, and 2 before it, with the same client steps.* the node died"):
        worker.receive()


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 24), ({"threads": 8}, 2), ({"threads": 8, "device": "cuda"}, 1), ({"workers": 3}, 3)],
)
def test_workers_fit_node_by_node(options: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        {"Alive": True, "Resources": {"CPU": 12.0, "GPU": 4.0}},
        {"Alive": True, "Resources": {"CPU": 12.0}},
        {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
    ]
    ray = SimpleNamespace(nodes=lambda: found)
    monkeypatch.setattr(ray_cluster, "connected", lambda machine: nullcontext(ray))
    machine = Machine(executor="ray", **{"workers": 0, **options})
    assert cluster_workers(machine) == expected
    found[:] = found[1:] if machine.device == "cuda" else []
    with pytest.raises(RunError, match="no worker fits on a node"):
        cluster_workers(machine)


def test_nodes_get_the_folder_of_local_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDKEEP_DATA", "sets")
    (tmp_path / "sets").mkdir()
    recipe = SimpleNamespace(to_toml=str)
    trial: Any = SimpleNamespace(
        experiment=SimpleNamespace(recipe=recipe, machine=Machine(executor="ray")),
        method=SimpleNamespace(label="FedAvg"),
        seed=0,
        folder=tmp_path,
        identity=SimpleNamespace(code={}),
    )
    assert _describe(trial, b"data")["machine"]["data_dir"] == str(tmp_path / "sets")


class RayHere(FakeRay):
    """Carries out each task in this process when it is given."""

    def is_initialized(self) -> bool:
        return True

    def put(self, value: Any) -> Any:
        self.asked.append("put")
        self.ready[len(self.asked) - 1] = value
        return len(self.asked) - 1

    def remote(self, **options: Any) -> Any:
        def ask(function: Any, *request: Any) -> Any:
            return self.put(function(*(self.ready[part] if isinstance(part, int) else part for part in request)))

        return lambda function: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=partial(ask, function)))

    def cancel(self, answer: int, **options: Any) -> None:
        assert answer in self.ready

    def nodes(self) -> list[Any]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}]


def test_tasks_give_the_bits_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, here = torch.get_num_threads(), RayHere()
    monkeypatch.setattr(ray_cluster, "require_optional", lambda *_: here)
    monkeypatch.setattr(ray_cluster, "_PREPARED", {})
    recipe = fedkeep.load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg"])
    alone = fedkeep.run(recipe, out=tmp_path / "alone")
    on_ray = fedkeep.run(recipe, out=tmp_path / "ray", machine=Machine(executor="ray", workers=2))
    torch.set_num_threads(threads)
    assert outputs(on_ray) == outputs(alone)
    assert len(here.asked) == 2 + 2 * 3, "the data and a first task; in each round a model and two clients"


# With a cluster of two nodes on this machine


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    started = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    started.add_node(**node)
    yield started
    started.shutdown()


@pytest.mark.slow
def test_trials_and_cohorts_give_the_same_bits(cluster: Any, tmp_path: Path) -> None:
    recipe = fedkeep.load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg", "sfedkd", "scaffold"])
    alone = fedkeep.run(recipe, out=tmp_path / "alone")
    machine = Machine(executor="ray", address=cluster.address, workers=0)
    assert outputs(fedkeep.run(recipe, out=tmp_path / "ray", machine=machine)) == outputs(alone)


class LosesNode(Executor, fedkeep.Callback):
    """Kills a node of the cluster in round 2, while all three nodes train clients."""

    def __init__(self, cluster: Any, node: Any) -> None:
        self.cluster, self.node = cluster, node
        self.lost = False

    def on_trial_begin(self, state: SimulationState) -> None:
        assert isinstance(state.executor, RayExecutor)
        self.inner, state.executor = state.executor, self
        self.prefetch = self.inner.prefetch

    def submit(self, *requests: StepRequest) -> list[Future]:
        return self.inner.submit(*requests)

    def wait(self, future: Future) -> Any:
        began = time.monotonic()
        while self.inner._first is not None and not self.lost:
            assert time.monotonic() < began + 120
            self.inner._receive()
        if future[0].requests[0].round == 2 and len(self.inner.under_way) == 3 and not self.lost:
            self.lost = True
            self.cluster.remove_node(self.node, allow_graceful=False)
        return self.inner.wait(future)

    def cancel_all(self) -> None:
        self.inner.cancel_all()

    def stop(self) -> None:
        self.inner.stop()


@pytest.mark.slow
def test_a_node_lost_in_the_middle_of_a_round_changes_nothing(cluster: Any, tmp_path: Path) -> None:
    node = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    machine = Machine(executor="ray", address=cluster.address, workers=3, use=(str(tmp_path / "sleepy.py"),))
    import_user_code(machine.use)
    settings = ["run.cohort_size=4", "run.rounds=3"]
    recipe = fedkeep.load_recipe(tiny.write_recipe(tmp_path), methods=["sleepy"], settings=settings)
    alone = fedkeep.run(recipe, out=tmp_path / "alone")
    losing = LosesNode(cluster, node)
    lost = fedkeep.run(recipe, out=tmp_path / "lost", machine=machine, callbacks=[losing])
    assert losing.lost
    assert outputs(lost) == outputs(alone)
