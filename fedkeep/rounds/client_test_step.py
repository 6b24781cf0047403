"""The reply step that lets clients test the evaluation models on examples of their own."""

import time
from typing import Any

from fedkeep.interface import Algorithm
from fedkeep.interface.algorithm import unwrap_step
from fedkeep.rounds.messages import refused
from fedkeep.rounds.reply_step import Reply, ReplyStep, Round
from fedkeep.rounds.state import SimulationState
from fedkeep.training.client_test import client_test, pooled


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
            possible = (test.is_possible(state.context.num_classes) for test in reply.value.values())
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
