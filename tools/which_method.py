"""Write the measured parts of docs/which-method-tables.md and docs/averaged-sequences.md, and pictures, from results/.

    python tools/which_method.py

Accuracy is read over the window that the recipe names. Time is counted in local trainings that must wait for one
another: ten a round for a sequence of ten clients, one for ten clients at once. Seconds in the archives are of shared
machines and compare nothing. What it costs to come to an accuracy is counted to FedAvg's (`target`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import isnan
from pathlib import Path
from statistics import fmean

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedkeep.reporting import figures
from fedkeep.reporting.metric import Metric, headline
from fedkeep.reporting.run_folder import Run, read_run
from fedkeep.reporting.summary import Row, difference, show_difference, summary, trials_of

ROOT = Path(__file__).resolve().parents[1]
TABLES_PAGE = ROOT / "docs" / "which-method-tables.md"
AVERAGES_PAGE = ROOT / "docs" / "averaged-sequences.md"
BEGIN, END = "<!-- tools/which_method.py writes what follows -->", "<!-- and ends here -->"
SHORT, LONG = "fedkeep-averaged-sequences-rounds-0.6.zip", "fedkeep-averaged-sequences.zip"
LONGEST = "averaged-sequences-long.zip"
SETTINGS = {
    "sfedkd-table1.zip/fashion-mnist-2-0.5": "Fashion-MNIST, two classes a client, 1,000 rounds",
    "fedkeep-campaign-sfedkd-rounds-0.2.zip/fashion-mnist-2-0.5": "Fashion-MNIST, two classes a client, 200 rounds",
    "fedkeep-campaign-sfedkd.zip/fashion-mnist-2-0.5": "Fashion-MNIST, two classes a client, 1,000 rounds, two seeds",
    "fedkeep-late-sfedkd.zip/fashion-mnist-2-0.5": "Fashion-MNIST, two classes a client, 1,000 rounds (GPU)",
    "fedkeep-late-sfedkd.zip/cifar10-2-0.5": "CIFAR-10, two classes a client, 1,000 rounds (GPU)",
    f"{SHORT}/fashion-mnist-exdir-2-0.5": "Fashion-MNIST, two classes a client, 60 rounds",
    f"{LONGEST}/fashion-mnist-1000-rounds": "Fashion-MNIST, two classes a client, 1,000 rounds, five seeds",
    f"{LONGEST}/fashion-mnist-falling-rate": "Fashion-MNIST, two classes a client, 500 rounds, five seeds",
    "confirm-averages.zip": "Fashion-MNIST, two classes a client, 100 rounds",
    f"{SHORT}/fashion-mnist-dirichlet-0.1": "Fashion-MNIST, Dirichlet(0.1), 60 rounds",
    f"{SHORT}/cifar10-exdir-2-0.5": "CIFAR-10, two classes a client, 60 rounds",
    f"{LONGEST}/cifar10-150-rounds": "CIFAR-10, two classes a client, 150 rounds",
    f"{SHORT}/cifar10-dirichlet-0.1": "CIFAR-10, Dirichlet(0.1), 60 rounds",
    f"{LONG}/femnist-writers": "FEMNIST, one client for each writer, 100 rounds",
    f"{LONG}/cifar100-30-exdir-6-1": "Thirty classes of CIFAR-100, six a client, 100 rounds",
    f"{LONG}/ham10000-dirichlet-0.3": "HAM10000, twenty clients, Dirichlet(0.3), 60 rounds",
    "fedadkd-table1.zip/cifar10-2": "CIFAR-10, two shards a client, 200 rounds",
    "fedadkd-table3.zip/cifar10-1-9": "CIFAR-10, one balanced client of ten, 200 rounds",
    "fedkeep-class-incremental.zip/fashion-mnist-5x2": "Fashion-MNIST, five tasks of two classes",
    "fedkeep-campaign-fedskf.zip/cifar100-30-3x10": "CIFAR-100's first thirty classes, three tasks of ten",
    "fedkeep-campaign-feddcl.zip/paper": "Grey images, three tasks of ten classes, generated replay",
}
"""Runs in archives of results/, and what their settings are called."""
POOLED = {
    "confirm-averages.zip": "pooled-fashion-mnist.zip",
    f"{SHORT}/cifar10-exdir-2-0.5": "fedkeep-pooled.zip/cifar10",
    f"{SHORT}/cifar10-dirichlet-0.1": "fedkeep-pooled.zip/cifar10",
    f"{LONG}/femnist-writers": "fedkeep-pooled.zip/femnist",
    f"{LONG}/cifar100-30-exdir-6-1": "fedkeep-pooled.zip/cifar100-30",
    f"{LONG}/ham10000-dirichlet-0.3": "fedkeep-pooled.zip/ham10000",
}
"""Runs of `SETTINGS`, and training on all images in one place with as many steps."""
LABELS = {
    **{(run, "FedADKD"): "FedADKD, binary reading" for run in SETTINGS if run.startswith("fedadkd-table")},
    **{(run, "FedADKD"): "FedADKD, weight 3" for run in SETTINGS if run.startswith((SHORT, LONG))},
    **{(run, "SeqKeep"): "SeqKeep, weight 3" for run in SETTINGS if run.startswith(SHORT)},
}
"""Other names of methods, by run, whose defaults were others then."""


@cache
def run_of(name: str) -> Run:
    """Return a run in an archive of results/."""
    return read_run(ROOT / "results" / name)


def rows_of(run: str) -> list[Row]:
    """Return the finished rows of a run, best first, without round means of what trains at once."""
    rows = [row for row in summary(run_of(run)) if row.finished]
    metric = headline(trials_of(rows))[0]
    # The model of a parallel method is its round's mean anyway.
    kept = [row for row in rows if row.trials[0].sequential or not is_round_mean(row)]
    kept = [replace(row, label=_shown(run, row)) for row in kept]
    return sorted(kept, key=lambda row: row.value(metric).mean, reverse=True)


def _shown(run: str, row: Row) -> str:
    return LABELS.get((run, row.method), row.method) + row.label.removeprefix(row.method)


def is_round_mean(row: Row) -> bool:
    """Tell whether the row is of the mean of the models of each round."""
    return row.evaluation_model == "round"


def megabytes(row: Row) -> float:
    """Return what all clients received and sent over the run, in MB, as a mean over seeds."""
    total = sum(record["down"] + record["up"] for trial in row.trials for record in trial.rounds)
    return float(total) / len(row.trials) / 1e6


def trainings_in_a_row(row: Row) -> int:
    """Return how many local trainings of the run wait for one another."""
    trial = row.trials[0]
    return trial.rounds_planned * (int(trial.info["cohort_size"]) if trial.sequential else 1)


def target(rows: list[Row]) -> int | None:
    """Return the mean accuracy of FedAvg's last model over the window, in percent, rounded down.

    None without FedAvg, and where classes arrive in tasks.
    """
    values = [row.value("window_mean").mean for row in rows if row.label == "FedAvg" and not row.trials[0].task_sizes]
    return int(100 * values[0]) if values else None


def cost_to_reach(row: Row, percent: int, cost: Callable[[Row], float]) -> str:
    """Return what a row had cost when it was first evaluated at an accuracy, in the mean over seeds."""
    reached = [trial.rounds_to(percent / 100) for trial in row.trials]
    if missing := sum(map(isnan, reached)):
        return "never" if missing == len(reached) else f"never by {missing} of {len(reached)} seeds"
    return f"{sum(reached) / len(reached) / row.trials[0].rounds_planned * cost(row):,.0f}"


def mean_over_classes(row: Row) -> float:
    """Return the mean of the classes' accuracies over the window, in percent, in the mean over seeds."""
    means = []
    for trial in row.trials:
        history = dict(zip(trial.evaluated.tolist(), trial.balanced_history.tolist(), strict=True))
        means.append(fmean(history[number] for number in trial.window_accuracies))
    return 100 * fmean(means)


