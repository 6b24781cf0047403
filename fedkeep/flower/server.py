"""What happens at the server: a recipe is carried out with the sites that stand behind a line."""

from __future__ import annotations

import json
import logging
import math
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout

from fedkeep._utils.files import atomic_write
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.build import (
    build_simulation,
    check_device,
    describe_trial,
    generator_hash,
    held_by_server,
    load_data,
    without_seen,
)
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.paths import trial_name
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.recipe import Method, Recipe
from fedkeep.experiment.recipe_loader import load_recipe, parse_recipe
from fedkeep.experiment.run import create_run_folder
from fedkeep.experiment.runtime import Machine, recorded_machine
from fedkeep.experiment.trial_runner import write_description
from fedkeep.flower.config import RunConfig
from fedkeep.flower.executor import FlowerExecutor
from fedkeep.flower.reply_log import ReplyLog
from fedkeep.flower.site_registry import SiteRegistry
from fedkeep.flower.state_store import state_ref_type
from fedkeep.flower.transport import Envelope, Transport
from fedkeep.flower.views import describe_dataset, server_view
from fedkeep.interface.algorithm import client_steps, is_annotated
from fedkeep.reporting.outputs import is_reported, write_all
from fedkeep.reporting.run_folder import Run
from fedkeep.simulation.callbacks import OnRoundEnd
from fedkeep.simulation.state import RoundResult, SimulationState
from fedkeep.simulation.trial import TrialBusy, run_trial
from fedkeep.training.context import pinned_threads

log = logging.getLogger(__name__)
IN_VAIN = 3  # rounds, all undone from the first on, after which a run stops
REJOIN = 60.0  # seconds that the sites of a run have to be seen again when the server starts again


def serve(transport: Transport, config: RunConfig) -> Run:
    """Carry out a recipe, method by method and seed by seed, and return the run; continues one that was stopped."""
    import_user_code(filter(None, config.use.split(",")))
    recipe = _recipe(config)
    folder = _folder(recipe, config)
    threads = recorded_machine(folder, Machine()).threads
    with _logged(folder / "server.log"), pinned_threads(threads):
        log.info("run folder: %s", folder.resolve())
        try:
            for trial in Experiment(recipe).trials(folder):
                with _alone(trial.folder):
                    _run(transport, config, recipe, trial.method, trial.seed, trial.folder)
        except BaseException as error:
            log.error("stopped: %s Continue with --run-config %s", error, shlex.quote(f'out="{folder.resolve()}"'))
            raise
        done = write_all(folder)
        log.info("finished: %s", (folder / "report.html").resolve())
        return done


def _run(transport: Transport, config: RunConfig, recipe: Recipe, method: Method, seed: int, folder: Path) -> None:
    """Run one method with one seed, in the round where it stopped if it was begun before."""
    data_dir = config.data_dir or None
    whole = load_data(config.data or recipe.data, data_dir, recipe.validation)
    kept = without_seen(recipe, whole, data_dir)
    dataset, held = held_by_server(recipe, seed, kept, data_dir)
    one = replace(recipe, methods=(method,), seeds=(seed,), paper={})
    data = describe_dataset(dataset, kept is not whole, generator_hash(one, data_dir))
    introduction = Envelope({"version": version("fedkeep"), "recipe": one.to_toml(), "data": data})
    book = folder / "sites.json"  # the run's name at the sites, and who takes part
    known = json.loads(book.read_text()) if book.exists() else None
    sites = SiteRegistry(transport, introduction, config.wait, recipe.tasks.tasks, known and known["nodes"])
    if known is None:
        count = config.sites or recipe.partition.clients
        if not count:
            raise ConfigError("this recipe's partition does not say how many clients there are. Set sites.")
        known = {"run": secrets.token_hex(16), "examples": sites.wait_for_all(count), "nodes": sites.nodes()}
        atomic_write(book, json.dumps(known))
    else:
        sites.gather(known["examples"].keys(), recipe.run.min_clients, grace=min(REJOIN, config.wait))
    federation = server_view(recipe, seed, dataset, held, known["examples"])
    simulation = build_simulation(recipe, method, seed, federation, config.device, config.data_dir or None)
    simulation.client_state = state_ref_type(simulation.client_state)
    reply_log = ReplyLog(folder / "journal")
    simulation.executor = FlowerExecutor(
        simulation, transport, sites, reply_log, introduction, known["run"], config.deadline
    )
    description = describe_trial(recipe, method, seed, federation, config.data_dir or None)
    if _rounds_in_vain(folder):  # nothing is lost by beginning anew, and rounds are won
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    write_description(folder, description)
    tell = _telling(trial_name(method, seed), recipe.rounds, description["test_total"])

    def check(state: SimulationState, result: RoundResult) -> None:
        tell(result)
        if result.record["undone"]:
            _check_for_success(folder, recipe)

    try:
        # A checkpoint after every round.
        run_trial(simulation, folder, [OnRoundEnd(check)], checkpoint_share=math.inf)
    except Exception:
        reply_log.remove()  # an answer may have been the cause: sites give theirs again, without training again
        raise
    reply_log.remove()


