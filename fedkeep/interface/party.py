"""Clients and the server as a method sees them: what they hold, and what they can compute.

A method calls only what is declared here. `fedkeep.training.party` implements it once, for simulations on one machine
and for real sites alike. Unless a docstring says otherwise, a model is a whole state dict (`fedkeep.models.Weights`).
A `Range` of numbers is declared where a field of a reply is declared, and checked before the reply is used.
"""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Generic, get_args

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from fedkeep.data import ImageFormat
from fedkeep.errors import ConfigError
from fedkeep.interface.pytree import tree_nodes
from fedkeep.interface.training_settings import EpochEndsWith, Parametrization, Training
from fedkeep.losses import Data, Loss
from fedkeep.models import Weights

if TYPE_CHECKING:
    from fedkeep.generation.generator import Generator

LARGEST_SHOWN = 1e300
"""Larger numbers are not shown: an integer may be of any length, and formatting one beyond floats fails."""


@dataclass(frozen=True)
class Range:
    """The smallest and the largest number that a field of a reply may hold, both inclusive.

    A reply with a number outside is refused before the method sees it. In tensors and containers the range holds for
    every number.

    A step whose reply has a share of its examples::

        @dataclass(frozen=True, eq=False)
        class FitWithShare(Fit):
            share: Annotated[float, Range(0, 1)]

    ``low``, ``high``: The bounds.
    """

    low: float = -inf
    high: float = inf


def find_out_of_range(reply: Any) -> str | None:
    """Find a number outside the range that its field declares.

    Returns: The field, the number and the range; None if all numbers are inside.
    """
    for node, is_leaf in tree_nodes(reply):
        kind: Any = type(node)
        for name, allowed in () if is_leaf else _ranges(kind).items():
            for leaf in {id(leaf): leaf for leaf, _ in tree_nodes(getattr(node, name))}.values():
                worst = _outside(leaf, allowed)
                if worst is not None:
                    return f"{name} {in_short(worst)}, which must be {allowed.low:g} to {allowed.high:g}"
    return None


def in_short(number: float) -> str:
    """Return a number as text of a few characters, also an integer that is too large for a float.

    ``number``: The number, which may come from a client.
    """
    if abs(number) > LARGEST_SHOWN:
        return f"beyond {'-' if number < 0 else ''}{LARGEST_SHOWN:g}"
    return f"{number:g}"


def _outside(leaf: Any, allowed: Range) -> float | None:
    """Return a number outside the range; None if there is none."""
    if isinstance(leaf, Tensor):
        bounds = [float(leaf.min()), float(leaf.max())] if leaf.numel() else []
    else:
        bounds = [leaf] if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) else []
    return next((number for number in bounds if not allowed.low <= number <= allowed.high), None)


@cache
def _ranges(cls: Any) -> Mapping[str, Range]:
    """Return the ranges that a dataclass declares, by field; cached, since every reply is checked."""
    if not is_dataclass(cls):
        return {}
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError:  # a class inside a function may name others there; it can be used in this process only
        return {}
    found = {name: [extra for extra in get_args(hint)[1:] if isinstance(extra, Range)] for name, hint in hints.items()}
    return {name: ranges[0] for name, ranges in found.items() if ranges}


@dataclass
class NoState:
    """The state of a client, or of a server, that keeps nothing between calls."""

    def __getattr__(self, name: str) -> Any:
        raise UndeclaredStateError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UndeclaredStateError(name)


class UndeclaredStateError(ConfigError, AttributeError):
    """A method uses a field of a state that it does not declare; also an AttributeError, as `hasattr` expects."""

    def __init__(self, field: str) -> None:
        super().__init__(
            f"the state has no field {field!r}, since the method names no class for it, and nothing would be kept. "
            "Write class MyMethod(Algorithm[ServerState]) for what the server keeps, Algorithm[ServerState, "
            "ClientState] for clients too, or Algorithm[NoState, ClientState] for clients alone; each is a @dataclass "
            "whose fields have defaults."
        )


S = TypeVar("S", default=NoState)

MAX_LOSS = float(torch.finfo(torch.float32).max)
"""The largest loss that a training can have, since it is summed in float32.

A training that diverges may come near it before its weights are refused, so that a lower limit would refuse some that
are honest. Penalties may be negative too.
"""


@dataclass(frozen=True, eq=False)
class Fit:
    """The result of `Party.fit`.

    Attributes
    ----------
    model : Weights
        The whole state dict after training.
    num_examples : int
        Number of examples in the first data set.
    num_steps : int
        Number of optimizer steps that were taken.
    loss : float
        Mean loss over these steps; 0.0 if there were none.
    """

    model: Weights
    num_examples: Annotated[int, Range(low=0)]
    num_steps: Annotated[int, Range(low=0)]
    loss: Annotated[float, Range(-MAX_LOSS, MAX_LOSS)]


