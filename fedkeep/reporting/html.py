"""The report: one HTML file that opens offline, in light or dark, on a wide or a narrow screen or on paper.

It is whole without a script. The one that it holds, `report.js`, lets a reader point at values, hide methods, sort
tables and smooth lines; it loads nothing, which the page's own policy (its ``Content-Security-Policy``) also forbids.
`write_all` writes it beside the results as CSV and Markdown.
"""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from hashlib import sha256
from importlib.resources import files
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep import metrics
from fedkeep._utils.files import atomic_write
from fedkeep._utils.templates import template
from fedkeep.data.catalog import is_known
from fedkeep.experiment.provenance import ARCHIVE_SUFFIX, TRIALS
from fedkeep.interface.training_settings import Training
from fedkeep.options import as_table
from fedkeep.reporting import figures, table
from fedkeep.reporting.findings import findings, warnings
from fedkeep.reporting.metric import METRICS, columns_for, headline, main_metric, show_number, shown_in
from fedkeep.reporting.run_folder import Run, read_run
from fedkeep.reporting.summary import (
    Row,
    Spread,
    deduplicate,
    difference_or_reason,
    show_difference,
    summary,
    trials_of,
)

LOST_SHOWN = 40  # rounds with lost clients that are listed one by one
CLIENTS_LISTED = 40  # with test examples of their own, the worst served first
WIDE = 20  # with more classes than this, the class-wise table has a row per class


def write_report(runs: Run | Sequence[Run], path: str | Path) -> Path:
    """Write the report of a run, or of several that are compared, as one self-contained HTML file; return its path.

    The same run folders give the same bytes. An older file is replaced only once the new one is complete.
    """
    return atomic_write(path, render(runs))


def render(runs: Run | Sequence[Run]) -> str:
    """Return the report of a run, or of several that are compared, as HTML text."""
    return template("reporting", "report.html.jinja", keep_trailing_newline=False).render(context(runs))


def context(runs: Run | Sequence[Run]) -> dict[str, Any]:
    """Return everything that the page shows, as plain values and finished SVG."""
    runs = [runs] if isinstance(runs, Run) else list(runs)
    rows = summary(runs)
    run = _combined(runs)
    line_styles = figures.styles(trial for row in rows for trial in row.trials)
    window = figures.smoothing(trial for row in rows for trial in row.trials)
    finished = [row for row in rows if row.finished]
    main = main_metric(run.trials)
    chain, local = (
        [row for row in rows if any(map(attrgetter(name), row.trials))] for name in ("chain", "local_models")
    )
    drawn = ([main.name] if main else []) + [name for name, curve in figures.CURVES.items() if curve.heading]
    return {
        "run": run,
        "facts": _facts(run),
        "data": run.trials[0].data_read().facts() if run.trials else [],
        "findings": findings(finished),
        "warnings": [line for one in runs for line in warnings(one.trials, one.settings)],
        "rows": rows,
        "swatches": {label: _swatch(style, place) for place, (label, style) in enumerate(line_styles.items())},
        "window": window,
        "unfinished": not all(row.finished for row in rows),
        "results": _results(rows),
        "chain": table.result_table(chain, shown_in("sequences")),
        "local": table.result_table(local, shown_in("local models")),
        "differences": _differences(finished),
        "compared": headline(trials_of(rows))[0].heading(trials_of(rows)),
        "in_points": headline(trials_of(rows))[0].unit == "%",
        "charts": [figures.line_chart(rows, name, window) for name in drawn],
        "class_heatmaps": figures.class_heatmaps(rows),
        "teachers": figures.teacher_heatmaps(rows),
        "confusions": figures.confusion_heatmaps(rows),
        "clients": figures.client_accuracies(rows),
        "by_client": by_client(rows),
        "partition": figures.partition_heatmap(run),
        "script": script(),
        "tasks": _tasks(rows),
        "classes": _classes(rows),
        "costs": _costs(rows),
        "lost": _lost(rows),
        "methods": {row.label: row.trials[0] for row in rows},
        "repeat": _repeat(run),
    }


def _combined(runs: Sequence[Run]) -> Run:
    """Return several runs as one, which has no recipe and no command."""
    if len(runs) == 1:
        return runs[0]
    titles = list(dict.fromkeys(run.title for run in runs))
    versions = [str(run.info.get("fedkeep", "")) for run in runs]
    if len(set(versions)) > 1:
        versions = [f"{version or 'unknown'} ({run.path.name})" for run, version in zip(runs, versions, strict=True)]
    info = {"title": f"Comparison: {'; '.join(titles)}", "fedkeep": ", ".join(dict.fromkeys(versions))}
    return Run(runs[0].path, info, "", tuple(trial for run in runs for trial in run.trials))


