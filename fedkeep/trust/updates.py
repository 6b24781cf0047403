"""How far trainings moved models: updates that are too large, repeated, or nothing like what was sent.

An update is compared with those of the cohort if it was asked together, otherwise with those that were accepted last.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from fedkeep.interface import Fit
from fedkeep.models import Weights
from fedkeep.models.weights import distance, distances, join_norms, joint_norm
from fedkeep.rounds.messages import Fault, FaultKind, refused
from fedkeep.rounds.reply_step import Reply, ReplyStep, Round, begins_task
from fedkeep.rounds.run_settings import HISTORY_LENGTH, MIN_FOR_MEDIAN, Defense
from fedkeep.rounds.state import SimulationState

BUFFER_FACTOR = 1000
"""How many times farther than parameters buffers may move: no learning rate bounds batch norm's variances."""
FREE_NORM = 3.0
"""How many norms of the model an update may always have, however little the others moved."""
MIN_SIMILARITY, USUAL_SIMILARITY = 0.08, 0.6
"""Cosine similarity below which a model has nothing of the sent one, if the others' median is above the second."""
MIN_NORM = 1e-8
"""Smaller norms count as this one in a similarity."""
MIN_ELEMENTS = 256
"""Fewest elements of a tensor whose similarity is measured: chance alone makes that of a smaller one vary."""
FINGERPRINT_VALUES = 64
"""Number of values of each tensor that make a model's fingerprint."""
REMEMBERED_REPLIES = 8
"""Number of each client's replies that are recognised when they are sent again."""


@dataclass(frozen=True)
class KnownModels:
    """Fingerprints of the models that a client was sent and of those that it returned, in pairs."""

    pairs: tuple[tuple[str, str], ...] = ()

    def with_updates(self, updates: Sequence[UpdateSummary]) -> KnownModels:
        """Return the last pairs, these updates' too."""
        return KnownModels((self.pairs + pairs_of(updates))[-REMEMBERED_REPLIES:])


@dataclass
class UsualUpdates:
    """What the last accepted updates were like, and which models each client sent."""

    norms: list[float] = field(default_factory=list)
    similarities: list[float] = field(default_factory=list)
    models: dict[str, KnownModels] = field(default_factory=dict)


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

    @property
    def moves(self) -> dict[str, tuple[float, float]]:
        """The norms of what moved, by what errors call it: of its change, and of what was sent."""
        parameters, buffers = (self.parameter_change, self.parameter_norm), (self.buffer_change, self.buffer_norm)
        return {"an update": parameters, "buffers with a change": buffers}


class Updates(ReplyStep):
    """Refuses updates that are too large, repeated, or unlike those of the others."""

    kept: UsualUpdates
    note_type = UpdateSummary

    def __init__(self) -> None:
        self.kept = UsualUpdates()
        self.accepted_updates: dict[str, list[UpdateSummary]] = {}
        self._last_sent: ModelSummary | None = None

    def applies(self, state: SimulationState) -> bool:
        return state.settings.defense.check_replies or state.settings.defense.loss_check != "off"

    def allows_partial_aggregation(self, state: SimulationState) -> bool:
        return True

    def begin_round(self, state: SimulationState, number: int) -> None:
        self.accepted_updates = {}

    def check(self, state: SimulationState, reply: Reply) -> None:
        if reply.sent is not None:
            parameters = state.context_of(reply.client).runner.parameters
            if self._last_sent is None or not self._last_sent.describes(reply.sent, parameters):
                self._last_sent = ModelSummary(reply.sent, parameters)
            reply.notes[UPDATE_NOTE] = measure_update(self._last_sent, reply.sent, reply.value)

    def screen(self, round: Round, replies: Sequence[Reply]) -> Iterable[tuple[Reply, Fault]]:
        defense, updates = round.state.settings.defense, dict[str, UpdateSummary]()
        # Central DP's noise covers the mean alone: whether a client is in it must not depend on anybody's examples.
        checks = defense.check_replies and not round.state.settings.privacy.client_noise_multiplier
        for reply in replies:
            if (update := summary_of(reply)) is None or reply.client in round.lost:
                continue
            earlier = self.kept.models.get(reply.client, KnownModels()).pairs
            earlier += pairs_of(self.accepted_updates.get(reply.client, ()))
            if checks and (too_large := find_too_large(update, defense)):
                yield reply, refused(too_large, FaultKind.TOO_LARGE)
            elif checks and is_replay(update, earlier):
                yield reply, refused("a model that it had answered with before")
            else:
                updates[reply.client] = update
        if not checks:
            return
        before = [update for each in self.accepted_updates.values() for update in each]
        outliers = find_outliers(updates, defense, [*self.kept.norms, *(one.parameter_change for one in before)])
        outliers |= find_unrelated(updates, [*self.kept.similarities, *(one.similarity for one in before)])
        for reply in replies:
            if reply.client in outliers:
                yield reply, refused(outliers[reply.client])

    def accepted(self, round: Round, reply: Reply) -> None:
        if update := summary_of(reply):
            self.accepted_updates.setdefault(reply.client, []).append(update)

    def end_round(self, round: Round, record: Mapping[str, Any]) -> None:
        kept = self.kept
        if begins_task(round.state, round.number):  # which the last task still judged: nothing else was known
            kept.norms, kept.similarities = [], []
        for client, updates in self.accepted_updates.items():
            kept.models[client] = kept.models.get(client, KnownModels()).with_updates(updates)
        found = [update for updates in self.accepted_updates.values() for update in updates]
        norms = [update.parameter_change for update in found if update.parameter_change > 0]
        kept.norms = [*kept.norms, *norms][-HISTORY_LENGTH:]
        kept.similarities = [*kept.similarities, *(update.similarity for update in found)][-HISTORY_LENGTH:]