def shown_label(row: Row, rows: Sequence[Row]) -> str:
    """Return a row's label, which says that it is of last models where another row has an average of the same runs."""
    averaged = {other.method for other in rows if other.evaluation_model != "last"}
    return f"{row.label}, last model" if row.label in averaged else row.label


def table(rows: list[Row], pooled: Sequence[Row] = ()) -> list[str]:
    """Return a Markdown table of one setting; pooled training sends nothing, and its trainings do not compare.

    Where test classes are unequal, the mean over classes is shown too; and if always answering the largest class is as
    accurate as FedAvg, the cost of getting there says nothing and is left out.
    """
    accuracy, forgetting = headline(trials_of(rows))
    most = max(len(row.seeds) for row in rows)
    best = next(row for row in rows if len(row.seeds) == most)  # fewer seeds would leave others fewer pairs
    counts = rows[0].trials[0].test_total
    unequal = not rows[0].trials[0].task_sizes and bool(max(counts) > 2 * min(counts))
    percent = target(rows)
    if percent is not None and 100 * max(counts) >= percent * sum(counts):
        percent = None
    heads = ["method", "accuracy", *["mean over classes"] * unequal, "minus the best row", "forgetting"]
    heads += ["MB sent in all", *[f"MB to {percent} %"] * (percent is not None)]
    heads += ["trainings in a row", *[f"to {percent} %"] * (percent is not None), "seeds"]
    lines = [f"| {' | '.join(heads)} |", "|:--" + "|--:" * (len(heads) - 1) + "|"]
    for row in sorted([*rows, *pooled], key=lambda row: row.value(accuracy).mean, reverse=True):
        several = len(row.seeds) > 2
        label = shown_label(row, pooled if row in pooled else rows)
        cells = [f"{label} ({row.note})" if row.note else label, shown_accuracy(row, accuracy)]
        cells += [f"{mean_over_classes(row):.1f}"] if unequal else []
        compared = several and row is not best and row not in pooled
        cells += [show_difference(difference(row, best, accuracy)) if compared else ""]
        cells += [f"{100 * row.value(forgetting).mean:.1f}"]
        for cost in (megabytes, trainings_in_a_row):
            cells += ["" if row in pooled else f"{cost(row):,.0f}"]
            if percent is not None:
                cells += ["" if row in pooled else cost_to_reach(row, percent, cost)]
        lines.append(f"| {' | '.join([*cells, str(len(row.seeds))])} |")
    return lines


