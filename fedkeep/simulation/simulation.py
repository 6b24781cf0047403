"""One trial in progress: a method with a seed, round after round, whatever carries out the client steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from fedkeep.aggregation.mean import ema
from fedkeep.interface import NoState
from fedkeep.interface.algorithm import handles_tasks, state_types
from fedkeep.interface.pytree import copy_containers
from fedkeep.simulation.callbacks import Callback, Evaluation
from fedkeep.simulation.cohort import RoundCohort
from fedkeep.simulation.reply_store import load
from fedkeep.simulation.rounds import RoundState, TooFewClients
from fedkeep.simulation.state import RoundResult, SimulationState
from fedkeep.simulation.step_checks import check_server


@dataclass
class Simulation(SimulationState):
    """One method with one seed on one federation; `run_round` carries out the next round.

    ``callbacks``: Called at the end of every round; by default `Evaluation`. `fedkeep.simulation.trial.run_trial` adds
        others.
    """

    callbacks: Sequence[Callback] = field(default_factory=lambda: [Evaluation()])

    def run_round(self) -> RoundResult:
        """Carry out the next round, and the beginning or the end of a task if it is due.

        If an exception is raised, the simulation is as it was after the round before.
        """
        began = time.perf_counter()
        number = self.finished + 1
        before = self.server.model, self.server.eval_model, copy_containers(self.server.state)
        averages, task, history = (self.round_average, self.moving_average), self.federation.task, self.history
        if number > 1 and self.run_settings.position(number)[1] == 1:
            self.history = copy(history)
            self.history.begin_task()
        self.context.timer.reset()
        self.server.logged = {}
        round = RoundState(self, number, self.sample_cohort(number))
        rolled_back = False
        try:
            self.set_task(round.task)
            self.executor.begin_round(number, round.cohort)
            started = time.perf_counter()
            self.server.begin_round(round.task, round.round)
            if round.round == 1:
                self._begin_task(round)
            # `begin_task` is carried out once: its effects stay even if the task's first round is rolled back.
            round_start = (
                self.server.model,
                self.server.eval_model,
                copy_containers(self.server.state),
                dict(round.client_states),
            )
            try:
                self.algorithm.round(self.server, RoundCohort(round, round.cohort))
                check_server(self.algorithm, self.server, type(before[2]))
                round.finish()
            except TooFewClients:
                rolled_back = True
                round.abandon()
                self.server.model, self.server.eval_model, self.server.state, round.client_states = round_start
            if round.round == self.run_settings.rounds:
                with round.between_rounds():
                    self.algorithm.end_task(self.server, RoundCohort(round, self.federation.clients))
                    round.finish()
            self.server.model, self.server.eval_model = load(self.server.model), load(self.server.eval_model)
            self.context.synchronize()
            server_work = self.context.timer.total - round.client_seconds
            server_seconds = time.perf_counter() - started - round.waiting_seconds - server_work
            round.evaluate_own_models()
            self.finished = number
        except BaseException:
            self.server.model, self.server.eval_model, self.server.state = before
            self.round_average, self.moving_average = averages
            self.history = history
            self.set_task(task)
            self.executor.stop()
            raise
        if self.client_state_type is not NoState:
            self.client_states |= round.client_states
            self.changed |= set(round.client_states)
        if not rolled_back:
            self._average(round)
        timings = {"round": number, "train": self.context.timer.train, "teachers": self.context.timer.teachers}
        timings["server"] = server_seconds
        timings |= {f"step {name}": seconds for name, seconds in round.step_seconds.items()}
        timings["evaluate"] = round.evaluation_seconds
        result = RoundResult(round.record() | {"rolled_back": rolled_back, "log": self.server.logged}, timings)
        for callback in self.callbacks:
            callback.on_round_end(self, result)
        self._keep_history(round, result.record)
        timings["round_seconds"] = time.perf_counter() - began
        return result

    def _keep_history(self, round: RoundState, record: Mapping[str, Any]) -> None:
        """Keep what the round showed of the clients' replies and of the model."""
        if round.round == 1 and round.task > 1:
            self.history.forget_measurements()
        updates = {
            client: [
                (update.parameter_change, update.sent_fingerprint, update.returned_fingerprint) for update in listed
            ]
            for client, listed in round.updates.items()
        }
        similarities = [update.similarity for listed in round.updates.values() for update in listed]
        self.history.end_round(
            round.answered,
            round.refused,
            updates,
            label_counts=round.loss_checker.label_counts,
            loss_falls=round.loss_checker.loss_falls,
            logit_excesses=round.loss_checker.logit_excesses,
            similarities=similarities,
            losses=round.loss_checker.losses,
            explained=round.loss_checker.explained,
            backoffs=dict.fromkeys(round.loss_checker.refused, self.defense.backoff),
        )
        if "correct" in record:
            accuracy = sum(record["correct"]) / max(len(self.federation.dataset.test["label"]), 1)
            self.history.add_accuracy(accuracy, 1 / self.context.num_classes, round.number)

    def _begin_task(self, round: RoundState) -> None:
        """Let the method prepare for a task; one that handles no tasks starts with fresh states, from its model."""
        if round.task > 1:
            self.server.eval_model = {}
            self.round_average = self.server.expand_head(self.round_average)
            self.moving_average = self.server.expand_head(self.moving_average)
            if not handles_tasks(type(self.algorithm)):
                self.server.state = state_types(type(self.algorithm))[0]()
                round.client_states |= {client: self.client_state_type() for client in self.client_states}
        with round.between_rounds():
            self.algorithm.begin_task(self.server, RoundCohort(round, self.federation.clients))
            round.finish()

    def _average(self, round: RoundState) -> None:
        """Add the model of a finished round to the averages that are evaluated."""
        if self.evaluation_models != ("last",):
            self.round_average = round.mean.value() or self.server.model
        if "moving" in self.evaluation_models:
            self.moving_average = ema(self.moving_average, self.round_average, self.run_settings.ema_decay)
