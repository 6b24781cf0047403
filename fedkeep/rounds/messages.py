"""Requests for client steps and their results, as values and in the form in which they are sent to a worker.

What a method's own code hands over is checked: its author learns what is wrong from a sentence, not a traceback.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MethodType
from typing import Any

from torch import Tensor

from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import ConfigError, RunError, ValueRefused
from fedkeep.interface import Algorithm, Server
from fedkeep.interface.algorithm import is_client_step, server_arguments, unwrap_step
from fedkeep.interface.codec import encode_structure, find_wrong_type, from_structure
from fedkeep.models import Weights
from fedkeep.models.weights import check_weights, find_mismatch, not_finite

UPDATE = "update"
"""With secure aggregation, the name of a client's update in the place of its model."""


class FaultKind(StrEnum):
    """Why a client is lost for a round; the record names the kind unless it is "no reply" or "refused"."""

    NO_REPLY = "no reply"
    REFUSED = "refused"
    NOT_FINITE = "not finite"
    TOO_LARGE = "too large"
    """Its update was larger than that of any training that goes well."""
    LOSS = "loss"
    """The loss check refused its model."""


class Fault(Exception):
    """Why a client is lost for the round; its state stays as it was before. The text follows the client's name.

    ``uses``: Of a client that gives nothing but this reason, its `StepResult.uses`: the reason follows from its
        examples too.
    """

    def __init__(self, text: str, kind: FaultKind = FaultKind.REFUSED, uses: Mapping[str, int] | None = None) -> None:
        super().__init__(text)
        self.text, self.kind, self.uses = text, kind, dict(uses or {})

    @property
    def refused(self) -> bool:
        """Whether the client answered, and its reply was refused."""
        return self.kind is not FaultKind.NO_REPLY


def refused(answer: str, kind: FaultKind = FaultKind.REFUSED) -> Fault:
    """Return the fault of a client that answered with what is refused."""
    return Fault(f"answered with {answer}", kind)


def no_reply(text: str, uses: Mapping[str, int] | None = None) -> Fault:
    """Return the fault of a client that did not answer, or only why it does not."""
    return Fault(text, FaultKind.NO_REPLY, uses)


@dataclass(frozen=True, eq=False)
class StepRequest:
    """What the server asks of a client: a client step, with its arguments.

    ``step``: A bound client step of the method.
    ``args``: Positional arguments from the server.
    ``kwargs``: Keyword arguments from the server.
    ``task``: The task of the stream, counted from 1.
    ``round``: The round of this task, counted from 1.
    ``state``: The client's state; None for a client that has none yet.
    ``uses``: Number of times that each purpose has used randomness in this round.
    """

    client: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    task: int
    round: int
    state: Any = None
    uses: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Say which step this is, for error messages."""
        where = f"task {self.task}, round {self.round}" if self.task > 1 else f"round {self.round}"
        return f"This happened in step {self.step.__name__!r} of client {self.client}, {where}."


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of a client step.

    ``reply``: What the step returned.
    ``state``: The client's state afterwards.
    ``uses``: The updated `StepRequest.uses`.
    """

    reply: Any
    state: Any
    uses: dict[str, int]


@dataclass(frozen=True, eq=False)
class UpdateSum:
    """The sum of several clients' updates, of which the server sees no single one.

    ``total``: The sum modulo 2^64, int64 [numbers] (see `fedkeep.privacy.secure_sum`); empty if all clients are
        lost.
    ``lost``: The clients whose update is not in it, and the reasons.
    """

    total: Tensor
    lost: dict[str, str]


def encode_request(request: StepRequest, name: Callable[[Tensor], str]) -> dict[str, Any]:
    """Encode a request.

    ``name``: Returns the name that stands for a tensor.
    Returns: The request as JSON can represent it, with names in place of tensors.
    """
    return {
        "client": request.client,
        "step": request.step.__name__,
        "task": request.task,
        "round": request.round,
        "uses": request.uses,
        "state": None if request.state is None else encode_structure(request.state, name),
        "args": [encode_structure(arg, name) for arg in request.args],
        "kwargs": {key: encode_structure(value, name) for key, value in request.kwargs.items()},
    }


def decode_request(
    algorithm: Algorithm[Any, Any],
    encoded: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    client_state_type: type[Any],
    *,
    builtin: Mapping[str, Callable[..., Any]],
) -> StepRequest:
    """Decode a request that `encode_request` has encoded, and check it against the annotations of its step.

    ``tensors``: The tensors by name.
    ``builtin``: Steps by name that are allowed too, which the method itself does not have.
    """
    name = str(encoded["step"])
    step: Any = getattr(algorithm, name, None)
    if step is None and name in builtin:
        step = MethodType(builtin[name], algorithm)
    if not is_client_step(step):
        raise ValueRefused(f"{encoded['step']!r} is not a client step of {algorithm.name()}.")
    hints, names = annotations_of(unwrap_step(step)), server_arguments(step)
    args = encoded["args"]
    return StepRequest(
        encoded["client"],
        step,
        tuple(from_structure(arg, tensors, hints[name]) for name, arg in zip(names[: len(args)], args, strict=True)),
        {name: from_structure(value, tensors, hints[name]) for name, value in encoded["kwargs"].items()},
        encoded["task"],
        encoded["round"],
        None if encoded["state"] is None else from_structure(encoded["state"], tensors, client_state_type),
        encoded["uses"],
    )


def results_type(steps: Sequence[Callable[..., Any]], client_state_type: type[Any]) -> Any:
    """Return the type of the results of several steps, against which a worker's answer is checked.

    Returns: A tuple of three: (reply, state, uses) of each step, seconds of training, and seconds of teachers.
    """
    replies = (annotations_of(unwrap_step(step))["return"] for step in steps)
    results = tuple(tuple.__class_getitem__((reply, client_state_type, dict[str, int])) for reply in replies)
    return tuple.__class_getitem__((tuple.__class_getitem__(results), float, float))


def sent_model(request: StepRequest, form: Weights) -> Weights | None:
    """Return the model that a client was sent to train. Server and site must find the same one.

    Returns: The first argument with the names and the shapes of that form; None if there is none.
    """
    for argument in (*request.args, *request.kwargs.values()):
        if (
            isinstance(argument, Mapping)
            and argument.keys() == form.keys()
            and all(argument[name].shape == tensor.shape for name, tensor in form.items())
        ):
            return argument
    return None


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


def check_models(server: Server[Any], before: Weights, step: str) -> None:
    """Check that a step of a method left models that the next round can train.

    ``before``: The server's model before it.
    ``step``: What error messages call it, such as ``FedAvg.round``.
    """
    for name in ("model", "eval_model"):
        model: Weights = getattr(server, name)
        if model and before and (mismatch := find_mismatch(model, before)):
            raise ConfigError(f"server.{name} after {step} is not of the form that the model had before: {mismatch}.")
        if (invalid := not_finite(model)) is not None:
            raise RunError(f"{step} left numbers that are not finite in server.{name}: in {invalid!r}.")


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
