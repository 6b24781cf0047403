"""An experiment: a recipe with its federations, networks and machine, which are prepared once; and its trials.

Trials and partitions are described for reports, and for checks when a trial is resumed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedkeep._utils.digests import Identity
from fedkeep.data import Federation
from fedkeep.data.columns import columns_to_json
from fedkeep.data.partition import ByColumn
from fedkeep.data.schema import CLIENT
from fedkeep.errors import ConfigError, collect, refuse
from fedkeep.experiment import build, provenance
from fedkeep.experiment.initial_model import InitialModel, initial_model
from fedkeep.experiment.recipe import (
    Method,
    Recipe,
    check_robust_aggregation,
    client_architectures,
    describe_extractor,
    pretrained_models,
)
from fedkeep.experiment.runtime import Machine
from fedkeep.interface import Algorithm
from fedkeep.interface.privacy import Privacy
from fedkeep.models import Architecture
from fedkeep.models.custom import describe_network
from fedkeep.models.heads import check_growing
from fedkeep.models.weights import hash_weights, tensor_hash
from fedkeep.options import as_table
from fedkeep.rounds.reply_step import ReplyStep
from fedkeep.rounds.run_settings import Defense, distinct_models
from fedkeep.rounds.state import SimulationState
from fedkeep.tracking import check_packages
from fedkeep.training.model_runner import check_batch_size, has_batch_norm
from fedkeep.training.per_example import MIXES_EXAMPLES
from fedkeep.trials.simulation import Simulation
from fedkeep.trials.trial import MANIFEST

log = logging.getLogger(__name__)

MAX_CACHED_SEEDS = 3
"""The most seeds whose federations are cached: each may hold its own copy of the images."""

MAX_LISTED_CLIENTS = 100_000
"""The most clients whose examples by class are recorded; for a million it would be 30 MB in every trial."""


@dataclass
class Experiment:
    """A recipe on a machine. The data are prepared once for each seed, and all methods share them.

    ``machine``: Device, processes and folders.
    """

    recipe: Recipe
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        check_robust_aggregation(self.recipe)
        self._federations: dict[int, Federation] = {}
        self._initial_models: dict[int, InitialModel | None] = {}

    def federation(self, seed: int) -> Federation:
        """Return the federation of a seed.

        Returns: Which client holds which examples.
        """
        if seed not in self._federations:
            while len(self._federations) >= MAX_CACHED_SEEDS:
                del self._federations[next(iter(self._federations))]
            self._federations[seed] = build.build_federation(self.recipe, seed, self.machine.data_dir)
        return self._federations[seed]

    def initial_model(self, seed: int) -> InitialModel | None:
        """Return the model from which a seed's trials begin, if the recipe gives one; it may have to be trained."""
        if seed not in self._initial_models:
            device = build.check_device(self.machine.device)
            found = initial_model(self.recipe, seed, self.federation(seed), device, self.machine.data_dir)
            self._initial_models[seed] = found
        return self._initial_models[seed]

    def release(self, seed: int) -> None:
        """Remove a seed's federation from the cache, once all its trials are finished."""
        self._federations.pop(seed, None)
        self._initial_models.pop(seed, None)

    def check(self, steps: Sequence[ReplyStep] = ()) -> None:
        """Check the whole experiment before any training.

        ``steps``: Reply steps of the user's own.
        """
        recipe, data_dir = self.recipe, self.machine.data_dir
        build.check_device(self.machine.device)
        check_packages(recipe.log)
        for seed in reversed(recipe.seeds):  # the first seed, with which the run begins, is then still cached
            federation = self.federation(seed)
            build.check_federation(recipe, federation, data_dir)
        if missing := build.untrained_classes(federation):
            named = ", ".join(map(repr, missing[:5])) + ", ..." * (len(missing) > 5)
            log.warning("No client has an example of %s, and the test set has. No method can learn it.", named)
        names = build.class_names(federation)
        for method in recipe.methods:
            method.algorithm.check_classes(names)
            if idle := _idle_parts(method.algorithm, len(names), federation.num_tasks, recipe):
                log.warning("A part of %s does nothing here: %s.", method.label, idle)
        tasks = federation.stream.tasks[1:] if federation.stream else ()
        if single := [task.number for task in tasks if task.num_classes - task.num_old_classes == 1]:
            log.warning(
                "%s has a single new class. Where labels compete among a task's new classes only, as in most "
                "methods as they come, nothing is learned there: its loss is 0. Give tasks two classes or more, or let "
                "labels compete among all classes (ce_classes=all, or head=joint, where a method has one of these).",
                f"Task {single[0]}" if len(single) == 1 else f"Each of the tasks {', '.join(map(str, single))}",
            )
        own = client_architectures(recipe.client_models, federation.clients)
        normalised = set()
        for model in {recipe.model, *own.values()}:
            network = build.check_network(model, federation, data_dir)
            if tasks:
                check_growing(network, federation.cumulative_classes[0], model.name)
            for method in recipe.methods:
                option = "training.batch_size" + f" of {method.label}" * ("batch_size" in method.training)
                check_batch_size(network, recipe.training_of(method).batch_size, option)
            if has_batch_norm(network):
                normalised.add(model)
                if recipe.privacy.noise_multiplier:
                    raise ConfigError(f"privacy.noise_multiplier: {MIXES_EXAMPLES}.")
            if recipe.pretraining.passes:
                check_batch_size(network, recipe.pretraining.batch_size, "model.pretraining.batch_size")
        problems: list[str] = []
        try:
            copies = copy.deepcopy(steps)
        except Exception as error:  # of the user's code
            named = ", ".join(type(step).__name__ for step in steps)
            raise ConfigError(f"each trial has copies of {named}, which cannot be made: {error}") from error
        restricting = recipe.run.client_test or steps or (recipe.privacy, recipe.defense) != (Privacy(), Defense())
        simulation = None
        for method in recipe.methods if restricting else ():  # not every method can be carried out with them
            with collect(problems):
                if simulation is None:
                    simulation = build.build_simulation(recipe, method, seed, federation, self.machine.device, data_dir)
                simulation.algorithm = method.algorithm
                simulation.take_steps(copies)
        refuse(problems)
        lone = [federation.clients[one] for one in (federation.partition.sizes == 1).nonzero().flatten().tolist()]
        if alone := sum(own.get(client, recipe.model) in normalised for client in lone):
            log.warning(
                "%d of %d clients have a single example%s. Batch norm cannot learn from one, so they never train.",
                alone,
                len(federation.clients),
                " of the first task" * bool(tasks),
            )
        if recipe.weights:
            self.initial_model(recipe.seeds[0])

    def describe_network(self, model: Architecture) -> dict[str, Any]:
        """Describe a user's network, so that a resumed run notices another one.

        ``model``: The server's, or that of clients.

        Returns: Its digest, and shape and number of classes for which it was built; empty for FedKeep's architectures.
        """
        federation = self.federation(self.recipe.seeds[0])
        return describe_network(model, federation.dataset.shape, federation.cumulative_classes[0])

    def simulation(self, method: Method, seed: int) -> Simulation:
        """Return the simulation of a trial, before its first round."""
        machine, federation = self.machine, self.federation(seed)
        begun = self.initial_model(seed)
        initial = None if begun is None else begun.weights
        return build.build_simulation(self.recipe, method, seed, federation, machine.device, machine.data_dir, initial)

    def describe(self, method: Method, seed: int) -> dict[str, Any]:
        """Describe a trial for reports (see `describe_trial`).

        Returns: The description, which JSON can represent.
        """
        initial = self.initial_model(seed)
        return describe_trial(self.recipe, method, seed, self.federation(seed), self.machine.data_dir, initial)

    def describe_partition(self, seed: int) -> dict[str, Any]:
        """Describe a seed's partition for reports (see `describe_partition`)."""
        return describe_partition(self.federation(seed), local_models=self.recipe.run.evaluate_local_models)

    def all_trials(self, folder: Path, prefix: str = "") -> list[Trial]:
        """Return all trials of a run folder, seed by seed; ``--trial`` counts them in this order.

        ``prefix``: What the trials' names in progress reports begin with.
        """
        return [
            Trial(self, folder, method, seed, f"{prefix}{provenance.trial_name(method, seed)}")
            for seed in self.recipe.seeds
            for method in self.recipe.methods
        ]

    def trials(self, folder: Path, only: Sequence[tuple[str, int]] | None = None, prefix: str = "") -> list[Trial]:
        """Return the unfinished trials of a run folder, seed by seed.

        ``only``: Labels and seeds of the wanted trials; default: all.
        ``prefix``: What the trials' names in progress reports begin with.
        """
        wanted = [
            trial
            for trial in self.all_trials(folder, prefix)
            if only is None or (trial.method.label, trial.seed) in only
        ]
        unfinished = [trial for trial in wanted if not trial.is_finished]
        for trial in unfinished:
            if (trial.folder / MANIFEST).is_file():
                damage = " ".join(provenance.find_damage(trial.folder))
                log.warning("%s The last rounds of this finished trial are repeated.", damage)
        return unfinished


