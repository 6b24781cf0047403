"""The state of a simulation between two rounds: all that a round starts from and that a checkpoint contains."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from types import MappingProxyType
from typing import Any

import torch

from fedkeep._utils import seeds
from fedkeep.data import Augmentation, Federation
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, Training
from fedkeep.interface.algorithm import BUILTIN_STEPS, state_types
from fedkeep.interface.privacy import Privacy
from fedkeep.models import Weights
from fedkeep.models.weights import WeightsFile
from fedkeep.rounds.executor import Executor, SerialExecutor
from fedkeep.rounds.run_settings import Attack, Defense, EvaluationModel, RunSettings, distinct_models
from fedkeep.training.client_test import client_test
from fedkeep.training.context import ClientContext, LoadGenerator, no_generator
from fedkeep.training.evaluation import Counts, ModelCheck, count_correct
from fedkeep.training.model_runner import Factory, ModelRunner, check_batch_size
from fedkeep.training.party import LocalServer

FaultInjector = Callable[[int, str, str], str | None]
"""Lets client steps fail on demand: maps (round, client, step) to the reason of the failure, or to None."""

MAX_STEP_FACTOR = 10
"""How many times the optimizer steps that the recipe's epochs and batch size need a client may have taken."""
MAX_PERMUTED = 100_000
"""Largest number of clients for which a cohort is sampled by permuting all of them."""


@dataclass
class RoundResult:
    """The result of a round.

    ``record``: The same on every machine: cohort, lost clients, loss, bytes, and in evaluated rounds correct
        predictions by class.
    ``timings``: Seconds by part of the round, which differ between machines.
    ``releases``: What left with noise, for a ledger that no resume cuts back (see `ReplyStep.releases`).
    """

    record: dict[str, Any]
    timings: dict[str, float]
    releases: dict[str, Any] = field(default_factory=dict)


@dataclass
class Settings:
    """Options of a simulation.

    ``device``: Where models and data are.
    ``stack``: Largest number of clients that are trained as one stacked model (see `fedkeep.training.vmap_training`).
    ``fault_injector``: For tests: lets client steps fail on demand.
    ``through_codec``: For tests: encodes and decodes every message instead of passing it by reference.
    """

    training: Training = field(default_factory=Training)
    run: RunSettings = field(default_factory=RunSettings)
    augmentation: Augmentation = field(default_factory=Augmentation)
    defense: Defense = field(default_factory=Defense)
    privacy: Privacy = field(default_factory=Privacy)
    attack: Attack = field(default_factory=Attack)
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    stack: int = 1
    fault_injector: FaultInjector | None = None
    through_codec: bool = False

    def __post_init__(self) -> None:
        if self.stack < 1:
            raise ConfigError(f"a stack contains at least one client, not {self.stack}. Set stack=1 for none.")


class ClientStates(dict[str, Any]):
    """The clients' states by client id.

    ``type``: The dataclass of what a client keeps between rounds.
    ``changed``: Clients whose state has changed since the last checkpoint.
    """

    def __init__(self, type: type[Any]) -> None:
        super().__init__()
        self.type = type
        self.changed: set[str] = set()

    def put(self, states: Mapping[str, Any]) -> None:
        """Take the states of a checkpoint in place of all."""
        self.clear()
        self.update(states)
        self.changed.clear()


