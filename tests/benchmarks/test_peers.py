"""The driver of benchmarks/peers, with programs that only pretend to train."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))

import driver  # noqa: E402
import memory  # noqa: E402
import report  # noqa: E402

FAKE = """
import sys
sys.path.insert(0, {runners!r})
import numpy as np
from turns import Turns
played = 0
turns = Turns(lambda: ({{"w": np.full(2, played)}}, played))
print("what a framework prints is no answer", flush=True)
going = turns.begin("numpy")
while going:
    played += 1
    if played > {lives}:
        raise RuntimeError("out of order")
    open({diary!r}, "a").write({name!r})
    going = turns.done()
"""


@pytest.fixture
def starter(tmp_path: Path) -> Callable[..., Callable[[], driver.Turns]]:
    """Return what makes a starter of a fake contestant that dies after so many rounds."""

    def make(name: str, lives: int = 1000) -> Callable[[], driver.Turns]:
        text = FAKE.format(runners=str(PEERS / "runners"), lives=lives, diary=str(tmp_path / "diary"), name=name)
        return lambda: driver.Turns(name, [sys.executable, "-c", text], tmp_path / f"{name}.log", tmp_path)

    return make


def test_contestants_take_turns_in_changing_order(starter, tmp_path):
    schedule = driver.Schedule(cycles=3, warm_up=1, settle=0.0)
    found = driver.alternate({name: starter(name) for name in "ab"}, schedule, tmp_path)
    memory_rounds = "a" * driver.MEMORY_ROUNDS + "b" * driver.MEMORY_ROUNDS
    assert (tmp_path / "diary").read_text() == "ab" + "ab" + "ba" + "ab" + memory_rounds
    assert [len(found[name].seconds) for name in "ab"] == [3, 3]
    assert found["a"].about == {"numpy": np.__version__}
    with np.load(tmp_path / "a.npz") as left:
        assert left["w"].tolist() == [found["a"].rounds] * 2 == [1, 1]


def test_the_slow_play_in_fewer_cycles_evenly_spread():
    schedule = driver.Schedule(cycles=20, budget=20.0)
    assert all(schedule.plays(cycle, 0.1) for cycle in range(20))
    assert [cycle for cycle in range(20) if schedule.plays(cycle, 4.0)] == [3, 7, 11, 15, 19]
    assert sum(schedule.plays(cycle, 100.0) for cycle in range(20)) == 3
    assert all(driver.Schedule(cycles=2).plays(cycle, 100.0) for cycle in range(2))


def test_one_that_dies_is_left_out_with_its_reason(starter, tmp_path):
    starters = {"a": starter("a"), "b": starter("b", lives=2)}
    found = driver.alternate(starters, driver.Schedule(4, warm_up=1, settle=0.0), tmp_path)
    assert len(found["a"].seconds) == 4
    assert not found["a"].failed
    assert found["b"].failed.endswith("RuntimeError: out of order")
    assert "Left out: b: RuntimeError: out of order" in report.page({"w": _workload(found)}, "")


def test_one_that_says_nothing_is_given_up_and_ended(tmp_path):
    with pytest.raises(driver.Failed, match="said nothing for 0 s"):
        driver.Turns("c", [sys.executable, "-c", "input()"], tmp_path / "c.log", tmp_path, patience=0.2)


@pytest.mark.skipif(not memory.PROC.is_dir(), reason="needs /proc")
def test_memory_is_that_of_the_whole_tree(tmp_path):
    grown = "import subprocess, sys; b = b'x' * 50_000_000; subprocess.run([sys.executable, '-c', %r])"
    child = "b = b'x' * 50_000_000; print('here', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", grown % child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        process.stdout.readline()
        assert len(memory.tree(process.pid)) == 2
        assert memory.proportional(memory.tree(process.pid)) > 100e6
        process.communicate(b"\n")


def _workload(found):
    about = {"title": "t", "data": "d", "steps": None, "load": 1.0, **report.here()}
    return {**about, "found": {label: vars(one) for label, one in found.items()}}