@dataclass(frozen=True, eq=False)
class Trial:
    """One method with one seed, in a run folder.

    ``experiment``: The experiment that it belongs to.
    ``seed``: The seed of all random numbers.
    ``name``: Its name in progress reports.
    """

    experiment: Experiment
    run: Path
    method: Method
    seed: int
    name: str

    @property
    def folder(self) -> Path:
        """The trial's own folder."""
        return provenance.trial_folder(self.run, self.method, self.seed)

    @property
    def identity(self) -> Identity:
        """To what its files belong, without the data."""
        return provenance.identity_of(self.run, self.method.label, self.seed)

    @property
    def is_finished(self) -> bool:
        """Whether it is finished; raises `ForeignFile` if what lies in its folder belongs to something else."""
        provenance.check_recipe(self.run)
        provenance.check_trial(self.run, self.folder)
        return provenance.is_finished(self.folder)

    @property
    def rounds(self) -> int:
        """The number of rounds, over all tasks."""
        return self.experiment.recipe.rounds


# Descriptions, which JSON can represent


def _idle_parts(algorithm: Algorithm, num_classes: int, num_tasks: int, recipe: Recipe) -> str:
    """Return which options and parts of a method do nothing here; empty if all act."""
    first, rounds = getattr(algorithm, "first_round", 1), recipe.run.rounds
    late = f"its teacher, which begins in round {first} of {rounds}" if first > rounds else ""
    part = algorithm.idle_part(num_classes, num_tasks)
    return "; ".join(filter(None, [*algorithm.idle_options(), part, late]))


