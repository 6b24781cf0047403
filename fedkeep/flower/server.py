"""What the server does: it runs a recipe whose clients are sites behind a transport.

A server without data learns from its sites the form of theirs: classes and shape, and statistics over all sites.
"""

import json
import logging
import math
import secrets
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeep._utils.digests import DamagedFile, read_json, write_json
from fedkeep._utils.torch_state import plain_torch
from fedkeep.data import DataSet
from fedkeep.data.columns import MAX_VALUES, TableColumn, columns_from_json
from fedkeep.data.dataset import describe_input
from fedkeep.data.schema import check_spelling, number_names
from fedkeep.errors import ConfigError, DataError, RunError, in_one_line, refuse
from fedkeep.experiment import build
from fedkeep.experiment.build import check_device
from fedkeep.experiment.experiment import Experiment, Trial, describe_trial, initial_model_evaluated
from fedkeep.experiment.initial_model import initial_model
from fedkeep.experiment.plugins import import_user_code, instances_of
from fedkeep.experiment.provenance import check_code, find_checkpoint_damage, trial_name
from fedkeep.experiment.recipe import Method, Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.run import create_run_folder, recorded_recipe
from fedkeep.experiment.runtime import Machine, recorded_machine
from fedkeep.experiment.trial_runner import begun_description, described_identity, trackers, write_description
from fedkeep.flower.config import RunConfig, own_code
from fedkeep.flower.executor import FlowerExecutor
from fedkeep.flower.state_store import state_ref_type, stored_secret
from fedkeep.flower.transport import Envelope, SiteRegistry, Transport
from fedkeep.flower.views import describe_dataset, server_view
from fedkeep.interface.algorithm import client_steps, is_annotated
from fedkeep.privacy.privacy_checks import reason_against_privacy, reason_against_sums
from fedkeep.reporting.html import is_reported, write_all
from fedkeep.reporting.metric import check_main
from fedkeep.reporting.run_folder import Run
from fedkeep.rounds.reply_step import ReplyStep
from fedkeep.rounds.state import RoundResult, SimulationState
from fedkeep.tracking import check_log, check_packages
from fedkeep.trials.callbacks import Callback, OnRoundEnd
from fedkeep.trials.checkpoint import load_manifest, manifests
from fedkeep.trials.trial import lock_trial, run_trial

NO_DATA = "none"
"""What the run configuration's ``data`` is for a server without data of its own."""
MAX_NUMBERS = 10**8
"""The most numbers in one input that a site is believed to have."""
LARGEST_STATISTIC = 1e30
"""The largest mean or deviation that a site is believed to have: larger ones cannot be pooled."""
_TYPES = {"images": torch.uint8, "token ids": torch.int64, "numbers": torch.float32}


def data_of_form(about: Mapping[str, Any], name: str = "the sites' data") -> DataSet:
    """Return a data set of the form that `fedkeep.flower.views.describe_dataset` tells, with one example of zeros."""
    try:
        shape = tuple(map(int, about["shape"]))
        if not 0 < math.prod(shape) <= MAX_NUMBERS:
            raise ValueError(f"inputs of the shape {list(shape)[:8]}")
        row = {"input": torch.zeros(1, *shape, dtype=_TYPES[about["kind"]]), "label": torch.zeros(1, dtype=torch.int64)}
        columns = columns_from_json({"columns": about["columns"]})
        names, mean, std = (tuple(about[key]) for key in ("label_names", "mean", "std"))
        numbers = [*mean, *std, *(number for c in columns for number in (c.fill, c.mean, c.scale))]
        if len(mean) != len(std) or not all(abs(number) < LARGEST_STATISTIC for number in numbers):
            raise ValueError(f"statistics beyond {LARGEST_STATISTIC:g}, or not all of them")
        return DataSet(name, row, row, tuple(map(str, names)), mean, std, columns=columns)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, DataError) as error:
        raise DataError(f"{name}: this is no description of data ({type(error).__name__}: {error}).") from None


