"""Checks of one reply alone: finite, in range, true to the client's examples, and of the model's form."""

from collections.abc import Mapping
from typing import Any

from fedkeep.errors import ConfigError
from fedkeep.interface import Fit
from fedkeep.interface.algorithm import invalid_counts, send_label_counts, unwrap_step
from fedkeep.interface.party import find_out_of_range
from fedkeep.interface.pytree import find_nonfinite, iter_instances
from fedkeep.models.weights import find_mismatch
from fedkeep.rounds.messages import FaultKind, StepRequest, refused
from fedkeep.rounds.reply_step import Reply, ReplyStep
from fedkeep.rounds.state import SimulationState
from fedkeep.training.model_runner import ModelRunner


class PlausibilityCheck(ReplyStep):
    """Refuses replies that cannot be used, or cannot be true; the method may refuse more."""

    def allows_partial_aggregation(self, state: SimulationState) -> bool:
        return True

    def check(self, state: SimulationState, reply: Reply) -> None:
        try:
            where = find_nonfinite(reply.value)
            fault = f"a {where} that is not finite" if where else find_fault(state, reply.request, reply.value)
        except Exception as error:  # a malformed reply must not stop the run
            raise refused(f"what cannot be checked ({type(error).__name__}: {error})") from error
        if fault:
            raise refused(fault, FaultKind.NOT_FINITE if where else FaultKind.REFUSED)


def find_fault(state: SimulationState, request: StepRequest, reply: Any) -> str | None:
    """Return why a finite reply is refused, after "answered with"; None if it is valid."""
    if state.settings.defense.check_replies and (fault := find_out_of_range(reply)):
        return fault
    held = state.federation.num_examples(request.client)
    if unwrap_step(request.step) is send_label_counts and state.settings.defense.check_replies:
        return invalid_counts(reply, state.context.num_classes, held, state.settings.privacy.counts_epsilon)
    runner = state.context_of(request.client).runner
    hidden = state.settings.privacy.secure_aggregation and isinstance(reply, Fit) and not reply.model
    mismatches = [find_mismatch(reply.model, runner.initial)] if isinstance(reply, Fit) and not hidden else []
    mismatches += (_mismatch(weights, runner) for weights in iter_instances(reply, Mapping))
    if mismatch := next(filter(None, mismatches), None):
        return f"another model: {mismatch}"
    if state.settings.defense.check_replies and (fault := _untrue(state, request.client, reply)):
        return fault
    fault = state.algorithm.validate_reply(state.server, reply, held)
    if fault and not isinstance(fault, str):
        name = f"{type(state.algorithm).__name__}.validate_reply"
        raise ConfigError(f"{name} returned {fault!r:.80}. Return a text that says what is wrong, or None.")
    return fault or None


def _untrue(state: SimulationState, client: str, reply: Any) -> str | None:
    """Return why a training cannot be true, such as one on more examples than the client holds."""
    for fit in iter_instances(reply, Fit):
        held = state.trainable_examples(client)
        if fit.num_examples > held:
            hint = "" if state.algorithm.keeps_examples else " in this task; the method does not say `keeps_examples`"
            return f"a model trained on {fit.num_examples} examples, and it has {held}{hint}"
        most = state.most_steps(client)
        if fit.num_steps > most:
            return f"a model trained in {fit.num_steps} steps, and its examples need at most {most}"
        if state.algorithm.uses_num_steps and not state.settings.privacy.secure_aggregation:  # which hides the number
            batch_norm = state.context_of(client).runner.has_batch_norm
            needed = state.settings.training.num_steps(fit.num_examples, batch_norm=batch_norm)
            if fit.num_steps != needed:
                return f"a model trained in {fit.num_steps} steps, and its {fit.num_examples} examples need {needed}"
    return None


def _mismatch(weights: Mapping[Any, Any], runner: ModelRunner) -> str | None:
    """Return how tensors under a model's names differ from its form; parameters without buffers are one too."""
    if weights.keys().isdisjoint(runner.initial):
        return None
    whole = weights.keys() != set(runner.parameters)
    expected = runner.initial if whole else {name: runner.initial[name] for name in runner.parameters}
    return find_mismatch(weights, expected)
