"""The toolbox of `fedkeep.interface.Party`, implemented once for clients and the server of every engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import log_softmax

from fedkeep import seeds
from fedkeep.data import Augmentation, ImageFormat
from fedkeep.engine.fit import Assignment, Source, fit
from fedkeep.engine.forms import filled, tensors
from fedkeep.engine.networks import Networks
from fedkeep.errors import ConfigError
from fedkeep.interface import Client, Data, Fit, Server, Training
from fedkeep.interface.party import Party
from fedkeep.interface.training import Composition, PassEnds, Watch
from fedkeep.models import Weights
from fedkeep.models.heads import continued
from fedkeep.models.weights import load_into
from fedkeep.objectives import Objective

if TYPE_CHECKING:
    from fedkeep.synthesis.diffusion.generator import Generator


LoadGenerator = Callable[[int], "Generator"]


def no_generator(task: int) -> Generator:
    """Raise `ConfigError`: stands where a recipe names no generator."""
    raise ConfigError("this run has no generator of images. Name it in the recipe: generator.name or by_task.")


@dataclass
class Clock:
    """Seconds of a round: in local training, Fisher information included, and in asking frozen models."""

    train: float = 0.0
    teachers: float = 0.0

    @property
    def worked(self) -> float:
        """Both."""
        return self.train + self.teachers

    def restart(self) -> None:
        """Begin at zero again, for all who share the clock."""
        self.train = self.teachers = 0.0


@dataclass
class Workplace:
    """What parties of one network share on one device: it, what it reads of images, the settings, and a clock.

    ``classes`` are those seen so far, of which ``old`` came before the task; ``label_names`` names all, in order of
    arrival. ``format`` is what images are like. ``load_generator`` gives a task's generator.
    """

    networks: Networks
    normalise: Callable[[Tensor], Tensor]
    augmentation: Augmentation
    training: Training
    seed: int
    classes: int
    format: ImageFormat
    label_names: tuple[str, ...]
    load_generator: LoadGenerator
    old: int = 0
    clock: Clock = field(default_factory=Clock)

    def of(self, networks: Networks) -> Workplace:
        """Return the place of parties with other networks, the clock shared.

        A frozen extractor takes the place of normalisation: what it says of an image is computed once, and learned
        from as it is, without augmentation.
        """
        if networks.extractor is None:
            return replace(self, networks=networks)
        return replace(self, networks=networks, normalise=networks.extractor, augmentation=Augmentation())

    def enter(self, seen: Sequence[int]) -> None:
        """Go to a task, given how many classes were seen with each from the first on."""
        self.classes, self.old = seen[-1], seen[-2] if len(seen) > 1 else 0
        self.networks.enter(seen)

    def train(self, assignment: Assignment) -> Fit:
        """Carry out one training."""
        with self.training_time():
            return fit(self.networks, assignment, self.training)

    @contextmanager
    def training_time(self) -> Iterator[None]:
        """Count the seconds of the block as training."""
        began = time.perf_counter()
        yield
        self.catch_up()
        self.clock.train += time.perf_counter() - began

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Count the seconds of the block as asking frozen models."""
        began = time.perf_counter()
        yield
        self.catch_up()
        self.clock.teachers += time.perf_counter() - began

    def catch_up(self) -> None:
        """Wait for a GPU to do what it was told: else a clock counts it where somebody next wants to know a number."""
        if self.networks.device.type == "cuda":
            torch.cuda.synchronize(self.networks.device)


