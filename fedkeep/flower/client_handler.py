"""What happens at a site: an envelope comes in, a step is carried out on the site's own data, an envelope goes out."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from torch import Tensor

from fedkeep.errors import ConfigError, FedKeepError
from fedkeep.experiment.build import build_simulation, generator_hash, load_data, split_clients, without_seen
from fedkeep.experiment.model_config import select_client
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_loader import parse_recipe
from fedkeep.flower.config import NodeConfig
from fedkeep.flower.state_store import StateStore, state_ref, state_ref_type
from fedkeep.flower.transport import Envelope, MessageKind, content_namer
from fedkeep.flower.views import SiteView, class_schedule, client_view, match_dataset, site_view
from fedkeep.generation.diffusion.generator_config import GeneratorConfig
from fedkeep.interface.codec import encode_structure
from fedkeep.models import Pretrained
from fedkeep.simulation.messages import decode_task, results_type
from fedkeep.simulation.simulation import Simulation
from fedkeep.training.context import pinned_threads

log = logging.getLogger(__name__)


def handle_message(kind: MessageKind, envelope: Envelope, node: NodeConfig) -> Envelope:
    """Answer what the server asks. Whatever goes wrong is logged here and told there.

    Parameters
    ----------
    kind : what is asked: who the site is, or a client step.
    node : what the site's operator has configured.
    """
    try:
        with pinned_threads(node.threads):
            return perform(envelope, node) if kind == "perform" else introduce(envelope, node)
    except FedKeepError as error:
        log.error("site %s cannot answer: %s", node.site, error)
        return Envelope({"error": str(error)})
    except Exception as error:
        log.exception("site %s cannot answer", node.site)
        return Envelope({"error": f"{type(error).__name__}: {error}"})


def introduce(envelope: Envelope, node: NodeConfig) -> Envelope:
    """Tell who this is and how many examples of each task there are, if the data fit the run."""
    federation = _simulation(envelope, node).federation
    examples = [federation.for_task(task).num_examples(node.site) for task in range(1, federation.num_tasks + 1)]
    log.info("site %s fits the run, with %s examples", node.site, " + ".join(map(str, examples)))
    return Envelope({"site": node.site, "examples": examples})


def perform(envelope: Envelope, node: NodeConfig) -> Envelope:
    """Perform a client step from the state that the server names, or answer as before if it was performed already."""
    head, simulation = envelope.head, _simulation(envelope, node)
    received = {name: tensor.to(simulation.device) for name, tensor in envelope.tensors.items()}
    kept = state_ref_type(simulation.client_state)
    task = decode_task(simulation.algorithm, head["request"], received, kept)
    if task.client != node.site:
        raise ConfigError(f"this is site {node.site}, and the server asks {task.client}.")
    store = StateStore(Path(node.state_dir), str(head["run"]), node.site, simulation.device)
    call = str(head["call"])
    with store.lock():
        found = store.answer(call, results_type([task.step], kept))
        if found is None:
            step = task.step.__name__
            log.info("site %s does %s in round %d of task %d", node.site, step, task.round, task.task)
            simulation.set_task(task.task)
            timer = simulation.context.timer
            timer.reset()
            state = store.state(task.state, simulation.client_state)
            (future,) = simulation.serial.submit(replace(task, state=state))
            result = simulation.serial.wait(future)
            left = (result.reply, state_ref(call, simulation.client_state), result.uses)
            found = ((left,), timer.train, timer.teachers)
            store.keep(call, result.state, found)
        store.forget(call, str(head["settled"]))
    tensors: dict[str, Tensor] = {}
    return Envelope({"answer": encode_structure(found, content_namer(tensors, {}))}, tensors)


def _simulation(envelope: Envelope, node: NodeConfig) -> Simulation:
    """Return a simulation with the site's own data, on which the run's steps can be performed."""
    theirs, ours = envelope.head["version"], version("fedkeep")
    if theirs != ours:
        raise ConfigError(f"the server has FedKeep {theirs} and this site {ours}. Install the same version on both.")
    return _built(envelope.head["recipe"], json.dumps(envelope.head["data"]), node)


@lru_cache(maxsize=4)  # a simulation's processes play many sites
def _built(text: str, wanted: str, node: NodeConfig) -> Simulation:
    import_user_code(filter(None, node.use.split(",")))
    recipe = parse_recipe(text, "the server's recipe", allow_code=node.allow_code)
    own = select_client(recipe.client_models, node.site)
    if own:  # the server's network, perhaps one with a pre-trained extractor, is nothing to this site
        recipe = replace(recipe, model=own[0].model)
    elif isinstance(recipe.model, Pretrained) and node.partition_id < 0:
        raise ConfigError(
            f"site {node.site} would need a copy of the pre-trained extractor {recipe.model.source!r}, which sites "
            "cannot name yet. Give the site a network of its own in [[client_models]]."
        )
    run = replace(recipe.run, cohort=1, min_clients=1)
    alone = replace(recipe, run=run, client_models=own, generator=_generator(recipe, node))
    federation = _own(alone, recipe.seeds[0], json.loads(wanted), node)
    return build_simulation(alone, recipe.methods[0], recipe.seeds[0], federation, node.device, node.data_dir or None)


def _generator(recipe: Recipe, node: NodeConfig) -> GeneratorConfig:
    """Return the generator as this site has it: a real site reads no folder that the run names."""
    if node.generator and recipe.generator.per_task:  # else the run has none, and nothing is kept from its clients
        return recipe.generator.at_site(node.generator)
    if "generator" in recipe.methods[0].algorithm.needs and node.partition_id < 0:
        raise ConfigError(
            f"site {node.site} has no generator of images, and this run needs one. Copy it there and name its folder "
            'in the node-config: generator="/path/to/it".'
        )
    return recipe.generator if node.partition_id >= 0 else GeneratorConfig()


def _own(recipe: Recipe, seed: int, wanted: dict[str, object], node: NodeConfig) -> SiteView:
    """Return the site's own view of the federation, with its classes numbered as the run's."""
    data_dir = node.data_dir or None
    ours, theirs = generator_hash(recipe, data_dir), wanted["generator"]
    if ours and theirs and ours != theirs:
        raise ConfigError(
            f"site {node.site} has another generator of images than the run's server. Copy the server's folder to the "
            "place that the node-config names."
        )
    whole = load_data(node.data or recipe.data, data_dir, recipe.validation)
    kept = without_seen(recipe, whole, data_dir)
    if wanted["left_out"] and kept is whole:
        raise ConfigError(
            f"this run keeps what its generator learned from out of its clients' data, and site {node.site} does not "
            "know these images. Copy the generator there and name its folder in the node-config: "
            'generator="/path/to/it".'
        )
    dataset = match_dataset(kept, wanted)
    if node.partition_id < 0:
        return site_view(node.site, dataset, class_schedule(recipe, seed, dataset))
    left, _ = recipe.auxiliary.split(dataset, seed)
    federation = split_clients(recipe, seed, left, {})
    clients = len(federation.clients)
    if node.num_partitions not in (0, clients):
        raise ConfigError(
            f"the recipe splits its data over {clients} clients, and there are {node.num_partitions} nodes. Start as "
            f"many, or set partition.clients={node.num_partitions}."
        )
    return client_view(federation, str(node.partition_id), node.site)
