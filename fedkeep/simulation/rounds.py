"""A round in progress: which clients are asked, which are lost, what is sent, and their new states.

Client states take effect only when the round is over, so that it can be rolled back.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import ceil, inf, isfinite
from types import MethodType
from typing import Any, Final

import torch

from fedkeep._utils import progress, seeds
from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import ConfigError, ValueRefused, in_one_line
from fedkeep.interface import Fit
from fedkeep.interface.algorithm import server_arguments, unwrap_step
from fedkeep.interface.codec import decode, encode
from fedkeep.interface.privacy import SPENDING, spent
from fedkeep.interface.pytree import copy_containers, num_bytes
from fedkeep.models import Weights
from fedkeep.models.weights import RunningMean, find_mismatch
from fedkeep.options import as_table
from fedkeep.simulation.central_dp import noised_mean
from fedkeep.simulation.executor import Future
from fedkeep.simulation.loss_checker import LossChecker, ReturnedModel
from fedkeep.simulation.messages import ClientFailure, StepRequest, StepResult, sent_model
from fedkeep.simulation.replies import (
    UpdateSummary,
    find_fault,
    find_outliers,
    find_replay,
    find_spending_fault,
    find_too_large,
    find_unrelated,
    measure_update,
)
from fedkeep.simulation.reply_store import ReplyStore
from fedkeep.simulation.robust import KRUM, reason_less_robust, robust_replies
from fedkeep.simulation.secure_sum import secure_mean, secure_update, without_update
from fedkeep.simulation.state import SimulationState

log = logging.getLogger(__name__)
Step = Callable[..., Any]
LOST: Final = object()
"""Stands for the reply of a client that was lost."""


class TooFewClients(BaseException):  # not an Exception: a method that catches those must not swallow it
    """Fewer clients replied than ``run.min_clients``; the round is rolled back."""


class RoundState:
    """Asks the clients of one round and keeps its records.

    ``state``: What the round starts from. Its client states are replaced only when the round is over.
    ``number``: The round, counted over the whole run.
    ``task``: The current task, counted from 1.
    ``round``: The round of this task, counted from 1.
    ``lost``: Lost clients, and the reasons.
    ``refused``: Those of the lost clients whose reply was refused, and the reasons.
    ``updates``: Accepted updates of models, by client.
    ``answered``: Clients of whom a reply was accepted.
    ``left_out``: Clients whose models robust aggregation did not choose.
    ``less_robust``: Why robust aggregation was not applied as the recipe asks.
    ``sent``: The models that were sent to the clients that were asked last, by client.
    ``trained``: With secure aggregation: the last trainings of the clients that were asked last, by client.
    ``loss_checker``: Checks the losses of this round's models, if the recipe lets somebody measure them.
    ``lost_between_rounds``: Clients that were lost at the beginning or the end of the task only.
    ``requires_min_clients``: Whether the round is rolled back if fewer than ``run.min_clients`` clients reply.
    ``client_states``: New states of the round's clients.
    ``uses``: Number of uses of randomness in this round, by client and purpose.
    ``spent``: What clients spent of their privacy in this round (see `fedkeep.interface.privacy`).
    ``num_noised_means``: How many noised means of models were made.
    ``sample_rate``: The largest probability with which a client was asked for one of these means.
    ``waiting``: Requests that have not been submitted yet, by client.
    ``under_way``: Requests that have been submitted, by client.
    ``checked``: Results that arrived and are not accepted yet, since those of earlier clients have not arrived.
    ``down``, ``up``: Bytes sent to clients, and bytes of their replies.
    ``fits``: Results of local training, in the order of arrival, without models.
    ``mean``: Of the models that clients returned, if it is evaluated.
    ``local_models``: Evaluations of the clients' models.
    ``evaluation_seconds``: Seconds of these evaluations.
    ``waiting_seconds``: Seconds in which the server waited for clients.
    ``client_seconds``: Seconds of training and teachers within these.
    ``step_seconds``: Seconds of waiting for each client step, by name.
    ``replies``: Number of times that each client step was waited for, by name.
    """

    def __init__(self, state: SimulationState, number: int, cohort: list[str]) -> None:
        self.state = state
        self.number = number
        self.task, self.round = state.run_settings.position(number)
        self.cohort = cohort
        self.lost: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.updates: dict[str, list[UpdateSummary]] = {}
        self.answered: set[str] = set()
        self.left_out: list[str] = []
        self.less_robust: list[str] = []
        self.loss_checker = LossChecker(self)
        self.sent: dict[str, Weights] = {}
        self.trained: dict[str, ReturnedModel] = {}
        self.lost_between_rounds: dict[str, str] = {}
        self.requires_min_clients = True
        self.client_states: dict[str, Any] = {}
        self.uses: dict[str, dict[str, int]] = {}
        self.spent: dict[str, dict[str, int]] = {}
        self.num_noised_means = 0
        self.sample_rate = 0.0
        self.waiting: dict[str, list[StepRequest]] = {}
        self.under_way: dict[str, tuple[StepRequest, Future | ClientFailure]] = {}
        self.checked: dict[str, _Checked] = {}
        self.down = self.up = 0
        self.fits: list[tuple[str, Fit]] = []
        self.mean = RunningMean()
        self.local_models: list[dict[str, Any]] = []
        self.evaluation_seconds = 0.0
        self.waiting_seconds = 0.0
        self.client_seconds = 0.0
        self.step_seconds: dict[str, float] = {}
        self.replies: dict[str, int] = {}

    def start(self, requests: Sequence[StepRequest]) -> None:
        """Queue requests without waiting for them.

        Each is carried out before its client's next one; the result does not depend on when.
        """
        with self._timed():
            self._queue(requests)
            self._prefetch()

    def queue(self, requests: Sequence[StepRequest]) -> list[str]:
        """Queue requests for which `collect` is called next.

        Returns: The ids of their clients.
        """
        with self._timed():
            self._queue(requests)
        return [request.client for request in requests]

    def collect(self, clients: Sequence[str], *, one_by_one: bool = False) -> dict[str, Any]:
        """Carry out all waiting requests of some clients.

        ``clients``: The ids of the clients, in the order of the replies.
        ``one_by_one``: Whether each client is finished before the next one starts. Otherwise they are carried out side
            by side if there are workers or stacks.
        Returns: The last reply of each client, or `LOST`.
        """
        self.sent = {}
        replies: dict[str, Any] = dict.fromkeys(clients, LOST)
        arrived: list[ReturnedModel] = []
        expected = 0 if self.state.own_contexts else len(clients)  # other networks, other sizes
        store = ReplyStore(self.state.weights_file, expected) if len(clients) > 1 else None
        together = not one_by_one and (self.state.executor.prefetch or self.state.stack > 1)
        with self._timed():
            for group in [clients] if together else [[client] for client in clients]:
                while unfinished := [client for client in group if self._is_unfinished(client)]:
                    self._launch_together(unfinished)
                    if len(group) == 1:  # a cohort that is asked at once keeps all workers busy anyway
                        self._prefetch()
                    # Checked as they arrive, so that few results wait in memory; accepted in the clients' order, on
                    # which the record depends.
                    asked, self.checked = set(unfinished), {}
                    checked = self.checked
                    order = deque(client for client in unfinished if client in self.under_way)
                    for client, began in self._arriving([client for client in self.under_way if client in asked]):
                        request, future = self.under_way.pop(client)
                        failed = isinstance(future, ClientFailure)
                        result = future if failed else self.state.executor.wait(future)
                        step = request.step.__name__
                        self.step_seconds[step] = self.step_seconds.get(step, 0.0) + time.perf_counter() - began
                        checked[client] = self._check(request, result, store)
                        del future, result  # which may be stored by now, while the next one is made
                        if store is not None:
                            store.trim()
                        while order and order[0] in checked:
                            following = order.popleft()
                            replies[following] = self._accept(checked.pop(following), arrived)
        self._screen(arrived)
        if self.state.privacy.secure_aggregation or self.state.defense.robust_aggregation in KRUM:
            self.trained = {one.request.client: one for one in arrived}
        for client in clients:
            self.waiting.pop(client, None)
            if client in self.lost:
                replies[client] = LOST
        return replies

    def make_secure(self, replies: dict[str, Any]) -> dict[str, Any]:
        """Put the securely aggregated mean in the place of models that were asked for together.

        ``replies``: The replies by client.
        Returns: The replies as the method sees them; without `privacy.secure_aggregation`, and without models, the
            same.
        """
        fits = {client: reply for client, reply in replies.items() if isinstance(reply, Fit)}
        if not self.state.privacy.secure_aggregation or not fits:
            return replies
        with self._timed():
            requests = {client: self.trained[client].request for client in fits}
            others = sum(client not in self.lost and client not in fits for client in self.cohort)
            seen, lost, size = secure_mean(self.state, fits, requests, self._min_replies - others)
        self.up += size
        for client, reason in lost.items():
            self.fits = [one for one in self.fits if one[0] != client]
            self.answered.discard(client)
            self._restore(self.trained[client])
            self._record_lost_client(client, reason)
        self.trained = {}
        self._require_clients()
        return {client: seen.get(client, reply) for client, reply in replies.items() if client not in lost}

    def make_robust(self, replies: dict[str, Any]) -> dict[str, Any]:
        """Apply the recipe's robust aggregation to models that were asked for together.

        ``replies``: The replies by client.
        Returns: The replies as the method sees them.
        """
        state, store = self.state, ReplyStore(self.state.weights_file)
        if reason := reason_less_robust(replies, self.sent, state.defense):
            self.less_robust.append(reason)
            if not state.warned_less_robust:
                log.warning(
                    "Round %d is less robust than asked: %s Further such rounds have it in their record.",
                    self.number,
                    reason,
                )
                state.warned_less_robust = True
        robust = robust_replies(replies, self.sent, state.defense, store.keep, state.context.runner.parameters)
        left_out = [client for client in replies if client not in robust]
        for client in left_out:
            if client in self.trained:  # Krum did not choose it: what it trained never happened, for itself too
                self._restore(self.trained[client])
        self.left_out += left_out
        self.trained = {}
        return robust

    def make_private(self, replies: dict[str, Any]) -> dict[str, Any]:
        """Apply the recipe's central differential privacy: noise on the mean of the models that clients returned.

        ``replies``: The replies by client, of clients that were asked together.
        Returns: The replies as the method sees them.
        """
        state, privacy, store = self.state, self.state.privacy, ReplyStore(self.state.weights_file)
        fits = {client: reply for client, reply in replies.items() if isinstance(reply, Fit)}
        if not privacy.client_noise_multiplier or not fits:
            return replies
        if missing := next((client for client in fits if client not in self.sent), ""):
            raise ConfigError(
                f"privacy.client_noise_multiplier: {state.algorithm.name()} sends client {missing} no model that its "
                "update could be measured from. Give the model to the client step as an argument of its own."
            )
        self.num_noised_means += 1
        self.sample_rate = max(self.sample_rate, self._sample_rate())
        noise = partial(state.context.repeated_noise, "noised mean", self.number, self.num_noised_means)
        return noised_mean(fits, self.sent, privacy, noise, store.keep)

    def finish(self) -> None:
        """Carry out all waiting requests, so that every step that was asked for is done by the end of the round."""
        self.collect(list(self.waiting), one_by_one=True)

    def abandon(self) -> None:
        """Drop all requests that are waiting or running."""
        with self._timed():
            self.waiting.clear()
            self._count_what_left()
            self.under_way.clear()
            self.state.executor.cancel_all()

    def _count_what_left(self) -> None:
        """Count what clients spend of their privacy that were asked already, although nobody uses their replies."""
        if not any(as_table(self.state.privacy)[option] for option in SPENDING):
            return
        found = {client: checked.result for client, checked in self.checked.items()}
        for client, (_, future) in self.under_way.items():
            found[client] = future if isinstance(future, ClientFailure) else self.state.executor.wait(future)
        for client, result in found.items():
            if isinstance(result, ClientFailure) or self._spending_fault(client, result):
                continue
            if privacy := spent(result.uses):
                self.spent[client] = privacy

    def ordered_fits(self) -> list[tuple[str, Fit]]:
        """Return the results of local training in the order of the cohort, so that sums do not depend on timing."""
        order = {client: number for number, client in enumerate(self.cohort)}
        return sorted(self.fits, key=lambda item: order.get(item[0], len(order)))

    def record(self) -> dict[str, Any]:
        """Return the part of the round's record that this object knows.

        Returns: Task, round, cohort, lost clients, loss (None if nobody told it, or it is not finite), examples, bytes,
            and evaluations of local models.
        """
        fits = [fit for _, fit in self.ordered_fits()]
        examples = sum(fit.num_examples for fit in fits)
        privacy = self.state.privacy
        has_loss = examples and not privacy.secure_aggregation and not privacy.client_noise_multiplier
        loss = _mean_loss(fits, examples) if has_loss else None
        record: dict[str, Any] = {
            "task": self.task,
            "round": self.number,
            "cohort": self.cohort,
            "lost": self.lost_between_rounds | self.lost,
            "loss": loss,
            "examples": examples,
            "down": self.down,
            "up": self.up,
        }
        server_spent = spent(self.state.server.uses)
        if self.spent or self.num_noised_means or server_spent:
            shared = {"means": self.num_noised_means, "sample_rate": self.sample_rate}
            record["privacy"] = as_table(privacy) | {"clients": self.spent} | shared
            record["privacy"] |= {"server": server_spent} if server_spent else {}
        if self.refused:
            record["refused"] = list(self.refused)
        if aside := self.state.clients_set_aside():
            record["set_aside"] = aside
        if self.less_robust:
            record["less_robust"] = list(dict.fromkeys(self.less_robust))
        if self.left_out:
            record["left_out"] = self.left_out
        return record | ({"local_models": self.local_models} if self._evaluates_local_models else {})

    def _sample_rate(self) -> float:
        """Return the probability with which a client is asked; clients that are set aside cannot be."""
        candidates = len(self.state.federation.clients) - len(self.state.clients_set_aside())
        between_rounds = not self.requires_min_clients  # when everybody is asked
        return 1.0 if between_rounds else min(1.0, len(self.cohort) / max(candidates, 1))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        timer = self.state.context.timer
        began, before = time.perf_counter(), timer.total
        try:
            yield
        finally:
            self.waiting_seconds += time.perf_counter() - began
            self.client_seconds += timer.total - before

    def _arriving(self, clients: Sequence[str]) -> Iterator[tuple[str, float]]:
        """Wait for the steps of clients, which are under way, and yield each client when its result arrives.

        The time at which the waiting began is yielded too. Failures come first; they have arrived.
        """
        steps = [self.under_way[client][0].step.__name__ for client in clients]
        failed = [client for client in clients if isinstance(self.under_way[client][1], ClientFailure)]
        others = [client for client in clients if not isinstance(self.under_way[client][1], ClientFailure)]
        completed = self.state.executor.as_completed([self.under_way[client][1] for client in others])
        arriving = chain(failed, (others[position] for position in completed))
        for step in steps:
            self._report(step)
            began = time.perf_counter()
            yield next(arriving), began

    def _queue(self, requests: Sequence[StepRequest]) -> None:
        for request in requests:
            rounds = self.state.history.rounds_aside(request.client, self.state.defense)
            if rounds and request.client not in self.lost:
                how_long = (
                    " any more" if rounds == inf else f" for {rounds:g} more {'round' if rounds == 1 else 'rounds'}"
                )
                self._lose_client(request.client, f"is not asked{how_long}, since its replies were refused")
            if request.client not in self.lost:
                self.down += num_bytes([request.args, request.kwargs])
                self.waiting.setdefault(request.client, []).append(self._delivered(request))

    def _is_unfinished(self, client: str) -> bool:
        return client not in self.lost and (client in self.under_way or bool(self.waiting.get(client)))

    def _prefetch(self) -> None:
        """Submit requests that nobody waits for yet to idle workers, in the order in which they were asked for."""
        if self.state.stack > 1:  # otherwise the groups would depend on which workers are idle
            return
        free = self.state.executor.prefetch - len(self.under_way)
        if free > 0:
            idle = [client for client in self.waiting if self.waiting[client] and client not in self.under_way]
            for client in idle[:free]:
                self._launch(client)

    def _launch_together(self, clients: Sequence[str]) -> None:
        """Submit the next request of some clients, in groups of about the same size; the largest clients come first.

        The groups depend only on the cohort, not on the workers, since stacking changes rounding.
        """
        ready = [client for client in clients if self.waiting.get(client) and client not in self.under_way]
        if len(ready) > 1:
            ready.sort(key=self.state.federation.num_examples, reverse=True)
        groups = ceil(len(ready) / self.state.stack)
        for number in range(groups):
            self._launch(*ready[len(ready) * number // groups : len(ready) * (number + 1) // groups])

    def _launch(self, *clients: str) -> None:
        """Submit the next request of some clients as one group."""
        requests: list[StepRequest] = []
        for client in clients:
            request = self.waiting[client].pop(0)
            state = self.client_states.get(client, self.state.client_states.get(client))
            request = replace(request, state=state, uses=dict(self.uses.get(client, {})))
            reason = self._injected_fault(client, request.step.__name__)
            if reason is None:
                requests.append(request)
            else:
                self.under_way[client] = request, ClientFailure(reason)
        if requests:
            for request, future in zip(requests, self.state.executor.submit(*requests), strict=True):
                self.under_way[request.client] = request, future

    def _check(self, request: StepRequest, result: StepResult | ClientFailure, store: ReplyStore | None) -> _Checked:
        """Check a result alone, and measure it; nothing of the round changes."""
        state = self.state
        if state.attacker is not None and not isinstance(result, ClientFailure):
            rows = state.context.num_classes * state.algorithm.rows_per_class
            result = state.attacker.tamper(request, result, self.number, rows)
        if isinstance(result, ClientFailure):
            return _Checked(request, result)
        if fault := self._spending_fault(request.client, result):
            return _Checked(request, replace(result, reply=None, uses=self.uses.get(request.client, {})), fault)
        reply = result.reply
        form = state.context_of(request.client).runner.initial
        secure = state.privacy.secure_aggregation and isinstance(reply, Fit)
        is_summed = secure and bool(reply.model) and not find_mismatch(reply.model, form)
        if is_summed:  # in a simulation; a site does so itself, and what it sends has left its model out
            try:
                reply = secure_update(state, request, reply)
            except ValueRefused as error:  # as the executor of sites says it
                return _Checked(request, ClientFailure(f"its site says: {error}"))
        if fault := find_fault(state, request, without_update(reply) if is_summed else reply):
            return _Checked(request, replace(result, reply=None), fault)
        sent = sent_model(request, reply.model) if isinstance(reply, Fit) else None
        parameters = state.context_of(request.client).runner.parameters
        measures_updates = state.defense.check_replies or state.defense.loss_check != "off"
        update = measure_update(sent, reply, parameters) if sent is not None and measures_updates else None
        size = num_bytes(without_update(reply) if secure else reply)
        if state.through_codec:
            new_state = decode(encode(result.state), state.client_state_type, state.device)
            result = replace(result, state=new_state)
            reply = decode(encode(reply), annotations_of(unwrap_step(request.step))["return"], state.device)
        else:
            reply = copy_containers(reply)
        reply = reply if store is None else store.keep(reply, None if secure else size)
        return _Checked(request, replace(result, reply=reply), None, size, update)

    def _spending_fault(self, client: str, result: StepResult) -> str | None:
        return find_spending_fault(self.state, client, self.uses.get(client, {}), result.uses)

    def _accept(self, checked: _Checked, arrived: list[ReturnedModel]) -> Any:
        """Keep the client's new state, and return the reply as the server receives it, or `LOST`.

        Models are added to ``arrived``.
        """
        request, result, client = checked.request, checked.result, checked.request.client
        if isinstance(result, ClientFailure):
            self._lose_client(client, result.reason, refused=result.refused)
            return LOST
        if privacy := spent(result.uses):  # also if the reply is refused: it has left the client
            self.spent[client] = privacy
        if checked.fault:
            self._lose_client(client, f"answered with {checked.fault}", refused=True)
            return LOST
        before = self.client_states.get(client, LOST)
        self.client_states[client], self.uses[client] = result.state, result.uses
        self.up += checked.size
        self.loss_checker.asked(request)
        if isinstance(result.reply, Fit):
            arrived.append(ReturnedModel(request, result.reply, before, checked.update))
        self.answered.add(client)
        return result.reply

    def _screen(self, arrived: list[ReturnedModel]) -> None:
        """Compare models that were asked for together, refuse those that cannot be right, and keep the others."""
        state, defense = self.state, self.state.defense
        updates: dict[str, UpdateSummary] = {}
        for one in arrived:
            client, update = one.request.client, one.update
            if update is None or client in self.lost:
                continue
            known = [*state.history.models.get(client, ()), *map(_fingerprints, self.updates.get(client, ()))]
            fault = find_too_large(update, defense) or find_replay(update, known)
            if fault and defense.check_replies:
                self.refuse(one, fault)
            else:
                updates[client] = update
        earlier = [update for each in self.updates.values() for update in each]
        outliers: dict[str, str] = {}
        # Central DP's noise covers the mean alone, so whether a client is in it must not depend on the others.
        may_compare = not state.privacy.client_noise_multiplier
        if may_compare:
            norms = [*state.history.norms, *(one.parameter_change for one in earlier)]
            outliers = find_outliers(updates, defense, norms)
        if may_compare and defense.check_replies:
            known_similarities = [*state.history.similarities, *(one.similarity for one in earlier)]
            outliers |= find_unrelated(updates, known_similarities)
        for one in arrived:
            client = one.request.client
            if client in outliers and client not in self.lost:
                self.refuse(one, outliers[client])
        self.loss_checker.check([one for one in arrived if one.request.client in updates])
        for one in arrived:
            client, sent = one.request.client, sent_model(one.request, one.reply.model)
            if client in self.lost:
                continue
            if sent is not None:
                self.sent[client] = sent
            if client in updates:
                self.updates.setdefault(client, []).append(updates.pop(client))
            if self._evaluates_local_models:
                with self._timed():
                    self._evaluate_local_model(client, one.reply.model, self.fits[-1][0] if self.fits else None)
            self._add_fit(client, one.reply)

    def _add_fit(self, client: str, fit: Fit) -> None:
        """Keep what the record and the mean of the round need of a training."""
        if self.state.averages_local_models and fit.num_steps:
            self.mean.add(fit.model)
        if self.state.algorithm.sequential:  # the model takes the place of the one before
            self.state.weights_file.trimmer.dropped(num_bytes(fit.model))
        self.fits.append((client, Fit({}, fit.num_examples, fit.num_steps, fit.loss)))

    def ask_builtin(self, step: Step, clients: Sequence[str], *args: Any) -> dict[str, Any]:
        """Ask clients for a step that every method has.

        ``step``: The step, one of `fedkeep.interface.steps.BUILTIN_STEPS`.
        Returns: The replies of those that are not lost.
        """
        bound = MethodType(step, self.state.algorithm)
        requests = [StepRequest(client, bound, args, {}, self.task, self.round) for client in clients]
        replies = self.collect(self.queue(requests))
        return {client: reply for client, reply in replies.items() if reply is not LOST}

    def refuse(self, one: ReturnedModel, fault: str) -> None:
        """Refuse a reply that had arrived: the client's state is as it was before the step.

        ``fault``: What is wrong with it, after "answered with".
        """
        self._restore(one)
        self._lose_client(one.request.client, f"answered with {fault}", refused=True)

    def _restore(self, one: ReturnedModel) -> None:
        """Give a client the state back that it had before a step."""
        if one.state_before is LOST:
            self.client_states.pop(one.request.client, None)
        else:
            self.client_states[one.request.client] = one.state_before

    def _report(self, step: str) -> None:
        """Report how many replies to a step have arrived.

        The total is the size of the cohort for the first replies. Whether a step is asked again, only the method knows.
        """
        done = self.replies.get(step, 0)
        self.replies[step] = done + 1
        progress.report(step, done, len(self.cohort) if self.requires_min_clients and done < len(self.cohort) else None)

    def _injected_fault(self, client: str, step: str) -> str | None:
        dropout, state = self.state.run_settings.client_dropout, self.state
        if dropout:
            number = torch.rand((), generator=seeds.rng(state.seed, "dropout", round=self.number, client=client))
            if number < dropout:
                return "dropped out"
        return state.fault_injector(self.number, client, step) if state.fault_injector else None

    def _lose_client(self, client: str, reason: str, *, refused: bool = False) -> None:
        self._record_lost_client(client, reason, refused=refused)
        self._require_clients()

    def _record_lost_client(self, client: str, reason: str, *, refused: bool = False) -> None:
        self.lost[client] = in_one_line(reason)  # it may contain text from the client
        if refused:
            self.refused[client] = self.lost[client]
        self.waiting.pop(client, None)

    def _require_clients(self) -> None:
        """End the round if too few of its clients are left."""
        replying = sum(name not in self.lost for name in self.cohort)
        if replying < self._min_replies:
            raise TooFewClients

    @property
    def _min_replies(self) -> int:
        """How many clients must reply, so that the round is not rolled back."""
        return min(self.state.run_settings.min_clients, len(self.cohort)) if self.requires_min_clients else 0

    @contextmanager
    def between_rounds(self) -> Iterator[None]:
        """Ask clients at the beginning or the end of a task within this block.

        No client counts as lost at first, and however many are lost, the round is not rolled back.
        """
        lost, self.lost, self.requires_min_clients = self.lost, {}, False
        yield
        self.lost_between_rounds |= self.lost
        self.lost, self.requires_min_clients = lost, True

    def evaluate_own_models(self) -> None:
        """Evaluate the models that the round's clients keep for themselves, if local models are evaluated.

        A client that was lost is left out: it may keep a model that lacks the outputs of a new task.
        """
        if not self._evaluates_local_models:
            return
        for client in self.cohort:
            state = None if client in self.lost else self.client_states.get(client)
            if state is not None and (model := self.state.algorithm.own_model(state)):
                self._evaluate_local_model(client, model, None)

    @property
    def _evaluates_local_models(self) -> bool:
        return self.state.run_settings.evaluate_local_models and self.state.run_settings.is_due(self.round)

    def _evaluate_local_model(self, client: str, model: Weights, previous: str | None) -> None:
        """Evaluate a client's model, also on the examples of the client that trained before it."""
        began = time.perf_counter()
        self.local_models.append(
            {
                "client": client,
                "correct": self.state.evaluate(model, client).correct,
                "own": self.state.evaluate_on(client, model, client),
                "previous": None if previous is None else self.state.evaluate_on(previous, model, client),
            }
        )
        self.evaluation_seconds += time.perf_counter() - began

    def _delivered(self, request: StepRequest) -> StepRequest:
        """Return a request as its client receives it."""
        if not self.state.through_codec:
            return replace(request, args=copy_containers(request.args), kwargs=copy_containers(request.kwargs))
        hints, device = annotations_of(unwrap_step(request.step)), self.state.device
        names = server_arguments(request.step)
        args = tuple(decode(encode(arg), hints[name], device) for name, arg in zip(names, request.args, strict=False))
        kwargs = {name: decode(encode(arg), hints[name], device) for name, arg in request.kwargs.items()}
        return replace(request, args=args, kwargs=kwargs)


@dataclass(frozen=True, eq=False)
class _Checked:
    """A result that was checked alone, its size in bytes, and how far its model moved, if it has one."""

    request: StepRequest
    result: StepResult | ClientFailure
    fault: str | None = None
    size: int = 0
    update: UpdateSummary | None = None


def _mean_loss(fits: Sequence[Fit], examples: int) -> float | None:
    """Return the mean loss of trainings over their examples; None if it is beyond floats, as unchecked ones may be."""
    loss = sum(fit.loss * fit.num_examples for fit in fits) / examples
    return loss if isfinite(loss) else None


def _fingerprints(update: UpdateSummary) -> list[str]:
    return [update.sent_fingerprint, update.returned_fingerprint]