def pool(described: Mapping[str, Any], examples: Mapping[str, int]) -> DataSet:
    """Return a data set of the form of all sites together, from what each describes, weighted by its examples."""
    sites = {site: data_of_form(described[site], f"site {site}") for site in sorted(described)}
    first, *others = sites.values()
    for other in others:  # the features of a table follow from its columns, of which sites may know other values
        is_table = bool(first.columns and other.columns)
        if other.kind != first.kind or (other.shape != first.shape and not is_table):
            raise DataError(
                f"{first.name} has {describe_input(first.train['input'])}, and {other.name} "
                f"{describe_input(other.train['input'])}. Bring them to one form."
            )
    weights = np.asarray([examples[site] for site in sites], dtype=np.float64)
    weights = weights / weights.sum() if weights.sum() else np.full(len(sites), 1 / len(sites))
    every = [dataset.label_names for dataset in sites.values()]
    try:
        check_spelling({name for of_site in every for name in of_site}, "the sites' data together")
    except DataError as error:
        told = [f"{dataset.name} has {', '.join(map(repr, dataset.label_names[:10]))}" for dataset in sites.values()]
        raise DataError(f"{error} {'; '.join(told[:10])}.") from None
    _, names = number_names([name for of_site in every for name in of_site], as_text=True)
    means, deviations = (zip(*(getattr(one, name) for one in sites.values()), strict=True) for name in ("mean", "std"))
    channels = [_pooled(*of, weights) for of in zip(means, deviations, strict=True)]
    columns = _columns(list(sites.values()), weights)
    features = sum(len(column.features) for column in columns)  # of a table, over all sites
    row = {**first.train, "input": torch.zeros(1, features)} if features else first.train
    return replace(
        first,
        name="the sites' data",
        label_names=every[0] if all(one == every[0] for one in every) else tuple(names),
        mean=tuple(mean for mean, _ in channels),
        std=tuple(std for _, std in channels),
        columns=columns,
        train=row,
        test=row,
    )


def _pooled(means: Sequence[float], deviations: Sequence[float], weights: Any) -> tuple[float, float]:
    """Return the mean and the standard deviation of all examples, from those of each site."""
    of_sites, spread = np.asarray(means), np.asarray(deviations)
    mean = float(weights @ of_sites)
    deviation = math.sqrt(float(weights @ (spread**2 + (of_sites - mean) ** 2)))
    return mean, deviation if deviation > 1e-12 * abs(mean) else 1.0  # less is what the sums were rounded by


def _columns(sites: Sequence[DataSet], weights: Any) -> tuple[TableColumn, ...]:
    """Return a table's columns over all sites; raise `DataError` if sites read a column in different ways."""
    names = [column.name for column in sites[0].columns]  # sites look for columns by name, so the order is the first's
    place = {name: number for number, name in enumerate(names)}
    told = [sorted(d.columns, key=lambda column: place.get(column.name, len(place))) for d in sites]
    if odd := [f"{site.name} {how}" for site in sites[1:] if (how := _otherwise(site, sites[0]))]:
        raise DataError(f"{'; '.join(odd)}. Give all sites the same columns of one kind.")
    found = []
    for of_sites in zip(*told, strict=True):
        mean, scale = _pooled([c.mean for c in of_sites], [c.scale for c in of_sites], weights)
        fill = float(weights @ np.asarray([c.fill for c in of_sites]))
        values = tuple(sorted({value for c in of_sites for value in c.values}))
        try:
            check_spelling(values, f"the sites' column {of_sites[0].name!r}")
        except DataError as error:
            log.warning("%s", error)
        other = any(c.other for c in of_sites)
        unit = next((c.unit for c in of_sites if c.unit), "")
        found.append(replace(of_sites[0], fill=fill, mean=mean, scale=scale, values=values, other=other, unit=unit))
    return tuple(found)


def _form(dataset: DataSet) -> dict[str, TableColumn]:
    """Return a table's columns by name, without what follows from its rows."""
    plain = (replace(c, fill=0.0, mean=0.0, scale=1.0, values=(), other=False) for c in dataset.columns)
    return {column.name: column for column in plain}


def _otherwise(one: DataSet, other: DataSet) -> str:
    """Say how a table's columns differ from another's; empty if they do not."""
    ours, theirs = _form(one), _form(other)
    lacks, more = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
    kinds = [name for name in sorted(ours.keys() & theirs.keys()) if not _is_read_alike(ours[name], theirs[name])]
    said = [f"lacks the column {', '.join(map(repr, lacks))} of {other.name}"] if lacks else []
    said += [f"also has {', '.join(map(repr, more))}"] if more else []
    said += [
        f"reads {name!r} as {_reading(ours[name])}, and {other.name} as {_reading(theirs[name])}" for name in kinds
    ]
    return " and ".join(said)


