"""What layout and precision gain: training steps of the engine in channels last, and in bfloat16, side by side.

FedKeep puts networks with convolutions into PyTorch's channels_last on a CPU (fedkeep/training/model_runner.py), and
computes their layers in bfloat16 if a recipe says training.precision. Here the same `fit`, with the same weights,
images and order of batches, runs in each way; a step includes laying out its batch, and a share of loading the model
and of copying it out. One thread; the order alternates, and ratios are taken within a repetition, so that what else the
machine does hits all. At the end the losses are compared: they did the same steps.

    python benchmarks/steps.py [--repetitions 9] [--note "what else ran on the machine"]

writes its result beside itself, with date, versions and hardware.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from telling import arguments, beginning, gain

from fedkeep.data import Augmentation
from fedkeep.interface import Fit, Training
from fedkeep.interface.training_settings import Precision
from fedkeep.losses import CrossEntropy
from fedkeep.models import Architecture, Shape
from fedkeep.models.networks import CNN4, AlexNet8, LeNet5, ResNet18
from fedkeep.training.local_training import BatchStream, TrainJob, fit
from fedkeep.training.model_runner import ModelRunner

WAYS: dict[str, tuple[torch.memory_format, Precision]] = {
    "plain": (torch.contiguous_format, "float32"),
    "last": (torch.channels_last, "float32"),
    "half": (torch.channels_last, "bfloat16"),
}


@dataclass(frozen=True)
class Case:
    """A network, the batches it is trained on, and how many of them make a measurement."""

    label: str
    architecture: Architecture
    shape: Shape
    batch: int
    steps: int


CASES = (
    Case("LeNet-5", LeNet5(), (1, 28, 28), 64, 100),
    Case("CNN-4", CNN4(), (3, 32, 32), 50, 20),
    Case("AlexNet-8", AlexNet8(), (3, 32, 32), 64, 4),
    Case("ResNet-18, batch norm", ResNet18(), (3, 32, 32), 16, 3),
)


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=9, help="after one to warm up (default: 9)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = report([measure(case, options.repetitions) for case in CASES], options.repetitions, options.note)
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


class Trainer:
    """Trains one network in one way, always from its initial weights."""

    def __init__(self, case: Case, layout: torch.memory_format, precision: Precision) -> None:
        self.case = case
        self.training = Training(batch_size=case.batch, lr=0.01, weight_decay=1e-4, precision=precision)
        self.runner = ModelRunner(lambda: case.architecture.build(case.shape, 10), 0, torch.device("cpu"))
        self.runner.layout = layout
        self.runner.train_network.to(memory_format=layout)  # type: ignore[call-overload]
        noise, count = torch.Generator().manual_seed(0), case.batch * case.steps
        self.data = {"input": torch.randn(count, *case.shape, generator=noise), "label": torch.arange(count) % 10}

    def train(self) -> Fit:
        """Take the case's steps."""
        order = torch.Generator().manual_seed(1)
        source = BatchStream(self.data, lambda images: images, Augmentation(), order, order, self.runner.layout)
        todo = TrainJob(self.runner.initial, CrossEntropy(), [source], epochs=1, round=1, seed=0)
        return fit(self.runner, todo, self.training)


@dataclass(frozen=True)
class Measured:
    """Seconds per step of each repetition by way, and the mean loss of each."""

    case: Case
    seconds: dict[str, list[float]]
    losses: dict[str, float]

    def row(self) -> str:
        """Return the row of the table."""
        images = "x".join(map(str, self.case.shape))
        times = " | ".join(f"{1e3 * statistics.median(self.seconds[name]):.2f}" for name in WAYS)
        gains = (
            f"{gain(self.seconds['plain'], self.seconds['last'])} | {gain(self.seconds['last'], self.seconds['half'])}"
        )
        return f"| {self.case.label} | {images} | {self.case.batch} | {times} | {gains} |"


def measure(case: Case, repetitions: int) -> Measured:
    """Train a case in all ways, orders alternated, after one training each to warm up."""
    trainers = {name: Trainer(case, *way) for name, way in WAYS.items()}
    losses = {name: trainer.train().loss for name, trainer in trainers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(repetitions):
        for name in list(trainers) if number % 2 else reversed(trainers):
            began = time.perf_counter()
            trainers[name].train()
            seconds[name].append((time.perf_counter() - began) / case.steps)
    return Measured(case, seconds, losses)


def report(measured: list[Measured], repetitions: int, note: str | None) -> str:
    """Return the result as Markdown."""
    gaps = {way: max(abs(one.losses["plain"] - one.losses[way]) for one in measured) for way in ("last", "half")}
    lines = [
        *beginning("Layout and precision", f"steps.py --repetitions {repetitions}", note),
        "| network | images | batch | plain, ms a step | channels last | bfloat16 | channels last, times as fast "
        "| bfloat16, times as fast again |",
        "|:--|:--|--:|--:|--:|--:|--:|--:|",
        *(one.row() for one in measured),
        "",
        "Milliseconds are medians over the repetitions; times as fast is the median of the ratios within a repetition",
        "(middle half). bfloat16 is quick only where the processor has instructions for it.",
        "",
        f"Largest difference of a mean loss from the plain one: {gaps['last']:.1e} with channels last, "
        f"{gaps['half']:.1e} in bfloat16.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
