"""Callbacks: what happens around the rounds of a simulation. Evaluation, records, checkpoints and progress are such."""

from __future__ import annotations

import time
from collections.abc import Callable

from fedkeep.models import Weights
from fedkeep.simulation.state import RoundResult, SimulationState
from fedkeep.training.evaluation import count_predictions


class Callback:
    """Called around the rounds of a trial. Override what is needed; by default nothing happens.

    All methods get the simulation's state, whose ``server.model`` is the global model, ``finished`` the number of
    finished rounds, ``algorithm`` the method and ``seed`` the seed. Read it; what a callback changes there, the results
    would depend on. An exception stops the trial, which keeps its finished rounds.
    """

    def on_trial_begin(self, state: SimulationState) -> None:
        """Called once before the first round, or before the first after a resume."""

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        """Called after every round, undone ones included, with what it left."""

    def on_trial_end(self, state: SimulationState) -> None:
        """Called once at the end, also if the trial was stopped by an exception or Ctrl-C."""


class OnRoundEnd(Callback):
    """Calls a function after every round.

    Parameters
    ----------
    function : Callable[[SimulationState, RoundResult], object]
        What to call.
    """

    def __init__(self, function: Callable[[SimulationState, RoundResult], object]) -> None:
        self.function = function

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        self.function(state, result)


class Evaluation(Callback):
    """Adds correct predictions by class to the records of the rounds in which the schedule asks for them."""

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        began = time.perf_counter()
        _, round = state.schedule.position(result.record["round"])
        if state.schedule.is_due(round):
            models = [(which, state.evaluation_model(which)) for which in state.schedule.served]
            (_, first), *others = [(which, self._evaluate(state, model)) for which, model in models]
            result.record |= first
            if others:
                result.record["served"] = dict(others)
        result.timings["evaluate"] = result.timings.get("evaluate", 0.0) + time.perf_counter() - began

    def _evaluate(self, state: SimulationState, model: Weights) -> dict[str, object]:
        """Evaluate a model, as the method predicts, on the test images of all classes seen so far."""
        counts = count_predictions(
            lambda images: state.algorithm.predict(state.server, model, images),
            state.federation.dataset.test,
            state.context.num_classes,
        )
        return {"correct": counts.correct, "test_loss": counts.loss}
