"""Draw docs/pictures/averages.png from results/confirm-averages.zip: last models, averages, and pooled training.

python tools/averages_figure.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from fedkeep.reporting import figures
from fedkeep.reporting.run_folder import read_run
from fedkeep.reporting.trial import TrialResult

ROOT = Path(__file__).resolve().parents[1]
ARCHIVE, PICTURE = ROOT / "results" / "confirm-averages.zip", ROOT / "docs" / "pictures" / "averages.png"
LINES = {
    ("pooled-fashion-mnist", "pooled, lr 0.03"): ("pooled training", "#6b7280", (3, 2)),
    ("confirm-averages", "FedSeq, lr 0.03, moving average"): (
        "moving average of FedSeq's models, lr 0.03",
        "#0f766e",
        (),
    ),
    ("confirm-averages", "FedSeq, lr 0.01, moving average"): ("the same, lr 0.01", "#5eb5ac", ()),
    ("confirm-averages", "FedSeq, lr 0.01"): ("FedSeq's last model, lr 0.01", "#c2410c", ()),
}
"""Run and row of each line, and what it is called, its colour and its dashes."""
PAPER = 83.66
"""SFedKD's accuracy in its paper, after 1,000 rounds."""


def main() -> int:
    """Draw the picture."""
    runs = {name: read_run(ARCHIVE / name) for name in {run for run, _ in LINES}}
    with figures.theme():
        figure = Figure(figsize=(7.0, 3.4), facecolor=figures.PAPER)
        axes = figure.subplots()
        for (run, label), (words, colour, dashes) in LINES.items():
            trials: list[TrialResult] = [trial for trial in runs[run].trials if trial.label == label]
            rounds, values = figures.history(trials, "accuracy", 1)
            rounds = rounds * 100 / trials[0].rounds_planned  # of as many training steps
            line = {"linestyle": (0, dashes)} if dashes else {}
            axes.plot(
                rounds, values.mean(axis=0), color=colour, linewidth=1.6, label=f"{words} ({len(trials)} seeds)", **line
            )
            axes.fill_between(rounds, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        axes.axhline(PAPER, color=figures.INK, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.annotate("SFedKD in its paper, after 1,000 rounds", (1, PAPER + 0.6), fontsize=7, color=figures.INK)
        axes.set_xlabel("rounds, each of 30,000 images trained on", fontsize=8)
        axes.set_ylabel("test accuracy, %", fontsize=8)
        axes.set_ylim(20, 93)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=figures.GRID, linewidth=0.6)
        axes.legend(loc="lower right", frameon=False, fontsize=7)
        figure.tight_layout()
        figures.save_figure(figure, PICTURE, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
