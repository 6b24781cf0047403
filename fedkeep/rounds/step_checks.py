"""Checks of what a method's own code hands over: its author learns what is wrong from a sentence, not a traceback."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, Server
from fedkeep.interface.algorithm import unwrap_step
from fedkeep.interface.codec import find_wrong_type
from fedkeep.models.weights import check_weights
from fedkeep.rounds.messages import StepRequest


def check_reply(request: StepRequest, reply: Any, state: Any, state_type: type[Any]) -> None:
    """Check what a client step returned, and the state that it left."""
    name = _name(request)
    hint = annotations_of(unwrap_step(request.step)).get("return", Any)
    if hint is not Any and (wrong := find_wrong_type(reply, hint, f"what {name} returned")):
        raise ConfigError(f"{wrong} Return what the annotation of the step says, or change the annotation.")
    _check_state(state, state_type, "client.state", name)


def check_server(algorithm: Algorithm[Any, Any], server: Server[Any], state_type: type[Any]) -> None:
    """Check what a method's round left on the server."""
    title = type(algorithm).__name__
    name = f"{title}.round"
    check_weights(server.model, f"server.model after {name}")
    check_weights(server.eval_model, f"server.eval_model after {name}")
    if server.eval_model and not algorithm.sets_eval_model:
        raise ConfigError(
            f"{name} assigns server.eval_model, but {title}.sets_eval_model is False, so that averages of other models "
            f"would be evaluated and exported beside it. Add the property sets_eval_model to {title} and let it return "
            f"True, or assign server.model alone."
        )
    _check_state(server.state, state_type, "server.state", name)


def check_arguments(request: StepRequest) -> None:
    """Check what a step was given, once it has failed."""
    name, signature = _name(request), inspect.signature(request.step)
    try:
        given = signature.bind(None, *request.args, **request.kwargs).arguments
    except TypeError as error:
        wanted = ", ".join(list(signature.parameters)[1:]) or "nothing"
        raise ConfigError(f"{name} cannot be asked like this: {error}. After the client it takes {wanted}.") from error
    hints = annotations_of(unwrap_step(request.step))
    for argument, value in list(given.items())[1:]:
        if argument in hints and (wrong := find_wrong_type(value, hints[argument], f"{argument} of {name}")):
            raise ConfigError(f"{wrong} Look at what the server's half gives to ask.")


def _check_state(state: Any, state_type: type[Any], what: str, where: str) -> None:
    if not isinstance(state, state_type):
        raise ConfigError(
            f"{what} is a {type(state).__name__} after {where}, not a {state_type.__name__}. Assign to its fields, not "
            f"to {what} itself."
        )
    if unknown := sorted(getattr(state, "__dict__", {}).keys() - {field.name for field in fields(state_type)}):
        raise ConfigError(
            f"{where} keeps {', '.join(unknown)} in {what}, which {state_type.__name__} has no field for, so that it "
            "would be lost. Declare the field with a default."
        )
    if wrong := find_wrong_type(state, state_type, what):
        raise ConfigError(f"{wrong} {where} left it so. The field's annotation must say all that it may hold.")


def _name(request: StepRequest) -> str:
    return getattr(request.step, "__qualname__", request.step.__name__)
