"""Draw docs/pictures/averages.png, the README's figure of last models, averages and pooled training.

    python tools/averages_figure.py

reads results/confirm-averages.zip and results/pooled-fashion-mnist.zip, which docs/averaged-sequences.md explains.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fedkeep.reporting import figures
from fedkeep.reporting.run_folder import read_run
from fedkeep.reporting.summary import summary

ROOT = Path(__file__).resolve().parents[1]
ROUNDS_A_PASS = 2
"""A round trains ten clients with 600 images each for five passes: half of a pass over all 60,000 images."""
LINES = {
    "pooled": "all images at one place",
    "FedSeq, lr 0.03, moving average": "a sequence's moving average",
    "FedSeq, lr 0.03, mean of the round": "the mean of its round",
    "FedSeq, lr 0.03": "its last model",
}
"""The rows that are drawn, and what a reader who knows no method calls them."""
PAPER, PAPER_LABEL = 83.66, "the paper's SFedKD, round 1,000"
"""What SFedKD's paper prints after 1,000 rounds, and its label."""


def spread_out(wanted: Sequence[float], gap: float, size: float) -> list[float]:
    """Move places apart to at least `gap` within 0..`size`, each as near as it can stay to where it wants to be."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[tuple[float, list[int]]] = []  # where the first of the block wants to be, and its members
    for i in order:
        start, members = min(max(wanted[i], 0.0), size), [i]
        while blocks and blocks[-1][0] + gap * len(blocks[-1][1]) > start:
            before, others = blocks.pop()
            start = (before * len(others) + (start - gap * len(others)) * len(members)) / (len(others) + len(members))
            members = others + members
            start = max(0.0, min(start, size - gap * (len(members) - 1)))
        blocks.append((start, members))
    placed = [0.0] * len(wanted)
    for start, members in blocks:
        for step, i in enumerate(members):
            placed[i] = start + gap * step
    return placed


def main() -> int:
    """Draw the figure."""
    runs = [read_run(ROOT / "results" / name) for name in ("confirm-averages.zip", "pooled-fashion-mnist.zip")]
    rows = {row.label: row for run in runs for row in summary(run)}
    rows["pooled"] = rows["pooled, lr 0.03"]
    looks = figures.styles(rows[label].trials[0] for label in LINES)
    with figures.theme():
        figure = Figure(figsize=(7.0, 3.4), facecolor=figures.PAPER)
        axes = figure.add_axes((0.06, 0.13, 0.65, 0.78))
        ends: dict[str, float] = {}
        for label in LINES:
            rounds, values = figures.history(rows[label].trials, "accuracy")
            rounds = rounds * (ROUNDS_A_PASS if label == "pooled" else 1)
            style = looks[rows[label].label]
            dashes = {"linestyle": (0, style.dashes)} if style.dashes else {}
            axes.plot(rounds, values.mean(axis=0), color=style.colour, linewidth=1.6, **dashes)
            axes.fill_between(
                rounds, values.min(axis=0), values.max(axis=0), color=style.colour, alpha=0.15, linewidth=0
            )
            ends[label] = float(values.mean(axis=0)[-5:].mean())
        axes.axhline(PAPER, color=figures.MUTED, linewidth=0.8)
        wanted = [*ends.values(), PAPER - 1]  # its label below the moving average's
        named = [(LINES[label], looks[rows[label].label].colour) for label in ends] + [(PAPER_LABEL, figures.MUTED)]
        for height, (text, colour) in zip(spread_out(wanted, 4.5, 100), named, strict=True):
            axes.text(101.5, height, text, color=colour, fontsize=figures.FONT_SIZE, va="center")
        axes.set_xlim(0, 100)
        axes.set_ylim(20, 95)
        axes.set_xlabel("rounds of ten clients (two rounds are one pass over all images)", fontsize=figures.FONT_SIZE)
        axes.set_title(
            "Accuracy in %, Fashion-MNIST, two classes a client, lr 0.03: mean and range of five seeds",
            loc="left",
            fontsize=figures.FONT_SIZE,
            color=figures.INK,
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=figures.GRID, linewidth=0.6)
        axes.tick_params(labelsize=7, length=2)
        figures.save_figure(figure, ROOT / "docs" / "pictures" / "averages.png", dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
