"""Checks of clients' replies before they are used: the same for simulations and for sites on Flower.

A reply is checked alone (`find_fault`), and its update is compared with others (`find_outliers`): with those of the
cohort if it was asked together, otherwise with those that were accepted last.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch

from fedkeep.interface import Fit
from fedkeep.interface.algorithm import unwrap_step
from fedkeep.interface.privacy import find_implausible_spending
from fedkeep.interface.pytree import find_nonfinite, iter_instances
from fedkeep.interface.ranges import find_out_of_range
from fedkeep.interface.steps import invalid_counts, send_label_counts
from fedkeep.models import Weights
from fedkeep.models.weights import distance, find_mismatch, joint_norm
from fedkeep.simulation.defense import MIN_FOR_MEDIAN, Defense
from fedkeep.simulation.messages import NOT_FINITE, TOO_LARGE, StepRequest
from fedkeep.simulation.state import SimulationState
from fedkeep.training.model_runner import ModelRunner

MAX_STEP_FACTOR = 10
"""How many times the optimizer steps that the recipe's epochs and batch size need a client may have taken."""
BUFFER_FACTOR = 1000
"""How many times farther than parameters buffers may move: no learning rate bounds batch norm's variances."""
FREE_NORM = 3.0
"""How many norms of the model an update may always have, however little the others moved."""
LEAST_SIMILARITY, USUAL_SIMILARITY = 0.08, 0.6
"""Cosine similarity below which a model has nothing of the sent one, if the others' median is above the second."""
MIN_ELEMENTS = 256
"""Fewest elements of a tensor whose similarity is measured: chance alone makes that of a smaller one vary."""
FINGERPRINT_VALUES = 64
"""Number of values of each tensor that make a model's fingerprint."""


@dataclass(frozen=True, eq=False)
class UpdateSummary:
    """How far a client's training moved the model that it was sent, without the models themselves.

    ``parameter_change``, ``buffer_change``: Norms of the difference between the model that was returned and the one
        that was sent.
    ``similarity``: The least cosine similarity of a tensor of weights that was sent with the returned one; 1 without
        such tensors.
    ``sent_fingerprint``, ``returned_fingerprint``: Hashes of a few values of the two models, by which they are
        recognised.
    """

    parameter_change: float
    buffer_change: float
    parameter_norm: float
    buffer_norm: float
    similarity: float
    sent_fingerprint: str
    returned_fingerprint: str


def find_fault(state: SimulationState, request: StepRequest, reply: Any) -> str | None:
    """Check a reply alone: no NaN or infinity, in range, plausible, of the model's form, and valid for the method.

    ``request``: What the client was asked.
    Returns: Why the reply is refused, after "answered with"; None if it is valid.
    """
    try:
        return _find_fault(state, request, reply)
    except Exception as error:  # a malformed reply must not stop the run
        return f"what cannot be checked ({type(error).__name__}: {error})"


def _find_fault(state: SimulationState, request: StepRequest, reply: Any) -> str | None:
    where = find_nonfinite(reply)
    if where is not None:
        return f"a {where} that is {NOT_FINITE}"
    if (fault := find_out_of_range(reply)) and state.defense.check_replies:
        return fault
    if unwrap_step(request.step) is send_label_counts and state.defense.check_replies:
        held, epsilon = state.federation.num_examples(request.client), state.privacy.counts_epsilon
        return invalid_counts(reply, state.context.num_classes, held, epsilon)
    runner = state.context_of(request.client).runner
    hidden = state.privacy.secure_aggregation and isinstance(reply, Fit) and not reply.model
    mismatches = [find_mismatch(reply.model, runner.initial)] if isinstance(reply, Fit) and not hidden else []
    mismatches += (_mismatch(weights, runner) for weights in iter_instances(reply, Mapping))
    if mismatch := next(filter(None, mismatches), None):
        return f"another model: {mismatch}"
    if (fault := _implausible(state, request.client, reply)) and state.defense.check_replies:
        return fault
    return state.algorithm.validate_reply(state.server, reply, state.federation.num_examples(request.client))