def _facts(run: Run) -> list[tuple[str, str]]:
    """Return what was run, in a few words each."""
    if not run.trials:
        return [("state", "no method has started yet")]
    info = run.trials[0].info
    scheme = run.trials[0].partition.get("scheme")
    settings = run.trials[0].partition.get("settings") or {}
    split = ", ".join(f"{key} {value}" for key, value in settings.items() if key != "num_clients")
    cohorts = {trial.info.get("cohort_size") for trial in run.trials}
    seeds = list(dict.fromkeys(str(trial.seed) for trial in run.trials))
    rounds = sorted({trial.rounds_planned for trial in run.trials})
    threads = f" ({count} thread{'s' * (count != 1)})" if (count := run.info.get("threads")) else ""
    idle_parts = [(trial.method, idle) for trial in run.trials if (idle := trial.info.get("idle_part"))]
    facts = [
        ("data", str(info.get("dataset") or "")),
        ("generator of images", next((trial.generator for trial in run.trials if trial.generator), "")),
        ("initial model", table.initial_models(run.trials)),
        ("pre-trained extractor", next((trial.extractor for trial in run.trials if trial.extractor), "")),
        ("clients", f"{info['num_clients']}" + (f", {info['cohort_size']} a round" if len(cohorts) == 1 else "")),
        ("partition", f"{scheme} ({split})" if split else str(scheme or table.NOTHING)),
        ("tasks", ", ".join(filter(None, (str(len(info.get("tasks") or "") or ""), str(info.get("sharing") or ""))))),
        ("rounds", ", ".join(map(str, rounds))),
        ("does nothing here", "; ".join(dict.fromkeys(f"{label}: {idle}" for label, idle in idle_parts))),
        ("local training", _training(run.settings.get("training") or {})),
        ("seed" + "s" * (len(seeds) > 1), ", ".join(seeds)),
        ("device", f"{run.info.get('device', '')}{threads}"),
        ("started", _moment(run.info.get("started"))),
    ]
    return [(name, text) for name, text in facts if text]


def _training(settings: Mapping[str, Any]) -> str:
    """Return settings of local training: those that everybody asks about, and those that are not the default."""
    defaults = as_table(Training())
    shown = {name: settings[name] for name in ("optimizer", "epochs", "batch_size", "lr") if name in settings}
    shown |= {name: value for name, value in settings.items() if value != defaults.get(name, value)}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _moment(text: Any) -> str:
    try:
        moment = datetime.fromisoformat(str(text))
        return f"{moment.day} {moment:%B %Y, %H:%M %Z}".strip()
    except ValueError:
        return str(text or "")


def _swatch(style: figures.LineStyle, place: int) -> dict[str, Any]:
    """Return a sample of the line: its place in the legend, the number of its colour, and its dashes in pixels."""
    dashes = " ".join(f"{2 * length:g}" for length in style.dashes)
    return {"place": place, "colour": style.index % len(figures.COLOURS), "dashes": dashes}


def _results(rows: Sequence[Row]) -> table.TextTable:
    beside = {"window_mean": [METRICS["window_std"]]}
    columns = [one for m in columns_for(trials_of(rows)) for one in (m, *beside.get(m.name, ()))]
    found = table.result_table(rows, columns)
    units = ["", "", *(", %" if metric.unit == "%" else "" for metric in columns)]
    return replace(found, heads=[head + unit for head, unit in zip(found.heads, units, strict=True)])


def _differences(rows: Sequence[Row]) -> table.TextTable:
    """Return the gains of each method on every other that comes before it, paired by seed, with their intervals."""
    metric = headline(trials_of(rows))[0]
    lines = []
    for place, row in enumerate(rows[1:], start=1):
        found = [difference_or_reason(row, reference, metric) for reference in rows[:place]]
        texts = [[show_number(value, gain.unit, sign="+") for value in gain.values] for gain in found]
        each = [", ".join(values) * (len(values) > 1) for values in texts]
        gains = [f"{show_difference(gain)}\n{values}" for gain, values in zip(found, each, strict=True)]
        lines.append([row.label, *gains, *[""] * (len(rows) - 1 - place)])
    return table.TextTable(["method", *(f"minus {row.label}" for row in rows[:-1])], lines, table.EXPLANATION)


