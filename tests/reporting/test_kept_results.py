"""The archives in results/: the present code reads them all, and the page of reproductions is what they give."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from attack_table import read_attacks, run_attacks
from each import for_each
from pages import PAGES, text

from fedkeep._utils.digests import read_all, read_json
from fedkeep.cli.main import main
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.recipe_loader import GONE, load_recipe
from fedkeep.experiment.runtime import Machine, recorded_machine
from fedkeep.options import as_table
from fedkeep.reporting import reproduction
from fedkeep.reporting.run_folder import Run, open_run, read_run, runs_in

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
RUNS = [path.relative_to(RESULTS).as_posix() for path in runs_in(RESULTS)]


@pytest.fixture(scope="module")
def kept() -> Iterator[Callable[[Path], Run]]:
    """Read each run in results/ once for all tests."""
    read = cache(read_run)
    yield read
    read.cache_clear()


def test_there_are_runs() -> None:
    assert len(RUNS) >= 27


@for_each(RUNS)
def test_a_kept_run_is_read_and_its_recipe_parses(name: str, kept: Callable[[Path], Run], tmp_path: Path) -> None:
    run = kept(RESULTS / name)
    assert run.trials
    assert all(trial.last > 0 for trial in run.trials)
    copy = tmp_path / "recipe.toml"
    root = open_run(RESULTS / name)
    copy.write_bytes(read_all(root / "recipe.toml"))
    for file in (root / "code").iterdir() if (root / "code").is_dir() else ():  # a method that only this run has
        (tmp_path / file.name).write_bytes(read_all(file))
        import_user_code([str(tmp_path / file.name)])
    recipe = load_recipe(str(copy))
    for trial in run.trials:
        (method,) = [m for m in recipe.methods if m.label in (trial.label, trial.info["label"])]
        assert method.algorithm.name() == trial.info["algorithm"]
        gone = {option: value for (name, option), value in GONE.items() if name == method.algorithm.name()}
        known = as_table(method.algorithm) | gone
        # The record of an earlier revision may lack options that came later; none may be unknown or another's.
        assert {key: known.get(key, "no option") for key in trial.options} == trial.options, trial.label


@pytest.mark.slow
@for_each(RUNS)
def test_a_kept_run_could_be_continued(name: str, tmp_path: Path) -> None:
    """Whoever unpacks an archive adds methods or seeds to it, so that no file of it may be unreadable."""
    root = open_run(RESULTS / name)
    files = [file for folder in (root, *(root / "trials").iterdir()) for file in folder.iterdir()]
    for file in files:
        if file.name.endswith(".json") and file.name != "result.json":
            read_json(file)
    (tmp_path / "run.json").write_bytes(read_all(root / "run.json"))
    machine = recorded_machine(tmp_path, Machine())
    assert machine.stack == 1 or "stack" in read_json(root / "run.json")


def test_the_page_is_what_the_archives_and_the_notes_give(
    kept: Callable[[Path], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").symlink_to(RESULTS)  # links of the page are relative
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduction, "read_run", lambda path: kept(ROOT / path))
    assert main(["reproduce", "--out", "results", "--page", "docs/reproduction.md"]) == 0
    assert Path("docs/reproduction.md").read_text() == (ROOT / "docs" / "reproduction.md").read_text()


def test_the_table_that_decides_is_what_the_archives_give(kept: Callable[[Path], Run]) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "which_method.py"))
    tool["rows_of"].__globals__["read_run"] = kept
    found = {name: tool["rows_of"](run) for run, name in tool["SETTINGS"].items()}
    for page, written in tool["pages"](found).items():
        assert written == page.read_text(), "run python tools/which_method.py"


def test_archives_that_pages_name_are_there() -> None:
    texts = {page: text(page) for page in [*PAGES, "CHANGELOG.md", "results/notes.md"]}
    named = [
        (page, path)
        for page, whole in texts.items()
        for code in re.findall(r"`([^`\n]+)`", whole)
        for path in re.findall(r"(?<![\w/.])results/([\w./-]+\.zip[\w./-]*)", code)
    ]
    records = r"[Rr]ecords (?:is|are) ((?:`[^`\n]+`(?:, | and )?)+) in \[[^]]*\]\([^)]*?([\w.-]+\.zip)\)"
    for page, whole in texts.items():
        for names, archive in re.findall(records, whole):
            named += [(page, f"{archive}/{name}") for name in re.findall(r"`([^`]+)`", names)]
    named += [("results/notes.md", f"{name}.zip") for name in re.findall(r"^## (.+)$", texts["results/notes.md"], re.M)]
    assert len(named) >= 18
    known = {*RUNS, *(path.name for path in RESULTS.glob("*.zip"))}
    assert not [f"{page}: {path}" for page, path in named if path.rstrip("/") not in known]


def test_the_kept_table_of_attacks_goes_on_with_the_recipe_as_it_is(tmp_path: Path) -> None:
    table = tmp_path / "attacks.csv"
    table.write_bytes((RESULTS / "attacks.csv").read_bytes())
    kinds = {trial.kind for trial in read_attacks(table) if trial.kind != "none"}
    seeds, methods = [0, 1, 2], ["fedavg", "fedseq", "sfedkd"]
    trials = run_attacks(
        "fedkeep/attacks",
        table,
        kinds=sorted(kinds),
        shares=[0.1, 0.2, 0.3],
        defenses=["none", "default"],
        seeds=seeds,
        methods=methods,
    )
    assert len(trials) == 679, "nothing was lacking, and the recipe is the one that they were run with"
