"""The base class of all methods: one class in one file, with the server's half and the clients' half side by side."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar, Generic, Literal, get_args, get_origin

import torch
from torch import Tensor
from typing_extensions import TypeVar

from fedkeep._utils.type_hints import annotations_of
from fedkeep.interface.cohort import Cohort
from fedkeep.interface.party import Client, Fit, NoState, S, Server
from fedkeep.models import Weights
from fedkeep.options import Options, find_named, named_subclasses

C = TypeVar("C", default=NoState)
F = TypeVar("F", bound=Callable[..., Any])

_CLIENT_STEP_FLAG = "_fedkeep_client_step"


def on_client(function: F) -> F:
    """Mark a method as a client step, which `Algorithm.round` may ask clients to carry out.

    Parameters
    ----------
    function : Callable
        A method that takes the client, then what the server sends, all with type annotations. What it returns is all
        that leaves the client.

    Returns
    -------
    Callable
        The same function.
    """
    setattr(function, _CLIENT_STEP_FLAG, True)
    return function


def is_client_step(function: Any) -> bool:
    """Tell whether a function or bound method is marked with `on_client`."""
    return bool(getattr(function, _CLIENT_STEP_FLAG, False))


@dataclass(frozen=True)
class Algorithm(Options, ABC, Generic[S, C]):
    """Base class of all methods.

    A subclass is a frozen dataclass. Its fields are its options (see `fedkeep.options.option`). It defines `round` and
    at least one client step, and keeps no state in itself: ``Algorithm[S, C]`` names the dataclass ``S`` that the
    server keeps, and the dataclass ``C`` that each client keeps. Everything that `round` does depends only on the
    server and on the clients' replies.

    Attributes
    ----------
    title : str
        The name as papers write it; by default the name of the class.
    paper : str
        The paper that describes the method.
    sequential : bool
        Whether the clients of a round train one after another, and not at the same time.
    needs : tuple[str, ...]
        What the method cannot do without: ``"images"`` as inputs, ``"sgd"`` as the optimizer, and the parts of a recipe
        ``"auxiliary"``, ``"public"`` and ``"generator"``.
    training_options : Mapping[str, object]
        Options of local training that the method sets itself, such as ``{"optimizer": "adam", "lr": 0.001}``.
    networks : {"one", "any"}
        Whether all clients must have the same architecture.
    has_rotating_role : bool
        Whether the clients of a cohort get a special role in turn, another client in every round.
    handles_tasks : bool
        Whether states last from task to task; by default the server and the clients start every task with fresh ones.
        True for every method that overrides `begin_task` or `end_task`.
    clients_read_initial_model : bool
        Whether client steps read `Client.initial_model`. Such a method cannot begin from given weights
        (``model.weights``) at real sites, which do not have them.
    """

    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    sequential: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()
    training_options: ClassVar[Mapping[str, Any]] = {}
    networks: ClassVar[Literal["one", "any"]] = "one"
    has_rotating_role: ClassVar[bool] = False
    handles_tasks: ClassVar[bool] = False
    clients_read_initial_model: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.handles_tasks |= not {"begin_task", "end_task"}.isdisjoint(vars(cls))

    @property
    def sets_eval_model(self) -> bool:
        """Whether `round` assigns the model that counts to `Server.eval_model`, such as an average of its own.

        This model alone is then evaluated and exported, and no average that any method could have.
        """
        return False

    @property
    def rows_per_class(self) -> int:
        """Number of adjacent classifier rows for each class; the first of them is the one that predicts the class."""
        return 1

    @property
    def generated_per_class(self) -> int:
        """Generated images of each class that clients add to their own examples, which `Fit.num_examples` counts too.

        A client is refused if it says that it trained on more examples than its own and these together.
        """
        return 0

    @property
    def uses_num_steps(self) -> bool:
        """Whether `round` computes with `Fit.num_steps`, as normalised averaging does.

        Then a client is refused whose number is not the one that follows from its `Fit.num_examples` with the recipe's
        epochs and batch size. So its clients call `Client.fit` with these, and end epochs with the first data set. Of
        other methods only a number that is far too large is refused, since `Client.fit` may be given other epochs.
        """
        return False

    @property
    def keeps_examples(self) -> bool:
        """Whether clients train on examples of earlier tasks too, which `Fit.num_examples` then counts.

        If False, a client is refused that says it trained on more examples than it holds in the task.
        """
        return False

    @property
    def reason_against_merging(self) -> str:
        """Why the method cannot bear replies that were merged coordinate by coordinate, or clipped; empty: it can.

        Such as "the server adds up what clients keep a part of". Median, trimmed mean and norm clipping are refused
        then (``defense.robust_aggregation``); Krum chooses among whole replies, and may be used.
        """
        return ""

    @property
    def reason_against_dp_sgd(self) -> str:
        """Why DP-SGD cannot make the method private, and what to choose instead; empty: it can.

        Such a reason is what a method learns from a client's examples beside the noised steps of `Client.fit`: "with
        MyMethod.means=true clients keep mean features, which epsilon would not cover. Set MyMethod.means=false." DP-SGD
        is refused then, before the first round. What clients send need not be named here: it is seen from the types of
        their replies.
        """
        kept = (
            "clients keep examples and tell their number, which epsilon would not cover. Take a method that keeps none."
        )
        return kept if self.keeps_examples else ""

    @property
    def reason_against_label_loss(self) -> str:
        """Why ``training.loss`` and ``training.class_weights`` are not for the method; empty: they are.

        They take the place of each `fedkeep.losses.CrossEntropy` in what clients give to `Client.fit`. A method whose
        clients learn from labels by something else says so here, such as "its loss weighs classes itself".
        """
        return ""

    def idle_part(self, num_classes: int, num_tasks: int) -> str:
        """Return what of the method does nothing in a run of so many classes and tasks, and why; empty: all of it acts.

        By default the weight ``w_nontarget`` with two classes, and what `end_task` keeps with one task. The report says
        it.
        """
        if num_classes == 2 and getattr(self, "w_nontarget", 0.0) > 0:
            return "with two classes there is one beside the label, so that the part with the weight w_nontarget is 0"
        if num_tasks == 1 and type(self).end_task is not Algorithm.end_task:
            return "with one task, what it keeps for later ones is never used"
        return ""

    def check_classes(self, label_names: Sequence[str]) -> None:
        """Raise `ConfigError`, on the server before the first round, if the method cannot learn some of these classes.

        ``label_names``: Of all tasks, in order of arrival.
        """

    @property
    def only_averages(self) -> bool:
        """Whether `round` uses clients' models only in weighted means over all of them.

        If True, secure aggregation may replace every client's model by their mean: weighted by `Fit.num_examples`, or
        the plain mean if the method has an option ``aggregation`` with the value ``"uniform"``; `Fit.loss` and
        `Fit.num_steps` are 0. Secure aggregation refuses a method with False, and one of your own that says nothing in
        the class that defines `round`, or in one derived from it. Sequences, and methods whose clients send more than a
        `Fit`, are refused anyway.

        If True, models whose mean is asked for before anybody looks at the replies are added up where they are trained;
        whoever looks at one later lets its client train once more.
        """
        return True

    @abstractmethod
    def round(self, server: Server[S], cohort: Cohort) -> None:
        """Carry out one communication round.

        Parameters
        ----------
        server : Server
            The server; assign the new global model to ``server.model``.
        cohort : Cohort
            The clients of this round.
        """

    def begin_task(self, server: Server[S], clients: Cohort) -> None:
        """Prepare for a task, before its first round. A run without tasks has one task.

        By default the classifier of ``server.model`` gets rows for the new classes.

        Parameters
        ----------
        server : Server
            The server.
        clients : Cohort
            All clients of the federation.
        """
        server.model = server.expand_head(server.model)

    def end_task(self, server: Server[S], clients: Cohort) -> None:
        """Finish a task, after its last round; by default nothing happens.

        Parameters
        ----------
        server : Server
            The server.
        clients : Cohort
            All clients of the federation.
        """

    def predict(self, server: Server[S], model: Weights, images: Tensor) -> Tensor:
        """Compute class scores, from which the model is evaluated.

        By default these are the model's logits, with the first row of each class.

        Parameters
        ----------
        server : Server
            The server.
        model : Weights
            The model to evaluate.
        images : Tensor
            Images as they are stored, uint8 [n, channels, height, width].

        Returns
        -------
        Tensor
            Scores, [n, classes].
        """
        return server.predict(model, {"input": images})[:, :: self.rows_per_class]

    def own_model(self, state: C) -> Weights:
        """Return the model that a client uses itself, if it keeps one that it does not send to the server.

        It is evaluated beside the models that clients send, in simulations with ``run.evaluate_local_models``.

        Parameters
        ----------
        state : C
            The client's state.

        Returns
        -------
        Weights
            The model; empty if the client keeps none.
        """
        return {}

    def validate_reply(self, server: Server[S], reply: Any, examples: int) -> str | None:
        """Check a client's reply beyond what is checked for every method; by default every reply is valid.

        Numbers that are not finite and models of another architecture are refused for every method. A client whose
        reply is invalid is lost for the round. What a reply holds beside a model is checked here alone: the names,
        shapes and types of its tensors, since one that `round` cannot use would stop the run.

        Parameters
        ----------
        server : Server
            The server.
        reply : object
            The reply to any of the method's steps.
        examples : int
            Number of the client's examples of this task.

        Returns
        -------
        str or None
            What is wrong with the reply, such as its shape; None if it is valid.
        """
        return None

    @classmethod
    def name(cls) -> str:
        """Return the method's name in recipes and on the command line: its title in lower case, or the class's name.

        Returns
        -------
        str
            The name.
        """
        return (cls.title or cls.__name__).lower().replace("+", "-").replace(" ", "-")


def state_types(cls: type[Algorithm[Any, Any]]) -> tuple[type[Any], type[Any]]:
    """Return the state classes that a method names in its base ``Algorithm[S, C]``.

    Returns: The dataclass that the server keeps, and the one that each client keeps; `NoState` where none is named.
    """
    bound: dict[Any, Any] = {}  # type variables of generic bases, and what subclasses put in their place
    for base in cls.__mro__:
        for generic in base.__dict__.get("__orig_bases__", ()):
            origin = get_origin(generic)
            arguments = [bound.get(a, _default(a)) if isinstance(a, typing.TypeVar) else a for a in get_args(generic)]
            if origin is Algorithm:
                return arguments[0], (arguments[1] if len(arguments) > 1 else NoState)
            if isinstance(origin, type) and issubclass(origin, Algorithm):
                bound |= dict(zip(origin.__parameters__, arguments, strict=False))  # type: ignore[attr-defined]
    return NoState, NoState


def _default(variable: Any) -> Any:
    """Return the default of a type variable that a base class leaves open."""
    return getattr(variable, "__default__", NoState)


def client_steps(cls: type[Algorithm[Any, Any]]) -> dict[str, Callable[..., Any]]:
    """Return a method's client steps.

    Returns: The functions that are marked with `on_client`, by name.
    """
    names = (name for name in dir(cls) if not name.startswith("__"))
    return {name: getattr(cls, name) for name in names if is_client_step(getattr(cls, name, None))}


def unwrap_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the plain function of a client step."""
    return getattr(step, "__func__", step)


