"""What every result begins with (command, date, versions, hardware), and a ratio with its spread."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

import fedkeep


def arguments(description: str | None, note: bool = True) -> argparse.ArgumentParser:
    """Return a parser that shows a script's own words, and by default takes a ``--note`` for its result."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if note:
        parser.add_argument("--note", help="a sentence for the result, such as what else ran on the machine")
    return parser


def beginning(title: str, command: str, note: str | None = None, *, where: str = "one thread") -> list[str]:
    """Return the first lines of a result, in Markdown.

    Parameters
    ----------
    command : of the script, from its name on. where : what else is to be said of the hardware.
    """
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return [
        f"# {title}",
        "",
        f"`python benchmarks/{command}`, {datetime.now(UTC):%Y-%m-%d};",
        f"FedKeep {fedkeep.__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}; {machine}"
        f"{', ' * bool(where)}{where}.",
        *([note] if note else []),
        "",
    ]


def gain(slow: Sequence[float], fast: Sequence[float]) -> str:
    """Return how many times as fast one way is as another: the median of the ratios, and their middle half."""
    gains = sorted(a / b for a, b in zip(slow, fast, strict=True))
    quarter = len(gains) // 4
    return f"{statistics.median(gains):.2f} ({gains[quarter]:.2f} to {gains[-1 - quarter]:.2f})"
