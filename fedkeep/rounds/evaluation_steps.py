"""Reply steps that evaluate: the models that clients return or keep, and the server's on examples of clients' own."""

import time
from typing import Any

from fedkeep.interface import Algorithm
from fedkeep.interface.algorithm import unwrap_step
from fedkeep.models import Weights
from fedkeep.rounds.messages import refused
from fedkeep.rounds.reply_step import Reply, ReplyStep, Round
from fedkeep.rounds.state import SimulationState
from fedkeep.training.client_test import client_test, pooled


class LocalModels(ReplyStep):
    """Evaluates the model that each client returns, or keeps, on the test examples and on clients' examples."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.is_due = False

    def applies(self, state: SimulationState) -> bool:
        return state.settings.run.evaluate_local_models

    def begin_round(self, state: SimulationState, number: int) -> None:
        self.found = []
        self.is_due = state.settings.run.is_due(state.settings.run.position(number)[1])

    def accepted(self, round: Round, reply: Reply) -> None:
        if self.is_due:
            with round.timed():
                self._evaluate(round, reply.client, reply.value.model, round.fits[-1][0] if round.fits else None)

    def record(self, round: Round) -> dict[str, Any]:
        """Also evaluate what clients keep; not of one that was lost, whose model may lack the outputs of a new task."""
        if not self.is_due:
            return {}
        for client in round.cohort:
            state = None if client in round.lost else round.client_states.get(client)
            if state is not None and (model := round.state.algorithm.own_model(state)):
                self._evaluate(round, client, model, None)
        return {"local_models": self.found}

    def _evaluate(self, round: Round, client: str, model: Weights, previous: str | None) -> None:
        """Evaluate a client's model, also on the examples of the client that trained before it."""
        began, state = time.perf_counter(), round.state
        self.found.append(
            {
                "client": client,
                "correct": state.evaluate(model, client).correct,
                "own": state.evaluate_on(client, model, client),
                "previous": None if previous is None else state.evaluate_on(previous, model, client),
            }
        )
        round.costs.evaluation_seconds += time.perf_counter() - began


class ClientTest(ReplyStep):
    """Lets all clients test the evaluation models in rounds that are evaluated; costs and losses do not count it."""

    is_abandoned = False

    def begin_round(self, state: SimulationState, number: int) -> None:
        self.is_abandoned = False

    def abandon(self, round: Round) -> None:
        self.is_abandoned = True

    def applies(self, state: SimulationState) -> bool:
        return bool(state.settings.run.client_test)

    def reason_against(self, state: SimulationState) -> str:
        method, why = state.algorithm, ""
        if type(method).predict is not Algorithm.predict:
            why = f"{method.name()} predicts with what only its server has"
        elif state.own_contexts:
            why = "clients with networks of their own ([[client_models]]) cannot run it"
        return f"run.client_test: clients test the server's model, and {why}. Set run.client_test=0." if why else ""

    def allows_partial_aggregation(self, state: SimulationState) -> bool:
        return True

    def check(self, state: SimulationState, reply: Reply) -> None:
        if unwrap_step(reply.request.step) is client_test:
            classes, scored = state.context.num_classes, bool(state.settings.run.metric)
            possible = (test.is_possible(classes, scored) for test in reply.value.values())
            if reply.value.keys() != set(state.evaluation_models) or not all(possible):
                raise refused("test results that cannot be true")

    def record(self, round: Round) -> dict[str, Any]:
        state, run = round.state, round.state.settings.run
        if not run.is_due(round.round) or (self.is_abandoned and not state.federation.holds_client_data):
            return {}  # a round that is lost at sites may be repeated, and so must leave nothing there
        began, models = time.perf_counter(), state.evaluation_models
        there = [client for client in state.federation.clients if (f := round.lost.get(client)) is None or f.refused]
        with round.uncounted() as lost:
            sent = {which: state.evaluation_model(which) for which in models}
            told = round.ask_builtin(client_test, there, sent, bool(run.metric))
        round.costs.evaluation_seconds += time.perf_counter() - began
        first, *others = (pooled({client: tests[which] for client, tests in told.items()}) for which in models)
        averages = {which: found for which, found in zip(models[1:], others, strict=True) if found}
        found = first | ({"evaluation_models": averages} if averages else {})
        return found | ({"untested": {client: fault.text for client, fault in lost.items()}} if lost else {})
