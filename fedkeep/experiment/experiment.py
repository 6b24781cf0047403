"""An experiment: a recipe with its federations, networks and machine, which are prepared once; and its trials."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkeep._utils.digests import Identity
from fedkeep.data import Federation
from fedkeep.experiment.build import (
    build_federation,
    build_simulation,
    check_device,
    check_federation,
    check_network,
    untrained_classes,
)
from fedkeep.experiment.description import describe_partition, describe_trial
from fedkeep.experiment.initial_model import InitialModel, initial_model
from fedkeep.experiment.provenance import (
    check_recipe,
    check_trial,
    find_damage,
    identity_of,
    is_finished,
    trial_folder,
    trial_name,
)
from fedkeep.experiment.recipe import Method, Recipe, check_robust_aggregation, client_architectures
from fedkeep.experiment.runtime import Machine
from fedkeep.models.custom import describe_network
from fedkeep.tracking import check_packages
from fedkeep.training.model_runner import check_batch_size
from fedkeep.trials.simulation import Simulation
from fedkeep.trials.trial import MANIFEST

log = logging.getLogger(__name__)

MAX_CACHED_SEEDS = 3
"""The most seeds whose federations are cached: each may hold its own copy of the images."""


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
            self._federations[seed] = build_federation(self.recipe, seed, self.machine.data_dir)
        return self._federations[seed]

    def initial_model(self, seed: int) -> InitialModel | None:
        """Return the model from which a seed's trials begin, if the recipe gives one; it may have to be trained."""
        if seed not in self._initial_models:
            device = check_device(self.machine.device)
            found = initial_model(self.recipe, seed, self.federation(seed), device, self.machine.data_dir)
            self._initial_models[seed] = found
        return self._initial_models[seed]

    def release(self, seed: int) -> None:
        """Remove a seed's federation from the cache, once all its trials are finished."""
        self._federations.pop(seed, None)
        self._initial_models.pop(seed, None)

    def check(self) -> None:
        """Check the whole experiment before any training."""
        recipe, data_dir = self.recipe, self.machine.data_dir
        check_device(self.machine.device)
        check_packages(recipe.log)
        for seed in reversed(recipe.seeds):  # the first seed, with which the run begins, is then still cached
            federation = self.federation(seed)
            check_federation(recipe, federation, data_dir)
        if missing := untrained_classes(federation):
            named = ", ".join(map(repr, missing[:5])) + ", ..." * (len(missing) > 5)
            log.warning("No client has an example of %s, and the test set has. No method can learn it.", named)
        classes = federation.for_task(federation.num_tasks).cumulative_classes[-1]
        for method in recipe.methods:
            if idle := method.algorithm.idle_part(classes, federation.num_tasks):
                log.warning("A part of %s does nothing here: %s.", method.label, idle)
        tasks = federation.stream.tasks[1:] if federation.stream else ()
        if single := [task.number for task in tasks if task.num_classes - task.num_old_classes == 1]:
            log.warning(
                "%s has a single new class. Where labels compete among a task's new classes only, as in most "
                "methods as they come, nothing is learned there: its loss is 0. Give tasks two classes or more, or let "
                "labels compete among all classes (ce_classes=all, or head=joint, where a method has one of these).",
                f"Task {single[0]}" if len(single) == 1 else f"Each of the tasks {', '.join(map(str, single))}",
            )
        for model in {recipe.model, *client_architectures(recipe.client_models, federation.clients).values()}:
            network = check_network(model, federation, data_dir)
            check_batch_size(network, recipe.training.batch_size)
            if recipe.pretraining.passes:
                check_batch_size(network, recipe.pretraining.batch_size, "model.pretraining.batch_size")
        if recipe.weights:
            self.initial_model(recipe.seeds[0])

    def describe_network(self) -> dict[str, Any]:
        """Describe a user's network, so that a resumed run notices another one.

        Returns: Its digest, and shape and number of classes for which it was built; empty for FedKeep's architectures.
        """
        federation = self.federation(self.recipe.seeds[0])
        return describe_network(self.recipe.model, federation.dataset.shape, federation.cumulative_classes[0])

    def simulation(self, method: Method, seed: int) -> Simulation:
        """Return the simulation of a trial, before its first round."""
        machine, federation = self.machine, self.federation(seed)
        begun = self.initial_model(seed)
        initial = None if begun is None else begun.weights
        return build_simulation(self.recipe, method, seed, federation, machine.device, machine.data_dir, initial)

    def describe(self, method: Method, seed: int) -> dict[str, Any]:
        """Describe a trial for reports (see `fedkeep.experiment.description.describe_trial`).

        Returns: The description, which JSON can represent.
        """
        initial = self.initial_model(seed)
        return describe_trial(self.recipe, method, seed, self.federation(seed), self.machine.data_dir, initial)

    def describe_partition(self, seed: int) -> dict[str, Any]:
        """Describe a seed's partition for reports (see `fedkeep.experiment.description.describe_partition`)."""
        return describe_partition(self.federation(seed), local_models=self.recipe.run.evaluate_local_models)

    def all_trials(self, folder: Path, prefix: str = "") -> list[Trial]:
        """Return all trials of a run folder, seed by seed; ``--trial`` counts them in this order.

        ``prefix``: What the trials' names in progress reports begin with.
        """
        return [
            Trial(self, folder, method, seed, f"{prefix}{trial_name(method, seed)}")
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
                damage = " ".join(find_damage(trial.folder))
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
        return trial_folder(self.run, self.method, self.seed)

    @property
    def identity(self) -> Identity:
        """To what its files belong, without the data."""
        return identity_of(self.run, self.method.label, self.seed)

    @property
    def is_finished(self) -> bool:
        """Whether it is finished; raises `ForeignFile` if what lies in its folder belongs to something else."""
        check_recipe(self.run)
        check_trial(self.run, self.folder)
        return is_finished(self.folder)

    @property
    def rounds(self) -> int:
        """The number of rounds, over all tasks."""
        return self.experiment.recipe.rounds
