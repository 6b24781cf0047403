"""What is measured: the workloads, and who takes part in which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
RECIPES = HERE / "recipes"


@dataclass(frozen=True)
class Places:
    """Where a contestant finds its things.

    Attributes
    ----------
    python : the interpreter of its environment. work : the folder that `prepare.write` made, if there is one.
    data : the data folder. scratch : an empty folder of its own.
    """

    python: Path
    work: Path
    data: Path
    scratch: Path


@dataclass(frozen=True)
class Contestant:
    """One program in one workload.

    Attributes
    ----------
    label : what the table calls it. peer : whose environment it needs; ``fedkeep`` for this one.
    command : its command line.
    """

    label: str
    peer: str
    command: Callable[[Places], list[str]]

    @property
    def slug(self) -> str:
        """The label as a file name."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.label.lower())


@dataclass(frozen=True)
class Workload:
    """The same work for several contestants.

    Attributes
    ----------
    recipe : FedKeep's recipe, from which the others' work is written; None where each makes its own data.
    method : of the recipe. contestants : the first is what ratios are taken to.
    """

    name: str
    title: str
    contestants: tuple[Contestant, ...]
    recipe: Path | None = None
    method: str = "fedavg"


def script(name: str, *arguments: str, before: tuple[str, ...] = ()) -> Callable[[Places], list[str]]:
    """Return the command of a runner that reads the work."""
    file = str(HERE / "runners" / name)
    return lambda places: [str(places.python), *before, file, str(places.work), *arguments]


def fedkeep(recipe: Path, method: str, workers: int) -> Callable[[Places], list[str]]:
    """Return the command of FedKeep's runner."""
    file = str(HERE / "runners" / "with_fedkeep.py")
    return lambda places: [
        *(str(places.python), file, str(recipe), method, str(workers), str(places.data), str(places.scratch / "run"))
    ]


def population(runner: str, clients: int) -> Callable[[Places], list[str]]:
    """Return the command of a runner that makes its own population."""
    return lambda places: [str(places.python), str(HERE / "runners" / runner), str(clients)]


def ours(recipe: Path, method: str) -> tuple[Contestant, Contestant]:
    """Return FedKeep as the command line runs it, with a process per core, and with one process."""
    return (
        Contestant("FedKeep", "fedkeep", fedkeep(recipe, method, 0)),
        Contestant("FedKeep, 1 process", "fedkeep", fedkeep(recipe, method, 1)),
    )


def bare(schedule: str = "parallel") -> tuple[Contestant, Contestant]:
    """Return the bare loops; the first keeps the weights that others are compared with."""
    return (
        Contestant("bare PyTorch loop, 1 thread", "fedkeep", script("bare.py", "1", schedule)),
        Contestant("bare PyTorch loop, 2 threads", "fedkeep", script("bare.py", "2", schedule)),
    )


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
PFL = (
    Contestant("pfl, 1 process", "pfl", script("with_pfl.py")),
    Contestant("pfl, 2 processes", "pfl", script("with_pfl.py", before=TORCHRUN)),
)
SMALL_PEERS = (
    *bare(),
    *PFL,
    Contestant("FedJAX", "fedjax", script("with_fedjax.py")),
    Contestant("FedLab", "fedlab", script("with_fedlab.py")),
    Contestant("Flower, 50 nodes", "flower", script("with_flower.py", "50")),
    Contestant("Flower, 1,000 nodes", "flower", script("with_flower.py", "1000")),
)
BIG_PEERS = (bare()[0], *PFL)


def of_recipe(name: str, title: str, *others: Contestant, file: str = "", method: str = "fedavg") -> Workload:
    """Return a workload in which FedKeep runs a recipe of `RECIPES`."""
    recipe = RECIPES / f"{file or name}.toml"
    return Workload(name, title, (*ours(recipe, method), *others), recipe, method)


def of_population(clients: int) -> tuple[Contestant, Contestant]:
    """Return FedKeep and pfl with so many clients, ten examples each."""
    return (
        Contestant(f"FedKeep, {clients:,} clients", "fedkeep", population("population_fedkeep.py", clients)),
        Contestant(f"pfl, {clients:,} clients", "pfl", population("population_pfl.py", clients)),
    )


_ALL = (
    of_recipe("w1-mlp", "W1, MLP: FedAvg, 1,000 clients with 50 examples, 50 a round", *SMALL_PEERS),
    of_recipe("w1-lenet5", "W1, LeNet-5: FedAvg, 1,000 clients with 50 examples, 50 a round", *SMALL_PEERS),
    of_recipe("w2-fedavg", "W2, FedAvg: SFedKD's Fashion-MNIST setting, LeNet-5", *bare(), file="w2"),
    of_recipe("w2-fedseq", "W2, FedSeq: the same", *bare("sequential"), file="w2", method="fedseq"),
    of_recipe("w2-sfedkd", "W2, SFedKD with 5 teachers: the same", file="w2", method="sfedkd"),
    of_recipe("w3", "W3: FedAvg, FedADKD's CIFAR-10 setting with one epoch, CNN-4", *bare(), *PFL),
    Workload(
        "w4",
        "W4: FedAvg, clients with 10 examples, 50 a round, 1 process",
        (*of_population(100), *of_population(10_000), *of_population(1_000_000)),
    ),
    of_recipe("w5-10", "W5, 10 clients a round: FedAvg, ResNet-18 of 45 MB, CIFAR-10, one step each", *BIG_PEERS),
    of_recipe("w5-100", "W5, 100 clients a round: the same", *BIG_PEERS),
)
WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}