def describe_trial(
    recipe: Recipe,
    method: Method,
    seed: int,
    federation: Federation,
    data_dir: str | Path | None = None,
    initial: InitialModel | None = None,
) -> dict[str, Any]:
    """Describe a trial, for reports and for a later check that a resumed trial still has the same inputs.

    ``federation``: Which client holds which examples.
    ``data_dir``: The folder of local generators and extractors.
    ``initial``: The model from which it begins, if the recipe gives one.
    Returns: The description, which JSON can represent.
    """
    dataset, final = federation.dataset, federation.for_task(federation.num_tasks)
    classes = final.cumulative_classes[-1]  # over all tasks
    # The labels change if the generator's images are left out or not.
    dependencies = {"training data": tensor_hash(dataset.train["label"])}
    if federation.holds_client_data:
        dependencies["partition"] = " ".join(partition.hash for partition in federation.partitions)
        if digest := build.data_digest(recipe, data_dir):
            dependencies["data set"] = digest
        if recipe.public.name:
            dependencies["public data"] = tensor_hash(federation.server_data["input"])
    else:  # clients vouch for their own, and the server for what it tests on
        tested = (federation.stream.dataset if federation.stream else dataset).test
        held = {f"{part}.{name}": column for part, data in (("test", tested), ("server", federation.server_data))
                for name, column in data.items()}  # fmt: skip
        dependencies["server's data"] = hash_weights(held)
    description = {
        "label": method.label,
        "algorithm": method.algorithm.name(),
        "options": as_table(method.algorithm),
        "training": {**method.algorithm.training_options, **method.training},
        "seed": seed,
        "rounds": recipe.rounds,
        "evaluation_models": list(distinct_models(recipe.run.evaluation_models, method.algorithm)),
        "sequential": method.algorithm.sequential,
        "paper": method.algorithm.paper,
        "cohort_size": recipe.run.cohort_size,
        "num_classes": classes,
        "dependencies": dependencies,
        **describe_data(federation),
    }
    found = {
        "idle_part": _idle_parts(method.algorithm, classes, federation.num_tasks, recipe),
        "metric": recipe.run.metric,
    }
    description |= {name: value for name, value in found.items() if value}
    if recipe.has_tasks:
        tasks = final.stream.tasks if final.stream else ()
        description["tasks"] = [task.num_classes - task.num_old_classes for task in tasks]
        description["sharing"] = recipe.tasks.sharing
    names, extractors = build.class_names(federation), []
    for whose, extractor in pretrained_models(recipe.model, recipe.client_models, data_dir).items():
        extractors.append((f"{whose}: " if whose else "") + describe_extractor(extractor, names))
        dependencies[f"extractor of {whose}" if whose else "extractor"] = extractor.hash()
    if extractors:
        description["extractor"] = "; ".join(extractors)
    if initial is not None:
        dependencies["initial model"] = initial.digest
        description["initial_model"] = {"made_by": initial.made_by, "weights": initial.given}
    if "generator" in method.algorithm.needs:
        description["generator"] = recipe.generator.describe(data_dir)
        dependencies["generator"] = build.generator_hash(recipe, data_dir)
    return description


