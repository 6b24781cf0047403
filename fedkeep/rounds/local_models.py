"""The reply step that evaluates the models that clients return or keep."""

import time
from typing import Any

from fedkeep.models import Weights
from fedkeep.rounds.reply_step import Reply, ReplyStep, Round
from fedkeep.rounds.state import SimulationState


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
