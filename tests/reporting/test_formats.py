"""Tables for a paper: every format has intervals and paired differences, and every option does something."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import read_run, write_run, write_trial

from fedkeep.cli import main
from fedkeep.errors import RunError
from fedkeep.reporting.figures import curves, save_figure
from fedkeep.reporting.summary import Row, difference, show_difference, show_interval, summary
from fedkeep.reporting.table import latex, markdown, print_table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg and a method with a name that no format may read, three seeds each."""
    run = write_run(tmp_path_factory.mktemp("formats") / "run")
    for seed in range(3):
        write_trial(run, "FedAvg", seed, [[150, 150], [160 + seed, 150]], total=[200, 200])
        write_trial(run, "A_{b} 50% & $x$", seed, [[170, 170], [180 + 2 * seed, 190]], total=[200, 200])
    return run


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[Row]:
    return summary(read_run(folder))


def test_every_format_has_intervals_differences_and_targets(rows: list[Row]) -> None:
    interval = show_interval(rows[0].interval("window_mean"))
    gain = show_difference(difference(rows[1], rows[0], "window_mean"))
    assert re.fullmatch(r"\[77\.\d\d, 78\.\d\d\]", interval)
    assert gain.startswith("+15.25 [")
    for text in (markdown(rows, "", 80), latex(rows, "", 80)):
        assert interval in text
        assert gain in text
        assert "never" in text


def test_a_label_is_no_latex(rows: list[Row]) -> None:
    text = latex(rows, "FedAvg")
    assert r"A\_\{b\} 50\% \& \$x\$ &" in text
    assert text.count("\\begin{table}") == text.count("\\end{table}") == 2
    assert r"\textbf{" in text
    for line in (line for line in text.splitlines() if line.endswith(r"\\")):
        assert len(re.findall(r"(?<!\\)&", line)) in (5, 3), line
    assert "train s" not in text


def test_a_row_of_latex_does_not_begin_with_what_would_be_a_length(rows: list[Row]) -> None:
    text = latex([replace(rows[0], label="[red]")])
    assert "\n  {}[red] &" in text or "\n{}[red] &" in text


def test_the_reference_may_be_named(rows: list[Row]) -> None:
    assert "-15.25 [" in markdown(rows, rows[1].label)
    with pytest.raises(RunError, match="no finished method 'nobody'"):
        markdown(rows, "nobody")


@pytest.mark.parametrize("width", [60, 80])
def test_tables_and_messages_fit_the_terminal(folder: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(print_table(summary(read_run(folder)), width=width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    assert any("90.00" in line or "92." in line or "93." in line for line in lines), "numbers stay whole"


def test_figures_are_what_their_names_say_and_as_wide_as_a_column(rows: list[Row], tmp_path: Path) -> None:
    trials = [trial for row in rows for trial in row.trials]
    heads = {".pdf": b"%PDF", ".png": b"\x89PNG", ".svg": b"<?xml"}
    for suffix, head in heads.items():
        files = [save_figure(curves(trials, "loss"), tmp_path / f"{i}{suffix}") for i in range(2)]
        assert files[0].read_bytes().startswith(head)
        assert files[0].read_bytes() == files[1].read_bytes(), suffix
    assert b'width="237.6pt"' in (tmp_path / "0.svg").read_bytes()  # 3.3 inches
    with pytest.raises(RunError, match=r"x.jpg names no format of a figure"):
        save_figure(curves(trials, "loss"), tmp_path / "x.jpg")


def test_no_option_is_silently_ignored(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["report", folder, "--target", "80"], "--target is for tables"),
        (["report", folder, "--format", "csv", "--target", "80"], "--target is for tables"),
        (["report", folder, "--format", "html", "--against", "FedAvg"], "--against is for tables"),
        (["report", folder, "--curve", "loss"], "--curve is for a figure"),
        (["report", folder, "--width", "5"], "--width is for a figure"),
        (["compare", folder, "--out", tmp_path / "x"], "choose its --format"),
        (["compare", folder, "--format", "html"], "--out comparison.html"),
    ):
        assert main(list(map(str, arguments))) == 1
        assert message in capsys.readouterr().err.replace("\n", " ")


def test_commands_write_what_they_are_asked_for(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*arguments: object) -> str:
        assert main(list(map(str, arguments))) == 0
        return capsys.readouterr().out

    assert call("report", folder, "--format", "latex").startswith("% needs")
    assert "table.csv" in call("report", folder, "--format", "csv", "--out", tmp_path, "--figure", tmp_path / "a.pdf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pdf", "table.csv"]
    assert (tmp_path / "table.csv").read_text() == call("compare", folder, "--format", "csv")
    call("compare", folder, folder, "--format", "html", "--out", tmp_path / "two.html")
    assert "Comparison: " in (tmp_path / "two.html").read_text()
