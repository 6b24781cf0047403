"""The driver of benchmarks/peers, with programs that only pretend to train."""

from __future__ import annotations

import dataclasses
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
import parts  # noqa: E402
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


def test_a_round_is_divided_by_what_its_processes_call():
    first, worker, agent = 'process 1:"with_x.py"', 'process 2:"spawn_main(1)"', 'process 3:"torchrun"'
    calls, add = "fit (fedkeep/training/local_training.py:9)", "add (fedkeep/models/weights.py:4)"
    raw = [
        f"{first};thread (1): MainThread;run (a.py:1);Turns._wait (turns.py:3) 50",
        f"{first};thread (1): MainThread;wait_for_any (fedkeep/executors/workers.py:3);wait (select.py:1) 60",
        f"{first};thread (1): MainThread;unpack (x.py:1);receive_message (fedkeep/executors/workers.py:3) 40",
        f"{first};{worker};thread (2): MainThread;{calls};linear (torch/nn/functional.py:1) 60",
        f"{first};{worker};thread (2): MainThread;{calls};{add} 10",
        f"{first};{worker};thread (2): MainThread;norm (fedkeep/trust/updates.py:4);{add} 20",
        f"{first};{worker};thread (2): MainThread;_Inbox.receive (fedkeep/executors/workers.py:4) 60",
        f"{first};{worker};thread (3);Connection._recv (multiprocessing/connection.py:4) 150",
        f"{agent};thread (4): MainThread;_invoke_run (api.py:4) 150",
    ]
    found = parts.shares("\n".join(raw))
    assert found[parts.FIRST] == dict.fromkeys(parts.PARTS, 0.0) | {parts.MODELS: 0.4, parts.WAITING: 0.6}
    assert found[parts.WORKER] == dict.fromkeys(parts.PARTS, 0.0) | {
        parts.TRAINING: 0.6, parts.MODELS: 0.1, parts.CHECKS: 0.2, parts.WAITING: pytest.approx(0.1)
    }  # fmt: skip
    (_, _, one, other, _) = parts.table({"x": {"seconds": [0.2], "parts": found}})
    assert one == "| x | 0 | 0 | 80 | 0 | 0 | 0 | 120 |"
    assert other == "| x, a worker | 120 | 0 | 20 | 40 | 0 | 0 | 20 |"


def test_pages_are_written_again_and_the_overview_into_another(tmp_path):
    one = driver.Measured("FedKeep", seconds=[0.5, 0.5, 0.5], start=2.0, memory=10**9)
    labels = {"FedKeep": 0.5, "FedKeep, 1 process": 1.0, "bare PyTorch loop, 1 thread": 0.8, "pfl, 2 processes": 0.75}
    found = {label: dataclasses.replace(one, label=label, seconds=[seconds]) for label, seconds in labels.items()}
    report.write({"w3": _workload(found)}, tmp_path, "quiet")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}old\n{report.END}after\n")
    report.rewrite(tmp_path, readme)
    row = "| t | 0.500 (1.000) | 1.60 (0.80) | 1.50 |  | pfl 1.2 | 2.0 (2.0) | 1,000 (1,000) |"
    text = readme.read_text()
    assert text.startswith(f"before\n{report.BEGIN}| workload |")
    assert text.endswith(f"{row}\n{report.END}after\n")
    assert "quiet" in (tmp_path / "results.md").read_text()


def _workload(found):
    about = {"title": "t", "data": "d", "steps": None, "load": 1.0, **report.here()}
    return {**about, "found": {label: vars(one) for label, one in found.items()}}
