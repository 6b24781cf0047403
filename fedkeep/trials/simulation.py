"""One trial in progress: a method with a seed, round after round, whatever carries out the client steps."""

import time
from collections.abc import Sequence
from typing import Any

from fedkeep.aggregation.mean import ema
from fedkeep.data import Federation
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, NoState
from fedkeep.interface.algorithm import state_types
from fedkeep.interface.pytree import changed_in_place, copy_containers, tensor_versions
from fedkeep.rounds.cohort import RoundCohort
from fedkeep.rounds.messages import check_models, check_server
from fedkeep.rounds.reply_step import ReplyStep, named, set_aside
from fedkeep.rounds.reply_store import load
from fedkeep.rounds.round import RoundState, TooFewClients
from fedkeep.rounds.state import RoundResult, Settings, SimulationState
from fedkeep.training.model_runner import Factory
from fedkeep.trials.callbacks import Callback, Evaluation
from fedkeep.trials.reply_steps import reply_steps
from fedkeep.trust.attacks import poison


class ChangedInPlace(ConfigError):
    """A round changed a tensor of the server in place, so that it cannot be undone."""


class Simulation(SimulationState):
    """One method with one seed on one federation; `run_round` carries out the next round.

    ``callbacks``: Called at the end of every round. `fedkeep.trials.trial.run_trial` adds others.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        federation: Federation,
        factory: Factory,
        settings: Settings,
        **networks: Any,
    ) -> None:
        federation = poison(federation, settings.attack, settings.seed)
        super().__init__(algorithm, federation, factory, settings, **networks)
        self.callbacks: Sequence[Callback] = [Evaluation()]
        self.take_steps(())

    def take_steps(self, own: Sequence[ReplyStep]) -> None:
        """Begin with new reply steps, the user's own among them; refuse what cannot be carried out with them."""
        self.steps = reply_steps([named(step) for step in own])
        reasons = [reason for step in self.steps if step.applies(self) and (reason := step.reason_against(self))]
        if reasons:
            raise ConfigError(" ".join(reasons))

    def run_round(self) -> RoundResult:
        """Carry out the next round, and the beginning or the end of a task if it is due.

        After any exception but `ChangedInPlace` the simulation is as it was before the call.
        """
        began = time.perf_counter()
        number = self.finished + 1
        before = self.server.model, self.server.eval_model, copy_containers(self.server.state)
        averages, task = dict(self.averages), self.federation.task
        kept = [copy_containers(step.kept) for step in self.steps]
        for step in self.steps:
            step.begin_round(self, number)
        self.context.timer.reset()
        self.server.logged = {}
        round = RoundState(self, number, self.sample_cohort(number, set_aside(self.steps, self)), self.steps)
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
            shared = tensor_versions(
                (f"server.{name}", getattr(self.server, name)) for name in ("model", "eval_model", "state")
            )
            try:
                self.algorithm.round(self.server, RoundCohort(round, round.cohort))
                check_server(self.algorithm, self.server, type(before[2]))
                round.finish()
            except TooFewClients:
                rolled_back = True
                round.abandon()
                self.server.model, self.server.eval_model, self.server.state, round.client_states = round_start
            if (changed := changed_in_place(shared)) is not None:
                raise ChangedInPlace(
                    f"{self.algorithm.name()}.round changed {changed} in place. So the round could not be undone, and "
                    "averages and clients may have the same tensor: make a new one, such as w - d in the place of "
                    "w -= d, and assign it."
                )
            if round.round == self.settings.run.rounds:
                with round.between_rounds():
                    self.algorithm.end_task(self.server, RoundCohort(round, self.federation.clients))
                    round.finish()
            self.server.model, self.server.eval_model = load(self.server.model), load(self.server.eval_model)
            method = type(self.algorithm)
            ends = [f" or {method.__name__}.end_task"] * (method.end_task is not Algorithm.end_task)
            check_models(self.server, round_start[0], f"{method.__name__}.round{''.join(ends)}")
            self.context.synchronize()
            server_work = self.context.timer.total - round.costs.client_seconds
            server_seconds = time.perf_counter() - started - round.costs.waiting_seconds - server_work
            if not rolled_back:
                self._average(round)
            record = round.record() | {"rolled_back": rolled_back, "log": self.server.logged}
            self.finished = number
        except BaseException:
            self.server.model, self.server.eval_model, self.server.state = before
            self.averages = averages
            for step, before_round in zip(self.steps, kept, strict=True):
                step.kept = before_round
            self.set_task(task)
            self.executor.stop()
            raise
        if self.client_states.type is not NoState:
            self.client_states |= round.client_states
            self.client_states.changed |= set(round.client_states)
        timings = {"round": number, "train": self.context.timer.train, "teachers": self.context.timer.teachers}
        timings["server"] = server_seconds
        timings |= {f"step {name}": seconds for name, seconds in round.queue.step_seconds.items()}
        timings["evaluate"] = round.costs.evaluation_seconds
        result = RoundResult(record, timings)
        for step in round.steps:
            result.releases |= step.releases(round, record)
        for callback in self.callbacks:
            callback.on_round_end(self, result)
        for step in round.steps:
            step.end_round(round, result.record)
        timings["round_seconds"] = time.perf_counter() - began
        return result

    def _begin_task(self, round: RoundState) -> None:
        """Let the method prepare for a task; one that handles no tasks starts with fresh states, from its model."""
        if round.task > 1:
            self.server.eval_model = {}
            self.averages = {which: self.server.expand_head(model) for which, model in self.averages.items()}
            if not self.algorithm.handles_tasks:
                self.server.state = state_types(type(self.algorithm))[0]()
                round.client_states |= {client: self.client_states.type() for client in self.client_states}
        with round.between_rounds():
            self.algorithm.begin_task(self.server, RoundCohort(round, self.federation.clients))
            round.finish()

    def _average(self, round: RoundState) -> None:
        """Add the model of a finished round to the averages that are evaluated."""
        if self.evaluation_models != ("last",):
            self.averages["round"] = round.mean.value() or self.server.model
        if "moving" in self.evaluation_models:
            new = ema(self.averages["moving"], self.averages["round"], self.settings.run.ema_decay)
            self.averages["moving"] = new
