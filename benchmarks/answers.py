"""How many images at once a frozen network should answer: milliseconds an image, by rows per forward pass.

Evaluation and teachers ask a network without gradient, in parts (`fedkeep.training.model_runner`). Parts that are too
small pay for the call, parts that are too large for maps that no cache holds and that the system must hand out anew.
Here the same images pass `ModelRunner.logits` in parts of every size, one thread; the order alternates, and times as
fast is the median of the ratios within a repetition, to parts of 1,024.

    python benchmarks/answers.py [--repetitions 9] [--note "what else ran on the machine"]

writes its result beside itself, with date, versions and hardware.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from telling import arguments, beginning

from fedkeep.models import Architecture, Shape
from fedkeep.models.networks import CNN4, MLP, AlexNet8, LeNet5
from fedkeep.training.model_runner import ModelRunner

ROWS = (32, 64, 128, 256, 512, 1024)
GREY, COLOUR = (1, 28, 28), (3, 32, 32)


@dataclass(frozen=True)
class Case:
    """A network, and how many images make a measurement."""

    label: str
    architecture: Architecture
    shape: Shape
    images: int


CASES = (
    Case("MLP", MLP(), GREY, 20480),
    Case("LeNet-5", LeNet5(), GREY, 10240),
    Case("CNN-4", CNN4(), COLOUR, 2048),
    Case("AlexNet-8", AlexNet8(), COLOUR, 1024),
)


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=9, help="after one to warm up (default: 9)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = report([row(case, measure(case, options.repetitions)) for case in CASES], options.repetitions, options.note)
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


def measure(case: Case, repetitions: int) -> dict[int, list[float]]:
    """Return milliseconds an image of each repetition, by rows per pass."""
    networks = ModelRunner(lambda: case.architecture.build(case.shape, 10), 0, torch.device("cpu"))
    images = torch.randn(case.images, *case.shape, generator=torch.Generator().manual_seed(0))
    taken: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for number in range(repetitions + 1):
        for rows in ROWS if number % 2 else reversed(ROWS):
            networks.eval_batch_size = rows
            began = time.perf_counter()
            networks.logits(networks.initial, images)
            if number:
                taken[rows].append(1e3 * (time.perf_counter() - began) / case.images)
    return taken


def row(case: Case, taken: dict[int, list[float]]) -> str:
    """Return the row of the table."""
    shown = []
    for rows in ROWS:
        gain = statistics.median(most / own for most, own in zip(taken[ROWS[-1]], taken[rows], strict=True))
        shown.append(f"{statistics.median(taken[rows]):.4f} ({gain:.2f})")
    return f"| {case.label} | {'x'.join(map(str, case.shape))} | {' | '.join(shown)} |"


def report(measured: list[str], repetitions: int, note: str | None) -> str:
    """Return the result as Markdown."""
    lines = [
        *beginning("Images at once", f"answers.py --repetitions {repetitions}", note),
        f"| network | images | {' | '.join(f'{rows} at once' for rows in ROWS)} |",
        f"|:--|:--|{'--:|' * len(ROWS)}",
        *measured,
        "",
        "Milliseconds an image, median over the repetitions (times as fast as 1,024 at once, median of the ratios",
        "within a repetition).",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
