"""Checks of a user's method when it is loaded, so that its mistakes do not show in the middle of a run."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import ConfigError, refuse
from fedkeep.interface.algorithm import Algorithm, algorithms, client_steps, server_arguments, state_types, unwrap_step
from fedkeep.interface.codec import find_unknown_type
from fedkeep.interface.party import Client, NoState, Server
from fedkeep.options import options_of, undeclared, unwritable

ROW_KEYS = ("label", "algorithm", "grid", "grid_of", "training")
"""What a method's row of a recipe has beside the method's options."""
_TRAVELS = "Tensor, numbers, text, None, Weights, list[...], dict[str, ...] and dataclasses of these"


def check_method(cls: type[Algorithm[Any, Any]]) -> None:
    """Check a user's method."""
    name = cls.__qualname__
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        own = [word for word, value in vars(cls).items() if callable(value) and not word.startswith("_")]
        near = [word for wanted in missing for word in difflib.get_close_matches(wanted, own, n=1)]
        hint = f" Is {near[0]!r} meant to be it?" if near else ""
        raise ConfigError(f"the method {name} does not define {', '.join(missing)}.{hint}")
    if "__init__" in vars(cls) and "__dataclass_params__" not in vars(cls):
        raise ConfigError(
            f"the method {name} has an __init__ of its own. Write its options as fields, such as "
            'w: float = option(0.1, "weight of the distillation"), and @dataclass(frozen=True) above it, '
            "so that recipes and records have them."
        )
    if any(isinstance(value, dataclasses.Field) for value in vars(cls).values()):
        raise ConfigError(f"the method {name} has options and is no dataclass: write @dataclass(frozen=True) above it.")
    refuse(undeclared(cls))
    refuse(_taken_names(cls))
    if isinstance(cls.needs, str) or cls.networks not in ("one", "any"):
        raise ConfigError(
            f"the method {name}: needs is a tuple, such as ('images',), not {cls.needs!r}, and networks is 'one' or "
            f"'any', not {cls.networks!r}."
        )
    refuse(unwritable(cls, _annotations(f"the method {name}", cls)))
    steps = client_steps(cls)
    if not steps:
        raise ConfigError(f"the method {name} asks nothing of clients: mark what clients do with @on_client.")
    for step_name, step in steps.items():
        _check_step(f"{name}.{step_name}", unwrap_step(step))
    for whose, state in zip(("server", "client"), state_types(cls), strict=True):
        _check_state(name, whose, state)
    _check_parties(cls, steps)
    algorithms()


def _taken_names(cls: type[Algorithm[Any, Any]]) -> list[str]:
    """Return what is wrong with options that have the name of something else."""
    facts = {name for name, hint in annotations_of(Algorithm).items() if get_origin(hint) is ClassVar}
    functions = {name for name in dir(Algorithm) if callable(getattr(Algorithm, name))}
    whose = dict.fromkeys(facts | functions, "methods") | dict.fromkeys(ROW_KEYS, "the rows of recipes")
    found = [name for name in options_of(cls) if name in whose]
    return [
        f"{cls.__qualname__}.{name} cannot be an option: {whose[name]} have a {name!r}. Rename it." for name in found
    ]


def _annotations(where: str, thing: type | Callable[..., Any]) -> dict[str, Any]:
    try:
        return annotations_of(thing)
    except NameError as error:
        raise ConfigError(f"{where}: a type annotation names {error.name!r}, which its file does not know.") from error


def _check_step(where: str, step: Callable[..., Any]) -> None:
    """Check the type annotations of a client step."""
    known = _annotations(where, step)
    travelling = (*server_arguments(step), "return")
    described = {name: "its result" if name == "return" else f"its argument {name}" for name in travelling}
    if bare := [described[argument] for argument in travelling if argument not in known]:
        raise ConfigError(
            f"{where} has no type annotation of {' and of '.join(bare)}. What travels between server "
            "and clients needs one, such as: def train(self, client: Client, model: Weights) -> Fit."
        )
    for argument in travelling:
        if (unknown := find_unknown_type(known[argument])) is not None:
            raise ConfigError(
                f"{where}: the annotation of {described[argument]} contains {unknown}, which says too little of what "
                f"travels, or cannot travel. These can: {_TRAVELS}."
            )


def _check_state(name: str, whose: str, state: type[Any]) -> None:
    """Check that a state can be made without arguments, changed, and kept."""
    where = f"the method {name}: {getattr(state, '__name__', state)}, the {whose}'s state,"
    if state is type(None):
        raise ConfigError(
            f"the method {name}: the {whose} keeps nothing, it says. Write NoState for that (from fedkeep.interface), "
            "such as Algorithm[NoState, MyClientState]."
        )
    if not isinstance(state, type) or "__dataclass_params__" not in vars(state):
        raise ConfigError(f"{where} is no dataclass, so that nothing of it would be kept: write @dataclass above it.")
    if vars(state)["__dataclass_params__"].frozen:
        raise ConfigError(f"{where} is frozen, and a state changes: write @dataclass without frozen=True above it.")
    for field in dataclasses.fields(state):
        if not field.init:
            raise ConfigError(
                f"{where} has field(init=False) for {field.name}: a state is made again from its fields, as when it is "
                "kept. Leave init=False out, and give it a default."
            )
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(
                f"{where} has no default for {field.name}, with which it begins. Give it one, such as 0, None or "
                "field(default_factory=dict)."
            )
        unknown = find_unknown_type(_annotations(where, state)[field.name])
        if unknown is not None:
            raise ConfigError(
                f"{where} keeps {field.name}, whose annotation contains {unknown}: that says too little, or cannot be "
                f"kept. These can: {_TRAVELS}."
            )


def _check_parties(cls: type[Algorithm[Any, Any]], steps: dict[str, Callable[..., Any]]) -> None:
    """Compare what a method writes in ``Server[...]`` and ``Client[...]`` with what it names in ``Algorithm[...]``."""
    server_state, client_state = state_types(cls)
    halves = {"round": cls.round, "begin_task": cls.begin_task, "end_task": cls.end_task, **steps}
    for half, function in halves.items():
        where = f"{cls.__qualname__}.{half}"
        try:
            hints = annotations_of(unwrap_step(function))
        except NameError:  # imported for type checkers only, or local to a function: nothing here travels
            continue
        for argument, hint in hints.items():
            party, declared = get_origin(hint), server_state if get_origin(hint) is Server else client_state
            if party not in (Server, Client) or argument not in inspect.signature(function).parameters:
                continue
            (written,) = get_args(hint)
            known = isinstance(written, type) and written is not Any
            if not known or isinstance(written, TypeVar) or issubclass(declared, written):
                continue
            both = (written, client_state) if party is Server else (server_state, written)
            names = ", ".join(state.__name__ for state in (both if both[1] is not NoState else both[:1]))
            raise ConfigError(
                f"{where} says {party.__name__}[{written.__name__}], and the method does not name this state, so that "
                f"nothing would be kept: write class {cls.__qualname__}(Algorithm[{names}])."
            )