UPDATE_NOTE = Updates.__name__
"""The note of a reply that holds its `UpdateSummary`."""


def pairs_of(updates: Iterable[UpdateSummary]) -> tuple[tuple[str, str], ...]:
    """Return fingerprints of the models that were sent and returned."""
    return tuple((update.sent_fingerprint, update.returned_fingerprint) for update in updates)


def summary_of(reply: Reply) -> UpdateSummary | None:
    """Return how far a reply's model moved, if it was measured."""
    found: UpdateSummary | None = reply.notes.get(UPDATE_NOTE)
    return found


class ModelSummary:
    """What is measured of a model that was sent; a cohort is often sent the same one."""

    def __init__(self, sent: Weights, parameters: Sequence[str]) -> None:
        self._seen = [weakref.ref(tensor) for tensor in sent.values()]
        self._parameters = parameters
        self.trained = [name for name in parameters if sent[name].is_floating_point()]
        trained = set(self.trained)
        self.buffers = [n for n, tensor in sent.items() if tensor.is_floating_point() and n not in trained]
        self.norm, self.buffer_norm = (joint_norm([sent[n] for n in names]) for names in (self.trained, self.buffers))
        self.large = [n for n in self.trained if sent[n].dim() > 1 and sent[n].numel() >= MIN_ELEMENTS]
        self.large_norms = _norms(sent, self.large)
        self.fingerprint = fingerprint(sent)

    def describes(self, sent: Weights, parameters: Sequence[str]) -> bool:
        """Tell whether these are the tensors that were measured."""
        same = len(sent) == len(self._seen) and self._parameters == parameters
        return same and all(seen() is tensor for seen, tensor in zip(self._seen, sent.values(), strict=True))


def measure_update(measured: ModelSummary, sent: Weights, reply: Fit) -> UpdateSummary:
    """Measure how far a client's training moved the model that it was sent."""
    changes = distances(reply.model, sent, measured.trained)
    return UpdateSummary(
        join_norms(changes),
        distance(reply.model, sent, measured.buffers),
        measured.norm,
        measured.buffer_norm,
        _least_similarity(measured, dict(zip(measured.trained, changes, strict=True)), reply.model),
        measured.fingerprint,
        fingerprint(reply.model),
    )


def _least_similarity(measured: ModelSummary, changes: Weights, returned: Weights) -> float:
    """Return the least cosine similarity of two tensors of weights of the same name; 1 without such tensors."""
    least, names = 1.0, measured.large
    moved = _numbers([changes[name] for name in names])
    for before, after, change in zip(measured.large_norms, _norms(returned, names), moved, strict=True):
        # By the law of cosines: without one more pass over the weights.
        product = (before * before + after * after - change * change) / 2
        least = min(least, product / (max(before, MIN_NORM) * max(after, MIN_NORM)))
    return least


def _norms(model: Weights, names: Sequence[str]) -> list[float]:
    return _numbers(torch._foreach_norm([model[name] for name in names]) if names else ())


