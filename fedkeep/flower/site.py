"""What happens at a site: a parcel comes in, the site's own data are looked at, a parcel goes out."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from torch import Tensor

from fedkeep.engine.embedded import Embedded
from fedkeep.engine.requests import answer_type, read_request
from fedkeep.errors import ConfigError, FedKeepError
from fedkeep.experiment.cells import pinned_threads
from fedkeep.experiment.networks import of_one
from fedkeep.experiment.plugins import use
from fedkeep.experiment.reading import parse_recipe
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.setup import engine_for, generator_hash, load_data, shared_out, without_seen
from fedkeep.flower.config import Place
from fedkeep.flower.federations import OwnData, announced, fitted, own_data, part_of
from fedkeep.flower.line import Kind, Parcel, naming
from fedkeep.flower.memory import Memory, left_by, reference
from fedkeep.generation.diffusion.generator_config import GeneratorConfig
from fedkeep.interface.codec import flatten
from fedkeep.models import Pretrained

log = logging.getLogger(__name__)


def answer(kind: Kind, parcel: Parcel, place: Place) -> Parcel:
    """Answer what the server asks. Whatever goes wrong is logged here and told there.

    Parameters
    ----------
    kind : what is asked: who the site is, or a client step.
    place : what the site's operator has configured.
    """
    try:
        with pinned_threads(place.threads):
            return perform(parcel, place) if kind == "perform" else introduce(parcel, place)
    except FedKeepError as error:
        log.error("site %s cannot answer: %s", place.site, error)
        return Parcel({"error": str(error)})
    except Exception as error:
        log.exception("site %s cannot answer", place.site)
        return Parcel({"error": f"{type(error).__name__}: {error}"})


def introduce(parcel: Parcel, place: Place) -> Parcel:
    """Tell who this is and how many examples of each task there are, if the data fit the run."""
    federation = _engine(parcel, place).federation
    examples = [federation.at(task).size(place.site) for task in range(1, federation.tasks + 1)]
    log.info("site %s fits the run, with %s examples", place.site, " + ".join(map(str, examples)))
    return Parcel({"site": place.site, "examples": examples})


def perform(parcel: Parcel, place: Place) -> Parcel:
    """Perform a client step from the state that the server names, or answer as before if it was performed already."""
    head, engine = parcel.head, _engine(parcel, place)
    received = {name: tensor.to(engine.device) for name, tensor in parcel.tensors.items()}
    kept = reference(engine.client_state)
    request = read_request(engine.algorithm, head["request"], received, kept)
    if request.client != place.site:
        raise ConfigError(f"this is site {place.site}, and the server asks {request.client}.")
    memory = Memory(Path(place.state_dir), str(head["run"]), place.site, engine.device)
    call = str(head["call"])
    with memory.lock():
        found = memory.answer(call, answer_type([request.step], kept))
        if found is None:
            step, task, round = request.step.__name__, request.task, request.round
            log.info("site %s does %s in round %d of task %d", place.site, step, round, task)
            engine.enter(task)
            clock = engine.place.clock
            clock.restart()
            state = memory.state(request.state, engine.client_state)
            outcome = engine.here.perform(replace(request, state=state))
            left = (outcome.reply, left_by(call, engine.client_state), outcome.uses)
            found = ((left,), clock.train, clock.teachers)
            memory.keep(call, outcome.state, found)
        memory.forget(call, str(head["settled"]))
    tensors: dict[str, Tensor] = {}
    return Parcel({"answer": flatten(found, naming(tensors, {}))}, tensors)


def _engine(parcel: Parcel, place: Place) -> Embedded:
    """Return an engine with the site's own data, on which the run's steps can be performed."""
    theirs, ours = parcel.head["version"], version("fedkeep")
    if theirs != ours:
        raise ConfigError(f"the server has FedKeep {theirs} and this site {ours}. Install the same version on both.")
    return _built(parcel.head["recipe"], json.dumps(parcel.head["data"]), place)


@lru_cache(maxsize=4)  # a simulation's processes play many sites
def _built(text: str, wanted: str, place: Place) -> Embedded:
    use(filter(None, place.use.split(",")))
    recipe = parse_recipe(text, "the server's recipe", allow_code=place.allow_code)
    own = of_one(recipe.client_models, place.site)
    if own:  # the server's network, perhaps one with a pre-trained extractor, is nothing to this site
        recipe = replace(recipe, model=own[0].model)
    elif isinstance(recipe.model, Pretrained) and place.partition_id < 0:
        raise ConfigError(
            f"site {place.site} would need a copy of the pre-trained extractor {recipe.model.source!r}, which sites "
            "cannot name yet. Give the site a network of its own in [[client_models]]."
        )
    run = replace(recipe.run, cohort=1, min_clients=1)
    alone = replace(recipe, run=run, client_models=own, generator=_generator(recipe, place))
    federation = _own(alone, recipe.seeds[0], json.loads(wanted), place)
    return engine_for(alone, recipe.methods[0], recipe.seeds[0], federation, place.device, place.data_dir or None)


def _generator(recipe: Recipe, place: Place) -> GeneratorConfig:
    """Return the generator as this site has it: a real site reads no folder that the run names."""
    if place.generator and recipe.generator.per_task:  # else the run has none, and nothing is kept from its clients
        return recipe.generator.at_site(place.generator)
    if "generator" in recipe.methods[0].algorithm.needs and place.partition_id < 0:
        raise ConfigError(
            f"site {place.site} has no generator of images, and this run needs one. Copy it there and name its folder "
            'in the node-config: generator="/path/to/it".'
        )
    return recipe.generator if place.partition_id >= 0 else GeneratorConfig()


def _own(recipe: Recipe, seed: int, wanted: dict[str, object], place: Place) -> OwnData:
    """Return the site's own view of the federation, with its classes numbered as the run's."""
    data_dir = place.data_dir or None
    ours, theirs = generator_hash(recipe, data_dir), wanted["generator"]
    if ours and theirs and ours != theirs:
        raise ConfigError(
            f"site {place.site} has another generator of images than the run's server. Copy the server's folder to the "
            "place that the node-config names."
        )
    whole = load_data(place.data or recipe.data, data_dir, recipe.validation)
    kept = without_seen(recipe, whole, data_dir)
    if wanted["left_out"] and kept is whole:
        raise ConfigError(
            f"this run keeps what its generator learned from out of its clients' data, and site {place.site} does not "
            "know these images. Copy the generator there and name its folder in the node-config: "
            'generator="/path/to/it".'
        )
    dataset = fitted(kept, wanted)
    if place.partition_id < 0:
        return own_data(place.site, dataset, announced(recipe, seed, dataset))
    left, _ = recipe.auxiliary.split(dataset, seed)
    federation = shared_out(recipe, seed, left, {})
    clients = len(federation.clients)
    if place.num_partitions not in (0, clients):
        raise ConfigError(
            f"the recipe splits its data over {clients} clients, and there are {place.num_partitions} nodes. Start as "
            f"many, or set partition.clients={place.num_partitions}."
        )
    return part_of(federation, str(place.partition_id), place.site)
