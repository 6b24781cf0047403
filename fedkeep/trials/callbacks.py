"""Callbacks of a simulation: evaluation, records, checkpoints, progress, and whatever users add."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from torch import Tensor

from fedkeep.errors import ConfigError, RunError
from fedkeep.models import Weights
from fedkeep.models.weights import not_finite
from fedkeep.rounds.state import RoundResult, SimulationState
from fedkeep.training.evaluation import count_predictions
from fedkeep.trust.attacks import backdoor_success, first_new_class

Outcome: TypeAlias = tuple[bool, Mapping[str, float]] | None
"""What a callback returns after a round: whether the trial ends, and numbers by name; None: neither."""


class Callback:
    """Base class of callbacks; override the methods that are needed.

    All methods receive the simulation's state, such as ``state.server.model`` (the global model), ``state.finished``
    (the number of finished rounds), ``state.algorithm`` and ``state.settings.seed``. Do not change it, since the
    results would change. An exception in a callback ends the trial, which keeps its finished rounds; others go on.
    """

    def on_trial_begin(self, state: SimulationState) -> None:
        """Run once before the first round, also after a resume.

        Parameters
        ----------
        state : SimulationState
            The simulation.
        """

    def on_round_end(self, state: SimulationState, result: RoundResult) -> Outcome:
        """Run after every round, including rounds that were rolled back.

        Parameters
        ----------
        state : SimulationState
            The simulation.
        result : RoundResult
            The record and the timings of the round.

        Returns
        -------
        tuple[bool, Mapping[str, float]] or None
            Whether the trial ends with this round, as if it had been the last one (clients that test models
            themselves, ``run.client_test``, have done so before); and numbers by name, which are in the round's record
            as ``measured``, and columns of tables; `fedkeep compare` calls them log.NAME.
        """
        return None

    def on_trial_end(self, state: SimulationState) -> None:
        """Run once at the end, also if the trial was stopped by an exception or Ctrl-C.

        Parameters
        ----------
        state : SimulationState
            The simulation.
        """


class OnRoundEnd(Callback):
    """Calls a function after every round."""

    def __init__(self, function: Callable[[SimulationState, RoundResult], object]) -> None:
        self.function = function

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        self.function(state, result)


class Evaluation(Callback):
    """Adds correct predictions by class to the records of the rounds that ``run.evaluate_every`` names."""

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        _, round = state.settings.run.position(result.record["round"])
        if state.settings.run.is_due(round):
            self.evaluate(state, result)

    def evaluate(self, state: SimulationState, result: RoundResult) -> None:
        """Add what the models predict to the record of a round."""
        began = time.perf_counter()
        if not state.settings.run.client_test:  # with which clients evaluate them
            models = [(which, state.evaluation_model(which)) for which in state.evaluation_models]
            (_, first), *others = [(which, self._evaluate(state, model)) for which, model in models]
            result.record |= first
            if others:
                result.record["evaluation_models"] = dict(others)
        if state.settings.attack.kind == "backdoor":
            result.record["backdoor"] = self._backdoor(state)
        result.timings["evaluate"] = result.timings.get("evaluate", 0.0) + time.perf_counter() - began

    def _evaluate(self, state: SimulationState, model: Weights) -> dict[str, object]:
        """Evaluate a model on the test images of all classes seen so far, with the method's `Algorithm.predict`."""
        predict, test = partial(class_scores, state, model), state.federation.dataset.test
        counts = count_predictions(predict, test, state.context.num_classes, bool(state.settings.run.metric))
        measured = {"scores": counts.scores} if counts.scores else {}
        return {"correct": counts.correct, "test_loss": counts.loss, **measured}

    def _backdoor(self, state: SimulationState) -> float:
        """Return how often the first evaluation model takes an image with a backdoor's trigger for its target."""
        model = state.evaluation_model(state.evaluation_models[0])
        predict = partial(class_scores, state, model)
        return backdoor_success(predict, state.federation.dataset.test, first_new_class(state.federation))


def class_scores(state: SimulationState, model: Weights, images: Tensor) -> Tensor:
    """Return a method's class scores of test images; raise `FedKeepError` for what a user's own method returns."""
    method, classes = state.algorithm, state.context.num_classes
    scores: Tensor = method.predict(state.server, model, images)
    if type(method).predict.__module__.startswith("fedkeep."):
        return scores
    name, expected = f"{type(method).__name__}.predict", [len(images), classes]
    if not (isinstance(scores, Tensor) and scores.is_floating_point() and [*scores.shape] == expected):
        kind = f"a {scores.dtype} tensor of shape {[*scores.shape]}" if isinstance(scores, Tensor) else repr(scores)
        raise ConfigError(f"{name} returned {kind:.80}. Expected scores, a floating-point tensor of shape {expected}.")
    if bool(scores.isnan().any()) and not_finite(model) is None:  # of a model that diverges that is told
        raise RunError(f"{name} returned scores that are not a number, after round {state.finished}.")
    return scores