def _is_read_alike(one: TableColumn, other: TableColumn) -> bool:
    """Tell whether two sites read a column alike; a unit that only one of them writes is cut off at both."""
    return replace(one, unit="") == replace(other, unit="") and (
        one.unit == other.unit or not (one.unit and other.unit)
    )


def _reading(column: TableColumn) -> str:
    how = (column.date or "YYYY-MM-DD") if column.kind == "date" else column.unit
    return f"{column.kind} ({how})" if how else column.kind


log = logging.getLogger(__name__)
MAX_ROLLED_BACK = 3  # rounds in a row that were rolled back, after which a run stops
SITES_FILE = "sites.json"
RECONNECT_SECONDS = 60.0  # seconds that a restarted server waits for all sites of its run


def serve(transport: Transport, config: RunConfig) -> Run:
    """Run a recipe's trials one after another at the sites; continue a run that was stopped.

    Returns: The finished run, with its report written.
    """
    import_user_code(own_code(config))
    recipe = _load_recipe(config)
    check_packages(recipe.log)
    check_main(recipe.run.metric)
    folder = _open_run_folder(recipe, config)
    threads = recorded_machine(folder, Machine()).threads
    with _log_to_file(folder / "server.log"), plain_torch(threads):
        log.info("run folder: %s", folder.resolve())
        try:
            for trial in Experiment(recipe).trials(folder):
                with lock_trial(trial.folder, ".server.lock", "server app"):
                    _run_trial(transport, config, recipe, trial)
        except BaseException as error:
            log.error("stopped: %s Continue with --run-config %s", error, shlex.quote(f'out="{folder.resolve()}"'))
            raise
        run = write_all(folder)
        log.info("finished: %s", (folder / "report.html").resolve())
        return run


def _run_trial(transport: Transport, config: RunConfig, recipe: Recipe, trial: Trial) -> None:
    """Run one method with one seed; continue it if it was begun before."""
    method, seed, folder = trial.method, trial.seed, trial.folder
    data_dir = config.data_dir or None
    trial_recipe = replace(recipe, methods=(method,), seeds=(seed,), paper={}, log=(), weights="")  # the server logs
    head = {"version": version("fedkeep"), "recipe": trial_recipe.to_toml()}
    told = _told_before(folder)
    loaded, first = _load_form(transport, config, recipe, trial, head, told)
    allowed = build.without_generator_images(recipe, loaded, data_dir)
    tested = replace(recipe, data=config.data) if config.data else recipe  # where its own test examples are from
    dataset, server_data = build.split_server_data(tested, seed, allowed, data_dir)
    data = describe_dataset(dataset, allowed is not loaded, build.generator_hash(trial_recipe, data_dir))
    introduction = Envelope({**head, "data": data})
    sites, saved = _gather(transport, config, recipe, trial, introduction, told, first)
    if len(saved["examples"]) < recipe.run.cohort_size:  # the run began without sites that were rejected
        recipe = replace(recipe, run=replace(recipe.run, cohort_size=len(saved["examples"])))
    federation = server_view(recipe, seed, dataset, server_data, saved["examples"])
    method.algorithm.check_classes(build.class_names(federation))
    initial = initial_model(recipe, seed, federation, check_device(config.device), data_dir)
    simulation = build.build_simulation(
        recipe, method, seed, federation, config.device, data_dir, None if initial is None else initial.weights
    )
    simulation.take_steps(instances_of(ReplyStep, own_code(config)))
    if recipe.weights and simulation.context.runner.frozen:
        raise ConfigError(
            f"model.weights={recipe.weights!r} has frozen parameters of the network, which never travel: sites would "
            "have others. Let the network's own function load them, at every site, and leave model.weights out."
        )
    simulation.client_states.type = state_ref_type(simulation.client_states.type)
    # The recipe, with the run's seed, goes to every site, and could take noise off that comes from it.
    simulation.context.noise_secret = stored_secret(folder)
    refused_rounds = recipe.defense.refused_rounds or MAX_ROLLED_BACK  # the time of real sites is dear
    simulation.settings.defense = replace(recipe.defense, refused_rounds=refused_rounds)
    description = describe_trial(recipe, method, seed, federation, data_dir, initial)
    description["identity"] = trial.identity.to_table()
    description["examples"] = {site: sum(each) for site, each in saved["examples"].items()}
    identity = replace(described_identity(description), run=saved["run"])
    executor = FlowerExecutor(simulation, transport, sites, introduction, saved["run"], config.deadline)
    simulation.executor = executor
    # Nothing was learned, so starting again loses nothing. But with secure aggregation a site gives one sum of a round
    # only: if sites are missing, the rounds go on.
    everybody = all(sites.node(site) is not None for site in saved["examples"])
    if (everybody or not recipe.privacy.secure_aggregation) and _all_rolled_back(folder):
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    description |= initial_model_evaluated(description, simulation, begun_description(folder))
    write_description(folder, description)
    in_a_row = 0

    def check(state: SimulationState, result: RoundResult) -> None:
        nonlocal in_a_row
        _log_round(trial_name(method, seed), recipe.rounds, description["test_total"], result.record)
        in_a_row = in_a_row + 1 if _is_lost(result) else 0
        if result.record["rolled_back"]:
            _check_progress(folder, recipe, in_a_row)

    def may_repeat(state: SimulationState, result: RoundResult) -> bool:
        # What a round told of private examples must stay on record, and so must what a task's begin or end changed.
        # Sites whose updates may be in a sum already would answer in no other sum of the same round.
        is_told = "privacy" in result.record or (recipe.privacy.secure_aggregation and bool(executor.trained))
        return _is_lost(result) and not is_told and not state.client_states.changed

    callbacks = [OnRoundEnd(check), *trackers(trial, description)]
    own = instances_of(Callback, own_code(config))
    share = math.inf  # a checkpoint after every round
    run_trial(simulation, folder, callbacks, own=own, identity=identity, checkpoint_share=share, may_repeat=may_repeat)


