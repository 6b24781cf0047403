"""What fusion by optimal transport costs: laying a model onto another's neurons, once a round, on one core.

Three cases of each network: two models of clients that left the same start (neurons stay in place, as in a round of
FedSKF), a permuted copy, which must come back exactly, and two unrelated models, the hardest. The exact solver is
`scipy`'s for assignments; where POT is installed (pip install pot), its solver of the general problem is timed on the
same costs and must give the same plans.

    python benchmarks/transport.py [--repetitions 5] [--vgg] [--note "what else ran on the machine"]

writes its result beside itself, with date, versions and hardware.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from telling import arguments, beginning

from fedkeep._utils import seeds
from fedkeep.aggregation.transport import ChannelLayer, LayerPlans, _cheapest, align, channel_groups, distances, project
from fedkeep.models import Architecture, Shape, Weights
from fedkeep.models.networks import VGG16, LeNet5, ResNet18
from fedkeep.models.weights import state_dict_copy

NETWORKS: tuple[tuple[str, Architecture, Shape], ...] = (
    ("LeNet-5", LeNet5(), (1, 28, 28)),
    ("ResNet-18, batch norm", ResNet18(), (3, 32, 32)),
    ("VGG-16", VGG16(), (3, 64, 64)),
)
SIZES = (64, 256, 512, 1024)


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=5, help="after one to warm up (default: 5)")
    parser.add_argument("--vgg", action="store_true", help="VGG-16 too, once: minutes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = []
    for label, architecture, shape in NETWORKS:
        if label != "VGG-16":
            measured += measure(label, architecture, shape, options.repetitions)
        elif options.vgg:
            measured += measure(label, architecture, shape, 1)
    text = report(measured, [compare(size) for size in SIZES], options)
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


@dataclass(frozen=True)
class Measured:
    """Seconds of each repetition, and the mean share of mass that stayed in place."""

    network: str
    case: str
    seconds: list[float]
    stayed: float

    def row(self) -> str:
        """Return the row of the table."""
        middle, worst = statistics.median(self.seconds), max(self.seconds)
        return f"| {self.network} | {self.case} | {middle:.2f} | {worst:.2f} | {self.stayed:.3f} |"


def measure(label: str, architecture: Architecture, shape: Shape, repetitions: int) -> list[Measured]:
    """Lay sources of three kinds onto a base."""
    layers = channel_groups(architecture.build(shape, 10))
    base, other = (initial(architecture, shape, seed) for seed in (0, 1))
    cases = {"same start": nudged(base), "permuted copy": permuted(base, layers), "unrelated": other}
    found = []
    for case, source in cases.items():
        seconds = []
        for _ in range(repetitions + 1):
            began = time.perf_counter()
            projection = project(source, base, layers)
            seconds.append(time.perf_counter() - began)
        if case == "permuted copy":
            assert all(torch.equal(tensor, base[name]) for name, tensor in projection.model.items())
        stayed = statistics.mean(projection.diagonal.values())
        found.append(Measured(label, case, seconds[1:], stayed))
    return found


def initial(architecture: Architecture, shape: Shape, seed: int) -> Weights:
    """Return initial weights."""
    with seeds.temporary_seed(seed):
        return state_dict_copy(architecture.build(shape, 10))


def nudged(model: Weights) -> Weights:
    """Return a model a tenth of the weights' own spread away, as after some steps of training."""
    noise = torch.Generator().manual_seed(2)
    return {
        name: tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=noise) if tensor.ndim > 1 else tensor
        for name, tensor in model.items()
    }


def permuted(model: Weights, layers: Sequence[ChannelLayer]) -> Weights:
    """Return the model with the channels of every group in a random order."""
    noise = torch.Generator().manual_seed(3)
    sizes = {layer.writes: len(model[f"{layer.name}.weight"]) for layer in layers if layer.writes is not None}
    orders = {group: torch.randperm(size, generator=noise) for group, size in sizes.items()}
    return align(
        model, layers, {a.name: LayerPlans(orders.get(a.reads or ""), orders.get(a.writes or "")) for a in layers}
    )


def compare(size: int) -> str:
    """Return a row: milliseconds of the exact solver, and of POT's if it is there, on unrelated units."""
    noise = torch.Generator().manual_seed(4)
    costs = distances(*(torch.randn(size, 2 * size, generator=noise) for _ in range(2)))
    began = time.perf_counter()
    plan = _cheapest(costs)
    ours, theirs = time.perf_counter() - began, "not installed"
    if importlib.util.find_spec("ot"):
        import ot

        mass = torch.ones(size, dtype=torch.float64).numpy()
        began = time.perf_counter()
        general = ot.emd(mass, mass, costs.numpy(), numItermax=10**7)
        theirs = f"{1e3 * (time.perf_counter() - began):.1f}"
        assert torch.equal(torch.from_numpy(general).argmax(0), plan)
    return f"| {size} | {1e3 * ours:.1f} | {theirs} |"


def report(measured: list[Measured], solvers: list[str], options: argparse.Namespace) -> str:
    """Return the result as Markdown."""
    lines = [
        *beginning(
            "Fusion by optimal transport",
            f"transport.py --repetitions {options.repetitions}{' --vgg' if options.vgg else ''}",
            options.note,
        ),
        "| network | models | median s | worst s | mass that stays |",
        "|:--|:--|--:|--:|--:|",
        *(one.row() for one in measured),
        "",
        "Every permuted copy came back equal bit for bit. A projection is made once a round, whatever the cohort.",
        "",
        "The exact plan of one layer of unrelated units, ms; the plans are the same:",
        "",
        "| units | assignment (scipy, used) | general (POT) |",
        "|--:|--:|--:|",
        *solvers,
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