def describe_data(federation: Federation) -> dict[str, Any]:
    """Describe the data of a federation, over all tasks: names, inputs, test examples of each class."""
    dataset, final = federation.dataset, federation.for_task(federation.num_tasks)
    tested = final.dataset.test["label"] if federation.holds_test_data else torch.zeros(0, dtype=torch.int64)
    named, scheme = dataset.values.get(CLIENT, ()) if federation.stream is None else (), federation.partition.scheme
    unused = f" The data name {len(named)} clients, and {scheme} makes others: partition.scheme=column takes them."
    return {
        "num_clients": len(federation.clients),
        "label_names": list(build.class_names(federation)),
        "input": {
            "shape": list(dataset.shape),
            "type": str(dataset.train["input"].dtype).removeprefix("torch."),
            "mean": list(dataset.mean),
            "std": list(dataset.std),
            "features": list(dataset.features),
            "columns": columns_to_json(dataset.columns),
        },
        "dataset": dataset.name,
        "dataset_note": (dataset.note + (unused if named and scheme != ByColumn.name else "")).strip(),
        "test_total": torch.bincount(tested, minlength=final.cumulative_classes[-1]).tolist(),
    }


def initial_model_evaluated(
    description: Mapping[str, Any], state: SimulationState, begun: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a description says of a given initial model, with its evaluation as that of round 0.

    ``begun`` is the description that a resumed trial has on record; empty before the first round.
    """
    if "initial_model" not in description:
        return {}
    if recorded := begun.get("initial_model"):
        return {"initial_model": recorded}
    if not state.federation.holds_test_data:
        return {}
    counts = state.evaluate(state.server.model)
    evaluated = {"round": 0, "correct": counts.correct, "total": counts.total, "test_loss": counts.loss}
    return {"initial_model": description["initial_model"] | evaluated}


def describe_partition(federation: Federation, local_models: bool = False) -> dict[str, Any]:
    """Describe a partition: its manifest, the number of examples by client and class, and the tasks.

    For more than `MAX_LISTED_CLIENTS` clients the numbers are left out, and the report has no heat map.

    ``local_models``: Clients' own models are evaluated, for which the numbers are always needed.
    Returns: The description, which JSON can represent.
    """
    stream = federation.stream
    manifest = federation.partition.manifest() if stream is None else stream.tasks[0].partition.manifest()
    tasks = {} if stream is None else {"tasks": stream.manifest()}
    listed = local_models or len(federation.clients) <= MAX_LISTED_CLIENTS
    names = _client_names(federation) if listed else ()
    return manifest | (_counts(federation) if listed else {}) | tasks | ({"client_names": list(names)} if names else {})


def _client_names(federation: Federation) -> tuple[str, ...]:
    """Return what the data call the clients "0", "1", ...; empty if each stands for several, or the data name none."""
    settings = federation.partition.settings
    if federation.partition.scheme != ByColumn.name or settings["num_clients"]:
        return ()
    column, names = federation.dataset.train[settings["column"]], federation.dataset.values.get(settings["column"], ())
    firsts = federation.partition.rows[federation.partition.offsets[:-1]]
    return tuple(names[int(number)] for number in column.cpu()[firsts]) if names else ()


def _counts(federation: Federation) -> dict[str, Any]:
    stream = federation.stream
    dataset = federation.dataset if stream is None else stream.dataset
    classes = dataset.num_classes if stream is None else stream.tasks[-1].num_classes
    by_task = [one.counts(dataset.train["label"], dataset.num_classes)[:, :classes] for one in federation.partitions]
    return {"counts": torch.stack(by_task).sum(0).tolist()}  # each class belongs to one task
