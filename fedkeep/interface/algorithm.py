"""A method: one class in one file, its server half and its client half side by side."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, get_args, get_origin

from torch import Tensor
from typing_extensions import TypeVar

from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import ConfigError, did_you_mean
from fedkeep.interface.cohort import Cohort
from fedkeep.interface.party import NoState, S, Server
from fedkeep.models import Weights
from fedkeep.options import Options

C = TypeVar("C", default=NoState)
F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_fedkeep_client_step"


def on_client(function: F) -> F:
    """Mark a method as a client step: what `round` may ask of a client, and all that it may."""
    setattr(function, _MARK, True)
    return function


def is_client_step(function: Any) -> bool:
    """Tell whether a function or bound method was marked with `on_client`."""
    return bool(getattr(function, _MARK, False))


@dataclass(frozen=True)
class Algorithm(Options, ABC, Generic[S, C]):
    """Base of all methods. ``S`` is the dataclass that the server keeps, ``C`` the one that each client keeps.

    A subclass is a frozen dataclass whose fields are its options (see `fedkeep.options.option`), with one `round` and
    at least one `on_client` step. It holds no state of its own. `round` depends on nothing but the server and the
    replies.
    """

    title: ClassVar[str] = ""  # as papers write it; default: the class's name
    paper: ClassVar[str] = ""
    schedule: ClassVar[Literal["parallel", "sequential"]] = "parallel"
    needs: ClassVar[tuple[str, ...]] = ()  # what it needs of a recipe, such as "auxiliary"
    networks: ClassVar[Literal["one", "any"]] = "one"  # whether clients may have networks of their own
    takes_turns: ClassVar[bool] = False  # whether every round treats another client of its cohort apart, in turn

    @property
    def rows_per_class(self) -> int:
        """How many rows of the classifier a class has; if several, side by side, its first says what it is."""
        return 1

    @abstractmethod
    def round(self, server: Server[S], cohort: Cohort) -> None:
        """Carry out one communication round: ask clients, and leave in ``server.model`` what they learned."""

    def begin_task(self, server: Server[S], clients: Cohort) -> None:
        """Prepare for a task, before its first round, with all clients at hand. Without tasks there is one.

        By default the model gets rows for the new classes. A method that defines neither this nor `end_task` knows
        nothing of tasks: it begins each without what it kept in the one before.
        """
        server.model = server.expand_head(server.model)

    def end_task(self, server: Server[S], clients: Cohort) -> None:
        """Finish a task, after its last round."""

    def predict(self, server: Server[S], model: Weights, images: Tensor) -> Tensor:
        """Return scores [n, classes] of images, [n, channels, height, width] as they are stored: how it is evaluated.

        By default the logits of the model that is served, of each class's first row.
        """
        return server.predict(model, {"image": images})[:, :: self.rows_per_class]

    def own_model(self, state: C) -> Weights:
        """Return the model that a client itself would use, from its state, if that is another than the server's.

        Where one machine plays all clients it can be evaluated with theirs (``run.evaluate_local_models``). Fits that
        come back are evaluated anyway; this is for models that stay at home.
        """
        return {}

    def validate_reply(self, server: Server[S], reply: Any, examples: int) -> str | None:
        """Return what is wrong with a reply, such as its shape; None if nothing is. Who sent it is lost for the round.

        ``examples`` is how many the client has in this task. Whether numbers are finite, and models of the client's
        form, is looked after already.
        """
        return None

    @classmethod
    def name(cls) -> str:
        """Return the name in recipes and on the command line: the title in lower case, or the class's name."""
        return (cls.title or cls.__name__).lower().replace("+", "-").replace(" ", "-")


def handles_tasks(cls: type[Algorithm[Any, Any]]) -> bool:
    """Tell whether a method does something of its own when a task begins or ends."""
    return cls.begin_task is not Algorithm.begin_task or cls.end_task is not Algorithm.end_task


def state_types(cls: type[Algorithm[Any, Any]]) -> tuple[type[Any], type[Any]]:
    """Return the dataclasses (server's, client's) that a method's base ``Algorithm[S, C]`` names."""
    given: dict[Any, Any] = {}
    for base in cls.__mro__:
        for written in base.__dict__.get("__orig_bases__", ()):
            origin = get_origin(written)
            arguments = [given.get(a, _default(a)) if isinstance(a, typing.TypeVar) else a for a in get_args(written)]
            if origin is Algorithm:
                return arguments[0], (arguments[1] if len(arguments) > 1 else NoState)
            if isinstance(origin, type) and issubclass(origin, Algorithm):
                given |= dict(zip(origin.__parameters__, arguments, strict=False))  # type: ignore[attr-defined]
    return NoState, NoState


def _default(variable: Any) -> Any:
    """Return what a type variable stands for where nothing is said."""
    return getattr(variable, "__default__", NoState)


def client_steps(cls: type[Algorithm[Any, Any]]) -> dict[str, Callable[..., Any]]:
    """Return a method's client steps by name."""
    names = (name for name in dir(cls) if not name.startswith("__"))
    return {name: getattr(cls, name) for name in names if is_client_step(getattr(cls, name, None))}


def unwrap_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a step, bound or not."""
    return getattr(step, "__func__", step)


def server_arguments(step: Callable[..., Any]) -> list[str]:
    """Return the names of a step's parameters after the method and the client: what the server sends."""
    return list(inspect.signature(unwrap_step(step)).parameters)[2:]


def is_annotated(step: Callable[..., Any]) -> bool:
    """Tell whether a step says of what types its parameters and its result are, without which it cannot travel."""
    return {*server_arguments(step), "return"} <= annotations_of(unwrap_step(step)).keys()


def algorithms() -> dict[str, type[Algorithm[Any, Any]]]:
    """Return all methods by name: those of `fedkeep.algorithms`, found by looking, and any that have been imported."""
    package = importlib.import_module("fedkeep.algorithms")
    for module in pkgutil.walk_packages(package.__path__, "fedkeep.algorithms."):
        importlib.import_module(module.name)
    found: dict[str, type[Algorithm[Any, Any]]] = {}
    pending: list[type[Algorithm[Any, Any]]] = list(Algorithm.__subclasses__())
    for cls in pending:
        pending.extend(cls.__subclasses__())
        if getattr(cls, "__abstractmethods__", None):
            continue
        other = found.get(cls.name())
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"{other.__module__}.{other.__qualname__} and {cls.__module__}.{cls.__qualname__} are both named "
                f"{cls.name()!r}. Give your own another title."
            )
        found[cls.name()] = cls
    return dict(sorted(found.items()))


def get_algorithm(name: str) -> type[Algorithm[Any, Any]]:
    """Return a method by name, case ignored; raise `ConfigError` with the nearest name for an unknown one."""
    known = algorithms()
    if name.lower() not in known:
        raise ConfigError(
            f"there is no method {name!r}.{did_you_mean(name.lower(), known)} A method of your own is found when its "
            "file is named with --use FILE."
        )
    return known[name.lower()]