class SimulationState:
    """One method with one seed on one federation, between two rounds.

    ``federation``: The clients' data; with a stream of tasks that of the first task, and later that of the current
        task.
    ``server``: The server, with its model and state.
    ``client_states``: The clients' states.
    ``finished``: Number of finished rounds, over all tasks.
    ``ended``: Whether a callback has ended the trial before its last round.
    ``serial``: Carries out client steps in this process; its contexts hold the networks.
    ``executor``: Carries out client steps; `serial` unless it is replaced.
    ``weights_file``: Where models of a round lie for which memory has no room.
    ``averages``: The ``round`` model of the last round that was not rolled back, and the moving average of these
        models, empty before the first (see `EvaluationModel`).
    ``steps``: The reply steps (see `fedkeep.rounds.reply_step`).
    """

    steps: Sequence[Any] = ()
    ended = False

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        federation: Federation,
        factory: Factory,
        settings: Settings,
        *,
        load_generator: LoadGenerator = no_generator,
        client_factories: Mapping[str, Factory] = MappingProxyType({}),
        initial: Weights | None = None,
    ) -> None:
        """Begin a simulation.

        ``factory``: Builds the network, with PyTorch's default initial weights and the classes of the first task.
        ``load_generator``: Returns the frozen image generator. It is called often, so it should cache.
        ``client_factories``: Build the networks of clients with another architecture, by client id; clients that share
            an architecture share the factory object.
        ``initial``: The initial model of the server's network; by default what the factory builds.
        """
        self.algorithm, self.settings = algorithm, settings
        self.federation = federation.to(settings.device)
        dataset, seed, rows = federation.dataset, settings.seed, algorithm.rows_per_class
        build = partial(ModelRunner, rows_per_class=rows, batch_size=settings.training.batch_size)
        runner = build(factory, seed, settings.device, initial=initial)
        base = ClientContext(
            runner,
            dataset.normalise,
            settings.augmentation,
            settings.training,
            seed,
            self.federation.cumulative_classes,
            dataset.image_format,
            dataset.label_names,
            load_generator,
            settings.run.rounds,
            privacy=settings.privacy,
        )
        contexts = {
            own: base.with_runner(build(own, seed, settings.device)) for own in dict.fromkeys(client_factories.values())
        }
        own_contexts = {client: contexts[own] for client, own in client_factories.items()}
        server_state, client_state = state_types(type(algorithm))
        self.serial = SerialExecutor(base.with_runner(runner), self.federation, client_state, own_contexts)
        self.executor: Executor = self.serial
        for context in self.contexts:
            check_batch_size(context.runner.train_network, settings.training.batch_size)
        defense, data = settings.defense, self.federation.server_data
        checks = defense.loss_check == "server" and "label" in data  # a site has none of the server's examples
        check = ModelCheck(self.context, data, defense.loss_examples) if checks else None
        clients = len(self.federation.clients)
        self.server = LocalServer(self.context, data, server_state(), runner.initial, clients, check)
        self.client_states = ClientStates(client_state)
        self.finished = 0
        self.weights_file = WeightsFile()
        self.averages: dict[EvaluationModel, Weights] = {"round": self.server.model, "moving": {}}

    @property
    def context(self) -> ClientContext:
        """What the server and the clients with its network share."""
        return self.serial.context

    @property
    def own_contexts(self) -> Mapping[str, ClientContext]:
        """The contexts of clients with networks of their own."""
        return self.serial.own_contexts

    @property
    def contexts(self) -> list[ClientContext]:
        """All contexts, each once."""
        return list({id(context): context for context in (self.context, *self.own_contexts.values())}.values())

    @property
    def evaluation_models(self) -> tuple[EvaluationModel, ...]:
        """The models that are evaluated, each once."""
        return distinct_models(self.settings.run.evaluation_models, self.algorithm)

    @property
    def averages_local_models(self) -> bool:
        """Whether the mean of the models that a round's clients returned is wanted (see `EvaluationModel`)."""
        return self.evaluation_models != ("last",) and self.algorithm.sequential

    @property
    def rounds(self) -> int:
        """Number of rounds of the run, over all tasks."""
        return self.settings.run.rounds * self.federation.num_tasks

    def set_task(self, task: int) -> None:
        """Go to a task: its data, and networks with rows for its classes. No model changes."""
        if task != self.federation.task:
            self.federation = self.serial.federation = self.federation.for_task(task)
            for context in self.contexts:
                context.set_task(self.federation.cumulative_classes)

    def context_of(self, client: str) -> ClientContext:
        """Return the context with a client's network.

        ``client``: The client's id; any other text for the server.
        """
        return self.own_contexts.get(client, self.context)

    def sample_cohort(self, round: int, aside: Collection[str] = ()) -> list[str]:
        """Return the clients of a round, in order, which are the same for every method with this seed.

        Clients that are set aside are not drawn, so that a cohort stays as large as the recipe says. The round is
        counted over the whole run.
        """
        clients = self.federation.clients
        population = len(clients)
        if len(aside) == population:
            aside = ()
        size = min(self.settings.run.cohort_size, population - len(aside))
        rng = seeds.rng(self.settings.seed, "cohort", round=round)
        if population <= MAX_PERMUTED:
            order = [clients[i] for i in torch.randperm(population, generator=rng).tolist()[: size + len(aside)]]
        else:
            # Permuting millions to choose a few is slow: sample with replacement and keep first occurrences instead.
            first: dict[str, None] = {}
            while len(first) < size + len(aside):
                drawn = torch.randint(population, (2 * size,), generator=rng).tolist()
                first |= dict.fromkeys(clients[i] for i in drawn)
            order = list(first)
        return [client for client in order if client not in aside][:size]

    def trainable_examples(self, client: str) -> int:
        """Return on how many examples a client can train at most in this task."""
        algorithm, federation = self.algorithm, self.federation
        held = federation.total_examples(client) if algorithm.keeps_examples else federation.num_examples(client)
        return held + algorithm.generated_per_class * self.context.num_classes

    def most_steps(self, client: str) -> int:
        """Return how many optimizer steps a client's training has at most."""
        batches = ceil(self.trainable_examples(client) / self.settings.training.batch_size)
        return MAX_STEP_FACTOR * self.settings.training.epochs * max(batches, 1)

    @property
    def builtin_steps(self) -> dict[str, Callable[..., Any]]:
        """The steps by name that clients are asked for every method, as the recipe says."""
        checks = BUILTIN_STEPS if self.settings.defense.loss_check != "off" else {}
        return {**checks, **({"client_test": client_test} if self.settings.run.client_test else {})}

    def evaluation_model(self, which: EvaluationModel) -> Weights:
        """Return a model to evaluate.

        ``which``: Which one (see `EvaluationModel`).
        Returns: The model; before the first round the initial one.
        """
        return (self.server.eval_model if which == "last" else self.averages[which]) or self.server.model

    def evaluate(self, model: Weights, client: str = "") -> Counts:
        """Count a model's correct predictions on the test images of all classes seen so far.

        ``client``: The client whose network it belongs to; empty for the server's.
        """
        return count_correct(self.context_of(client), model, self.federation.dataset.test)

    def evaluate_on(self, client: str, model: Weights, owner: str) -> list[int]:
        """Evaluate a model on a client's examples, without augmentation.

        ``owner``: The client whose network the model belongs to.
        Returns: Number of correct predictions, and number of examples.
        """
        data = self.federation.data(client)
        if not len(data["label"]):
            return [0, 0]
        counts = count_correct(self.context_of(owner), model, data)
        return [sum(counts.correct), sum(counts.total)]
