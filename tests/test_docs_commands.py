"""Every command that a page shows is run, or read by the parser of the program that it names."""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
import tiny
from each import for_each
from pages import PAGES, ROOT, command_lines, indented_commands, inline
from photos import take_photos

import fedkeep
from fedkeep.cli import main
from fedkeep.cli.main import parser
from fedkeep.errors import ConfigError
from fedkeep.experiment.recipe import OPTIONS
from fedkeep.experiment.recipe_files import paper_tables, recipe_names
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.interface import algorithms
from fedkeep.options import options_of

SHELL = {".", "cp", "docker", "export", "python3", "nginx", "ray"}
"""Programs that are not ours, and whose arguments nobody reads here."""
FLOWER = {"flwr", "flower-superlink", "flower-supernode"}
"""Read by tests/flower/test_deploy_guide.py."""
NOT_RUN = {
    "cifar": "a download",
    "--regime": "a download, and hours",
    "generators/": "generators that take hours",
    "--data-dir": "a download, and hours",
    "my_method.py": "a file that the reader writes; test_writing_methods.py runs one",
    "fedprox_sketch.py": "run by test_docs.py",
    "--executor ray": "a cluster; test_ray_cluster.py runs one",
    "fedkeep flower": "run by tests/flower/test_deploy_guide.py",
}
"""Commands that are read, not run: what they have in them, and why."""


the_parser = functools.cache(parser)


def option_strings(top: argparse.ArgumentParser) -> set[str]:
    found = set()
    for action in top._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found |= option_strings(command)
    return found


def names_a_command(words: list[str]) -> bool:
    """Whether the words are the name of a command without arguments, such as ``flower new``."""
    top: argparse.ArgumentParser | None = the_parser()
    for word in words:
        (choices,) = [a.choices for a in top._actions if isinstance(a, argparse._SubParsersAction)] or [{}]  # type: ignore[union-attr]
        top = choices.get(word)  # type: ignore[union-attr]
        if top is None:
            return False
    return True


def read_fedkeep(line: str, *, in_text: bool = False) -> None:
    """Read a command by the real parser, and its recipe with everything that it changes."""
    words = shlex.split(line, comments=True)[1:]
    if in_text and (names_a_command(words) or words == ["--version"]):
        return
    options = the_parser().parse_args(words)
    recipe = getattr(options, "recipe", None)
    own = getattr(options, "use", None) or recipe == "RECIPE" or (recipe or "").endswith(".toml")
    if recipe is not None and words[0] == "recipes":
        assert recipe in [*recipe_names(), *paper_tables(), *{name.rpartition("/")[0] for name in recipe_names()}], line
    elif recipe is not None and words[0] in ("run", "tune") and not own:
        changes = {name: getattr(options, name, None) for name in ("methods", "seeds", "rounds")}
        load_recipe(recipe, settings=options.settings or (), **changes)
    if words[0] == "reproduce" and options.table is not None:
        assert options.table in paper_tables(), line
    if words[0] == "methods" and options.name not in (None, "NAME"):
        assert options.name in algorithms(), line


def read_other(line: str) -> None:
    """Read a line of another program as far as it is about this repository."""
    words = shlex.split(line, comments=True)
    program = words[0].rpartition("/")[2] if words[0] != "." else "."
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
        assert {word for word in words[1:] if "=" not in word} <= set(targets), line
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = re.findall(r"\[([\w,]+)\]", line)
        assert {name for names in asked for name in names.split(",")} <= set(extras), line
        for flag, file in itertools.pairwise(words):
            assert flag not in ("-c", "-r", "--constraint", "--requirement") or (ROOT / file).is_file(), line
    elif words[:3] == ["python", "-m", "pytest"]:
        assert all((ROOT / file).exists() for file in words[3:]), line
    elif program == "python" and words[1].endswith(".py"):
        flags = {word for word in words[2:] if word.startswith("-")}
        assert all(f'"{flag}"' in (ROOT / words[1]).read_text() for flag in flags), line
    else:
        assert program in SHELL | FLOWER | {"while"}, f"no test reads {line!r}"


