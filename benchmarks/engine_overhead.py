"""What the engine and the teachers cost, beside a bare PyTorch loop and beside FedSeq, side by side.

The bare loop is what one would write by hand: the layers in a row, images normalised beforehand, torch.optim.SGD, the
same clients, batches and order; once in PyTorch's usual memory layout and once in FedKeep's, channels last. So the
first ratio says what a user gains or loses, the second what the engine itself costs. Two settings: SFedKD's
Fashion-MNIST one, in sequence, and FedADKD's CIFAR-10 one with one epoch, in parallel (peers/recipes). One thread a
process; all take turns round by round, and ratios are taken within a round, so that what else the machine does hits all
of them. At the end the weights are compared: they did the same steps, though a bare loop adds up a mean in another way.

With data at hand SFedKD also runs with a second process, which asks the teachers of the next clients ahead.

    python benchmarks/engine_overhead.py [--rounds 20] [--data-dir DIR]

writes its result beside itself, with date, versions and hardware. Without the data sets at hand it makes random images
of the same size and number, on which steps cost the same.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from telling import arguments, beginning, gain
from torch import Tensor, nn

import fedkeep
from fedkeep._utils import seeds
from fedkeep.data import DataSet, Federation
from fedkeep.errors import DataError
from fedkeep.experiment.build import build_simulation
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.run import create_run_folder
from fedkeep.experiment.runtime import Machine
from fedkeep.experiment.trial_runner import JOIN, CohortWorkers, TrialDescription, start_workers, worker_main
from fedkeep.trials.simulation import Simulation

RECIPES = Path(__file__).parent / "peers" / "recipes"
SHAPES = {"fashion-mnist": ((1, 28, 28), 60_000), "cifar10": ((3, 32, 32), 50_000)}
WARM = 2  # rounds that do not count: the first has no teachers either

Seconds = dict[str, list[float]]


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help=f"measured rounds, after {WARM} to warm up (20)")
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = [sequence(options.rounds, options.data_dir), parallel(options.rounds, options.data_dir)]
    text = report(parts, options.rounds, options.note)
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


def sequence(rounds: int, data_dir: str | None) -> list[str]:
    """Measure SFedKD's setting, and return what to write about it."""
    recipe, dataset, federation = setting("w2", "fashion-mnist", data_dir)
    engines = {name: engine(recipe, name, federation) for name in ("fedseq", "sfedkd")}
    loops = {name: BareLoop(engines["fedseq"], lenet5(), layout) for name, layout in LAYOUTS.items()}
    runners: dict[str, Callable[[], object]] = {name: loop.round for name, loop in loops.items()}
    runners |= {name: one.run_round for name, one in engines.items()}
    with tempfile.TemporaryDirectory() as folder:
        helped = None if dataset.name not in SHAPES else Helped(recipe, federation, Path(folder), data_dir)
        if helped is not None:
            runners["helped"] = helped.round
        seconds = measure(runners, rounds)
        if helped is not None:
            helped.workers.on_trial_end(helped.engine)
    ratios = [
        ("FedSeq / bare loop, usual layout", ratio(seconds, "fedseq", "bare"), ""),
        ("FedSeq / bare loop, FedKeep's layout", ratio(seconds, "fedseq", "bare, channels last"), "at most 1.03"),
        ("SFedKD, 5 teachers / FedSeq", ratio(seconds, "sfedkd", "fedseq"), "at most 1.35"),
    ]
    if helped is not None:
        ratios.append(("SFedKD, a second process / FedSeq", ratio(seconds, "helped", "fedseq"), "at most 1.10"))
    names = {"fedseq": "FedSeq", "sfedkd": "SFedKD, 5 teachers", "helped": "SFedKD, 5 teachers, a second process"}
    return written(f"In sequence: {dataset.name}, LeNet-5", seconds, names, ratios, gap(loops, engines["fedseq"]))