def find_spending_fault(
    state: SimulationState, client: str, before: Mapping[str, int], after: Mapping[str, int]
) -> str | None:
    """Check what a client says that a step spent of its privacy; it is in the record even if its reply is refused.

    ``before``, ``after``: Its uses of randomness in the round, before the step and after it.
    Returns: Why the reply is refused, after "answered with"; None if it can be true.
    """
    return find_implausible_spending(before, after, state.privacy, _most_steps(state, _trainable(state, client)))


def _implausible(state: SimulationState, client: str, reply: Any) -> str | None:
    """Return why a training cannot be true, such as one on more examples than the client holds."""
    for fit in iter_instances(reply, Fit):
        held = _trainable(state, client)
        if fit.num_examples > held:
            hint = "" if state.algorithm.keeps_examples else " in this task; the method does not say `keeps_examples`"
            return f"a model trained on {fit.num_examples} examples, and it has {held}{hint}"
        most = _most_steps(state, held)
        if fit.num_steps > most:
            return f"a model trained in {fit.num_steps} steps, and its examples need at most {most}"
        if state.algorithm.uses_num_steps and not state.privacy.secure_aggregation:  # which hides the number
            batch_norm = state.context_of(client).runner.has_batch_norm
            needed = state.training.num_steps(fit.num_examples, batch_norm=batch_norm)
            if fit.num_steps != needed:
                return f"a model trained in {fit.num_steps} steps, and its {fit.num_examples} examples need {needed}"
    return None


def _trainable(state: SimulationState, client: str) -> int:
    """Return on how many examples a client can train at most in this task."""
    algorithm, federation = state.algorithm, state.federation
    held = federation.total_examples(client) if algorithm.keeps_examples else federation.num_examples(client)
    return held + algorithm.generated_per_class * state.context.num_classes


def _most_steps(state: SimulationState, examples: int) -> int:
    """Return how many optimizer steps a training on so many examples has at most."""
    batches = math.ceil(examples / state.training.batch_size)
    return MAX_STEP_FACTOR * state.training.epochs * max(batches, 1)


def _mismatch(weights: Mapping[Any, Any], runner: ModelRunner) -> str | None:
    """Return how tensors under a model's names differ from the model's form; None if they do not.

    Parameters without buffers are a valid form too.
    """
    if weights.keys().isdisjoint(runner.initial):
        return None
    whole = weights.keys() != set(runner.parameters)
    expected = runner.initial if whole else {name: runner.initial[name] for name in runner.parameters}
    return find_mismatch(weights, expected)


def measure_update(sent: Weights, reply: Fit, parameters: Sequence[str]) -> UpdateSummary:
    """Measure how far a client's training moved a model.

    ``parameters``: Names of the trained tensors.
    """
    trained = [name for name in parameters if sent[name].is_floating_point()]
    buffers = [name for name, tensor in sent.items() if tensor.is_floating_point() and name not in set(trained)]
    before, before_buffers = (joint_norm([sent[name] for name in names]) for names in (trained, buffers))
    moved, moved_buffers = (distance(reply.model, sent, names) for names in (trained, buffers))
    similarity = _least_similarity(sent, reply.model, trained)
    return UpdateSummary(
        moved, moved_buffers, before, before_buffers, similarity, fingerprint(sent), fingerprint(reply.model)
    )


@torch.no_grad()
def _least_similarity(sent: Weights, returned: Weights, names: Sequence[str]) -> float:
    """Return the least cosine similarity of two tensors of weights of the same name; 1 without such tensors."""
    pairs = [(sent[n], returned[n]) for n in names if sent[n].dim() > 1 and sent[n].numel() >= MIN_ELEMENTS]
    similarities = [torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a, b in pairs]
    return float(torch.stack(similarities).min()) if similarities else 1.0


