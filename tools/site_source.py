"""Writes the source of the documentation site: the repository's pages, and those that are made from code.

    python tools/site_source.py        # then: mkdocs build

Pages keep their places, so that links between them hold on the site and in the repository. What is made: a page for
each method from its class, the reference of recipes and of the command line, and the tutorials from their programs.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import inspect
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fedkeep._utils.type_hints import annotations_of
from fedkeep.cli.main import parser
from fedkeep.data import DataOptions
from fedkeep.data.partition import schemes
from fedkeep.experiment.provenance import ARCHIVE_SUFFIX
from fedkeep.experiment.recipe import OPTIONS
from fedkeep.interface import Algorithm, algorithms
from fedkeep.interface.algorithm import describe_replies
from fedkeep.models import architectures
from fedkeep.options import Options, describe_type, options_of
from fedkeep.reporting.metric import METRICS
from fedkeep.reporting.run_folder import read_run, runs_in
from fedkeep.reporting.summary import summary
from fedkeep.reporting.trial import TrialResult
from fedkeep.training.pooled import PooledTraining

SOURCE = ROOT / "build" / "site-source"
FAMILIES = {
    "sequential": "In sequence",
    "parallel": "In parallel",
    "incremental": "Class-incremental",
    "heterogeneous": "Different networks",
}
"""The families of methods, by their package."""
METHODS = tomllib.loads((ROOT / "tools" / "methods.toml").read_text(encoding="utf-8"))
"""What is written about methods: the idea, formulas, and when to use them."""
TUTORIALS = ("own-data", "own-model", "pre-trained", "own-method", "class-incremental")
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def main() -> None:
    """Write all pages, and the navigation into build/mkdocs.yml."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for path in (*(ROOT / name for name in PAGES), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")):
        copy(path)
    write("index.md", on_site((ROOT / "README.md").read_text(encoding="utf-8"), ROOT))
    results = results_by_method(runs_in(ROOT / "results"))
    methods = algorithms()
    for name, cls in methods.items():
        write(f"docs/methods/{name}.md", method_page(cls, results.get(name, [])))
    write("docs/methods/index.md", methods_index(methods))
    write("docs/reference/recipes.md", recipes_page())
    write("docs/reference/commands.md", commands_page())
    write("docs/reference/metrics.md", metrics_page())
    for name in TUTORIALS:
        program = (ROOT / "docs" / "tutorials" / f"{name}.py").read_text(encoding="utf-8")
        write(f"docs/tutorials/{name}.md", tutorial_page(name, program))
        write(f"docs/tutorials/{name}.ipynb", notebook(program))
    for name in ("site.css", "site.js", "iframe-worker.js"):
        shutil.copy(ROOT / "tools" / name, SOURCE / name)
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    config |= {"nav": navigation(methods), "docs_dir": str(SOURCE), "site_dir": str(ROOT / "build" / "site")}
    config["plugins"][-1]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT)]
    (ROOT / "build" / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def navigation(methods: Mapping[str, type[Algorithm[Any, Any]]]) -> list[dict[str, Any]]:
    """Return the site's navigation."""
    families = [
        {
            title: [
                {cls.title or cls.__name__: f"docs/methods/{name}.md"}
                for name, cls in methods.items()
                if family_of(cls) == family
            ]
        }
        for family, title in FAMILIES.items()
    ]
    return [
        {"FedKeep": "index.md"},
        {"Get started": "docs/get-started.md"},
        {
            "Tutorials": [
                {heading((ROOT / f"docs/tutorials/{name}.py").read_text()): f"docs/tutorials/{name}.md"}
                for name in TUTORIALS
            ]
        },
        {
            "How to": [
                *rest("how-to"),
                *(
                    {heading(path.read_text()): f"docs/how-to/{path.name}"}
                    for path in sorted((ROOT / "docs/how-to").glob("*.md"), key=lambda path: place_in(HOW_TO, path))
                ),
                {"Deploy on Flower": "docs/deploy.md"},
                {"Train a generator": "docs/generators.md"},
                {"Let clients have networks of their own": "docs/model-heterogeneity.md"},
                {"Let classes arrive in tasks": "docs/class-incremental.md"},
            ]
        },
        {"Methods": [{"All methods": "docs/methods/index.md"}, {"Which one?": "docs/which-method.md"}, *families]},
        {"Concepts and glossary": "docs/glossary.md"},
        {
            "Reference": [
                {"Python": "docs/reference/api.md"},
                {"Recipes": "docs/reference/recipes.md"},
                {"Command line": "docs/reference/commands.md"},
                {"Metrics": "docs/reference/metrics.md"},
                {"Architecture": "docs/architecture.md"},
                {"Contributing": "CONTRIBUTING.md"},
                {"Releasing": "docs/releasing.md"},
                {"Changelog": "CHANGELOG.md"},
            ]
        },
        {"Reliability and security": rest("reliability", "security")},
        {"Findings": [*rest("findings"), {"Costs": costs()}]},
    ]


HOW_TO = ("command-line", "initial-model", "tune", "resume", "export", "scale", "track", "extend")
"""The order of docs/how-to/; pages that are not named come last."""
SECTIONS = {
    "data.md": "how-to",
    "report.md": "how-to",
    "findings.md": "findings",
    "averaged-sequences.md": "findings",
    "averaged-sequences-tried.md": "findings",
    "which-method-tables.md": "findings",
    "tried-readings.md": "findings",
    "reproduction.md": "findings",
    "privacy.md": "security",
    "threat-model.md": "security",
}
"""Where pages of docs/ stand that the navigation does not name, in its order; all others are about reliability."""
NAMED = {
    "get-started.md", "which-method.md", "glossary.md", "deploy.md", "generators.md",
    "model-heterogeneity.md", "class-incremental.md", "architecture.md", "releasing.md",
}  # fmt: skip


def place_in(order: Sequence[str], path: Path) -> tuple[int, str]:
    """Return where a page stands in an order."""
    return (order.index(path.stem) if path.stem in order else len(order), path.name)


def rest(*sections: str) -> list[Any]:
    """Return the pages of docs/ in some sections, so that a new page is on the site without further ado."""
    places = {page: place for place, page in enumerate(SECTIONS)}
    pages = sorted({path.name for path in (ROOT / "docs").glob("*.md")} - NAMED)
    pages.sort(key=lambda page: places.get(page, len(places)))
    found: list[Any] = [f"docs/{page}" for page in pages if SECTIONS.get(page, "reliability") in sections]
    return [*found, {"Reporting a weakness": "SECURITY.md"}] if "security" in sections else found


def costs() -> list[str]:
    """Return the pages of the benchmarks."""
    return sorted(f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.md"))


def heading(text: str) -> str:
    """Return the first heading of a page, or of a tutorial, whose text stands in comments."""
    return re.search(r"^(?:# )?# (?!%%)(.+)$", text, flags=re.M)[1]  # type: ignore[index]


def write(name: str, text: str) -> None:
    """Write a page of the site."""
    path = SOURCE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def copy(path: Path) -> None:
    """Copy a page of the repository to the same place."""
    write(path.relative_to(ROOT).as_posix(), on_site(path.read_text(encoding="utf-8"), path.parent))


@cache
def made_pages() -> dict[Path, str]:
    """Return the pages that are made, by the file or folder of the repository that they are made from.

    The repository's pages link to these sources, so that the links hold without the site too.
    """
    made = {
        ROOT / "fedkeep" / "algorithms": "docs/methods/index.md",
        ROOT / "fedkeep" / "recipes": "docs/reference/recipes.md",
        ROOT / "fedkeep" / "cli": "docs/reference/commands.md",
        ROOT / "fedkeep" / "reporting" / "metric.py": "docs/reference/metrics.md",
    }
    made |= {ROOT / "docs" / "tutorials" / f"{name}.py": f"docs/tutorials/{name}.md" for name in TUTORIALS}
    for name, cls in algorithms().items():
        if cls.__module__.startswith("fedkeep."):  # the importing program may have methods of its own
            made.setdefault(Path(inspect.getfile(cls)).resolve(), f"docs/methods/{name}.md")
    return made


def on_site(text: str, folder: Path) -> str:
    """Return a page whose links lead to pages of the site; a link to a file that is no page becomes its text.

    Pictures of the page are copied.
    """
    for target in re.findall(r"!\[[^\]]*\]\(([^)#\s]+)\)", text):
        if "://" not in target and (picture := (folder / target).resolve()).is_relative_to(ROOT):
            copied = SOURCE / picture.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(picture, copied)

    def link(match: re.Match[str]) -> str:
        shown, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith(("#", "mailto:")) or not target:
            return match[0]
        path = (folder / target).resolve()
        if path == ROOT / "README.md":
            up = "../" * len(folder.relative_to(ROOT).parts)
            return f"[{shown}]({up}index.md{anchor})"
        if path in made_pages():
            return f"[{shown}]({Path(os.path.relpath(ROOT / made_pages()[path], folder)).as_posix()})"
        kept = path.suffix in (".md", ".png", ".svg") and path.is_relative_to(ROOT)
        inside = kept and (
            path.parent == ROOT or path.is_relative_to(ROOT / "docs") or path.parent == ROOT / "benchmarks"
        )
        if not inside and path.suffix == ".zip" and path.name not in shown:
            return f"{shown}: `{path.relative_to(ROOT)}`"  # which is in the repository, not on the site
        return match[0] if inside else shown

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)", link, text)


def family_of(cls: type) -> str:
    """Return the family of a method."""
    return cls.__module__.split(".")[2]


def option_table(cls: type[Options]) -> list[str]:
    """Return a table of the options of a class."""
    hints = annotations_of(cls)
    rows = [
        f"| `{name}` | {cell(field.default)} | {cell(describe_type(hints[name]))} | {cell(field.metadata['doc'])} |"
        for name, field in options_of(cls).items()
    ]
    return ["| option | default | values | meaning |", "|:--|:--|:--|:--|", *rows, ""] if rows else ["None.", ""]


def cell(value: Any) -> str:
    """Return text for a trial of a table."""
    text = "required" if value is dataclasses.MISSING else str(value)
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;") or '""'


def method_page(cls: type[Algorithm[Any, Any]], results: Iterable[str]) -> str:
    """Return the page of a method."""
    doc = inspect.cleandoc(cls.__doc__ or "").replace("<", "&lt;")
    first, _, details = doc.partition("\n\n")
    said = METHODS.get(cls.name(), {})
    found = list(results)
    lines = [
        f"# {cls.title or cls.__name__}", "", said.get("idea", plain(first)).strip(), "",
        f"*{cls.paper}*" if cls.paper else "", "",
        "```", f"fedkeep run demo --methods {cls.name()} --rounds 2 --seeds 0", "```", "",
        *formulas(said.get("formulas", ()), said.get("letters", "")),
        *(["## Readings and details", "", plain(details), ""] if details else []),
        "## What leaves a client", "", *(f"- {cell(line)}" for line in describe_replies(cls)), "",
        "## Options", "", *option_table(cls),
        "## When to use it", "", *(f"- {line}" for line in ([said["when"]] if "when" in said else []) + usage(cls)), "",
        "## Our results", "", *(found or ["No full-scale result is recorded yet."]), "",
    ]  # fmt: skip
    if not runs_demo(cls):
        start = lines.index("```")
        del lines[start : start + 4]
    return "\n".join(lines)


def formulas(found: Iterable[str], letters: str) -> list[str]:
    """Return the section of a page that shows formulas, as MathML, which browsers draw without a script."""
    from latex2mathml.converter import convert

    lines = []
    for formula in found:
        words = re.sub(r"\\mathrm\{([^{}]*)\}", r"\\text{\1}", formula)  # one word each, not letters in a row
        drawn = convert(words, display="block").replace("<math ", f'<math alttext="{html.escape(formula)}" ', 1)
        lines += [f'<div class="formula" tabindex="0" role="group" aria-label="Formula">{drawn}</div>', ""]
    return ["## Formulas" if len(lines) > 2 else "## Formula", "", *lines, letters, ""] if lines else []


def plain(text: str) -> str:
    """Return the formulas of a docstring as code blocks; text stays text."""
    linked = re.sub(r"\bdocs/([\w-]+)\.md\b", r"[\1](../\1.md)", text)
    return re.sub(r"``([^`]+)``", r"`\1`", linked)


def runs_demo(cls: type[Algorithm[Any, Any]]) -> bool:
    """Return whether a method runs on the demo, without tasks, generators or further data."""
    return family_of(cls) in ("parallel", "sequential") and not {*cls.needs} - {"images", "sgd"}


def usage(cls: type[Algorithm[Any, Any]]) -> list[str]:
    """Return when a method can be used, from its class."""
    family = family_of(cls)
    lines = [
        "Clients train one after another and pass the model on: a round takes as long as all its clients together."
        if cls.sequential
        else "Clients of a round train at the same time, and the server aggregates what they return."
    ]
    if cls.handles_tasks or family == "incremental":
        lines.append("For new classes over time (class-incremental learning): `tasks.num_tasks=5`.")
    if cls.networks != "one":
        lines.append("Clients may have networks of their own (model heterogeneity).")
    needs = {
        "images": "Inputs must be images.",
        "sgd": "Local training must be plain SGD.",
        "auxiliary": "The server must hold some labelled examples: `auxiliary.images_per_class=32`.",
        "public": "The server must hold a public set: `public.name=DATA`.",
        "generator": "It needs a generator of images: [how to train one](../generators.md).",
    }
    return lines + [needs.get(need, f"The recipe must have: {need}.") for need in cls.needs]


def methods_index(methods: Mapping[str, type[Algorithm[Any, Any]]]) -> str:
    """Return the list of all methods."""
    lines = [
        "# Methods",
        "",
        "Each is one file with its server half and its client half. [Which one?](../which-method.md)",
        "",
    ]
    for family, title in FAMILIES.items():
        lines += [f"## {title}", "", "| method | what it does |", "|:--|:--|"]
        for name, cls in methods.items():
            if family_of(cls) == family:
                idea = inspect.cleandoc(cls.__doc__ or "").split("\n")[0]
                lines.append(f"| [{cls.title or cls.__name__}]({name}.md) | {plain(cell(idea))} |")
        lines.append("")
    return "\n".join(lines)


def results_by_method(runs: Iterable[Path]) -> dict[str, list[str]]:
    """Return lines about the recorded results of each method."""
    found: dict[str, list[str]] = {}
    for path in runs:
        for row in summary(read_run(path)):
            value = row.value("window_mean")
            if row.finished and value.mean == value.mean:
                said = f" ±{100 * value.std:.2f}" if value.std == value.std else ""
                name = path.relative_to(ROOT / "results").as_posix().replace(ARCHIVE_SUFFIX, "")
                lines = found.setdefault(
                    row.trials[0].algorithm,
                    ["| run | method | other than its defaults | accuracy, % | seeds |", "|:--|:--|:--|--:|--:|"],
                )
                lines.append(
                    f"| {name} | {cell(row.label)} | {cell(non_default_options(row.trials[0]))} | "
                    f"{100 * value.mean:.2f}{said} | {value.n} |"
                )
    return found


def non_default_options(trial: TrialResult) -> str:
    """Return the options of a recorded trial that are not what its method has today as it comes."""
    known = options_of(algorithms()[trial.algorithm])
    defaults = {name: list(f.default) if isinstance(f.default, tuple) else f.default for name, f in known.items()}
    changed = {name: value for name, value in trial.options.items() if name in defaults and defaults[name] != value}
    changed |= trial.info.get("training", {})
    former = trial.info.get("former_options", "")  # a text: its names are options no more
    return ", ".join([*(f"{name}={value}" for name, value in changed.items()), *[former] * bool(former)]) or "–"


def recipes_page() -> str:
    """Return the reference of recipes."""
    lines = [
        "# Recipes", "",
        "A recipe is a TOML file. `fedkeep recipes demo` prints one; `--set section.option=value` "
        "changes one. Beside its sections it has `title`, `seeds`, `extends` (recipes whose entries it takes over), "
        "`log` (where metrics are logged too), `[[methods]]` (each with `algorithm`, `label`, its options and a `grid` "
        "of options), `[[client_models]]` and `[paper]` (printed numbers).", "",
    ]  # fmt: skip
    for section, cls in {"data": DataOptions, **OPTIONS, "model.pretraining": PooledTraining}.items():
        lines += [f"## [{section}]", "", *option_table(cls)]
    for title, classes in (("[partition]: scheme", schemes()), ("[model]: name", architectures())):
        lines += [f"## {title}", ""]
        for name, each in classes.items():
            doc = inspect.cleandoc(each.__doc__ or "").split("\n\n")[0].replace("<", "&lt;")
            lines += [f"### {name}", "", plain(doc), "", *option_table(each)]
    return "\n".join(lines)


def metrics_page() -> str:
    """Return the table of all metrics of a trial."""
    lines = [
        "# Metrics", "",
        "What a trial is measured by. `run.compare(method, reference, metric)` takes a name; `run.table()` and CSV "
        "files have it as the head of a column, with `_std` after it for the standard deviation over seeds. A window "
        "is the rounds that `run.evaluation_window` names. In Python and in CSV shares are fractions, not percent.", "",
        "| name | in tables | unit | better | what it is |", "|:--|:--|:--|:--|:--|",
    ]  # fmt: skip
    for name, metric in METRICS.items():
        better = {1: "higher", -1: "lower", 0: "–"}[metric.better]
        said = plain(cell(metric.meaning[0].upper() + metric.meaning[1:]))
        lines.append(f"| `{name}` | {metric.title} | {metric.unit or '–'} | {better} | {said} |")
    return "\n".join([*lines, ""])


def commands_page() -> str:
    """Return the reference of the command line."""
    lines = ["# Command line", ""]
    for name, command in subcommands(parser()):
        command.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
        lines += [f"## {name}", "", "```text", command.format_help().strip(), "```", ""]
    return "\n".join(lines)


def subcommands(top: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser]]:
    """Return all commands and their parsers."""
    found = []
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found += subcommands(command) or [(command.prog, command)]
    return found


def cells(program: str) -> list[tuple[str, str]]:
    """Return the trials of a program in the percent format: ``("markdown" or "python", text)``."""
    found = []
    for part in re.split(r"^# %%", program, flags=re.M)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            found.append(
                ("markdown", "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.strip().split("\n")))
            )
        else:
            found.append(("python", body.strip()))
    return found


def tutorial_page(name: str, program: str) -> str:
    """Return the page of a tutorial."""
    parts = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells(program)]
    return "\n\n".join([*parts, f"This page is a [notebook]({name}.ipynb) that the tests run.", ""])


def notebook(program: str) -> str:
    """Return a tutorial as a Jupyter notebook."""
    made = [
        {"cell_type": "markdown", "metadata": {}, "source": text}
        if kind == "markdown"
        else {"cell_type": "code", "metadata": {}, "source": text, "outputs": [], "execution_count": None}
        for kind, text in cells(program)
    ]
    made = [{"id": f"cell-{number}", **cell_} for number, cell_ in enumerate(made)]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1)


if __name__ == "__main__":
    main()
