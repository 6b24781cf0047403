"""How many images at once a frozen network should predict, and whether several networks should be stacked.

Evaluation and teachers ask a network without gradient, in parts (`fedkeep.training.model_runner`). Parts that are too
small pay for the call, parts that are too large for maps that no cache holds and that the system must hand out anew.
Here the same images pass `ModelRunner.logits` in parts of every size, one thread; the order alternates, and times as
fast is the median of the ratios within a repetition, to parts of 1,024.

Five teachers predict the same images: one after another, or as one stacked network (`torch.func.vmap` over their
weights, which makes one wider convolution of the first and grouped ones of the others).

    python benchmarks/answers.py [--repetitions 9] [--note "what else ran on the machine"]

writes its result beside itself, with date, versions and hardware.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from telling import arguments, beginning
from torch import Tensor

from fedkeep.models import CNN4, MLP, AlexNet8, Architecture, LeNet5, Shape
from fedkeep.training.model_runner import ModelRunner

TEACHERS, EXAMPLES = 5, 600  # of SFedKD's Fashion-MNIST setting
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
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    one = [row(case, measure(case, options.repetitions)) for case in CASES]
    five = [row_of_five(case, measure_five(case, options.repetitions)) for case in CASES[:3]]
    text = report(one, five, options.repetitions, options.note)
    print(text)
    options.out.write_text(text)


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


def measure_five(case: Case, repetitions: int) -> dict[int, list[float]]:
    """Return milliseconds of each repetition, by rows per stacked pass; 0 for one network after another."""
    networks = ModelRunner(lambda: case.architecture.build(case.shape, 10), 0, torch.device("cpu"))
    images = torch.randn(EXAMPLES, *case.shape, generator=torch.Generator().manual_seed(0))
    noise = torch.Generator().manual_seed(0)
    teachers = [
        {name: weight + 0.01 * torch.randn(weight.shape, generator=noise) for name, weight in networks.initial.items()}
        for _ in range(TEACHERS)
    ]
    stacked = torch.func.vmap(partial(torch.func.functional_call, networks.eval_network), in_dims=(0, None))

    @torch.inference_mode()
    def predict(rows: int) -> Tensor:
        if not rows:
            return torch.stack([networks.logits(teacher, images) for teacher in teachers])
        weights = {name: torch.stack([teacher[name] for teacher in teachers]) for name in networks.initial}
        return torch.cat([stacked(weights, part) for part in images.split(rows)], 1)

    choices = (0, *ROWS[:4])
    assert all(torch.allclose(predict(rows), predict(0), atol=1e-4) for rows in choices)
    taken: dict[int, list[float]] = {rows: [] for rows in choices}
    for number in range(repetitions):
        for rows in choices if number % 2 else reversed(choices):
            began = time.perf_counter()
            predict(rows)
            taken[rows].append(1e3 * (time.perf_counter() - began))
    return taken


def row_of_five(case: Case, taken: dict[int, list[float]]) -> str:
    """Return the row of the table of stacked teachers."""
    shown = [f"{statistics.median(taken[0]):.1f}"]
    for rows in list(taken)[1:]:
        gain = statistics.median(single / own for single, own in zip(taken[0], taken[rows], strict=True))
        shown.append(f"{statistics.median(taken[rows]):.1f} ({gain:.2f})")
    return f"| {case.label} | {' | '.join(shown)} |"


def row(case: Case, taken: dict[int, list[float]]) -> str:
    """Return the row of the table."""
    shown = []
    for rows in ROWS:
        gain = statistics.median(most / own for most, own in zip(taken[ROWS[-1]], taken[rows], strict=True))
        shown.append(f"{statistics.median(taken[rows]):.4f} ({gain:.2f})")
    return f"| {case.label} | {'x'.join(map(str, case.shape))} | {' | '.join(shown)} |"


def report(one: list[str], five: list[str], repetitions: int, note: str | None) -> str:
    """Return the result as Markdown."""
    lines = [
        *beginning("Images at once", f"answers.py --repetitions {repetitions}", note),
        f"| network | images | {' | '.join(f'{rows} at once' for rows in ROWS)} |",
        f"|:--|:--|{'--:|' * len(ROWS)}",
        *one,
        "",
        "Milliseconds an image, median over the repetitions (times as fast as 1,024 at once, median of the ratios",
        "within a repetition).",
        "",
        f"{TEACHERS} teachers predict the same {EXAMPLES} images, milliseconds (times as fast as one after another):",
        "",
        f"| network | one after another | {' | '.join(f'stacked, {rows} at once' for rows in ROWS[:4])} |",
        f"|:--|{'--:|' * 5}",
        *five,
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
