"""A Ray cluster: the same results as one process, also when a node is lost in the middle of a round."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import fedkeep
from fedkeep.data.dataset import DataSet
from fedkeep.errors import ConfigError, FedKeepError, MissingExtra
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.ray_cluster import (
    MISSING,
    PREPARE,
    RayActor,
    RayExecutor,
    _encode_data,
    _read_data,
    _versions,
    cluster_workers,
)
from fedkeep.experiment.runtime import Machine
from fedkeep.simulation.executor import Executor, Future
from fedkeep.simulation.ipc import pack, unpack
from fedkeep.simulation.messages import ClientTask
from fedkeep.simulation.state import SimulationState
from fedkeep.simulation.workers import DONE, FAILED, REFUSED

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
    with pytest.raises(MissingExtra, match=r"pip install .*\[ray\]"):
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
    (tmp_path / "data").write_bytes(_encode_data(dataset, server))
    read, columns = _read_data(tmp_path / "data")
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


def test_an_actor_names_its_other_versions_and_missing_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path))
    threads = torch.get_num_threads()

    def ask(**changes: Any) -> Any:
        content = {"versions": _versions(), "machine": {}, "data": {"bytes": 3, "sha256": "0" * 64}} | changes
        return unpack(RayActor().carry_out(PREPARE, pack(content, {})))[0]

    assert ask() == [DONE, MISSING]
    status, text = ask(versions={"fedkeep": "0.0.1", "torch": "2.0"})
    assert status == REFUSED
    assert "Install the same versions on all nodes" in text
    assert ask(machine=None)[0] == FAILED
    torch.set_num_threads(threads)


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
    """Kills a node of the cluster in round 2, while both nodes train clients."""

    def __init__(self, cluster: Any, node: Any) -> None:
        self.cluster, self.node = cluster, node
        self.lost = False

    def on_trial_begin(self, state: SimulationState) -> None:
        assert isinstance(state.executor, RayExecutor)
        self.inner, state.executor = state.executor, self
        self.ahead = self.inner.ahead

    def submit(self, *tasks: ClientTask) -> list[Future]:
        return self.inner.submit(*tasks)

    def wait(self, future: Future) -> Any:
        began = time.monotonic()
        while len(self.inner.workers) < 2 and not self.lost:  # until both have started
            assert time.monotonic() < began + 120
            self.inner._receive()
        if future[0].tasks[0].round == 2 and len(self.inner.under_way) == 2 and not self.lost:
            self.lost = True
            self.cluster.remove_node(self.node, allow_graceful=False)
        return self.inner.wait(future)

    def drain(self) -> None:
        self.inner.drain()

    def stop(self) -> None:
        self.inner.stop()


@pytest.mark.slow
def test_a_node_lost_in_the_middle_of_a_round_changes_nothing(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert "others train its clients again" in caplog.text
    assert outputs(lost) == outputs(alone)