class LocalParty(Party[Any]):
    """A party whose computing happens in this process."""

    def __init__(
        self, place: Workplace, name: str, data: Data, state: Any, *, task: int, round: int, uses: dict[str, int]
    ) -> None:
        self.place = place
        self.name = name
        self.data = data
        self.state = state
        self.task = task
        self.round = round
        self.training, self.format = place.training, place.format
        self._look_round()
        self.parameters = place.networks.parameters
        self.train: Callable[[Assignment], Fit] = place.train
        self._uses = uses  # how often each purpose drew randomness in this round, over all of the party's calls

    def _look_round(self) -> None:
        """Note what a task changes."""
        self.classes, self.old, self.initial = self.place.classes, self.place.old, self.place.networks.initial
        self.label_names = self.place.label_names[: self.classes]

    def fit(
        self,
        model: Weights,
        objective: Objective,
        *data: Data,
        passes: int | None = None,
        batch_sizes: Sequence[int] = (),
        pass_ends: PassEnds = "first",
        composition: Composition | None = None,
        watch: Watch | None = None,
    ) -> Fit:
        assignment = self.assignment(
            model,
            objective,
            *data,
            passes=passes,
            batch_sizes=batch_sizes,
            pass_ends=pass_ends,
            composition=composition,
            watch=watch,
        )
        return self.train(assignment)

    def assignment(
        self,
        model: Weights,
        objective: Objective,
        *data: Data,
        passes: int | None = None,
        batch_sizes: Sequence[int] = (),
        pass_ends: PassEnds = "first",
        composition: Composition | None = None,
        watch: Watch | None = None,
    ) -> Assignment:
        """Return a training as it is carried out, its teachers settled and its generators drawn."""
        data = data or (self.data,)
        for columns in data:
            self._check(columns)
        if len(batch_sizes) > len(data):
            raise ValueError(f"there are {len(batch_sizes)} batch sizes for {len(data)} data sets; give one for each")
        objective = self._sent(self.settle(objective, *data))
        sizes = [*batch_sizes, *[0] * (len(data) - len(batch_sizes))]
        sources = [self._source(*given) for given in zip(data, sizes, strict=True)]
        passes = self.training.epochs if passes is None else passes
        noise = self._derive("network noise")
        return Assignment(model, objective, sources, passes, self.round, noise, pass_ends, composition, watch)

    def _sent(self, objective: Objective) -> Objective:
        """Return an objective on the device: what a method wrote down on the CPU would be sent anew in every step."""
        device = self.place.networks.device
        if device.type == "cpu":
            return objective
        there: Objective = filled(objective, [tensor.to(device) for tensor, _ in tensors(objective)])
        return there

    def settle(self, objective: Objective, *data: Data) -> Objective:
        with self.place.asking():
            for number, columns in enumerate(data or (self.data,)):
                if self.place.augmentation and columns and columns["image"].dtype == torch.uint8:
                    continue  # teachers must see the images that the student sees, which differ from pass to pass
                if columns and len(columns["image"]):
                    objective = objective.settle(_Answers(self, columns), columns, number)
        return objective

    def predict(self, model: Weights, data: Data | None = None) -> Tensor:
        with self.place.asking():
            return self.place.networks.logits(model, self._images(data))

    def features(self, model: Weights, data: Data | None = None) -> Tensor:
        with self.place.asking():
            return self.place.networks.features(model, self._images(data))

    def fisher(self, model: Weights, examples: int | None = None, batch: int = 1) -> Weights:
        return self._slopes(model, examples, batch, _log_likelihood, torch.square)

    def sensitivity(self, model: Weights, examples: int | None = None) -> Weights:
        return self._slopes(model, examples, 1, _squared_length, torch.abs)

    def _slopes(
        self,
        model: Weights,
        examples: int | None,
        batch: int,
        value: Callable[[Tensor, Tensor], Tensor],
        size: Callable[[Tensor], Tensor],
    ) -> Weights:
        """Return the mean over batches of the ``size`` of the gradient of a batch's ``value``, of logits and labels."""
        with self.place.training_time():
            images, labels = self._images(None), self.data["label"]
            if examples is not None and examples < len(labels):
                chosen = torch.randperm(len(labels), generator=self.rng("fisher"))[:examples].to(labels.device)
                images, labels = images[chosen], labels[chosen]
            network = self.place.networks.answering
            parameters = {name: model[name] for name, _ in network.named_parameters()}
            buffers = {name: model[name] for name, _ in network.named_buffers()}

            def of_batch(weights: Weights, images: Tensor, labels: Tensor) -> Tensor:
                return value(functional_call(network, {**weights, **buffers}, (images,), tie_weights=False), labels)

            gradient = grad(of_batch)
            if batch == 1:
                images, labels = images.unsqueeze(1), labels.unsqueeze(1)  # vectorised over batches of one
                gradients, rows = vmap(gradient, (None, 0, 0)), 64
            else:
                gradients, rows = gradient, batch
            total = {name: torch.zeros_like(weight) for name, weight in parameters.items()}
            if not len(labels):
                return total
            for some, said in zip(torch.split(images, rows), torch.split(labels, rows), strict=True):
                for name, slope in gradients(parameters, some, said).items():
                    total[name] += size(slope).sum(0) if batch == 1 else size(slope)
            return {name: slope / ceil(len(labels) / batch) for name, slope in total.items()}

    def grown(self, model: Weights) -> Weights:
        return continued(model, self.initial)

    def generator_of(self, task: int) -> Generator:
        return self.place.load_generator(task)

    def network(self, model: Weights) -> nn.Module:
        network = self.place.networks.build(model)
        load_into(network, model)
        return network

    def rng(self, purpose: str) -> torch.Generator:
        named = torch.Generator()
        named.manual_seed(self._derive(purpose))
        return named

    def _derive(self, purpose: str) -> int:
        use = self._uses.get(purpose, 0)
        self._uses[purpose] = use + 1
        return seeds.derive(self.place.seed, purpose, task=self.task, round=self.round, client=self.name, use=use)

    def _source(self, data: Data, batch_size: int) -> Source:
        augmentation = self.place.augmentation
        if data["image"].dtype == torch.uint8 and not augmentation:
            data = {**data, "image": self.place.normalise(data["image"])}
        return Source(
            data,
            self.place.normalise,
            augmentation,
            self.rng("batches"),
            self.rng("augmentation"),
            self.place.networks.layout,
            batch_size,
        )

    def _images(self, data: Data | None) -> Tensor:
        columns = self.data if data is None else data
        self._check(columns)
        return self.place.normalise(columns["image"])

    def _check(self, data: Data) -> None:
        if "image" not in data:
            whose = f"client {self.name}" if self.name else "the server"
            raise ConfigError(
                f"{whose} has no images here, only {sorted(data) or 'nothing'}. Give it data, or pass some."
            )
        lengths = {name: len(column) for name, column in data.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"the columns of a data set must be of one length, not {lengths}.")