def _tasks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return by method the accuracy of each task after each, in percent, averaged over seeds, and its mean over tasks.

    What has not arrived yet is NaN.
    """
    shown = []
    for row in rows:
        matrices = [trial.task_matrix for trial in row.trials]
        if most := max(map(len, matrices)):  # a seed that a callback ended has fewer tasks
            matrix = 100 * np.mean([one for one in matrices if len(one) == most], axis=0)
            known = np.where(np.tri(len(matrix), dtype=bool), matrix, np.nan)
            means = metrics.accuracy_after(matrix)
            lines = [{"values": list(values), "mean": mean} for values, mean in zip(known, means, strict=True)]
            shown.append({"row": row, "lines": lines})
    return shown


def _classes(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the class-wise accuracies of the last evaluation, in percent, averaged over seeds."""
    shown = [row for row in rows if any(len(trial.evaluated) for trial in row.trials)]
    lines: list[dict[str, Any]] = []
    for row in shown:
        lasts = np.asarray([trial.class_history[-1] for trial in row.trials if len(trial.evaluated)])
        values = [100 * Spread.of(column).mean for column in lasts.T]
        lines.append({"row": row, "what": "", "values": values, "mean": 100 * row.value("balanced").mean})
        others = np.asarray([trial.specificities[-1] for trial in row.trials if len(trial.evaluated)])
        if not np.isnan(others).all():
            values = [100 * Spread.of(column).mean for column in others.T]
            lines.append({"row": row, "what": "specificity", "values": values, "mean": Spread.of(values).mean})
    names = figures.class_names(shown[0].trials[0]) if shown else []
    return {"names": names, "lines": lines, "wide": len(names) > WIDE}


def by_client(rows: Sequence[Row]) -> table.TextTable:
    """Return what the model at the end is worth to each client by its name, the worst served first.

    Empty where clients have no test examples of their own, or no names that mean the same with every seed.
    """
    trials = trials_of(rows)
    if not all(one.client_history and (one.partition.get("client_names") or not one.partition) for one in trials):
        return table.TextTable([], [])
    score, lines = main_metric(trials), []
    for client in dict.fromkeys(name for trial in trials for name in trial.client_accuracy):
        cells, worst = [client], np.inf
        for row in rows:
            value = Spread.of(trial.client_accuracy.get(client, np.nan) for trial in row.trials).mean
            cells.append(table.NOTHING if np.isnan(value) else f"{100 * value:.1f}")
            worst = np.nanmin([worst, value])
            of_clients = (trial.client_scores(score.name if score else "") for trial in row.trials)
            if score and not np.isnan(value := Spread.of(of.get(client, np.nan) for of in of_clients).mean):
                cells[-1] += f"\n{score.title} {100 * value:.1f}"
        lines.append((worst, cells))
    listed = [line for _, line in sorted(lines, key=itemgetter(0))[:CLIENTS_LISTED]]
    more = len(lines) - len(listed)
    note = f"{more} better served clients are in the trials' rounds.jsonl." if more else ""
    return table.TextTable(["client", *(row.label for row in rows)], listed, note)


PARTS = {"training": "train", "teachers": "teachers", "server": "server"}
PARTS |= {"evaluation": "evaluate", "saving": "checkpoint"}


def _costs(rows: Sequence[Row]) -> table.TextTable:
    """Return the seconds of each part of a trial, and what was sent; `PARTS` are those of timings.jsonl."""
    played = {id(trial) for trial in deduplicate(trials_of(rows))}
    rows = [row for row in rows if any(id(trial) in played for trial in row.trials)]  # an average costs nothing
    heads = ["method", *(f"{name}, s" for name in PARTS), "local training per round, s"]
    heads += ["down per client and round", "up per client and round", "all traffic"]
    lines = []
    for row in rows:
        parts = [table.show(Spread.of(trial.seconds(part) for trial in row.trials), "s") for part in PARTS.values()]
        a_round = Spread.of(trial.train_seconds / trial.rounds_done for trial in row.trials if trial.rounds_done)
        traffic = (row.value("down"), row.value("up"), Spread.of(trial.traffic for trial in row.trials))
        cells = [*parts, f"{a_round.mean:.2f}" if a_round.n else table.NOTHING]
        lines.append([f"{row.label}\n{row.note}", *cells, *(table.human_bytes(spread.mean) for spread in traffic)])
    return table.TextTable(heads, lines, dim={i for i, row in enumerate(rows) if not row.finished})


