"""Where a simulation stands between two rounds: all that a round starts from and that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fedkeep._utils import seeds
from fedkeep.data import Augmentation, Federation
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, Training
from fedkeep.interface.algorithm import state_types
from fedkeep.models import Weights
from fedkeep.simulation.executor import Executor, SerialExecutor
from fedkeep.simulation.model_averaging import EvaluationModel
from fedkeep.simulation.schedule import Schedule
from fedkeep.training.context import ClientContext, LoadGenerator, no_generator
from fedkeep.training.evaluation import Counts, count_correct
from fedkeep.training.model_runner import Factory, ModelRunner, check_batch_size
from fedkeep.training.party import LocalServer

FaultInjector = Callable[[int, str, str], str | None]
"""Lets client steps fail on demand: maps (round, client, step) to the reason, or None."""

MOST_SHUFFLED = 100_000
"""Clients up to which a cohort is drawn from a permutation of all."""


@dataclass
class RoundResult:
    """What a round left.

    Attributes
    ----------
    record : dict
        Equal on every machine: cohort, lost clients, loss, bytes, and in evaluated rounds correct predictions by class.
    timings : dict[str, float]
        Seconds, which are not.
    """

    record: dict[str, Any]
    timings: dict[str, float]


@dataclass
class SimulationState:
    """One method with one seed on one federation, between two rounds.

    Parameters
    ----------
    algorithm : Algorithm
        The method.
    federation : Federation
        Who holds what. If it is of a stream of tasks, it is the first's; later on that of the current task.
    factory : Callable[[], nn.Module]
        Builds the network, with PyTorch's default initial weights and the classes of the first task.
    training, schedule, augmentation
        Settings.
    seed : int
        Of everything random (see `fedkeep._utils.seeds`).
    device : torch.device
        Where networks and data live.
    stack : int
        Up to how many clients of a cohort are trained as one stacked model (see `fedkeep.training.vmap_training`).
    fault_injector : FaultInjector, optional
        For tests: lets client steps fail on demand.
    through_codec : bool
        For tests: sends every message through the codec instead of passing it by reference.
    client_factories : Mapping[str, Callable[[], nn.Module]]
        Build the networks of clients whose network is another; one object for all that share one.
    load_generator : LoadGenerator
        Returns a task's frozen generator of images; called often, so it should remember.

    Attributes
    ----------
    server : LocalServer
        The server's half: its model and state.
    client_states : dict[str, object]
        What clients keep.
    changed : set[str]
        Clients whose state is newer than the last checkpoint.
    finished : int
        Rounds that are finished, over all tasks.
    executor : Executor
        Carries out client steps: `serial`, in this process, unless it was replaced.
    """

    algorithm: Algorithm[Any, Any]
    federation: Federation
    factory: Factory
    training: Training = field(default_factory=Training)
    schedule: Schedule = field(default_factory=Schedule)
    augmentation: Augmentation = field(default_factory=Augmentation)
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    stack: int = 1
    fault_injector: FaultInjector | None = None
    through_codec: bool = False
    client_factories: Mapping[str, Factory] = field(default_factory=dict)
    load_generator: LoadGenerator = no_generator

    def __post_init__(self) -> None:
        if self.stack < 1:
            raise ConfigError(f"a stack holds at least one client, not {self.stack}. Set stack=1 for none.")
        dataset = self.federation.dataset
        self.federation = self.federation.to(self.device)
        rows = self.algorithm.rows_per_class
        runner = ModelRunner(self.factory, self.seed, self.device, rows)
        base = ClientContext(
            runner,
            dataset.normalise,
            self.augmentation,
            self.training,
            self.seed,
            self.federation.cumulative_classes[-1],
            dataset.image_format,
            dataset.label_names,
            self.load_generator,
        )
        self.context = base.with_runner(runner)
        contexts = {
            factory: base.with_runner(ModelRunner(factory, self.seed, self.device, rows))
            for factory in dict.fromkeys(self.client_factories.values())
        }
        self.contexts = [self.context, *contexts.values()]
        self.own_contexts = {client: contexts[factory] for client, factory in self.client_factories.items()}
        for context in self.contexts:
            check_batch_size(context.runner.train_network, self.training)
        server_state, self.client_state = state_types(type(self.algorithm))
        self.server = LocalServer(
            self.context,
            self.federation.server,
            server_state(),
            self.context.runner.initial,
            len(self.federation.clients),
        )
        self.serial = SerialExecutor(self.context, self.federation, self.client_state, self.own_contexts)
        self.executor: Executor = self.serial
        self.client_states: dict[str, Any] = {}
        self.changed: set[str] = set()
        self.finished = 0
        self.round_average: Weights = self.server.model  # of the last round that was not undone
        self.moving_average: Weights = {}  # of the rounds' averages; empty before the first

    @property
    def rounds(self) -> int:
        """How many rounds the run has, over all tasks."""
        return self.schedule.rounds * self.federation.num_tasks

    def set_task(self, task: int) -> None:
        """Go to a task, counted from 1: who holds what, and networks that know its classes. No model changes."""
        if task != self.federation.task:
            self.federation = self.serial.federation = self.federation.for_task(task)
            for context in self.contexts:
                context.set_task(self.federation.cumulative_classes)

    def context_of(self, client: str) -> ClientContext:
        """Return a client's context: with the server's network, or with its own."""
        return self.own_contexts.get(client, self.context)

    def draw_cohort(self, round: int) -> list[str]:
        """Return the ordered cohort of a round, counted over all tasks: the same for every method with this seed."""
        population = len(self.federation.clients)
        wanted = min(self.schedule.cohort, population)
        generator = seeds.generator(self.seed, "cohort", round=round)
        if population <= MOST_SHUFFLED:
            drawn = torch.randperm(population, generator=generator)[:wanted].tolist()
        else:
            # A permutation of millions to draw a handful: draw with replacement and keep first occurrences instead.
            first: dict[int, None] = {}
            while len(first) < wanted:
                first |= dict.fromkeys(torch.randint(population, (2 * wanted,), generator=generator).tolist())
            drawn = list(first)[:wanted]
        return [self.federation.clients[i] for i in drawn]

    def evaluation_model(self, which: EvaluationModel) -> Weights:
        """Return a model that is evaluated; the initial one before the first round."""
        if which == "moving":
            return self.moving_average or self.server.model
        return self.round_average if which == "round" else self.server.eval_model or self.server.model

    def evaluate(self, model: Weights, client: str = "") -> Counts:
        """Count a model's correct predictions on the test images of all classes seen so far.

        Parameters
        ----------
        model : Weights
            The server's, or a client's.
        client : str
            Whose model it is; empty for the server's.
        """
        return count_correct(self.context_of(client), model, self.federation.dataset.test)

    def evaluate_on(self, client: str, model: Weights, owner: str) -> list[int]:
        """Return [correct, total] of an owner's model on a client's examples, without augmentation."""
        data = self.federation.data(client)
        if not len(data["label"]):
            return [0, 0]
        counts = count_correct(self.context_of(owner), model, data)
        return [sum(counts.correct), sum(counts.total)]
