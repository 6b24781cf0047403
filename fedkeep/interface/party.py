"""What a method's two halves can do: one toolbox for clients and the server.

Every name here is implemented once, in the engine, and used by all engines; methods see only this file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from fedkeep.data import ImageFormat
from fedkeep.interface.training import EpochEndsWith, Parametrization, StepCallback, Training
from fedkeep.losses import Data, Loss
from fedkeep.models import Weights

if TYPE_CHECKING:
    from fedkeep.generation.diffusion.generator import Generator


@dataclass
class NoState:
    """The state of a party that keeps nothing."""


S = TypeVar("S", default=NoState)


@dataclass(frozen=True, eq=False)
class Fit:
    """What a training returns: the trained weights, and what it took.

    Attributes
    ----------
    model : the whole state dict after training.
    examples : rows of the first data set.
    steps : optimiser steps taken.
    loss : mean loss over the steps; 0.0 without any.
    """

    model: Weights
    num_examples: int
    num_steps: int
    loss: float


class Party(ABC, Generic[S]):
    """A client or the server during one call.

    Attributes
    ----------
    state : what this party keeps from call to call; assign to its fields, never change a tensor in place.
    data : a client's examples of the task, as columns; on the server, what the recipe gives it (empty without).
    task, round : the task, and its round, both counted from 1. Without tasks there is one.
    num_classes : how many classes the model knows now, in order of arrival.
    num_old_classes : how many of them came before this task.
    label_names : of the classes known now.
    image_format : what the images are like: their shape, and how pixels are normalised.
    training : the recipe's settings of local training.
    initial_model : what the party's network began with, before anybody trained it, with rows for all classes known now.
    parameter_names : names of the model's tensors that are trained; the others are buffers, such as batch norm's
        statistics.
    """

    state: S
    data: Data
    task: int
    round: int
    num_classes: int
    num_old_classes: int
    label_names: tuple[str, ...]
    image_format: ImageFormat
    training: Training
    initial_model: Weights
    parameter_names: tuple[str, ...]

    @abstractmethod
    def fit(
        self,
        model: Weights,
        loss: Loss,
        *data: Data,
        epochs: int | None = None,
        batch_sizes: Sequence[int] = (),
        epoch_ends_with: EpochEndsWith = "first",
        parametrization: Parametrization | None = None,
        step_callback: StepCallback | None = None,
    ) -> Fit:
        """Train a copy of ``model``: the only training of the recipe's network.

        A data set's bool column ``made`` marks images that a generator drew: augmentation leaves their brightness.
        Several data sets are drawn side by side, one batch of each per step; a pass ends with the first, the others
        start over as often as needed. With ``epoch_ends_with="shortest"`` it ends with the shortest, and all start
        over. Without ``data`` it is the party's own; without ``epochs``, the recipe's epochs. ``batch_sizes`` gives
        the data sets, in their order, batch sizes of their own; 0, and what is not given, is the recipe's.
        With a ``composition`` the network's weights are computed anew in every step from ``model``, which may have any
        names beside the network's: all its tensors but the network's buffers are trained, are what objectives see as
        weights, and come back in `Fit.model`. ``watch`` sees every step before it is taken, and changes nothing.
        Frozen teachers of the loss are settled first. A party without examples gets its model back after 0 steps.
        Others may be trained meanwhile: hold nothing around it that is the whole process's, such as a seed or autocast.
        """

    @abstractmethod
    def cache_teachers(self, loss: Loss, *data: Data) -> Loss:
        """Replace an loss's frozen teachers by what they say about the data, once and for all epochs.

        With random augmentation teachers must see what the student sees; the loss is then returned as it is. A
        data set of which nothing is said may be given as {}, to number those behind it.
        """

    @abstractmethod
    def predict(self, model: Weights, data: Data | None = None) -> Tensor:
        """Return a model's logits [n, rows] on the data (default: the party's own), in evaluation mode.

        There is a row for each class that the model knows, or several (see `Algorithm.rows_per_class`).
        """

    @abstractmethod
    def features(self, model: Weights, data: Data | None = None) -> Tensor:
        """Return what a model's classifier reads, [n, width], in evaluation mode."""

    @abstractmethod
    def fisher(self, model: Weights, examples: int | None = None, batch: int = 1) -> Weights:
        """Return the diagonal Fisher information of each parameter at ``model``.

        The mean over the party's examples (the first ``examples`` in a random order) of the squared gradient of
        ln p(label | image), sample by sample. With ``batch`` above 1, the mean over batches of the squared gradient of
        a batch's mean: a coarser estimate, smaller by about that number. Zero for a party without examples.
        """

    @abstractmethod
    def sensitivity(self, model: Weights, examples: int | None = None) -> Weights:
        """Return how much a model's answers depend on each parameter, whatever the labels (memory-aware synapses).

        The mean over the party's examples (the first ``examples`` in a random order) of the absolute gradient of the
        squared length of the logits. Zero for a party without examples.
        """

    @abstractmethod
    def expand_head(self, model: Weights) -> Weights:
        """Return a model of an earlier task with rows for the classes since, the same at every party; see
        `initial_model`.

        One that knows all classes is returned as it is. An older model may also stay as it is: it then answers about
        the classes that it knows.
        """

    @property
    def generator(self) -> Generator:
        """The task's frozen generator of images, which every party has from the start; see `generator_of`."""
        return self.generator_of(self.task)

    @abstractmethod
    def generator_of(self, task: int) -> Generator:
        """Return the generator that the recipe names for a task: one for all, or each has its own."""

    @abstractmethod
    def network(self, model: Weights) -> nn.Module:
        """Return a fresh network with these weights, in evaluation mode, for what this toolbox does not offer."""

    @abstractmethod
    def rng(self, purpose: str) -> torch.Generator:
        """Return this party's generator for a purpose in this round; asked again, the next one of that purpose."""


class Client(Party[S]):
    """A client during one step. ``id`` is its name in the recipe."""

    id: str


class Server(Party[S]):
    """The server during a round. Assign to ``model`` what shall travel next and be evaluated.

    Assign to ``eval_model`` too if another model shall be evaluated and exported; empty, it is ``model``.
    ``num_clients`` is the number of clients that there are.
    """

    model: Weights
    eval_model: Weights
    num_clients: int

    @abstractmethod
    def log(self, name: str, value: float | list[float]) -> None:
        """Write a number, or a list of them, into this round's record under a name of the method's choice."""
