"""The results as a file for programs, a table and a plot."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import parts

Results = Mapping[str, Mapping[str, Any]]
"""By workload, what `__main__.measured` returns."""


def here() -> dict[str, Any]:
    """Return date and machine."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores ({model or platform.processor()})"
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine,
        "python": platform.python_version(),
    }


def _lines(file: str) -> list[str]:
    path = Path(file)
    return path.read_text().splitlines() if path.is_file() else []


def read(folder: Path) -> dict[str, Any]:
    """Return the results in a folder; none where there are none."""
    file = folder / "results.json"
    return dict(json.loads(file.read_text())["workloads"]) if file.is_file() else {}


TARGETS = {
    "w1-mlp": "FedJAX 1.0, pfl 1.5",
    "w1-lenet5": "pfl 1.1",
    "w3": "pfl 1.2",
    "w5-10": "pfl 1.1",
    "w5-100": "pfl 1.1",
}
"""Times as fast as whom FedKeep shall be, with two processes; nowhere slower than the loops."""
BEGIN, END = "<!-- peers -->\n", "<!-- end of peers -->\n"


def overview(results: Results) -> str:
    """Return a row for each workload that a loop of plain PyTorch plays too, as Markdown."""
    lines = [
        "| workload | s a round: two processes (one) | times as fast as the better loop (one thread) "
        "| as pfl's better | as FedJAX | target | ready, s | memory, MB |",
        "|:--|--:|--:|--:|--:|:--|--:|--:|",
    ]
    for name, workload in results.items():
        found = workload["found"]
        middle = {label: statistics.median(one["seconds"]) for label, one in found.items() if one["seconds"]}
        ours = [middle.get(f"FedKeep{which}") for which in ("", ", 1 process")]
        loops = {label: seconds for label, seconds in middle.items() if label.startswith("bare")}
        if None in ours or not loops:
            continue
        pfl = min((seconds for label, seconds in middle.items() if label.startswith("pfl")), default=None)
        told = [found[f"FedKeep{which}"] for which in ("", ", 1 process")]
        cells = [
            workload["title"].split(":")[0],
            _both(ours, ".3f"),
            _both([min(loops.values()) / ours[0], loops["bare PyTorch loop, 1 thread"] / ours[1]], ".2f"),
            _times(pfl, ours[0]),
            _times(middle.get("FedJAX"), ours[0]),
            TARGETS.get(name, ""),
            _both([one["start"] for one in told], ".1f"),
            _both([one["memory"] / 1e6 for one in told], ",.0f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _both(two: Sequence[float | None], form: str) -> str:
    first, second = ("–" if one is None else f"{one:{form}}" for one in two)
    return f"{first} ({second})"


def _times(theirs: float | None, ours: float) -> str:
    return "" if theirs is None else f"{theirs / ours:.2f}"


def rewrite(folder: Path, readme: Path) -> None:
    """Write the pages of results that are there already, and the overview into a page that has room for it."""
    results = read(folder)
    write(results, folder, json.loads((folder / "results.json").read_text())["note"])
    before, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(f"{before}{BEGIN}{overview(results)}{END}{rest.partition(END)[2]}")


def write(results: Results, folder: Path, note: str) -> None:
    """Write results.json, results.md and results.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps({"note": note, "workloads": results}, indent=1) + "\n")
    (folder / "results.md").write_text(page(results, note))
    draw(results, folder / "results.png")


def page(results: Results, note: str) -> str:
    """Return the table as Markdown."""
    lines = [
        "# FedKeep beside other engines",
        "",
        "`python benchmarks/peers`; what it does is in [README.md](README.md).",
        *([note] if note else []),
        "",
        *[line for workload in results.values() for line in _table(workload)],
        "Seconds are medians of the rounds that count, with the middle half in brackets; ratios are of medians.",
        "Memory is the largest sum of proportional set sizes (PSS) over all processes of a contestant while it plays.",
        "Ready is the time from its start until it can play a round (FedKeep from a recipe: until its first is over).",
        "Gap is the largest difference of its weights from those of the bare loop with one thread after the warm-up,",
        "some three rounds, as a share of how far these have moved.",
        "Milliseconds of a round: what a process (of equal ones the mean) does while py-spy looks, as shares.",
        "",
    ]
    return "\n".join(lines)


def _table(workload: Mapping[str, Any]) -> list[str]:
    found: Mapping[str, Mapping[str, Any]] = workload["found"]
    reference = next((statistics.median(one["seconds"]) for one in found.values() if one["seconds"]), None)
    first = next((label for label, one in found.items() if one["seconds"]), "")
    steps = f", {workload['steps']:,} steps in a median round" if workload["steps"] else ""
    rows = [_row(label, one, reference) for label, one in found.items()]
    failed = [f"{label}: {one['failed'].splitlines()[-1].strip()}" for label, one in found.items() if one["failed"]]
    return [
        f"## {workload['title']}",
        "",
        f"{workload['date']}; {workload['data']}{steps}; {workload['machine']}, Python {workload['python']}; load "
        f"{workload['load']:.1f} at the end;",
        f"{_versions(found)}.",
        "",
        f"| engine | seconds a round | times {first} | rounds | memory, MB | ready, s | gap |",
        "|:--|--:|--:|--:|--:|--:|--:|",
        *rows,
        "",
        *parts.table(found),
        *([f"Left out: {'; '.join(failed)}", ""] if failed else []),
    ]


def _row(label: str, one: Mapping[str, Any], reference: float | None) -> str:
    if not one["seconds"]:
        return f"| {label} | – | – | – | – | – | – |"
    seconds = sorted(one["seconds"])
    quarter, middle = len(seconds) // 4, statistics.median(seconds)
    gap = "–" if one["gap"] is None else "0" if one["gap"] == 0 else f"{one['gap']:.0e}"
    ratio = middle / reference if reference else 1.0
    return (
        f"| {label} | {middle:.3f} ({seconds[quarter]:.3f} to {seconds[-1 - quarter]:.3f}) | {ratio:.2f} | "
        f"{len(seconds)} | {one['memory'] / 1e6:,.0f} | {one['start']:.1f} | {gap} |"
    )


def _versions(found: Mapping[str, Mapping[str, Any]]) -> str:
    versions = {name: version for one in found.values() for name, version in one["about"].items()}
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def draw(results: Results, file: Path) -> None:
    """Draw a panel for each workload, all on one logarithmic scale: medians, and the middle half as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {
        workload["title"]: {label: sorted(one["seconds"]) for label, one in workload["found"].items() if one["seconds"]}
        for workload in results.values()
    }
    shown = {title: rows for title, rows in shown.items() if rows}
    if not shown:
        return
    heights = [len(rows) + 1.5 for rows in shown.values()]
    figure, panels = pyplot.subplots(
        *(len(shown), 1),
        figsize=(8, 0.27 * sum(heights) + 0.4),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, (title, rows) in zip(panels[:, 0], shown.items(), strict=True):
        for place, (label, seconds) in enumerate(rows.items()):
            quarter, middle = len(seconds) // 4, statistics.median(seconds)
            colour = "#1f6f8b" if label.startswith("FedKeep") else "#7d8b91"
            panel.plot([seconds[quarter], seconds[-1 - quarter]], [place, place], color=colour, linewidth=2)
            panel.plot(middle, place, "o", color=colour, markersize=6)
            panel.annotate(
                f"{middle:.3g} s", (middle, place), (0, 5), textcoords="offset points", fontsize=6, ha="center"
            )
        panel.set_xscale("log")
        panel.set_yticks(range(len(rows)), list(rows))
        panel.set_ylim(len(rows) - 0.4, -0.8)
        panel.set_title(title, fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
        panel.grid(axis="x", which="both", color="#eceff0")
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("seconds per round (logarithmic): median, and the middle half as a line", fontsize=8)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