def shown_accuracy(row: Row, metric: str | Metric) -> str:
    """Return a row's accuracy in percent, with its 95 % interval where there are three seeds or more."""
    found = row.interval(metric)
    interval = f" [{100 * found.low:.1f}, {100 * found.high:.1f}]" if len(row.seeds) > 2 else ""
    return f"{100 * found.mean:.1f}{interval}"


def gains(found: dict[str, list[Row]], *, beside_fedavg: bool = False) -> list[str]:
    """Return a Markdown table of what the moving average gains: for FedSeq, for FedAvg, and between the two.

    ``beside_fedavg`` leaves settings out in which FedAvg was not run.
    """
    heads = ["setting", "FedSeq, last model", "its moving average", "gain", "FedAvg, last model", "its moving average"]
    heads += ["gain", "FedSeq's average minus FedAvg's", "seeds"]
    lines = [f"| {' | '.join(heads)} |", "|:--" + "|--:" * (len(heads) - 1) + "|"]
    for name, rows in found.items():
        parallel = _with_average(rows, "FedAvg")
        sequences = (row.label for row in rows if _family(row) == "FedSeq" and row.evaluation_model == "last")
        for label in sorted(sequences):
            sequence = _with_average(rows, label)
            if not sequence or (beside_fedavg and not parallel):
                continue
            cells = [name + label.removeprefix("FedSeq")]
            for pair in (sequence, parallel):
                cells += [f"{100 * row.value('window_mean').mean:.1f}" for row in pair] if pair else ["", ""]
                cells += [show_difference(difference(pair[1], pair[0], "window_mean"))] if pair else [""]
            between = difference(sequence[1], parallel[1], "window_mean") if parallel else None
            cells += [show_difference(between) if between else "", str(len(sequence[0].seeds))]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _with_average(rows: list[Row], method: str) -> tuple[Row, Row] | None:
    found = {row.evaluation_model: row for row in rows if row.method == method}
    return (found["last"], found["moving"]) if found.keys() >= {"last", "moving"} else None


def _family(row: Row) -> str:
    """Return a method's name without what tells its settings apart."""
    return row.method.split(",")[0].split(" tau")[0].split(" (")[0]


def _best_of_each(rows: list[Row]) -> list[Row]:
    """Return of each method its best last model and its best average; rows come best first."""
    best = {(_family(row), row.evaluation_model == "last"): row for row in reversed(rows)}
    return list(best.values())