def _check_for_success(folder: Path, recipe: Recipe) -> None:
    """Raise `RunError` if a run would go on in vain: every round so far was undone, and these were several, or all."""
    undone = _rounds_in_vain(folder)
    if undone >= min(IN_VAIN, recipe.rounds):
        raise RunError(
            f"too few sites: fewer than {recipe.run.min_clients} answered in each of {undone} rounds, so that all were "
            "undone and nothing was learned. The lines above say who was lost and why. Mend that, and begin anew with "
            "the same out."
        )


def _rounds_in_vain(folder: Path) -> int:
    """Return how many rounds a trial has if every single one was undone; otherwise 0."""
    file = folder / "rounds.jsonl"
    whole = file.read_bytes().split(b"\n")[:-1] if file.exists() else []  # a kill may have left half a line
    return len(whole) if all(json.loads(line)["undone"] for line in whole) else 0


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let no other server app run this trial, nor name its run anew."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".server.lock", timeout=0):
            yield
    except Timeout:
        raise TrialBusy(f"{folder} is being run by another server app. Wait for it, or end it.") from None


def _telling(trial: str, rounds: int, images: Sequence[int]) -> Callable[[RoundResult], None]:
    """Return what tells of each round in the log; ``images`` are the test images of each class."""

    def tell(finished: RoundResult) -> None:
        record = finished.record
        hits = ""
        if "correct" in record:
            correct = record["correct"]  # of the classes that were seen by then
            hits = f", accuracy {sum(correct) / sum(images[: len(correct)]):.4f}"
        lost = "".join(f"; lost {site}: {reason}" for site, reason in record["lost"].items())
        undone = "; undone, for too few answered" if record["undone"] else ""
        log.info("%s: round %d of %d%s%s%s", trial, record["round"], rounds, hits, lost, undone)

    return tell


def _recipe(config: RunConfig) -> Recipe:
    """Return the recipe that the run configuration asks for."""
    settings = shlex.split(config.settings)
    settings += [f"run.min_clients={config.min_clients}"] if config.min_clients else []
    try:
        seeds = [int(seed) for seed in config.seeds.split(",")] if config.seeds else None
    except ValueError:
        raise ConfigError(f"seeds must be integers with commas between them, not {config.seeds!r}.") from None
    recipe = load_recipe(
        _found(config.recipe),
        settings=settings,
        methods=config.methods.split(",") if config.methods else None,
        seeds=seeds,
        rounds=config.rounds or None,
        allow_code=config.allow_code,
    )
    if recipe.run.evaluate_local_models:
        raise ConfigError(
            "run.evaluate_local_models looks at clients' examples, which the server has not. Set it to false."
        )
    for method in recipe.methods:
        for name, step in client_steps(type(method.algorithm)).items():
            if not is_annotated(step):
                raise ConfigError(f"{method.label}: step {name} does not annotate all that it takes and gives.")
    check_device(config.device)
    return recipe


def _found(name: str) -> str:
    """Return a recipe's path, sought where the server runs and in the Flower app, whose folder is on the path."""
    places = [Path(name), *(Path(folder) / name for folder in sys.path)]
    return next((str(place) for place in places if name.endswith(".toml") and place.is_file()), name)


def _folder(recipe: Recipe, config: RunConfig) -> Path:
    """Return the run folder: a new one, or the one that was begun."""
    out = Path(config.out).expanduser() if config.out else None
    if out is None or not (out / "run.json").is_file():
        return create_run_folder(recipe, out, Machine(device=config.device), ["flwr", "run"])
    begun = parse_recipe((out / "recipe.toml").read_text(encoding="utf-8"), str(out), allow_code=config.allow_code)
    if begun.to_toml() != recipe.to_toml():  # as text: an option that an older version did not write has its default
        raise RunError(f"{out} was begun with another recipe. Choose another out, or set the recipe as it was.")
    if not Experiment(recipe).trials(out) and is_reported(out):
        raise RunError(f"{out} is finished. Choose another out for a new run.")
    return out


@contextmanager
def _logged(file: Path) -> Iterator[None]:
    """Write what FedKeep logs into a file of the run folder too."""
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