class Party(ABC, Generic[S]):
    """What a client and the server have in common while one of their methods runs.

    Attributes
    ----------
    state : S
        What this party keeps from one call to the next. Assign to its fields; never change a tensor in place.
    data : Data
        The examples of the current task, as columns of one length: ``"input"``, such as images, uint8
        [n, channels, height, width], and ``"label"``, int64 [n]. On the server it holds what the recipe gives the
        server, and is empty if that is nothing.
    task : int
        The current task, counted from 1. A run without tasks has one task.
    round : int
        The current round of this task, counted from 1.
    num_rounds : int
        Number of rounds of the run; with tasks, of each task. A callback may end the run before.
    num_classes : int
        Number of classes that have been seen so far. Classes are numbered in their order of arrival.
    num_old_classes : int
        Number of classes that arrived before the current task.
    label_names : tuple[str, ...]
        Names of the classes that have been seen so far.
    image_format : ImageFormat
        Shape of the images, and how their pixels are normalised. Only for methods that need images.
    training : Training
        The recipe's settings of local training.
    initial_model : Weights
        The model from which the run begins, the same for everyone with this architecture. Its classifier has rows for
        all classes that have been seen so far.
    parameter_names : tuple[str, ...]
        Names of the model's trained tensors. All other tensors are buffers, such as batch norm's running statistics.
    """

    state: S
    data: Data
    task: int
    round: int
    num_rounds: int
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
    ) -> Fit:
        """Train a copy of a model with the recipe's optimizer and return the trained weights.

        The optimizer starts afresh in every call. Before the first step, `cache_teachers` is applied to ``loss``. A
        party without examples gets its model back after 0 steps.

        Parameters
        ----------
        model : Weights
            The weights from which training starts. They are not changed.
        loss : Loss
            The loss of a step. It receives one batch of each data set.
        *data : Data
            The data sets; by default the party's own, `data`. With several, every step takes one batch of each. A bool
            column ``"generated"`` [n] marks generated images, whose brightness augmentation does not change.
        epochs : int, optional
            Number of passes over the data; by default that of the recipe (``training.epochs``).
        batch_sizes : Sequence[int]
            Batch size of each data set, in the order of ``data``. For 0, and for data sets beyond the end of the
            sequence, the recipe's batch size is used.
        epoch_ends_with : {"first", "shortest"}
            When an epoch over several data sets ends. ``"first"``: with the first data set; the others start over as
            often as needed, and are not reset between epochs. ``"shortest"``: with the data set that has the fewest
            batches; all of them start over in the next epoch.
        parametrization : Parametrization, optional
            A differentiable function that computes the network's weights from ``model`` in every step. ``model`` may
            then have tensors that the network does not have. All its tensors are trained, except for the network's
            buffers. The loss sees these tensors as the weights, and `Fit.model` contains them.

        Returns
        -------
        Fit
            The trained weights, the numbers of examples and steps, and the mean loss.

        Raises
        ------
        ConfigError
            If a data set has no images, or columns of different lengths.
        ValueError
            If there are more batch sizes than data sets, or if a data set other than the first has no examples.

        Notes
        -----
        This is the only training loop for the recipe's network, so that every method trains alike.

        Do not wrap `fit` in process-wide contexts such as a seed or autocast: other clients may train in this process
        meanwhile.
        """

    @abstractmethod
    def cache_teachers(self, loss: Loss, *data: Data) -> Loss:
        """Compute the outputs of a loss's frozen teachers once, instead of in every step.

        If images are augmented at random, a teacher must see the same augmented images as the student. Teachers are
        not cached then, and the loss is returned unchanged.

        Parameters
        ----------
        loss : Loss
            A loss that may contain frozen teachers.
        *data : Data
            The data sets that will be given to `fit`, in the same order; by default the party's own. Write ``{}`` for
            a data set to be skipped.

        Returns
        -------
        Loss
            The same loss with cached outputs instead of teachers.
        """

    @abstractmethod
    def predict(self, model: Weights, data: Data | None = None) -> Tensor:
        """Compute a model's logits in evaluation mode, without gradient.

        Parameters
        ----------
        model : Weights
            The model.
        data : Data, optional
            A data set with a column ``"input"`` [n, ...]; by default the party's own.

        Returns
        -------
        Tensor
            Logits, float32 [n, rows]. There is one row for each class that the model knows, or several if the method
            says so (`Algorithm.rows_per_class`).
        """

    @abstractmethod
    def features(self, model: Weights, data: Data | None = None) -> Tensor:
        """Compute the input of a model's classifier in evaluation mode, without gradient.

        Parameters
        ----------
        model : Weights
            The model.
        data : Data, optional
            A data set with a column ``"input"`` [n, ...]; by default the party's own.

        Returns
        -------
        Tensor
            Features, float32 [n, width].
        """

    @abstractmethod
    def fisher(self, model: Weights, examples: int | None = None, batch: int = 1) -> Weights:
        """Estimate the diagonal of the Fisher information matrix on the party's own examples.

        Parameters
        ----------
        model : Weights
            The model at which it is estimated.
        examples : int, optional
            Number of examples to use, chosen at random; by default all of them.
        batch : int
            1 for the mean over examples of the squared gradient of ln p(label | image). A larger number for the mean
            over batches of the squared gradient of the batch mean, which is cheaper, coarser, and smaller by about
            that factor.

        Returns
        -------
        Weights
            A tensor for each parameter, of the parameter's shape; zeros for a party without examples.
        """

    @abstractmethod
    def expand_head(self, model: Weights) -> Weights:
        """Add rows to the classifier of an older model, for the classes that have arrived since.

        The new rows are those of `initial_model`, and so the same for every party. This is needed only where the model
        shall be trained or predict the new classes.

        Parameters
        ----------
        model : Weights
            A model of this task or of an earlier one.

        Returns
        -------
        Weights
            The model with the new rows; ``model`` itself if it knows all classes already.
        """

    @property
    @abstractmethod
    def generator(self) -> Generator:
        """The frozen image generator that the recipe names, which every party has from the start."""

    @abstractmethod
    def refuse_if_private(self, what: str) -> None:
        """Refuse to use a client's examples for something that the noise of its trainings does not cover.

        `features` and `fisher` do so.

        Parameters
        ----------
        what : str
            What is used, such as ``"the sizes of its examples"``.

        Raises
        ------
        ConfigError
            On a client, if the recipe asks for DP-SGD (``privacy.noise_multiplier``).
        """

    @abstractmethod
    def network(self, model: Weights) -> nn.Module:
        """Build a new network with the given weights, for computations that no other method offers.

        Parameters
        ----------
        model : Weights
            The weights, which are copied.

        Returns
        -------
        nn.Module
            The network in evaluation mode.
        """

    @abstractmethod
    def rng(self, purpose: str) -> torch.Generator:
        """Return a random generator that depends only on the run's seed, the party, the round and the purpose.

        Parameters
        ----------
        purpose : str
            What the random numbers are for, such as ``"reservoir"``.

        Returns
        -------
        torch.Generator
            A generator on the CPU. Each further call in this round with the same purpose returns an independent one.
        """