@for_each(PAGES)
def test_every_command_of_a_page_can_be_read(page: str) -> None:
    """Those between the words, too."""
    wrong = []
    in_text = [code for code in inline(page) if re.match(r"(fedkeep|make|python) [\w<-]", code)]
    for line in [*command_lines(page), *indented_commands(page), *in_text]:
        try:
            if line.startswith("fedkeep "):
                read_fedkeep(line, in_text=line in in_text)
            else:
                read_other(line)
        except (AssertionError, SystemExit, ConfigError, OSError) as error:
            wrong.append(f"{line}: {error}")
    assert not wrong, "\n".join(wrong)


def test_every_option_in_the_text_exists() -> None:
    """``--option``, and ``section.option`` of a recipe or ``method.option``; Flower has options of its own."""
    scripts = "".join(path.read_text() for folder in ("tools", "benchmarks") for path in (ROOT / folder).glob("*.py"))
    flower = {"--run-config", "--insecure", "--trusted-entities", "--node-config", "--port", "--superlink"}
    flags = option_strings(the_parser()) | set(re.findall(r'"(--[a-z-]+)"', scripts)) | flower
    sections: Mapping[str, type] = {**algorithms(), **OPTIONS}
    wrong = []
    for page in PAGES:
        for code in inline(page):
            if code.startswith("--"):
                wrong += [f"{page}: {code}" for flag in re.findall(r"(?<!\S)--[a-z-]+", code) if flag not in flags]
            setting = re.match(r"(?:--(?:set|grid) '?)?([a-z-]+)\.([a-z_]+)(?= ?=|$)", code)
            if (
                setting is not None
                and setting[1] in sections
                and setting[2] not in ("py", "md", "toml", "json", "jsonl", "training")
            ):
                known = options_of(sections[setting[1]])
                wrong += [f"{page}: {code}"] if setting[2] not in known else []
    assert not wrong, "\n".join(wrong)


def lines_to_run(page: str) -> list[str]:
    lines = [line for line in command_lines(page) if line.startswith("fedkeep ")]
    return [line for line in lines if not any(part in line for part in NOT_RUN)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs") / "runs"
    recipe = load_recipe(tiny.write_recipe(made.parent), seeds=[0, 1], rounds=2)
    for name in ("A", "B"):
        fedkeep.run(recipe, methods=["fedavg", "fedseq"], out=made / name)
    return made


@pytest.fixture
def folder(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with photos of different sizes, a recipe for them, patients and two runs, in which commands are run."""
    take_photos(tmp_path / "photos")
    lines = [f"P{n},h{n % 4},{n % 37},{'yes' if n % 5 == 0 else 'no'}" for n in range(80)]
    (tmp_path / "patients.csv").write_text("patient_id,hospital,age,outcome\n" + "\n".join(lines))
    options = {"data.name": "photos", "data.size": [64, 64], "model.name": "lenet5", "partition.num_clients": 2}
    settings = [f"{name}={value}" for name, value in options.items()]
    recipe = load_recipe("demo", methods=["fedavg"], rounds=1, settings=[*settings, "run.cohort_size=2"])
    (tmp_path / "photos.toml").write_text(recipe.to_toml())
    shutil.copytree(runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if lines_to_run(page)])
def test_the_commands_of_a_page_do_what_it_says(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one folder, in their order. Runs are short where the page asks for long ones.

    The slow tests of exported models write ONNX; here it would take longer than all commands.
    """
    monkeypatch.setitem(sys.modules, "onnx", None)
    for line in lines_to_run(page):
        words = [{"RUN": "runs/A"}.get(word, word) for word in shlex.split(line, comments=True)[1:]]
        if words[0] in ("run", "tune"):
            words += [] if "--workers" in words else ["--workers", "1"]
            words += ["--quiet"]
            if "--out" not in words:  # the page promises nothing of the run folder
                words += ["--rounds", "2", "--seeds", "100" if words[0] == "tune" else "0"]
        assert main(words) == 0, line