def _numbers(scalars: Sequence[Tensor]) -> list[float]:
    return torch.stack(list(scalars)).tolist() if scalars else []


def fingerprint(model: Weights) -> str:
    """Return a short hash of values from every tensor: equal for equal models, and hardly ever for two trainings."""
    values = [tensor.reshape(-1) for _, tensor in sorted(model.items()) if tensor.is_floating_point()]
    steps = [max(1, one.numel() // FINGERPRINT_VALUES) for one in values]
    sampled = [one[: step * FINGERPRINT_VALUES : step] for one, step in zip(values, steps, strict=True)]
    joined = torch.cat(sampled).detach().double().cpu() if sampled else torch.zeros(0)
    return hashlib.blake2b(joined.numpy().tobytes(), digest_size=8).hexdigest()


def is_replay(update: UpdateSummary, known: Iterable[tuple[str, str]]) -> bool:
    """Tell whether a client returned a model that it had returned before, when it was sent another one.

    A client that changes nothing, or is sent the same again, replays nothing.
    """
    if update.sent_fingerprint == update.returned_fingerprint:
        return False
    return any(returned == update.returned_fingerprint and sent != update.sent_fingerprint for sent, returned in known)


def find_too_large(update: UpdateSummary, defense: Defense) -> str | None:
    """Tell whether an update is too large for the model that it changes."""
    times = {"an update": defense.model_norm, "buffers with a change": BUFFER_FACTOR * defense.model_norm}
    for what, (norm, before) in update.moves.items() if defense.model_norm else ():
        limit = times[what] * max(before, 1.0)
        if not norm <= limit:
            return f"{what} of norm {norm:.3g}, where at most {limit:.3g} fits the model that it was sent"
    return None


def find_unrelated(updates: Mapping[str, UpdateSummary], known: Sequence[float]) -> dict[str, str]:
    """Find models that have nothing of the one that was sent, where others' have: weights at random, or exchanged rows.

    However far an honest training moves a model, some of its direction stays: over 900 honest updates on digits and
    Fashion-MNIST, 500 of them with tasks, the least similarity was 0.70. It was 0.17 at 50 times the learning rate, and
    0.11 for one client of 1,000 examples among clients of 30 after 20 epochs with a strong weight decay. Where the
    others' models keep nothing either, as in layers that begin at zero, no client is refused.
    """
    usual = _usual([update.similarity for update in updates.values()], known)
    if usual < USUAL_SIMILARITY:
        return {}
    return {
        client: "weights that have nothing of those that it was sent: their cosine similarity is "
        f"{update.similarity:.2f} in one tensor, and {usual:.2f} is usual. A learning rate that is too high does so too"
        for client, update in updates.items()
        if update.similarity < MIN_SIMILARITY
    }


def find_outliers(updates: Mapping[str, UpdateSummary], defense: Defense, known: Sequence[float]) -> dict[str, str]:
    """Compare the updates of several clients with the median of their norms.

    An update of up to `FREE_NORM` times the norm of the model that it changes is never an outlier: where most clients
    have nothing left to learn, one with new classes may move thousands of times as far, and is honest. Beyond that an
    update is too large as long as too few others are known to compare it with: the first hop of a sequence is one.
    """
    found: dict[str, str] = {}
    limit = defense.update_norm
    compared_with = (("an update", limit, known), ("buffers with a change", 10 * limit, ()))
    for what, times, earlier in compared_with if limit else ():
        moves = {client: update.moves[what] for client, update in updates.items()}
        usual = _usual([norm for norm, _ in moves.values() if norm > 0], earlier)
        if not usual and what != "an update":
            continue  # batch norm's first variances may be of any size
        for client, (norm, before) in moves.items():
            if norm > max(times * usual, FREE_NORM * max(before, 1.0)):
                so_far = f"more than {FREE_NORM:g} times that of the model, before others have shown what is usual"
                compared = f"{norm / usual:.3g} times that of the others' median" if usual else so_far
                found[client] = f"{what} of norm {norm:.3g}, {compared}"
    return found


def _usual(measured: Sequence[float], earlier: Sequence[float]) -> float:
    """Return the median of what updates measure, with earlier ones where these are few; 0 if all are too few."""
    known = measured if len(measured) >= MIN_FOR_MEDIAN else [*earlier, *measured]
    return median_low(known) if len(known) >= MIN_FOR_MEDIAN else 0.0