def parallel(rounds: int, data_dir: str | None) -> list[str]:
    """Measure FedADKD's setting, and return what to write about it."""
    recipe, dataset, federation = setting("w3", "cifar10", data_dir)
    fedavg = engine(recipe, "fedavg", federation)
    loops = {name: BareLoop(fedavg, cnn4(), layout) for name, layout in LAYOUTS.items()}
    runners: dict[str, Callable[[], object]] = {name: loop.round for name, loop in loops.items()}
    seconds = measure(runners | {"fedavg": fedavg.run_round}, rounds)
    ratios = [
        ("FedAvg / bare loop, usual layout", ratio(seconds, "fedavg", "bare"), ""),
        ("FedAvg / bare loop, FedKeep's layout", ratio(seconds, "fedavg", "bare, channels last"), "at most 1.03"),
    ]
    return written(f"In parallel: {dataset.name}, CNN-4", seconds, {"fedavg": "FedAvg"}, ratios, gap(loops, fedavg))


def setting(recipe: str, data: str, data_dir: str | None) -> tuple[Recipe, DataSet, Federation]:
    """Return a recipe of the peers' with its data, or noise of their size, dealt to clients."""
    loaded = load_recipe(str(RECIPES / f"{recipe}.toml"))
    try:
        dataset = fedkeep.load(data, data_dir=data_dir)
    except (DataError, ImportError):
        shape, count = SHAPES[data]
        noise = torch.Generator().manual_seed(0)
        train = {"input": torch.randint(256, (count, *shape), generator=noise).to(torch.uint8)}
        train["label"] = torch.arange(count) % 10
        test = {name: column[:10_000] for name, column in train.items()}
        mean = (0.5,) * shape[0]
        dataset = DataSet("random images", train, test, tuple("0123456789"), mean, mean)
    return loaded, dataset, Federation(dataset, loaded.partition.split(dataset.train, dataset.num_classes, seed=0))


def engine(recipe: Recipe, name: str, federation: Federation) -> Simulation:
    """Return a method's engine, in this process and without stacks."""
    method = next(method for method in recipe.methods if method.algorithm.name() == name)
    return build_simulation(recipe, method, 0, federation)


class Helped:
    """SFedKD with a second process, as a run has it: this process trains nothing."""

    def __init__(self, recipe: Recipe, federation: Federation, folder: Path, data_dir: str | None) -> None:
        experiment = Experiment(recipe, Machine(data_dir=data_dir))
        run = create_run_folder(recipe, folder / "run", experiment.machine)
        self.engine = engine(recipe, "sfedkd", federation)
        trials = experiment.trials(run)
        trial = next(trial for trial in trials if trial.method.algorithm.name() == "sfedkd" and trial.seed == 0)
        description = experiment.describe(trial.method, trial.seed)
        TrialDescription(trial, description, 2).on_trial_begin(self.engine)  # which the workers read
        request = JOIN, [str(trial.run), trial.method.label, trial.seed]
        self.workers = CohortWorkers(2, lambda: start_workers(2, worker_main, experiment.machine, 0), request)
        while self.engine.executor is self.engine.serial:
            self.round()
            if not self.workers.count:
                raise RuntimeError("the second process could not start; the log says why")

    def round(self) -> None:
        """Play the next round."""
        self.workers.on_round_end(self.engine, self.engine.run_round())


def lenet5() -> nn.Sequential:
    """Return LeNet-5 for 1x28x28, by hand."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def cnn4() -> nn.Sequential:
    """Return the network of FedNTD for 3x32x32, by hand."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


LAYOUTS = {"bare": torch.contiguous_format, "bare, channels last": torch.channels_last}