class Client(Party[S]):
    """A client during one of its steps.

    Attributes
    ----------
    id : str
        In a simulation the client's number as text, from ``"0"`` on, whatever the data call it; at real sites the
        site's name.
    """

    id: str

    @abstractmethod
    def label_counts(self) -> Tensor:
        """Count the client's examples of each class, as others may know it: noised if the recipe says so.

        Returns
        -------
        Tensor
            Number of examples of each class, float32 [classes]; whole numbers.
        """

    @abstractmethod
    def noised_change(self, sent: Tensor, found: Tensor) -> Tensor:
        """Return what the client made of a tensor, as others may know it: clipped and noised if the recipe says so.

        Parameters
        ----------
        sent : Tensor
            The tensor that it was sent, such as prototypes.
        found : Tensor
            What it made of that, of the same shape.

        Returns
        -------
        Tensor
            Of the same shape.
        """


class Server(Party[S]):
    """The server during a round.

    Attributes
    ----------
    model : Weights
        The global model. Assign the result of the round to it; it is evaluated unless `eval_model` is set.
    eval_model : Weights
        The model to evaluate and export, if that shall be another than `model`; empty otherwise.
    num_clients : int
        Number of clients in the federation.
    """

    model: Weights
    eval_model: Weights
    num_clients: int

    @abstractmethod
    def may_teach(self, model: Weights, label_counts: Tensor) -> bool:
        """Tell whether a model may teach: its answers on the server's examples are no worse than chance.

        Parameters
        ----------
        model : Weights
            The model.
        label_counts : Tensor
            Label counts [classes] of the client that trained it: classes count as they do there.

        Returns
        -------
        bool
            True too if the server checks no losses (``defense.loss_check``).
        """

    @abstractmethod
    def noised_means(self, means: Tensor, counts: Tensor) -> Tensor:
        """Return means over the server's examples, as clients may know them: noised if the recipe says so.

        Parameters
        ----------
        means : Tensor
            Of a number between 0 and 1 of each example, such as a probability, over the examples of each class,
            [classes].
        counts : Tensor
            Number of examples of each class, [classes].

        Returns
        -------
        Tensor
            Between 0 and 1, [classes]; with noise multiples of 2**-16.
        """

    @abstractmethod
    def log(self, name: str, value: float | list[float] | list[str]) -> None:
        """Add a number, or a list of numbers or of client ids, to the record of this round.

        Keep it small: a record is one line, and a run has many.

        Parameters
        ----------
        name : str
            The key in the record.
        value : float, list[float] or list[str]
            What to record.
        """