def server_arguments(step: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that the server sends to a client step.

    Returns: The parameters after the method and the client.
    """
    return list(inspect.signature(unwrap_step(step)).parameters)[2:]


def is_annotated(step: Callable[..., Any]) -> bool:
    """Tell whether a client step has the type annotations without which it cannot be sent.

    Returns: True if all parameters that the server sends, and the result, are annotated.
    """
    return {*server_arguments(step), "return"} <= annotations_of(unwrap_step(step)).keys()


def returns_model(cls: type[Algorithm[Any, Any]]) -> bool:
    """Tell whether clients return models that they have trained, so that the server can average them.

    Returns: True if the reply of a client step is a `Fit`.
    """
    replies = [annotations_of(step).get("return") for step in client_steps(cls).values()]
    return any(isinstance(reply, type) and issubclass(reply, Fit) for reply in replies)


@functools.cache
def _import_methods() -> None:
    """Import all modules of `fedkeep.algorithms`, once: every recipe looks its methods up."""
    package = importlib.import_module("fedkeep.algorithms")
    for module in pkgutil.walk_packages(package.__path__, "fedkeep.algorithms."):
        importlib.import_module(module.name)


def algorithms() -> dict[str, type[Algorithm[Any, Any]]]:
    """Find all methods: those of `fedkeep.algorithms`, and any others that have been imported.

    Returns: The methods by name, in alphabetical order.
    """
    _import_methods()
    found = named_subclasses(
        Algorithm,  # type: ignore[type-abstract]
        lambda cls: None if getattr(cls, "__abstractmethods__", None) else cls.name(),
        "Give yours another title.",
    )
    return dict(sorted(found.items()))


def get_algorithm(name: str) -> type[Algorithm[Any, Any]]:
    """Return a method by name.

    ``name``: The name; upper and lower case are the same.
    """
    return find_named(name, algorithms(), "method", "To use a method from a file, name the file with --use FILE.")


def describe_replies(cls: type[Algorithm[Any, Any]], *, summed: bool = False) -> list[str]:
    """Describe what leaves a client: a line for each client step that returns anything.

    ``summed``: Whether models leave in a secure sum only.
    """
    replying = {
        name: step for name, step in client_steps(cls).items() if annotations_of(step)["return"] is not NoneType
    }
    return [describe_reply(step, name, summed=summed) for name, step in replying.items()]


def describe_reply(step: Callable[..., Any], name: str = "", *, summed: bool = False) -> str:
    """Describe a client step's reply: its fields, or the first line of the step's docstring.

    Returns: Such as ``"train: model, num_examples"``.
    """
    result = annotations_of(step)["return"]
    if summed and isinstance(result, type) and issubclass(result, Fit):
        sent = "num_examples, and the model in a secure sum only"
    elif dataclasses.is_dataclass(result):
        sent = ", ".join(field.name for field in dataclasses.fields(result))
    elif step.__doc__:
        sent = step.__doc__.strip().splitlines()[0]
    else:
        sent = getattr(result, "__name__", str(result))
    return f"{name or step.__name__}: {sent}"


MAX_NOISE = 40
"""Most noise in a count that is believed, times epsilon: more has a probability of exp(-40)."""


@on_client
def send_label_counts(self: object, client: Client[Any]) -> Tensor:
    """Send the client's number of examples of each class.

    Returns: Number of examples of each class, float32 [classes].
    """
    return client.label_counts()


def invalid_counts(reply: Tensor, classes: int, examples: int, epsilon: float) -> str | None:
    """Check the reply to `send_label_counts`, which sums over clients would pass on to everyone.

    ``epsilon``: Of the noise in its counts, with which they have another sum; 0 without.
    Returns: What is wrong with the reply; None if it is valid.
    """
    if reply.shape != (classes,) or reply.dtype != torch.float32:
        return f"label counts of shape {list(reply.shape)} and type {reply.dtype} instead of {[classes]} and float32"
    if bool((reply < 0).any()) or bool((reply != reply.round()).any()):
        return "label counts that are negative or not whole numbers"
    total = int(reply.double().sum())
    if not epsilon:
        return f"label counts of {total} examples, and it has {examples}" if total != examples else None
    most = examples + MAX_NOISE / epsilon * classes
    return f"label counts of {total} examples, where noise makes {most:.0f} at most" if total > most else None


BUILTIN_STEPS: dict[str, Callable[..., Any]] = {"send_label_counts": send_label_counts}
"""Steps that the server may ask of a client for every method, if the recipe checks losses ([defense])."""