def _log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    return log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).mean()


def _squared_length(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().sum(-1).mean()


class _Answers:
    """Answers of frozen models about one data set: images normalised once for all, and a model asked once."""

    def __init__(self, party: LocalParty, data: Data) -> None:
        self.party = party
        self.data = data
        self.images: Tensor | None = None
        self.said: list[tuple[Weights, Tensor]] = []

    def __call__(self, model: Weights) -> Tensor:
        for asked, answer in self.said:
            if asked is model:
                return answer
        answer = self.party.place.networks.logits(model, self._normalised())
        self.said.append((model, answer))
        return answer

    def features(self, model: Weights) -> Tensor:
        return self.party.place.networks.features(model, self._normalised())

    def about(self, data: Data) -> _Answers:
        return _Answers(self.party, data)

    def _normalised(self) -> Tensor:
        if self.images is None:
            self.images = self.party.place.normalise(self.data["image"])
        return self.images


class LocalClient(LocalParty, Client[Any]):
    """A client in this process."""

    @property
    def id(self) -> str:  # type: ignore[override]
        return self.name


class LocalServer(LocalParty, Server[Any]):
    """The server in this process."""

    def __init__(
        self,
        place: Workplace,
        data: Data,
        state: Any,
        model: Weights,
        population: int,
        place_of: Callable[[str], Workplace],
    ) -> None:
        super().__init__(place, "", data, state, task=1, round=0, uses={})
        self.model = model
        self.population = population
        self.place_of = place_of
        self.served: Weights = {}
        self.logged: dict[str, float | list[float]] = {}

    def begin(self, task: int, round: int) -> None:
        """Set the clock of the server to a task's round."""
        self.task, self.round, self._uses = task, round, {}
        self._look_round()

    def predict_as(self, client: str, model: Weights, data: Data) -> Tensor:
        self._check(data)
        place = self.place_of(client)  # it may read images in another way than the server does
        with place.asking():
            return place.networks.logits(model, place.normalise(data["image"]))

    def log(self, name: str, value: float | list[float]) -> None:
        self.logged[name] = value