def picture(found: dict[str, list[Row]], path: Path, cost: Callable[[Row], float], title: str) -> None:
    """Draw accuracy against what it cost until then, a panel a setting without tasks.

    Of a method with several settings, such as learning rates, the best last model and the best average are drawn.
    """
    drawn = {
        name: [row for row in rows if not is_round_mean(row)]
        for name, rows in found.items()
        if not rows[0].trials[0].task_sizes
    }
    drawn = {name: _best_of_each(rows) for name, rows in drawn.items()}
    names = sorted({_family(row) for rows in drawn.values() for row in rows})
    looks = {name: colormaps["tab20"](place) for place, name in enumerate(names)}
    with figures.theme():
        lines = -(-len(drawn) // 2)
        figure = Figure(figsize=(7.0, 1.9 * lines + 0.9), facecolor=figures.PAPER)
        axes = figure.subplots(lines, 2).flatten()
        for panel, (name, rows) in zip(axes, drawn.items(), strict=False):
            for row in rows:
                rounds, values = figures.history(row.trials, "accuracy", figures.smoothing(row.trials))
                average = row.evaluation_model != "last"
                costs = rounds * cost(row) / row.trials[0].rounds_planned
                colour = looks[_family(row)]
                panel.plot(
                    costs,
                    values.mean(axis=0),
                    color=colour,
                    linewidth=1.4 if average else 0.8,
                    linestyle="-" if average else (0, (1, 1)),
                )
            panel.set_title(name.replace(" a client", ""), loc="left", fontsize=figures.FONT_SIZE, color=figures.INK)
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter("{x:,.0f}")
            panel.xaxis.set_minor_formatter("")
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(axis="y", color=figures.GRID, linewidth=0.6)
            panel.tick_params(labelsize=7, length=2, which="both")
            panel.set_xlabel(title, fontsize=7)
        for panel in axes[len(drawn) :]:
            panel.set_visible(False)
        samples = [Line2D([], [], color=looks[name]) for name in names]
        samples += [Line2D([], [], color=figures.INK), Line2D([], [], color=figures.INK, linestyle=(0, (1, 1)))]
        figure.legend(
            samples,
            [*names, "moving average", "last model"],
            loc="lower center",
            ncols=4,
            frameon=False,
            fontsize=6.5,
            handlelength=3,
            columnspacing=1,
        )
        figure.subplots_adjust(left=0.07, right=0.98, top=0.97, bottom=0.9 / lines / 1.9, hspace=0.55, wspace=0.16)
        figures.save_figure(figure, path, dpi=150)


def setting_of(run: str) -> str:
    """Return one sentence on what all rows of a run have in common, unless their labels say otherwise."""
    read = run_of(run)
    recipe, trial = read.settings, read.trials[0]
    training, running = recipe["training"], recipe["run"]
    parts = [
        f"{trial.info['num_clients']} clients, {trial.info['cohort_size']} a round",
        f"{training['epochs']} local epoch{'s' * (training['epochs'] != 1)} with batches of {training['batch_size']}",
        f"network {recipe['model']['name']}",
        f"learning rate {training['lr']:g}",
        f"decay of moving averages {running['ema_decay']:g}",
        f"evaluated every {running['evaluate_every']} rounds"
        if running["evaluate_every"] > 1
        else "evaluated each round",
    ]
    return f"{', '.join(parts)}."


def tables(found: dict[str, list[Row]]) -> list[str]:
    """Return the lines of a table for each setting, with links to its records."""
    lines = []
    for (run, name), rows in zip(SETTINGS.items(), found.values(), strict=True):
        pooled = rows_of(POOLED[run]) if run in POOLED else []
        archives = [path.partition("/")[0] for path in (run, POOLED.get(run, "")) if path]
        links = " and ".join(f"[{archive}](../results/{archive})" for archive in archives)
        lines += [f"## {name}", "", setting_of(run), "", *table(rows, pooled), "", f"Records: {links}.", ""]
    return lines


def pages(found: dict[str, list[Row]]) -> dict[Path, str]:
    """Return the pages with what stands between their two marks written anew."""
    texts = {}
    everything = [*tables(found), "## What the moving average gains", "", *gains(found), ""]
    for page, lines in ((TABLES_PAGE, everything), (AVERAGES_PAGE, [*gains(found, beside_fedavg=True), ""])):
        before, _, rest = page.read_text().partition(BEGIN)
        texts[page] = "\n".join([before + BEGIN, "", *lines]) + END + rest.partition(END)[2]
    return texts


def main() -> int:
    """Write the pages and the pictures."""
    found = {name: rows_of(archive) for archive, name in SETTINGS.items()}
    for page, text in pages(found).items():
        page.write_text(text)
    folder = ROOT / "docs" / "pictures"
    picture(found, folder / "which-method-bytes.png", megabytes, "MB sent so far by all, up and down")
    picture(found, folder / "which-method-time.png", trainings_in_a_row, "local trainings one after another so far")
    return 0


if __name__ == "__main__":
    sys.exit(main())