class BareLoop:
    """FedSeq or FedAvg as a hand-written loop over the same clients, batches and order."""

    def __init__(self, engine: Simulation, network: nn.Sequential, layout: torch.memory_format) -> None:
        self.engine = engine
        self.finished = 0
        self.network = network.to(memory_format=layout)  # type: ignore[call-overload]
        self.layout = layout
        self.names = list(engine.context.runner.initial)
        self._load(engine.context.runner.initial.values())
        dataset = engine.federation.dataset
        self.images, self.labels = dataset.normalise(dataset.train["input"]), dataset.train["label"]

    def round(self) -> None:
        """Train the next round's clients, each from the one before or all from the server's weights."""
        self.finished += 1
        cohort = self.engine.sample_cohort(self.finished)
        if self.engine.algorithm.sequential:
            for client in cohort:
                self._train(client)
            return
        server = [parameter.detach().clone() for parameter in self.network.parameters()]
        total = [torch.zeros_like(weight) for weight in server]
        examples = sum(map(self.engine.federation.num_examples, cohort))
        for client in cohort:
            self._load(server)
            self._train(client)
            for summed, parameter in zip(total, self.network.parameters(), strict=True):
                summed.add_(parameter.detach(), alpha=self.engine.federation.num_examples(client) / examples)
        self._load(total)

    def _train(self, client: str) -> None:
        engine, training = self.engine, self.engine.settings.training
        loss_of = nn.CrossEntropyLoss()
        rows = engine.federation.partition[int(client)]
        images, labels = self.images[rows], self.labels[rows]
        optimiser = torch.optim.SGD(
            self.network.parameters(), training.lr, momentum=training.momentum, weight_decay=training.weight_decay
        )
        order_of = seeds.rng(engine.settings.seed, "batches", task=1, round=self.finished, client=client)
        for _ in range(training.epochs):
            order = torch.randperm(len(rows), generator=order_of)
            for batch in order.split(training.batch_size):
                optimiser.zero_grad()
                loss_of(self.network(images[batch].contiguous(memory_format=self.layout)), labels[batch]).backward()
                optimiser.step()

    @torch.no_grad()
    def _load(self, weights: object) -> None:
        for own, given in zip(self.network.parameters(), weights, strict=True):  # type: ignore[call-overload]
            own.copy_(given)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights under the engine's names."""
        return {name: p.detach() for name, p in zip(self.names, self.network.parameters(), strict=True)}


def gap(loops: Mapping[str, BareLoop], engine: Simulation) -> str:
    """Return the largest difference between an engine's weights and those of the loop in its layout."""
    bare = loops["bare, channels last"].weights()
    return f"{max((bare[name] - weight).abs().max().item() for name, weight in engine.server.model.items()):.1e}"


def measure(runners: Mapping[str, Callable[[], object]], rounds: int) -> Seconds:
    """Return seconds per round of each runner, in orders that change, without those that warm up."""
    seconds: Seconds = {name: [] for name in runners}
    luck = random.Random(0)
    for number in range(rounds + WARM):
        for name in luck.sample(list(runners), len(runners)):
            began = time.perf_counter()
            runners[name]()
            if number >= WARM:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(seconds: Seconds, a: str, b: str) -> str:
    """Return the median of the ratios within a round, with the middle half."""
    return gain(seconds[a], seconds[b])


def written(
    title: str, seconds: Seconds, names: Mapping[str, str], ratios: list[tuple[str, str, str]], gap: str
) -> list[str]:
    """Return one setting's result as Markdown."""
    labels = {"bare": "bare PyTorch loop", "bare, channels last": "bare PyTorch loop, channels last", **names}
    return [
        f"## {title}",
        "",
        "| what | median seconds per round |",
        "|:--|--:|",
        *(f"| {labels[name]} | {statistics.median(values):.2f} |" for name, values in seconds.items()),
        "",
        "| ratio, median over rounds (middle half) | measured | target |",
        "|:--|--:|--:|",
        *(f"| {what} | {value} | {target} |" for what, value, target in ratios),
        "",
        f"Largest difference between FedKeep's weights and the bare loop's in its layout after all rounds: {gap}.",
        "",
    ]


def report(parts: list[list[str]], rounds: int, note: str | None) -> str:
    """Return the result as Markdown."""
    lines = [
        *beginning("Engine overhead", f"engine_overhead.py --rounds {rounds}", note, where="one thread a process"),
    ]
    return "\n".join(lines + [line for part in parts for line in part])


if __name__ == "__main__":
    main()
