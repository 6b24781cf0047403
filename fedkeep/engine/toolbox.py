"""The toolbox of `fedkeep.interface.Party`, implemented once for clients and the server of every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedkeep import seeds
from fedkeep.engine import slopes
from fedkeep.engine.answers import Answers
from fedkeep.engine.fit import Assignment, Source
from fedkeep.engine.forms import filled, tensors
from fedkeep.engine.workplace import Workplace
from fedkeep.errors import ConfigError
from fedkeep.interface import Client, Data, Fit, Server
from fedkeep.interface.party import Party
from fedkeep.interface.training import Composition, PassEnds, Watch
from fedkeep.losses import Loss
from fedkeep.models import Weights
from fedkeep.models.heads import continued
from fedkeep.models.weights import load_into

if TYPE_CHECKING:
    from fedkeep.generation.diffusion.generator import Generator


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
        objective: Loss,
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
        objective: Loss,
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
        objective = self._sent(self.cache_teachers(objective, *data))
        sizes = [*batch_sizes, *[0] * (len(data) - len(batch_sizes))]
        sources = [self._source(*given) for given in zip(data, sizes, strict=True)]
        passes = self.training.epochs if passes is None else passes
        noise = self._derive("network noise")
        return Assignment(model, objective, sources, passes, self.round, noise, pass_ends, composition, watch)

    def _sent(self, objective: Loss) -> Loss:
        """Return an objective on the device: what a method wrote down on the CPU would be sent anew in every step."""
        device = self.place.networks.device
        if device.type == "cpu":
            return objective
        there: Loss = filled(objective, [tensor.to(device) for tensor, _ in tensors(objective)])
        return there

    def cache_teachers(self, objective: Loss, *data: Data) -> Loss:
        with self.place.asking():
            for number, columns in enumerate(data or (self.data,)):
                if self.place.augmentation and columns and columns["image"].dtype == torch.uint8:
                    continue  # teachers must see the images that the student sees, which differ from pass to pass
                if columns and len(columns["image"]):
                    objective = objective.cache_teachers(Answers(self.place, columns), columns, number)
        return objective

    def predict(self, model: Weights, data: Data | None = None) -> Tensor:
        with self.place.asking():
            return self.place.networks.logits(model, self._images(data))

    def features(self, model: Weights, data: Data | None = None) -> Tensor:
        with self.place.asking():
            return self.place.networks.features(model, self._images(data))

    def fisher(self, model: Weights, examples: int | None = None, batch: int = 1) -> Weights:
        with self.place.training_time():
            return slopes.fisher(self.place.networks.answering, model, *self._some(examples), batch)

    def sensitivity(self, model: Weights, examples: int | None = None) -> Weights:
        with self.place.training_time():
            return slopes.sensitivity(self.place.networks.answering, model, *self._some(examples))

    def _some(self, examples: int | None) -> tuple[Tensor, Tensor]:
        """Return the party's images and labels, or so many of them, drawn at random."""
        images, labels = self._images(None), self.data["label"]
        if examples is None or examples >= len(labels):
            return images, labels
        chosen = torch.randperm(len(labels), generator=self.rng("fisher"))[:examples].to(labels.device)
        return images[chosen], labels[chosen]

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
