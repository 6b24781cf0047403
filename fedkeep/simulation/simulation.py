"""The embedded engine: server and clients in this process, one client after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fedkeep import seeds
from fedkeep.data import Augmentation, Federation
from fedkeep.errors import ConfigError
from fedkeep.fusion.mean import moved
from fedkeep.interface import Algorithm, NoState, Training
from fedkeep.interface.algorithm import knows_tasks, state_types
from fedkeep.interface.values import copied
from fedkeep.models import Weights
from fedkeep.simulation.cohort import LocalCohort
from fedkeep.simulation.executor import Executor, Here
from fedkeep.simulation.model_averaging import EvaluationModel, round_mean
from fedkeep.simulation.rounds import RoundState, TooFewClients
from fedkeep.simulation.schedule import Schedule
from fedkeep.training.context import ClientContext, LoadGenerator, no_generator
from fedkeep.training.evaluation import Counts, count, tally
from fedkeep.training.model_runner import Factory, ModelRunner, check_batch_size
from fedkeep.training.party import LocalServer

FaultInjector = Callable[[int, str, str], str | None]
"""Decides on demand whether a call fails: (round, client, step) to the reason, or None."""


@dataclass
class RoundResult:
    """What one round left: its record, equal on every machine, and its timings, which are not."""

    record: dict[str, Any]
    timings: dict[str, float]


@dataclass
class Simulation:
    """One method with one seed on one federation; `advance` plays the next round.

    Parameters
    ----------
    algorithm, federation, training, plan, augmentation : what is run. If the federation is of a stream of tasks, it is
        of the first; later on, ``federation`` is that of the task that is played.
    factory : builds the network, with PyTorch's default initial weights and the classes of the first task.
    own : clients whose network is another than the server's, and what builds it; one object for all that share one.
    load_generator : gives a task's frozen generator of images; called often, so it should remember.
    seed : of everything random (see `fedkeep.seeds`).
    device : where networks and data live.
    stack : up to how many clients of a cohort are trained as one stacked model (see `fedkeep.training.vmap_training`).
    lose : for tests, lets calls fail on demand.
    through_codec : for tests, sends every message through the codec instead of passing it by reference.
    """

    algorithm: Algorithm[Any, Any]
    federation: Federation
    factory: Factory
    training: Training = field(default_factory=Training)
    plan: Schedule = field(default_factory=Schedule)
    augmentation: Augmentation = field(default_factory=Augmentation)
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    stack: int = 1
    lose: FaultInjector | None = None
    through_codec: bool = False
    own: Mapping[str, Factory] = field(default_factory=dict)
    load_generator: LoadGenerator = no_generator

    def __post_init__(self) -> None:
        dataset = self.federation.dataset
        self.federation = self.federation.to(self.device)
        rows = self.algorithm.rows_per_class
        networks = ModelRunner(self.factory, self.seed, self.device, rows)
        plain = ClientContext(
            networks,
            dataset.normalise,
            self.augmentation,
            self.training,
            self.seed,
            self.federation.seen[-1],
            dataset.format,
            dataset.label_names,
            self.load_generator,
        )
        self.place = plain.of(networks)
        built = {factory: ModelRunner(factory, self.seed, self.device, rows) for factory in self.own.values()}
        places = {factory: plain.of(networks) for factory, networks in built.items()}
        self.places = [self.place, *places.values()]
        self.own_contexts = {client: places[factory] for client, factory in self.own.items()}
        for place in self.places:
            check_batch_size(context.runner.trained, self.training)
        if self.stack < 1:
            raise ConfigError(f"a stack holds at least one client, not {self.stack}. Set stack=1 for none.")
        server_state, self.client_state = state_types(type(self.algorithm))
        clients = len(self.federation.clients)
        self.server = LocalServer(
            self.place, self.federation.server, server_state(), self.context.runner.initial, clients, self.place_of
        )
        self.here = Here(self.place, self.federation, self.client_state, self.own_contexts)
        self.executor: Executor = self.here  # replaced by a pool of workers, if there is one
        self.states: dict[str, Any] = {}
        self.changed: set[str] = set()  # clients whose state is newer than the last checkpoint
        self.finished = 0  # rounds, over all tasks
        self.graduates: Weights = self.server.model  # the mean of the last round that was not undone
        self.average: Weights = {}  # its moving average, if that is served; empty before the first

    @property
    def rounds(self) -> int:
        """How many rounds the run has, over all tasks."""
        return self.plan.rounds * self.federation.tasks

    def enter(self, task: int) -> None:
        """Go to a task, counted from 1: who holds what, and networks that know its classes. No model changes."""
        if task != self.federation.task:
            self.federation = self.here.federation = self.federation.at(task)
            for place in self.places:
                place.enter(self.federation.seen)

    def context_of(self, client: str) -> ClientContext:
        """Return where a client works: with the server's network, or with one of its own."""
        return self.own_contexts.get(client, self.place)

    def advance(self) -> RoundResult:
        """Play the next round and return its record. An exception leaves everything as after the last round."""
        began = time.perf_counter()
        number = self.finished + 1
        before = self.server.model, self.server.served, copied(self.server.state)
        averages, task = (self.graduates, self.average), self.federation.task
        self.context.clock.restart()
        self.server.logged = {}
        flight = RoundState(self, number, self.draw_cohort(number))
        try:
            self.enter(flight.task)
            self.executor.begin(number, flight.cohort)
            playing = time.perf_counter()
            undone = self._play(flight)
            self.context.catch_up()
            own_work = self.context.clock.worked - flight.clients_worked
            serving = time.perf_counter() - playing - flight.asking - own_work
            flight.look_at_own_models()
            self.finished = number
        except BaseException:
            self.server.model, self.server.served, self.server.state = before
            self.graduates, self.average = averages
            self.enter(task)
            self.executor.stop()
            raise
        if self.client_state is not NoState:
            self.states |= flight.states
            self.changed |= set(flight.states)
        record = flight.record() | {"undone": undone, "log": self.server.logged}
        timings = {"round": number, "train": self.context.clock.train, "teachers": self.context.clock.teachers}
        timings["server"] = serving
        timings |= {f"step {name}": seconds for name, seconds in flight.steps.items()}
        evaluating = time.perf_counter()
        if not undone:
            self._average(flight)
        if self.plan.is_due(flight.round):
            first, *others = ({"correct": c.correct, "test_loss": c.loss} for c in map(self._count, self.plan.served))
            record |= first
            if others:
                record["served"] = dict(zip(self.plan.served[1:], others, strict=True))
        timings["evaluate"] = time.perf_counter() - evaluating + flight.evaluating
        timings["round_seconds"] = time.perf_counter() - began
        return RoundResult(record, timings)

    def _play(self, flight: RoundState) -> bool:
        """Play a round, and the task's beginning and end where they fall; return whether the round was undone."""
        self.server.begin(flight.task, flight.round)
        if flight.round == 1:
            self._begin_task(flight)
        # What a task's beginning left stands even if its first round does not: it is done once.
        kept = self.server.model, self.server.served, copied(self.server.state), dict(flight.states)
        try:
            self.algorithm.round(self.server, LocalCohort(flight, flight.cohort))
            flight.settle()
            undone = False
        except TooFewClients:
            undone = True
            flight.abandon()
            self.server.model, self.server.served, self.server.state, flight.states = kept
        if flight.round == self.plan.rounds:
            with flight.with_everyone():
                self.algorithm.end_task(self.server, LocalCohort(flight, self.federation.clients))
                flight.settle()
        return undone

    def _begin_task(self, flight: RoundState) -> None:
        """Let the method prepare for a task; one that knows nothing of tasks begins afresh, from its model."""
        if flight.task > 1:
            self.server.served = {}
            self.graduates, self.average = self.server.grown(self.graduates), self.server.grown(self.average)
            if not knows_tasks(type(self.algorithm)):
                self.server.state = state_types(type(self.algorithm))[0]()
                flight.states |= {client: self.client_state() for client in self.states}
        with flight.with_everyone():
            self.algorithm.begin_task(self.server, LocalCohort(flight, self.federation.clients))
            flight.settle()

    def _average(self, flight: RoundState) -> None:
        """Take a finished round into the averages that are served."""
        if set(self.plan.served) != {"last"}:
            fits = flight.in_order()
            self.graduates = round_mean(self.server.model, fits, self.algorithm.schedule == "sequential")
        if "moving" in self.plan.served:
            self.average = moved(self.average, self.graduates, self.plan.decay)

    def serves(self, what: EvaluationModel) -> Weights:
        """Return a model that is served; the initial one before the first round."""
        if what == "moving":
            return self.average or self.server.model
        return self.graduates if what == "round" else self.server.served or self.server.model

    def _count(self, what: EvaluationModel) -> Counts:
        """Count a served model's hits on the test images of all classes seen so far, as the method predicts."""
        model = self.evaluation_model(what)
        return tally(
            lambda images: self.algorithm.predict(self.server, model, images),
            self.federation.dataset.test,
            self.context.classes,
        )

    def draw_cohort(self, round: int) -> list[str]:
        """Return the ordered cohort of a round, counted over all tasks: the same for every method with this seed."""
        population, wanted = len(self.federation.clients), min(self.plan.cohort, len(self.federation.clients))
        generator = seeds.generator(self.seed, "cohort", round=round)
        if population <= 100_000:
            drawn = torch.randperm(population, generator=generator)[:wanted].tolist()
        else:
            # A permutation of millions to draw a handful: draw with replacement and keep first occurrences instead.
            first: dict[int, None] = {}
            while len(first) < wanted:
                first |= dict.fromkeys(torch.randint(population, (2 * wanted,), generator=generator).tolist())
            drawn = list(first)[:wanted]
        return [self.federation.clients[i] for i in drawn]

    def evaluate(self, model: Weights, client: str = "") -> Counts:
        """Count a model's hits on the test images of all classes seen so far; a client's model, if it is named."""
        return count(self.context_of(client), model, self.federation.dataset.test)

    def evaluate_on(self, client: str, model: Weights, owner: str) -> list[int]:
        """Return [correct, total] of an owner's model on a client's own examples, without augmentation."""
        data = self.federation.data(client)
        if not len(data["label"]):
            return [0, 0]
        counts = count(self.context_of(owner), model, data)
        return [sum(counts.correct), sum(counts.total)]