def fingerprint(model: Weights) -> str:
    """Return a short hash of values from every tensor: equal for equal models, and hardly ever for two trainings."""
    values = [tensor.detach().reshape(-1) for _, tensor in sorted(model.items()) if tensor.is_floating_point()]
    sampled = [one[:: max(1, one.numel() // FINGERPRINT_VALUES)][:FINGERPRINT_VALUES].double() for one in values]
    joined = torch.cat(sampled).cpu() if sampled else torch.zeros(0)
    return hashlib.blake2b(joined.numpy().tobytes(), digest_size=8).hexdigest()


def find_replay(update: UpdateSummary, known: Iterable[Sequence[str]]) -> str | None:
    """Tell whether a client returned a model that it had returned before, when it was sent another one.

    Returns: The reason; None for a new model. A client that changes nothing, or is sent the same again, replays
        nothing.
    """
    if update.sent_fingerprint == update.returned_fingerprint:
        return None
    replayed = any(
        returned == update.returned_fingerprint and sent != update.sent_fingerprint for sent, returned in known
    )
    return "a model that it had answered with before" if replayed else None


def find_too_large(update: UpdateSummary, defense: Defense) -> str | None:
    """Tell whether an update is too large for the model that it changes.

    Returns: The reason; None if it is not, or without a limit.
    """
    parts = (
        ("an update", update.parameter_change, defense.model_norm * max(update.parameter_norm, 1.0)),
        (
            "buffers with a change",
            update.buffer_change,
            BUFFER_FACTOR * defense.model_norm * max(update.buffer_norm, 1.0),
        ),
    )
    for what, norm, limit in parts if defense.model_norm else ():
        if not norm <= limit:
            return f"{what} of norm {norm:.3g}, where at most {limit:.3g} {TOO_LARGE}"
    return None


def find_unrelated(updates: Mapping[str, UpdateSummary], known: Sequence[float] = ()) -> dict[str, str]:
    """Find models that have nothing of the one that was sent, where others' have: weights at random, or exchanged rows.

    However far an honest training moves a model, some of its direction stays: over 900 honest updates on digits and
    Fashion-MNIST, 500 of them with tasks, the least similarity was 0.70. It was 0.17 at 50 times the learning rate, and
    0.11 for one client of 1,000 examples among clients of 30 after 20 epochs with a strong weight decay. Where the
    others' models keep nothing either, as in layers that begin at zero, no client is refused.

    ``known``: Similarities of earlier updates, which are the reference if there are too few updates.
    Returns: The reasons, by client.
    """
    similarities = [update.similarity for update in updates.values()]
    similarities = similarities if len(similarities) >= MIN_FOR_MEDIAN else [*known, *similarities]
    if len(similarities) < MIN_FOR_MEDIAN or (usual := median_low(similarities)) < USUAL_SIMILARITY:
        return {}
    return {
        client: "weights that have nothing of those that it was sent: their cosine similarity is "
        f"{update.similarity:.2f} in one tensor, and {usual:.2f} is usual"
        for client, update in updates.items()
        if update.similarity < LEAST_SIMILARITY
    }


def find_outliers(
    updates: Mapping[str, UpdateSummary],
    defense: Defense,
    known: Sequence[float] = (),
) -> dict[str, str]:
    """Compare the updates of several clients with the median of their norms.

    An update of up to `FREE_NORM` times the norm of the model that it changes is never an outlier: where most clients
    have nothing left to learn, one with new classes may move thousands of times as far, and is honest. Beyond that an
    update is too large as long as too few others are known to compare it with: the first hop of a sequence is one.

    ``known``: Norms of earlier updates, which are the reference if there are too few updates.
    Returns: The reasons, by client, of those that are too large.
    """
    found: dict[str, str] = {}
    limit = defense.update_norm
    measures: tuple[tuple[str, float, Callable[[UpdateSummary], tuple[float, float]], Sequence[float]], ...] = (
        ("an update", limit, lambda update: (update.parameter_change, update.parameter_norm), known),
        ("buffers with a change", 10 * limit, lambda update: (update.buffer_change, update.buffer_norm), ()),
    )
    for what, times, measure, earlier in measures if limit and defense.check_replies else ():
        norms = [norm for norm, _ in map(measure, updates.values()) if norm > 0]
        norms = norms if len(norms) >= MIN_FOR_MEDIAN else [*earlier, *norms]
        usual = median_low(norms) if len(norms) >= MIN_FOR_MEDIAN else 0.0
        if not usual and what != "an update":
            continue  # batch norm's first variances may be of any size
        for client, update in updates.items():
            norm, before = measure(update)
            if norm > max(times * usual, FREE_NORM * max(before, 1.0)):
                times_usual = (
                    f"{norm / usual:.3g} times that of the others' median"
                    if usual
                    else (f"more than {FREE_NORM:g} times that of the model, before others have shown what is usual")
                )
                found[client] = f"{what} of norm {norm:.3g}, {times_usual}"
    return found
