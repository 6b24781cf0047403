"""Names of others do nothing to a terminal, a spreadsheet, a page: at each border where they leave the program."""

from __future__ import annotations

import csv
import io
import itertools
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

sys.path.append(str(Path(__file__).parent / "reporting"))
import synthetic_run

from fedkeep._utils.escaping import csv_text, markdown, printable
from fedkeep.cli import main
from fedkeep.cli import text as cli_text
from fedkeep.cli.text import Terminal, TerminalHandler, say, say_error
from fedkeep.reporting import reproduction
from fedkeep.reporting.run_folder import read_run
from fedkeep.reporting.summary import summary
from fedkeep.reporting.table import latex, trials_csv
from fedkeep.reporting.table import markdown as as_markdown

CONTROLS = [
    "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "\x9b2J", "a\rb", "a\x08b",
    "\x90q\x9c", "right\u202etfel", "\u2066x\u2069", "\x7f", "a\u2028b",
]  # fmt: skip
HARMLESS = ["plain", "Käse", "名前", "x = 1", "a\tb", "10 % ± 2", "e\u0301", "\N{FAMILY}", "فارسی\u200cها"]
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@pytest.mark.parametrize("text", CONTROLS)
def test_a_terminal_shows_controls_and_obeys_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    console = Terminal()
    say(console, f"label {text}")
    console.print(f"label {text}", markup=False)
    console.print(Text(text))
    table = Table("method", title=text, caption=text)
    table.add_row(text)
    console.print(table)
    with Progress(console=console) as bars:
        bars.add_task(text)
    say_error(text)
    TerminalHandler().emit(logging.LogRecord("x", logging.WARNING, "", 0, "%s", (text,), None))
    written = capsys.readouterr()
    for shown in (written.out, written.err):
        assert shown
        assert not UNSAFE.search(shown)


@pytest.mark.parametrize("text", HARMLESS)
def test_text_of_any_language_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_colours_of_our_own_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console = Terminal()
    console.file = io.StringIO()
    console.print(Text("x", "bold red"))
    assert "\x1b[" in console.file.getvalue()


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t=", " =", *"＝＋－＠﹢"])
def test_no_cell_of_a_csv_file_is_a_formula(start: str) -> None:
    text = f'{start}HYPERLINK("http://x";"y")'
    (line,) = csv.reader(io.StringIO(csv_text([[text, "plain", -1.5, "-1.5", "+3e-05", "nan", ""]])))
    assert line[0].startswith("'")
    assert line[1:] == ["plain", "-1.5", "-1.5", "+3e-05", "nan", ""]


@pytest.mark.parametrize(
    "text",
            ["<script>x</script>", "<img src=x onerror=y>", "a|b", "![x](http://y)", "[x](javascript:y)", "`x`",
             "**x**", "a\n\n# b", "&lt;b&gt;", "<!-- x", "a\r\nb"]
)  # fmt: skip
def test_markdown_shows_text(text: str) -> None:
    shown = markdown(text)
    assert "<" not in shown
    assert "\n" not in shown
    assert not re.search(r"(?<!\\)[|`*\[\]#]", shown)
    mark = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    page = mark.render(f"| head |\n|:--|\n| {shown} |\n")
    inside = re.search(r"<td[^>]*>(.*)</td>", page)
    assert inside is not None
    assert not re.search(r"<(?!br)", inside[1])


LABEL = "=<b>x</b>|\x1b[31m`$\\input{/etc/passwd}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = synthetic_run.write_run(tmp_path_factory.mktemp("escaping") / "run")
    for label, seed in itertools.product(("FedAvg", LABEL), (0, 1)):
        names = [f"{LABEL} {number}" for number in range(2)]
        synthetic_run.write_trial(path, label, seed, [[5 + seed, 5]] * 4, label_names=names)
    return path


def test_tables_of_a_run_with_hostile_names(run: Path) -> None:
    rows = summary(read_run(run))
    for text in (as_markdown(rows), as_markdown(rows, LABEL), latex(rows), trials_csv(rows)):
        assert "\\x1b" in text or r"\textbackslash{}x1b" in text
        assert not UNSAFE.search(text)
    for text in (as_markdown(rows), as_markdown(rows, LABEL)):
        assert "<b>" not in text
        assert len({line.count(" | ") for line in text.splitlines() if line.startswith("| ")}) <= 2
    cells = [cell for line in csv.reader(io.StringIO(trials_csv(rows))) for cell in line]
    assert not [cell for cell in cells if cell.startswith("=")]
    assert r"\input" not in latex(rows)


def test_a_reproduction_says_the_texts_of_a_foreign_table_without_html() -> None:
    foreign: Any = SimpleNamespace(title="<b>x</b>|\x1b[31m", notes="see <script>x</script> \x1b[31m", columns=())
    text = reproduction.markdown(foreign)
    assert "<" not in text
    assert not UNSAFE.search(text)


@pytest.mark.parametrize("command", ["report", "compare", "verify"])
@pytest.mark.parametrize("form", [[], ["--format", "markdown"], ["--format", "csv"], ["--format", "latex"]])
def test_commands_print_no_control_of_a_name(
    run: Path, tmp_path: Path, command: str, form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "verify" and form:
        pytest.skip("it has one form")
    out = ["--out", str(tmp_path)] if command == "report" and not form else []
    main([command, str(run), *form, *out])
    written = capsys.readouterr()
    assert not UNSAFE.search(written.out + written.err)


def test_a_refused_argument_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["\x1b[31mrun"])
    assert main(["report", "\x1b[31mnowhere"]) == 1
    assert not UNSAFE.search(capsys.readouterr().err)


# --- commands that are printed -------------------------------------------------------------------------------------


@pytest.fixture
def begun_as(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("fedkeep", "python"):
        (tmp_path / ".venv" / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))


@pytest.mark.usefixtures("begun_as")
@pytest.mark.parametrize(
    ("argv0", "on_path", "own", "pip"),
    [
        (".venv/bin/fedkeep", False, ".venv/bin/fedkeep", ".venv/bin/python -m pip"),
        ("{here}/.venv/bin/fedkeep", False, ".venv/bin/fedkeep", ".venv/bin/python -m pip"),
        ("{here}/.venv/bin/fedkeep", True, "fedkeep", "pip"),
        ("{here}/src/fedkeep/__main__.py", False, ".venv/bin/python -m fedkeep", ".venv/bin/python -m pip"),
        ("{here}/src/fedkeep/__main__.py", True, "python -m fedkeep", "python -m pip"),
        ("{here}/lib/pytest/__main__.py", False, "fedkeep", "pip"),
        ("", False, "fedkeep", "pip"),
    ],
)
def test_printed_commands_begin_as_the_program_was_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv0: str, on_path: bool, own: str, pip: str
) -> None:
    monkeypatch.setattr(sys, "argv", [argv0.format(here=tmp_path)])
    monkeypatch.setenv("PATH", str(tmp_path / ".venv" / "bin") if on_path else str(tmp_path))
    cli_text.program.cache_clear()
    try:
        said = cli_text.runnable("Go on: fedkeep resume runs/a, fedkeep --help; my-fedkeep run, pip install 'x'.")
    finally:
        cli_text.program.cache_clear()
    assert said == f"Go on: {own} resume runs/a, {own} --help; my-fedkeep run, {pip} install 'x'."