def _lost(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the rounds in which clients were lost or that were rolled back."""
    lines: list[dict[str, Any]] = []
    trials = deduplicate(trials_of(rows))
    for trial in trials:
        who: dict[int, list[str]] = {number: [] for number in trial.rolled_back}
        for lost in trial.lost:
            who.setdefault(lost.round, []).append(f"{lost.client} ({lost.reason})")
        for number in sorted(who):
            line = {"label": trial.label, "seed": trial.seed, "round": number, "who": ", ".join(who[number])}
            lines.append({**line, "rolled_back": number in trial.rolled_back})
    clients, count = sum(len(trial.lost) for trial in trials), sum(len(trial.rolled_back) for trial in trials)
    often = Counter((trial.label, trial.seed, client) for trial in trials for _, client in trial.refused)
    refused = [
        f"client {client} in {times} {'round' if times == 1 else 'rounds'} of {label}, seed {seed}"
        for (label, seed, client), times in often.most_common(LOST_SHOWN)
    ]
    last = [(trial, trial.rounds[-1].get("set_aside", ())) for trial in trials if trial.rounds]
    aside = [f"{', '.join(named)} of {trial.label}, seed {trial.seed}" for trial, named in last if named]
    shown = {"lines": lines[:LOST_SHOWN], "more": len(lines[LOST_SHOWN:])}
    return shown | {"clients": clients, "rolled_back": count, "refused": refused, "set_aside": aside}


def _repeat(run: Run) -> dict[str, Any]:
    command = [str(word) for word in run.info.get("command") or []]
    versions = {"fedkeep": run.info.get("fedkeep"), **dict(run.info.get("versions") or {})}
    versions["FedKeep's git commit"] = run.info.get("git")
    resumed = {trial.path: trial.versions for trial in run.trials if len(trial.versions) > 1}
    versions |= {f"{path.name} was run by": "; then ".join(by) for path, by in resumed.items() if path}
    code = (run.info.get("identity") or {}).get("code") or {}
    versions |= {f"code/{name}, a copy of your own code": f"SHA-256 {digest}" for name, digest in code.items()}
    used = [str(Path(run.path.name) / name) if name.endswith(".py") else name for name in run.info.get("use", ())]
    own = [word for name in used for word in ("--use", name)]
    recipe = str(Path(run.path.name) / "recipe.toml")
    how = {"device": "cpu", "threads": 1, "stack": 0}
    options = [f"--{name}={run.info[name]}" for name, usual in how.items() if run.info.get(name, usual) != usual]
    networks = [run.settings.get("model", {}), *run.settings.get("client_models", ())]
    options += ["--allow-code"] * any(":" in str(network.get("name", "")) for network in networks)
    data = str(run.settings.get("data", {}).get("name", ""))
    relative = run.info.get("data_path") and not is_known(data) and not Path(data).is_absolute()
    again = shlex.join(["fedkeep", "run", recipe, *own, *options])
    if command[:2] == ["flwr", "run"]:
        sites = str(max((trial.info.get("num_clients", 1) for trial in run.trials), default=1))
        again = shlex.join(["fedkeep", "flower", "new", "again", "--recipe", recipe, "--sites", sites])
        again += "\nflwr run again --stream  # at the same sites, with the same --run-config"
    return {
        "again": again,
        "data": data if relative else "",
        # Where a program lies on the machine of the run helps nobody else.
        "command": shlex.join([Path(command[0]).name, *command[1:]]) if command else "",
        "versions": [(name, str(version)) for name, version in versions.items() if version],
        "recipe": run.recipe,
    }


@cache
def script() -> dict[str, str]:
    """Return the script of the report, and its hash, by which a page allows this script and no other."""
    text = files("fedkeep.reporting").joinpath("report.js").read_text(encoding="utf-8")
    digest = b64encode(sha256(text.encode()).digest()).decode()
    return {"text": text, "hash": f"sha256-{digest}"}


REPORT = "report.html"


def is_reported(folder: str | Path) -> bool:
    """Tell whether `write_all` came to its end after the last trial of a run folder was finished."""
    last = Path(folder) / REPORT  # of what it writes
    results = [file.stat().st_mtime_ns for file in Path(folder).glob(f"{TRIALS}/*/result.json")]
    return last.is_file() and last.stat().st_mtime_ns >= max(results, default=0)


def write_all(path: str | Path, out: str | Path | None = None) -> Run:
    """Write results.csv, table.md and report.html of a run, each whole or not at all, and return the run.

    An unfinished run gets them too, with its unfinished trials marked; calling it again replaces them.

    ``path``: A run folder, an archive of one, or a folder in an archive.
    ``out``: The folder to write into: by default the run folder, and `default_out` of an archive.
    """
    run = read_run(path)
    rows = summary(run)
    folder = Path(out) if out is not None else default_out(run.path)
    atomic_write(folder / "results.csv", table.trials_csv(rows))
    atomic_write(folder / "table.md", table.markdown(rows))
    write_report(run, folder / REPORT)
    return run


def default_out(path: Path) -> Path:
    """Return where a run's report is written: into its folder, or, of an archive, into one of its own under runs/."""
    return path if path.is_dir() else Path("runs") / f"report-{path.name.removesuffix(ARCHIVE_SUFFIX)}"
