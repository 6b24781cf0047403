"""What commands print fits a narrow terminal: 60 columns, and 80."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import tiny
from rich.console import Console

import fedkeep
from fedkeep.cli import main
from fedkeep.cli.text import Terminal, TerminalHandler, say
from fedkeep.display import Display
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.runtime import Progress

SHOWN = [
    *("methods", "methods sfedkd", "methods fedskf", "recipes", "recipes sfedkd/table1", "datasets"),
    *("verify RUN", "resume RUN", "compare RUN RUN --against FedAvg --target 50", "new-method MyMethod", "reproduce"),
    # errors
    *("runn", "run --roundz 4", "run nothing", "run RECIPE --methods fedavgg", "run RECIPE --methods fedgems"),
    "run RECIPE --set training.learning_rate=1",
    "run RECIPE --set data.name=photos",
    *("report nothing", "compare RUN --out x", "predict nothing nothing.png", "generator train nothing --out x"),
]
LONG = [
    "run RECIPE --methods fedavg --rounds 1 --out new --workers 1",
    "archive RUN --out archives",
    "report RUN",
    "export RUN --method fedseq --out exported",
    "reproduce sfedkd/table1 --columns fashion-mnist-2-0.5 --methods fedavg,sfedkd --dry-run",
    "tune RECIPE --grid sfedkd.tau=1,2 --seeds 100 --rounds 1 --out tuned --workers 1",
]
HELP = [*("run", "tune", "reproduce", "report", "compare", "flower new", "generator train", "recipes", "predict")]


def too_wide(text: str, width: int) -> list[str]:
    """The lines that are wider than a terminal for another reason than one long word or command."""
    lines = re.split(r"[\n\r]", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))
    said = [line for line in map(str.rstrip, lines) if not re.match(r" *(\S*/)?(fedkeep|python|flwr|export) ", line)]
    return [line for line in said if len(line) > width and len(line.split()) > 1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("widths")
    fedkeep.run(load_recipe(tiny.write_recipe(folder), seeds=[0, 1], rounds=1), out=folder / "run")
    return folder / "run"


@pytest.mark.parametrize("width", ["0", "-5", "", "wide", "9" * 12])
def test_a_width_that_cannot_be_is_unknown(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert main(["methods"]) == 0
    assert "fedavg" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", width)
    assert main(["run", "nothing"]) == 1
    assert "error: " in capsys.readouterr().err


def wide_lines(
    commands: Sequence[str], width: int, run: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, list[str]]:
    """The lines that are too wide, by the command that prints them."""
    names = {"RUN": str(run), "RECIPE": str(run.parent / "recipe.toml")}
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setitem(sys.modules, "onnx", None)
        patch.chdir(folder)
        for command in commands:
            with suppress(SystemExit):  # argparse
                main([names.get(word, word) for word in command.split()])
            printed = "".join(capsys.readouterr())
            assert printed, command
            if wide := too_wide(printed, width):
                found[command] = wide
    return found


@pytest.mark.parametrize("width", [60, pytest.param(80, marks=pytest.mark.slow)])
def test_what_commands_print_fits(width: int, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not wide_lines([*SHOWN, *(f"{command} --help" for command in HELP)], width, run, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80])
def test_what_long_commands_print_fits(
    width: int, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not wide_lines(LONG, width, run, tmp_path, capsys)


@pytest.mark.parametrize("width", [60, 80])
def test_progress_fits(width: int) -> None:
    file = io.StringIO()
    console = Console(width=width, file=file, force_terminal=True)
    with Display(console, {"fedntd-asd-with-a-long-label-seed0": 200}) as display:
        display(Progress("fedntd-asd-with-a-long-label-seed0", 100, 200, None, activity="images drawn 5,120/60,000"))
    with Display(console, {}, unit="step") as display:
        display.count(1, 20_000, "loss 0.1234")
    shown = file.getvalue()
    assert "100/200" in shown, "numbers stay whole"
    assert not too_wide(shown, width)


def printed(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    say(Terminal(), text)
    return capsys.readouterr().out.rstrip("\n")


def test_sentences_break_between_words_and_commands_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    command = "fedkeep run a/folder/with/a/name.toml --set 'a b = c d e f g h i j k' --seeds 2,3,4"
    assert printed(f"  what to do:\n    {command}", capsys).split("\n")[1] == f"    {command}"
    path = "/a/path/that/is/much/longer/than/the/whole/terminal"
    broken = printed(f"error: there is no {path} anywhere near", capsys).split("\n")
    assert path in broken
    assert len(broken) == 3
    assert [line[:2] for line in printed("  " + "a word " * 10, capsys).split("\n")] == ["  "] * 2
    monkeypatch.delenv("COLUMNS")
    assert printed("a word " * 30, capsys) == "a word " * 30, "in a file lines stay as they are"


def test_warnings_in_a_log_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    TerminalHandler().emit(logging.LogRecord("fedkeep", logging.WARNING, "", 0, "a word " * 30, (), None))
    shown = capsys.readouterr().err
    assert shown.startswith("WARNING a word")
    assert not too_wide(shown, 60)