def _told_before(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what each begun trial of the run wrote of its sites, by trial: this one first, then those of most sites.

    All trials have the data and the sites of the first; a later one may have begun without some of these.
    """
    files = [folder / SITES_FILE, *sorted(folder.parent.glob(f"*/{SITES_FILE}"))]
    found = {file.parent.name: saved for file in files if (saved := _read_sites(file))}
    order = sorted(found, key=lambda name: (name != folder.name, -len(found[name]["examples"])))
    return {name: found[name] for name in order}


def _load_form(
    transport: Transport,
    config: RunConfig,
    recipe: Recipe,
    trial: Trial,
    head: Mapping[str, Any],
    told: Mapping[str, Any],
) -> tuple[DataSet, Mapping[str, int]]:
    """Return the server's data, or the form of the sites'; and the nodes of the sites that told it."""
    begun = next(iter(told.values()), None)
    if begun and (before := begun.get("tested_by", "sites" if "data" in begun else "server")) != _tester(config):
        how = 'data="none"' if before == "sites" else "data at the server"
        raise RunError(
            f"{trial.folder.parent.parent} was begun with {how}. Go on so, or choose another out for a new run."
        )
    if config.data != NO_DATA:
        return _load_server_data(config, recipe), {}
    if begun:
        return data_of_form(begun.get("data", {})), {}
    return _form_of_sites(transport, config, recipe, head)


def _tester(config: RunConfig) -> str:
    return "sites" if config.data == NO_DATA else "server"


def _gather(
    transport: Transport,
    config: RunConfig,
    recipe: Recipe,
    trial: Trial,
    introduction: Envelope,
    told: Mapping[str, Any],
    first: Mapping[str, int],
) -> tuple[SiteRegistry, dict[str, Any]]:
    """Wait for the sites of a trial; return also what is written of them: the run's identifier, nodes and examples.

    ``first``: Sites that are preferred in a run's first trial, and their nodes.
    """
    saved, data, fewest = told.get(trial.folder.name), introduction.head["data"], recipe.run.min_clients
    begun: Mapping[str, Any] = next(iter(told.values()), {})
    if _tester(config) == "server" and "data" in begun and _form_told(begun["data"]) != _form_told(data):
        raise RunError(
            f"{trial.folder.parent.parent} was begun with other data at the server: their classes, columns, mean or "
            "scale differ, by which sites scale theirs. Give the former data, or choose another out for a new run."
        )
    of_this_seed = [one["examples"] for name, one in told.items() if name.endswith(f"-seed{trial.seed}")]  # same data
    sizes = saved["examples"] if saved else {site: n for each in of_this_seed for site, n in each.items()} or None
    nodes = saved["nodes"] if saved else None
    members = begun["examples"].keys() if begun else None  # all trials have the same sites
    tasks, most = recipe.tasks.num_tasks, config.max_examples
    sites = SiteRegistry(transport, introduction, config.wait, tasks, nodes, most, sizes, members)
    if saved is not None:
        sites.wait_for(saved["examples"].keys(), fewest, grace=min(RECONNECT_SECONDS, config.wait))
        return sites, saved
    if members is None:
        count = len(first) or _num_sites(config, recipe)  # nobody waits twice for those that did not say
        examples = sites.wait_for_all(count, fewest, first)
    else:
        examples = sites.wait_for_known(members, fewest)
    _warn_of_other_data(examples, told, recipe)
    saved = {"run": secrets.token_hex(16), "examples": examples, "nodes": sites.nodes()}
    saved |= {"data": data, "tested_by": _tester(config)}
    write_json(trial.folder / SITES_FILE, saved)
    return sites, saved


def _warn_of_other_data(examples: Mapping[str, Sequence[int]], told: Mapping[str, Any], recipe: Recipe) -> None:
    """Warn if the sites have fewer or more examples in all than in a trial of another seed, which splits them anew."""
    total = sum(map(sum, examples.values()))
    for name, other in told.items():
        before = sum(map(sum, other["examples"].values()))
        splits_all = recipe.run.client_test in (0, "own") and not getattr(recipe.partition, "num_groups", 0)
        if other["examples"].keys() == examples.keys() and before != total and splits_all:
            log.warning(
                "the sites have %d examples in all, and in the trial %s they had %d: if data of a site have changed, "
                "these are no seeds of one experiment. Begin a new run.",
                total,
                name,
                before,
            )


def _load_server_data(config: RunConfig, recipe: Recipe) -> DataSet:
    """Load the server's own data, and say if it tests on a part of them only."""
    data_dir = config.data_dir or None
    loaded = build.load_data(config.data or recipe.data, data_dir, recipe.validation, recipe.data_options)
    tested, others = len(loaded.test["label"]), len(loaded.train["label"])
    if loaded.test_held_out:
        log.warning(
            "The server's data have no test split: it tests on %d of their %d examples. To test on others, name the "
            "column that marks rows as train or test: data.split.",
            tested,
            tested + others,
        )
    return loaded


def _form_told(data: Mapping[str, Any]) -> str:
    """Return what the server tells all sites of its data, in all trials."""
    return json.dumps({name: data[name] for name in ("label_names", "shape", "kind", "columns", "mean", "std")})


def _num_sites(config: RunConfig, recipe: Recipe) -> int:
    if count := config.sites or recipe.partition.num_clients:
        return count
    raise ConfigError("this recipe's partition does not say how many clients there are. Set sites.")


def _form_of_sites(
    transport: Transport, config: RunConfig, recipe: Recipe, head: Mapping[str, Any]
) -> tuple[DataSet, Mapping[str, int]]:
    """Ask the sites what their data are like, for a server that has none; return also the nodes of those that say."""
    sites = SiteRegistry(transport, Envelope({**head, "data": None}), config.wait, max_examples=config.max_examples)
    sizes = sites.wait_for_all(_num_sites(config, recipe), recipe.run.min_clients)
    log.info("%d sites told what their data are like; each is now asked to take part with all of them", len(sizes))
    described = _usable({site: sites.described[site] for site in sorted(sizes)}, recipe.run.min_clients)
    nodes = {site: node for site, node in sites.nodes().items() if site in sizes}
    return pool(described, {site: sum(sizes[site]) for site in described}), nodes


def _usable(described: Mapping[str, Any], fewest: int) -> dict[str, Any]:
    """Return the descriptions of data that can be read, and of these the ones of the form of more than half of them.

    All forms are kept if so many are fewer than ``fewest``. A site that is left out is asked to take part with the form
    of the others, and refused if it does not fit.
    """
    told: dict[str, DataSet] = {}
    for site, about in described.items():
        try:
            one = data_of_form(about, f"site {site}")
            if any(len(column.values) > MAX_VALUES for column in one.columns):
                raise DataError(f"site {site} tells of a column of more than {MAX_VALUES} values.")
            told[site] = one
        except DataError as error:
            log.warning("%s It is left out.", in_one_line(str(error)))
            refusal = error
    if len(told) < max(fewest, 1):
        raise refusal
    forms = {site: _whole_form(one) for site, one in told.items()}
    usual, count = Counter(forms.values()).most_common(1)[0]
    alike = [site for site, form in forms.items() if form == usual]
    if count <= len(forms) / 2 or count < fewest:
        alike = list(told)
    for site in told.keys() - set(alike):
        how = _otherwise(told[site], told[alike[0]]) or f"has {describe_input(told[site].train['input'])}"
        log.warning("site %s %s: what it tells of its data is left out", site, how)
    return {site: described[site] for site in alike}


def _whole_form(dataset: DataSet) -> tuple[Any, ...]:
    """Return what data of one form have in common: a table's columns, or the shape of an input."""
    return dataset.kind, frozenset(_form(dataset).values()), () if dataset.columns else tuple(dataset.shape)


def _read_sites(file: Path) -> dict[str, Any] | None:
    """Return the run's identifier, and the sites that take part; None before the first round of a trial.

    Raises `RunError` if the file is damaged, or is missing although rounds are saved.
    """
    if not file.exists() and not manifests(file.parent / "checkpoint"):
        return None
    try:
        saved = read_json(file)
        if missing := {"run", "nodes", "examples"} - saved.keys():
            raise DamagedFile(f"{file} is damaged: it lacks {', '.join(sorted(missing))}.")
        return saved
    except DamagedFile as damage:
        raise RunError(
            f"{damage} It names the sites of this trial and cannot be made again: put back a copy, or choose another "
            "out for a new run."
        ) from None


def _is_lost(result: RoundResult) -> bool:
    """Tell whether a round taught nothing since too few sites were left; for refused replies see ``[defense]``."""
    return result.record["rolled_back"] and not result.record.get("refused")


def _check_progress(folder: Path, recipe: Recipe, in_a_row: int) -> None:
    """Raise `RunError` if all rounds were rolled back, or the last ones were lost."""
    rounds = _all_rolled_back(folder)
    if rounds >= min(MAX_ROLLED_BACK, recipe.rounds):
        raise RunError(
            f"too few sites: fewer than {recipe.run.min_clients} answered in each of {rounds} rounds, so that all were "
            "rolled back and nothing was learned. The log above says which sites were lost and why. Correct that, and "
            "start again with the same out."
        )
    if in_a_row >= MAX_ROLLED_BACK:
        saved = load_manifest(folder / "checkpoint" / manifests(folder / "checkpoint")[0])
        raise RunError(
            f"too few sites: fewer than {recipe.run.min_clients} were left in each of the last {in_a_row} rounds, so "
            "that these were rolled back and taught nothing. The log above says which sites were lost and why. Correct "
            f"that, and start again with the same out: the run then goes on after round {saved.round}."
        )


def _all_rolled_back(folder: Path) -> int:
    """Return a trial's number of rounds if too few sites answered in each; otherwise, or if the file is damaged, 0."""
    file = folder / "rounds.jsonl"
    last = manifests(folder / "checkpoint")[:1]
    if last and find_checkpoint_damage(folder, last[0], only_records=True):
        return 0
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []  # the last line may be incomplete
    try:
        rows = [json.loads(line) for line in lines]
        return len(rows) if all(row["rolled_back"] and not row.get("refused") for row in rows) else 0
    except (KeyError, TypeError, ValueError):
        return 0


def _log_round(trial: str, rounds: int, test_total: Sequence[int], record: Mapping[str, Any]) -> None:
    """Log a round; ``test_total`` is the number of test images of each class."""
    accuracy = ""
    if "correct" in record:
        correct = record["correct"]  # of the classes that have arrived so far
        accuracy = f", accuracy {sum(correct) / sum(record.get('total', test_total)[: len(correct)]):.4f}"
        accuracy += f" at {len(record['clients'])} sites" if "clients" in record else ""
    lost = "".join(f"; lost {site}: {reason}" for site, reason in record["lost"].items())
    rolled_back = "; rolled back, since too few replies were usable" if record["rolled_back"] else ""
    log.info("%s: round %d of %d%s%s%s", trial, record["round"], rounds, accuracy, lost, rolled_back)


def _load_recipe(config: RunConfig) -> Recipe:
    """Return the recipe that the run configuration asks for, checked for a run at sites."""
    recipe = load_recipe(
        _find_recipe(config.recipe), settings=shlex.split(config.settings), allow_code=config.allow_code
    )
    if recipe.run.evaluate_local_models:
        raise ConfigError(
            "run.evaluate_local_models needs the clients' examples, which the server does not have. Set it to false."
        )
    if config.data == NO_DATA:
        needing = {"[auxiliary]": recipe.auxiliary.images_per_class, "[generator]": recipe.generator.name}
        if needs := [name for name, given in needing.items() if given]:
            raise ConfigError(f'data="none": {" and ".join(needs)} need examples that the server knows. Omit them.')
        if not recipe.run.client_test:
            raise ConfigError(
                'data="none": a server without data cannot test. Let sites: settings="run.client_test=own".'
            )
    if recipe.pretraining.passes:
        raise ConfigError(
            "model.pretraining trains on the clients' examples in one place, and those of sites never leave them. "
            "Leave it out, or begin from weights that the server has (model.weights)."
        )
    for method in recipe.methods:
        if recipe.weights and method.algorithm.clients_read_initial_model:
            raise ConfigError(
                f"{method.label}'s clients begin from the initial model themselves, and sites do not have "
                f"model.weights={recipe.weights!r}. Leave the method or the weights out."
            )
        _check_privacy(recipe, method)
        for name, step in client_steps(type(method.algorithm)).items():
            if not is_annotated(step):
                raise ConfigError(f"{method.label}: client step {name} must annotate all parameters and the result.")
    check_device(config.device)
    if config.log:
        recipe = replace(recipe, log=tuple(filter(None, map(str.strip, config.log.split(",")))))
        check_log(recipe.log)
    return recipe


def _check_privacy(recipe: Recipe, method: Method) -> None:
    """Raise `ConfigError` before a site is asked, if a method cannot be as private as the recipe says."""
    algorithm, defense, privacy = method.algorithm, recipe.defense, recipe.privacy
    reasons = [reason_against_privacy(algorithm, privacy, defense)]
    if privacy.secure_aggregation:
        reasons.append(reason_against_sums(algorithm, defense, privacy, recipe.run))
    refuse(filter(None, reasons))


def _find_recipe(name: str) -> str:
    """Return a recipe's path: in the working folder, or in the Flower app, whose folder is on the import path."""
    paths = [Path(name), *(Path(folder) / name for folder in sys.path)]
    return next((str(path) for path in paths if name.endswith(".toml") and path.is_file()), name)


def _open_run_folder(recipe: Recipe, config: RunConfig) -> Path:
    """Return the run folder: a new one, or one that an earlier run of the same recipe began."""
    out = Path(config.out).expanduser() if config.out else None
    if out is None or not (out / "run.json").is_file():
        machine = Machine(device=config.device, use=own_code(config))
        return create_run_folder(recipe, out, machine, ["flwr", "run"])
    check_code(out, own_code(config))
    begun = recorded_recipe(out, allow_code=config.allow_code)
    if begun.to_toml() != recipe.to_toml():  # as text: an option that an older version did not write has its default
        raise RunError(f"{out} was begun with another recipe. Choose another out, or set the recipe as it was.")
    if not Experiment(recipe).trials(out) and is_reported(out):
        raise RunError(f"{out} is finished. Choose another out for a new run.")
    return out


@contextmanager
def _log_to_file(file: Path) -> Iterator[None]:
    """Write FedKeep's log messages to a file too."""
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("fedkeep")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()
