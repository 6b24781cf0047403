"""An experiment: a recipe with its data, partitions, networks and machine, resolved once and passed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkeep._utils import seeds
from fedkeep.data import Federation
from fedkeep.experiment.build import (
    build_federation,
    build_simulation,
    check_augmentation,
    check_cohort,
    check_device,
    check_generator,
    describe_partition,
    describe_trial,
)
from fedkeep.experiment.model_config import client_architectures, resolve_pretrained
from fedkeep.experiment.paths import is_finished, trial_folder, trial_name
from fedkeep.experiment.recipe import Method, Recipe
from fedkeep.experiment.runtime import Machine
from fedkeep.simulation.simulation import Simulation
from fedkeep.training.model_runner import check_batch_size

KEPT = 3
"""Seeds whose federation an experiment remembers: each may hold its own copy of the images."""


@dataclass
class Experiment:
    """A recipe on a machine. Data are prepared once per seed, however many methods share them.

    Parameters
    ----------
    recipe : Recipe
        What is compared on what.
    machine : Machine
        Where and how.
    """

    recipe: Recipe
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        self._federations: dict[int, Federation] = {}

    def federation(self, seed: int) -> Federation:
        """Return who holds what with a seed."""
        if seed not in self._federations:
            while len(self._federations) >= KEPT:
                del self._federations[next(iter(self._federations))]
            self._federations[seed] = build_federation(self.recipe, seed, self.machine.data_dir)
        return self._federations[seed]

    def forget(self, seed: int) -> None:
        """Let a seed's federation go, once all its trials are finished."""
        self._federations.pop(seed, None)

    def check(self) -> None:
        """Raise `FedKeepError` for what cannot be carried out, before any training."""
        recipe, data_dir = self.recipe, self.machine.data_dir
        check_device(self.machine.device)
        for seed in reversed(recipe.seeds):  # the first, with which a run begins, is then remembered
            federation = self.federation(seed)
            check_cohort(recipe, federation)
            check_augmentation(recipe, federation)
            check_generator(recipe, federation, data_dir)
        for model in {recipe.model, *client_architectures(recipe.client_models, federation.clients).values()}:
            with seeds.temporary_seed(0):
                network = resolve_pretrained(model, data_dir).build(
                    federation.dataset.shape, federation.cumulative_classes[0]
                )
            check_batch_size(network, recipe.training)

    def simulation(self, method: Method, seed: int) -> Simulation:
        """Return the simulation of one method with one seed, at round 0."""
        machine, federation = self.machine, self.federation(seed)
        return build_simulation(self.recipe, method, seed, federation, machine.device, machine.data_dir)

    def describe(self, method: Method, seed: int) -> dict[str, Any]:
        """Return what a report needs to know about one method with one seed."""
        return describe_trial(self.recipe, method, seed, self.federation(seed), self.machine.data_dir)

    def describe_partition(self, seed: int) -> dict[str, Any]:
        """Return who holds what with a seed, for a report."""
        return describe_partition(self.federation(seed), local_models=self.recipe.run.evaluate_local_models)

    def trials(self, folder: Path, only: Sequence[tuple[str, int]] | None = None, prefix: str = "") -> list[Trial]:
        """Return the trials of a run folder that are not finished, seed by seed.

        Parameters
        ----------
        folder : Path
            Of the run.
        only : Sequence[tuple[str, int]], optional
            Labels and seeds of the trials that are wanted; by default all.
        prefix : str
            Of the names under which progress calls them.
        """
        return [
            Trial(self, folder, method, seed, f"{prefix}{trial_name(method, seed)}")
            for seed in self.recipe.seeds
            for method in self.recipe.methods
            if (only is None or (method.label, seed) in only) and not is_finished(trial_folder(folder, method, seed))
        ]


@dataclass(frozen=True, eq=False)
class Trial:
    """One method with one seed, in a run folder.

    Attributes
    ----------
    experiment : Experiment
        Of which it is a part.
    run : Path
        The run folder.
    method : Method
        What is run.
    seed : int
        Of everything random.
    name : str
        What progress calls it.
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
    def rounds(self) -> int:
        """How many rounds it has."""
        return self.experiment.recipe.rounds
