"""Progress of a run in a log: what it says, and the time that it says is left."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import tiny
from rich.console import Console

import fedkeep
from fedkeep.display import Display, duration
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.runtime import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def lines(clock: list[float], trials: dict[str, int], reports: list[tuple[float, Progress]]) -> list[str]:
    """Return what a log has of reports at these seconds."""
    file = io.StringIO()
    with Display(Console(file=file, width=200), trials) as display:
        for clock[0], report in reports:
            display(report)
    return file.getvalue().splitlines()


def test_a_line_now_and_then_says_what_a_long_round_does_and_how_long_all_will_take(clock: list[float]) -> None:
    step = "train 2/10, step 30/60"
    shown = lines(
        clock,
        {"a": 10},
        [
            (40.0, Progress("a", 0, 10, None, activity="train 0/10", share=0.0)),  # 40 seconds to start
            (45.0, Progress("a", 0, 10, None, activity="train 1/10", share=0.1)),
            (60.0, Progress("a", 0, 10, None, activity=step, share=0.25)),
            (120.0, Progress("a", 1, 10, {"correct": [8, 7]}, 20)),
            (300.0, Progress("a", 10, 10, None)),
        ],
    )
    assert shown == [
        "a: round 0/10  train 0/10  (0/10 rounds in all)",
        f"a: round 0/10  {step}  (0/10 rounds in all, about 13 min left)",
        "a: round 1/10  accuracy 0.750  (1/10 rounds in all, about 12 min left)",
        "a: round 10/10    (10/10 rounds in all)",
    ]


def test_what_a_resumed_trial_had_done_is_not_part_of_the_pace(clock: list[float]) -> None:
    shown = lines(
        clock,
        {"a": 100, "b": 100},
        [
            (0.0, Progress("a", 91, 100, None)),
            (10.0, Progress("a", 92, 100, None)),
            (20.0, Progress("b", 51, 100, None)),
        ],
    )
    assert shown == ["b: round 51/100    (143/200 rounds in all, about 10 min left)"], "two rounds in 20 seconds"


def test_a_script_shows_progress_beside_what_it_prints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg"], rounds=1)
    fedkeep.run(recipe, out=tmp_path / "run")
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("fedavg-seed0: round 1/1  accuracy ")
    fedkeep.run(recipe, out=tmp_path / "quiet", on_progress=lambda report: None)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("seconds", "said"), [(0.2, "1 s"), (89, "89 s"), (150, "2 min"), (12_000, "3.3 h")])
def test_times_have_about_two_digits(seconds: float, said: str) -> None:
    assert duration(seconds) == said
