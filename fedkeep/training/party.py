"""Clients and the server in this process: the implementation of `fedkeep.interface.Party` for all executors."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep._utils import seeds
from fedkeep._utils.noise_stream import laplace_on_grid
from fedkeep.data import ImageFormat
from fedkeep.errors import ConfigError
from fedkeep.generation.generator import Generator
from fedkeep.interface import Client, Data, Fit, Server
from fedkeep.interface.party import Party
from fedkeep.interface.privacy import CHANGE_TOLD, COUNTS_TOLD, MEANS_TOLD, steps_name
from fedkeep.interface.pytree import iter_instances, replace_tensors, tree_tensors
from fedkeep.interface.training_settings import EpochEndsWith, Parametrization, Training
from fedkeep.losses import Loss
from fedkeep.losses.base import check_loss
from fedkeep.losses.classification import OWN_LOSSES, CrossEntropy, LabelLoss
from fedkeep.losses.wrappers import replace_cross_entropy
from fedkeep.models import Weights
from fedkeep.models.heads import expand_like
from fedkeep.models.weights import check_weights, load_weights
from fedkeep.training.context import ClientContext
from fedkeep.training.evaluation import ModelCheck, mean_of_labels
from fedkeep.training.local_training import BatchStream, TrainJob, fit
from fedkeep.training.per_example import fisher, private_fit, sample_rate

log = logging.getLogger(__name__)


class TeacherCache:
    """Outputs of frozen models on one data set; images are normalised once, and each model runs once."""

    def __init__(self, context: ClientContext, data: Data) -> None:
        self.context = context
        self.data = data
        self._logits: list[tuple[Weights, Tensor]] = []

    def __call__(self, model: Weights) -> Tensor:
        """Return a model's logits, computed on the first call.

        Returns: Logits, float32 [n, rows].
        """
        for known, logits in self._logits:
            if known is model:
                return logits
        logits = self.context.runner.logits(model, self._images)
        self._logits.append((model, logits))
        return logits

    def features(self, model: Weights) -> Tensor:
        """Compute the input of a model's classifier.

        Returns: Features, float32 [n, width].
        """
        return self.context.runner.features(model, self._images)

    def for_data(self, data: Data) -> TeacherCache:
        """Return a cache for another data set.

        Returns: An empty cache.
        """
        return TeacherCache(self.context, data)

    @cached_property
    def _images(self) -> Tensor:
        return self.context.normalise(self.data["input"])


class LocalParty(Party[Any]):
    """A client or the server in this process.

    ``name``: The client's name; empty for the server.
    ``data``: The party's examples of the task.
    ``state``: What the party keeps between calls.
    ``task``: The current task, counted from 1.
    ``round``: The current round of the task, counted from 1.
    ``uses``: Number of times that each purpose has used randomness in this round, over all steps of the party. It is
        updated.
    """

    train: Callable[[TrainJob], Fit] | None = None
    """Carries out local training; by default each job is trained at once."""
    assignable = frozenset({"name", "state", "data", "task", "round", "train", "_uses"})
    """Attributes that change; anything else that a method assigned would be lost after the call."""

    def __init__(
        self, context: ClientContext, name: str, data: Data, state: Any, *, task: int, round: int, uses: dict[str, int]
    ) -> None:
        self.context = context
        self.name = name
        self.data = data
        self.state = state
        self.task = task
        self.round = round
        self._uses = uses  # last: from now on only some attributes change

    def __setattr__(self, name: str, value: Any) -> None:
        if "_uses" in vars(self) and name not in self.assignable and not callable(value):  # a spy is callable
            party = "client" if isinstance(self, Client) else "server"
            raise ConfigError(
                f"{party}.{name} = ... would be lost, since only {party}.state is kept: write {party}.state.{name}, a "
                "field of the state's class (see fedkeep.interface.Algorithm), or use a local variable."
            )
        super().__setattr__(name, value)

    @property
    def image_format(self) -> ImageFormat:  # type: ignore[override]
        if self.context.image_format is None:
            raise ConfigError("this method needs images, and the inputs of this data set are something else.")
        return self.context.image_format

    @property
    def training(self) -> Training:  # type: ignore[override]
        return self.context.training

    @property
    def num_rounds(self) -> int:  # type: ignore[override]
        return self.context.num_rounds

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        return self.context.num_classes

    @property
    def num_old_classes(self) -> int:  # type: ignore[override]
        return self.context.num_old_classes

    @property
    def label_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.context.label_names[: self.num_classes]

    @property
    def initial_model(self) -> Weights:  # type: ignore[override]
        return self.context.runner.initial

    @property
    def parameter_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.context.runner.parameters

    def fit(self, model: Weights, loss: Loss, *data: Data, **how: Any) -> Fit:
        job = self.train_job(model, loss, *data, **how)
        privacy = self.context.privacy
        if privacy.noise_multiplier and self.name:  # the server trains on what is not the clients'
            return self._fit_privately(job)
        if self.train is not None:
            return self.train(job)
        with self.context.training_time():
            return fit(self.context.runner, job, self.context.training)

    def _fit_privately(self, job: TrainJob) -> Fit:
        if found := next((term for term in iter_instances(job.loss, Loss) if term.compares_examples), None):
            raise ConfigError(
                f"privacy.noise_multiplier: the loss {type(found).__name__} compares the examples of a batch with each "
                "other, as by weights, and DP-SGD takes each alone. Take a loss that is a mean over examples."
            )
        rate, steps = steps_name(sample_rate(job, self.training)), job.most_steps(self.training.batch_size)
        self._uses[rate] = self._uses.get(rate, 0) + steps
        use = self._use("noise")
        noise = self.context.fresh_noise("noise", task=self.task, round=self.round, client=self.name, use=use)
        with self.context.training_time():
            return private_fit(self.context.runner, job, self.training, self.context.privacy, noise)

    def train_job(
        self,
        model: Weights,
        loss: Loss,
        *data: Data,
        epochs: int | None = None,
        batch_sizes: Sequence[int] = (),
        epoch_ends_with: EpochEndsWith = "first",
        parametrization: Parametrization | None = None,
    ) -> TrainJob:
        """Prepare a local training without carrying it out.

        Returns: The training, with cached teachers and its own random generators.
        """
        check_weights(model, "the model that fit is given")
        check_loss(loss)
        data = data or (self.data,)
        for columns in data:
            self._check(columns)
        if len(batch_sizes) > len(data):
            raise ValueError(f"there are {len(batch_sizes)} batch sizes for {len(data)} data sets; give one for each")
        loss = self._to_device(self.cache_teachers(self._with_own_labels(loss, data), *data))
        sizes = [*batch_sizes, *[0] * (len(data) - len(batch_sizes))]
        streams = [self._stream(columns, size) for columns, size in zip(data, sizes, strict=True)]
        epochs = self.training.epochs if epochs is None else epochs
        noise = self._training_seed("network noise")
        return TrainJob(model, loss, streams, epochs, self.round, noise, epoch_ends_with, parametrization)

    def _with_own_labels(self, loss: Loss, data: Sequence[Data]) -> Loss:
        """Return a client's loss with the recipe's loss of labels, or class weights, in its cross-entropies."""
        function, weights = OWN_LOSSES.get(self.training.loss), self.training.class_weights
        if not self.name or (function is None and weights == "none"):  # the server trains on what is not the clients'
            return loss

        def make(term: CrossEntropy, seen: slice) -> Loss:
            weight = None
            if weights == "balanced":
                counts = torch.bincount(data[term.dataset_index]["label"], minlength=self.num_classes).float()
                weight = counts.sum() / ((counts > 0).sum() * counts.clamp(min=1))
            elif weights != "none":
                weight = torch.tensor(weights)
            if weight is not None:
                weight = weight.repeat_interleave(self.context.runner.rows_per_class)[seen]
            return LabelLoss(function, weight, term.dataset_index, term.tau, self.training.loss)

        replaced, labelled = replace_cross_entropy(loss, make), any("label" in columns for columns in data)
        if labelled and next(iter_instances(replaced, LabelLoss), None) is None:
            # Methods of FedKeep have trainings without labels too, or say that they weigh classes themselves.
            terms = (type(term) for term in iter_instances(replaced, Loss))
            if own := next((cls for cls in terms if not cls.__module__.startswith("fedkeep.")), None):
                _warn_of_labels_unused(own.__name__)
        return replaced

    def _to_device(self, loss: Loss) -> Loss:
        """Return a loss with its tensors on the device, so that they are not copied from the CPU in every step."""
        device = self.context.runner.device
        if device.type == "cpu":
            return loss
        return replace_tensors(loss, [tensor.to(device) for tensor, _ in tree_tensors(loss)])

    def cache_teachers(self, loss: Loss, *data: Data) -> Loss:
        with self.context.inference_time():
            for number, columns in enumerate(data or (self.data,)):
                if self.context.augmentation and columns and columns["input"].dtype == torch.uint8:
                    continue  # teachers must see the same augmented images as the student, which differ in every pass
                if columns and len(columns["input"]):
                    loss = loss.cache_teachers(TeacherCache(self.context, columns), columns, number)
        return loss

    def predict(self, model: Weights, data: Data | None = None) -> Tensor:
        check_weights(model, "the model that predict is given")
        with self.context.inference_time():
            return self.context.runner.logits(model, self._images(data))

    def features(self, model: Weights, data: Data | None = None) -> Tensor:
        check_weights(model, "the model that features is given")
        self.refuse_if_private("the features of examples")
        with self.context.inference_time():
            return self.context.runner.features(model, self._images(data))

    def refuse_if_private(self, what: str) -> None:
        if self.context.privacy.noise_multiplier and self.name:
            raise ConfigError(
                f"privacy.noise_multiplier: epsilon would not cover {what} that a client's step uses. Set "
                "privacy.noise_multiplier=0, or take a method that only trains."
            )

    def fisher(self, model: Weights, examples: int | None = None, batch: int = 1) -> Weights:
        self.refuse_if_private("Fisher information of its examples")
        self.context.timer.by_example |= batch == 1
        with self.context.training_time():
            return fisher(self.context.runner.eval_network, model, *self._sample(examples, batch > 1), batch)

    def _sample(self, examples: int | None, in_batches: bool) -> tuple[Tensor, Tensor]:
        """Return the party's images and labels: all of them, or that many, chosen at random.

        Batches would have one class each in the order in which clients' examples are stored.
        """
        images, labels = self._images(None), self.data["label"]
        if not in_batches and (examples is None or examples >= len(labels)):
            return images, labels
        chosen = torch.randperm(len(labels), generator=self.rng("fisher"))[:examples].to(labels.device)
        return images[chosen], labels[chosen]

    def expand_head(self, model: Weights) -> Weights:
        return expand_like(model, self.initial_model)

    @property
    def generator(self) -> Generator:
        return self.context.load_generator()

    def network(self, model: Weights) -> nn.Module:
        network = self.context.runner.build(model)
        load_weights(network, model)
        return network

    def rng(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(self._derive(purpose))

    def _use(self, purpose: str) -> int:
        """Return how often a purpose has used randomness in this round, and count one use more."""
        self._uses[purpose] = self._uses.get(purpose, 0) + 1
        return self._uses[purpose] - 1

    def _derive(self, purpose: str) -> int:
        use = self._use(purpose)
        return seeds.derive(self.context.seed, purpose, task=self.task, round=self.round, client=self.name, use=use)

    def _training_seed(self, purpose: str) -> int:
        """Return the seed of crops, flips or dropout.

        They are drawn in the order of a batch, so one example more shifts those of all after it. Who knows the seed
        could see that through DP-SGD's noise, so a real site takes its seed from the operating system.
        """
        seed = self._derive(purpose)
        is_site = bool(self.name) and self.context.noise_secret is not None
        return secrets.randbits(63) if is_site and self.context.privacy.noise_multiplier else seed

    def _stream(self, data: Data, batch_size: int) -> BatchStream:
        augmentation = self.context.augmentation
        if data["input"].dtype == torch.uint8 and not augmentation:
            data = {**data, "input": self.context.normalise(data["input"])}
        return BatchStream(
            data,
            self.context.normalise,
            augmentation,
            self.rng("batches"),
            torch.Generator().manual_seed(self._training_seed("augmentation")),
            self.context.runner.layout,
            batch_size,
        )

    def _images(self, data: Data | None) -> Tensor:
        columns = self.data if data is None else data
        self._check(columns)
        return self.context.normalise(columns["input"])

    def _check(self, data: Data) -> None:
        if "input" not in data:
            whose = f"client {self.name}" if self.name else "the server"
            raise ConfigError(
                f"{whose} has no inputs here, only {sorted(data) or 'nothing'}. Give it data, or pass some."
            )
        lengths = {name: len(column) for name, column in data.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"the columns of a data set must be of one length, not {lengths}.")


class LocalClient(LocalParty, Client[Any]):
    """A client in this process."""

    @property
    def id(self) -> str:  # type: ignore[override]
        return self.name

    def label_counts(self) -> Tensor:
        counts = torch.bincount(self.data["label"], minlength=self.num_classes).float()
        epsilon = self.context.privacy.counts_epsilon
        if not epsilon:
            return counts
        self._uses[COUNTS_TOLD] = 1
        # Each class has noise of its own, whatever its number is among the classes of a run.
        noised = [int(count) + self._counts_noise(number, int(count)) for number, count in enumerate(counts)]
        return torch.tensor(noised, dtype=torch.float64, device=counts.device).clamp(min=0).float()

    def _counts_noise(self, number: int, count: int) -> int:
        """Return discrete Laplace noise: whole numbers, with which counts that differ by one are epsilon-private."""
        epsilon, names = self.context.privacy.counts_epsilon, self.context.label_names
        name = names[number] if number < len(names) else str(number)
        # Each task's noise is its own: that an old class is told with the same number again would say that it was 0.
        told: tuple[Any, ...] = (self.name, name, count, epsilon, *([self.task] if self.task > 1 else []))
        return self.context.repeated_noise("count", *told).laplace(Fraction(epsilon))

    def noised_change(self, sent: Tensor, found: Tensor) -> Tensor:
        privacy = self.context.privacy
        if not privacy.prototypes_noise_multiplier:
            return found
        use = self._use(CHANGE_TOLD)
        stream = self.context.fresh_noise("change", task=self.task, round=self.round, client=self.name, use=use)
        change, limit = found - sent, privacy.max_prototype_change
        change = change * min(1.0, limit / max(float(change.norm()), 1e-12))
        return stream.gaussian(sent + change, privacy.prototypes_noise_multiplier * limit)


class LocalServer(LocalParty, Server[Any]):
    """The server in this process.

    ``data``: The server's examples; empty if it has none.
    ``state``: What the server keeps between rounds.
    ``check``: Measures models for `may_teach`.
    ``logged``: What the method has logged in this round.
    """

    assignable = LocalParty.assignable | {"model", "eval_model", "logged", "released_means"}

    def __init__(
        self, context: ClientContext, data: Data, state: Any, model: Weights, num_clients: int, check: ModelCheck | None
    ) -> None:
        self.model = model
        self.num_clients = num_clients
        self.check = check
        self.eval_model: Weights = {}
        self.logged: dict[str, float | list[float] | list[str]] = {}
        self.released_means: list[list[float]] = []  # the noised means of this round
        super().__init__(context, "", data, state, task=1, round=0, uses={})

    def may_teach(self, model: Weights, label_counts: Tensor) -> bool:
        if self.check is None:
            return True
        correct = mean_of_labels(self.check.scores(model).correct, label_counts)
        return correct is None or correct * self.num_classes >= 1

    def noised_means(self, means: Tensor, counts: Tensor) -> Tensor:
        epsilon = self.context.privacy.confidences_epsilon
        if not epsilon:
            return means
        use = self._use(MEANS_TOLD)
        # A server that is started again in the middle of a round says the same again.
        noise = self.context.repeated_noise("means", means, counts, epsilon, self.task, self.round, use)
        # Sensitivity: one example counted as 0 moves the mean of its class by at most 1 / count, and no other mean.
        told = [
            laplace_on_grid(mean, 1 / max(count, 1), epsilon, noise)
            for mean, count in zip(means.clamp(0, 1).nan_to_num(0).tolist(), counts.tolist(), strict=True)
        ]
        self.released_means.append(told)
        return torch.tensor(told).to(means)

    @property
    def uses(self) -> Mapping[str, int]:
        """Number of uses of the server's randomness in this round, by purpose."""
        return self._uses

    def begin_round(self, task: int, round: int) -> None:
        """Set the current round.

        ``round``: The round of this task, counted from 1.
        """
        self.task, self.round, self._uses, self.released_means = task, round, {}, []

    def log(self, name: str, value: float | list[float] | list[str]) -> None:
        self.logged[name] = _loggable(name, value)


def _loggable(name: str, value: Any) -> float | list[float] | list[str]:
    """Return a value of `Server.log` as JSON has it; raise `ConfigError` for what it cannot have."""
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim <= 1:
        value = value.tolist()
    entries = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, str) or not all(isinstance(entry, str | int | float) for entry in entries):
        raise ConfigError(
            f"server.log({name!r}, ...) takes a number, or a list of numbers or of client ids, not {value!r:.80}."
        )
    return list(value) if isinstance(value, tuple) else value


@cache
def _warn_of_labels_unused(loss: str) -> None:
    """Warn once of a training that the recipe's loss or class weights leave as it is, such as a phase of its own."""
    log.warning(
        "training.loss and training.class_weights take the place of a fedkeep.losses.CrossEntropy, and change nothing "
        "in a training whose loss is %s. Build it of CrossEntropy() if they should.",
        loss,
    )
