"""What a site does with the server's messages: it runs client steps on its own examples and returns the results."""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path

from torch import Tensor

from fedkeep._utils.digests import Identity
from fedkeep._utils.torch_state import plain_torch
from fedkeep.data import DataSet
from fedkeep.data.columns import TableColumn, columns_from_json
from fedkeep.data.federation import hold_out_client_test
from fedkeep.data.holdout import with_held_out
from fedkeep.errors import ConfigError, DataError, DataNotFound, FedKeepError, ValueRefused
from fedkeep.experiment import build
from fedkeep.experiment.build import build_simulation, load_data
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.provenance import code_digests
from fedkeep.experiment.recipe import Recipe, select_client
from fedkeep.experiment.recipe_loader import parse_recipe
from fedkeep.flower import views
from fedkeep.flower.config import NodeConfig, own_code
from fedkeep.flower.state_store import StateStore, state_ref, state_ref_type, stored_secret
from fedkeep.flower.transport import Envelope, MessageKind, content_namer
from fedkeep.generation.generator_config import GeneratorConfig
from fedkeep.interface import Fit
from fedkeep.interface.codec import encode_structure
from fedkeep.models.pretrained import Pretrained
from fedkeep.privacy.secure_sum import secure_update, without_model
from fedkeep.rounds.messages import UPDATE, decode_request, results_type
from fedkeep.rounds.run_settings import Attack
from fedkeep.trials.simulation import Simulation

log = logging.getLogger(__name__)


def handle_message(kind: MessageKind, envelope: Envelope, config: NodeConfig) -> Envelope:
    """Return a site's reply to a message. Errors are logged at the site and reported to the server.

    ``kind``: What the server asks: the site's name and number of examples, a client step, or a stage of an aggregation.
    """
    try:
        with plain_torch(config.threads):
            return _HANDLERS[kind](envelope, config)
    except FedKeepError as error:
        log.error("site %s cannot answer: %s", config.site, error)
        return Envelope({"error": str(error)})
    except Exception as error:
        log.exception("site %s cannot answer", config.site)
        why = "its own log says why" if config.partition_id < 0 else str(error).rstrip(".")  # it may name cells of rows
        return Envelope({"error": f"{type(error).__name__}: {why}."})


def introduce(envelope: Envelope, config: NodeConfig) -> Envelope:
    """Return the site's name and its number of examples in each task; to a server without data also their form."""
    if envelope.head["data"] is None:
        _check_version(envelope)
        import_user_code(own_code(config))
        recipe = parse_recipe(envelope.head["recipe"], "the server's recipe", allow_code=config.allow_code)
        dataset = _load(recipe, config)
        log.info("site %s tells the server its classes and the statistics of its inputs", config.site)
        if recipe.data_options.scaling == "standard":
            dataset = views.with_true_deviations(dataset)
        about = views.describe_dataset(dataset, left_out=False, generator="")
        return Envelope({"site": config.site, "examples": [len(dataset.train["label"])], "data": about})
    federation = _simulation(envelope, config)[0].federation
    examples = [federation.for_task(task).num_examples(config.site) for task in range(1, federation.num_tasks + 1)]
    log.info("site %s fits the run, with %s examples", config.site, " + ".join(map(str, examples)))
    return Envelope({"site": config.site, "examples": examples})


def perform(envelope: Envelope, config: NodeConfig) -> Envelope:
    """Run a client step, or return the stored reply if the step was run before.

    ``envelope``: The request for a client step, with a reference to the client state from which the step begins.
    """
    head, (simulation, site) = envelope.head, _simulation(envelope, config)
    tensors = {name: tensor.to(simulation.settings.device) for name, tensor in envelope.tensors.items()}
    ref_type = state_ref_type(simulation.client_states.type)
    builtin = simulation.builtin_steps
    request = decode_request(simulation.algorithm, head["request"], tensors, ref_type, builtin=builtin)
    if request.client != config.site:
        raise ConfigError(f"this is site {config.site}, and the server asks {request.client}.")
    store = StateStore(Path(config.state_dir), replace(site, run=str(head["run"])), simulation.settings.device)
    call_id = str(head["call"])
    with store.lock():
        store.check_owner()
        reply = store.reply(call_id, results_type([request.step], ref_type))
        if reply is None:
            step, task, round = request.step.__name__, request.task, request.round
            log.info("site %s runs %s in round %d of task %d", config.site, step, round, task)
            simulation.set_task(task)
            timer = simulation.context.timer
            timer.reset()
            state, before = store.state(request.state, simulation.client_states.type), dict(request.uses)
            (future,) = simulation.serial.submit(replace(request, state=state))
            result = simulation.serial.wait(future)
            value = result.reply
            uses = result.uses | store.count_spent(before, result.uses, task)
            if simulation.settings.privacy.secure_aggregation and isinstance(value, Fit):
                try:
                    update = secure_update(simulation, request, value)[UPDATE]
                except ValueRefused as error:
                    log.error("site %s cannot answer: %s", config.site, error)
                    return Envelope({"error": str(error), "uses": uses})
                store.store_update(call_id, update)  # which waits to be masked
                value = without_model(value)
            sent = (value, state_ref(call_id, simulation.client_states.type), uses)
            reply = ((sent,), timer.train, timer.teachers)
            store.store(call_id, result.state, reply)
        store.prune(call_id, str(head["checkpointed"]))
    collected: dict[str, Tensor] = {}
    answer = encode_structure(reply, content_namer(collected, {}))
    return Envelope({"answer": answer, "call": call_id}, collected)


def aggregate(envelope: Envelope, config: NodeConfig) -> Envelope:
    """Answer in one stage of secure aggregation; see `fedkeep.flower.secagg.answer_stage`."""
    from fedkeep.flower.secagg import answer_stage  # which needs Flower's cryptography; nothing else here does

    return answer_stage(envelope, config)


_HANDLERS = {"introduce": introduce, "perform": perform, "aggregate": aggregate}


def _simulation(envelope: Envelope, config: NodeConfig) -> tuple[Simulation, Identity]:
    """Return a simulation of the run with the site's own data, which runs its client steps, and its identity."""
    _check_version(envelope)
    return _build(envelope.head["recipe"], json.dumps(envelope.head["data"]), config)


def _check_version(envelope: Envelope) -> None:
    server_version, site_version = envelope.head["version"], version("fedkeep")
    if server_version != site_version:
        raise ConfigError(
            f"the server has FedKeep {server_version} and this site {site_version}. Install the same version on both."
        )


def _load(recipe: Recipe, config: NodeConfig, columns: Sequence[TableColumn] = ()) -> DataSet:
    """Load the site's data; the share that it holds back for the test is their test split."""
    name, data_dir, share = config.data or recipe.data, config.data_dir or None, recipe.run.client_test
    # Where the server tests, it is the one that holds a part back to choose options on.
    validation = recipe.validation if share or config.partition_id >= 0 else 0.0
    try:
        load_with = partial(load_data, name, data_dir, validation, recipe.data_options)
        dataset = load_with(columns if config.partition_id < 0 else None)
        if columns and dataset.columns != tuple(columns):  # a server with data of its own
            dataset = load_with(columns)
    except DataError as error:
        if config.partition_id >= 0 or isinstance(error, DataNotFound):
            raise
        log.error("site %s cannot read its data: %s", config.site, error)  # the reason may name cells of single rows
        raise DataError(f"site {config.site} cannot read its data as the recipe says. Its own log says why.") from None
    if config.partition_id >= 0:
        return dataset
    about_cells = r"""\d+ (?:of \d+ |empty )?cells (?:'[^']*'|"[^"]*"|.)*?\.(?= |$)"""  # names may have full stops
    for note in re.findall(about_cells, dataset.note) if columns else ():
        log.warning("site %s: %s", config.site, note)
    if share == "own":
        if dataset.test_held_out == "nothing":
            log.warning("site %s has too few examples to hold some out: it tests no model", config.site)
        return dataset
    if not validation:
        dataset = with_held_out(dataset)  # the server tests on its own examples
    return hold_out_client_test(dataset, share) if share else dataset


@lru_cache(maxsize=8)  # in Flower's simulations one process stands for many sites
def _build(text: str, data_description: str, config: NodeConfig) -> tuple[Simulation, Identity]:
    import_user_code(own_code(config))
    recipe = parse_recipe(text, "the server's recipe", allow_code=config.allow_code)
    own_models = select_client(recipe.client_models, config.site)
    if own_models:  # the site does not need the server's network, which may have a pre-trained extractor
        recipe = replace(recipe, model=own_models[0].model)
    if isinstance(recipe.model, Pretrained) and config.partition_id < 0:
        raise ConfigError(
            f"site {config.site} would need a copy of the pre-trained extractor {recipe.model.source!r}, which sites "
            "cannot name yet. Give the site a network of its own in [[client_models]]."
        )
    run = replace(recipe.run, cohort_size=1, min_clients=1)
    generator = _generator(recipe, config)
    recipe = replace(recipe, run=run, client_models=own_models, generator=generator, attack=Attack())
    method, seed, data_dir = recipe.methods[0], recipe.seeds[0], config.data_dir or None
    federation = _load_view(recipe, seed, json.loads(data_description), config)
    simulation = build_simulation(recipe, method, seed, federation, config.device, data_dir)
    if config.partition_id < 0:  # everybody knows the run's seed, and could take noise off that comes from it
        for context in simulation.contexts:
            context.noise_secret = stored_secret(Path(config.state_dir))
    code = code_digests(own_code(config))
    return simulation, Identity(method.label, seed, code=code, inputs={"data": federation.digest()}, site=config.site)


def _generator(recipe: Recipe, config: NodeConfig) -> GeneratorConfig:
    """Return the generator in the site's own folder; a real site reads no folder that the run names."""
    if config.generator and recipe.generator.name:  # otherwise the run has no generator
        return replace(recipe.generator, name=config.generator)
    if "generator" in recipe.methods[0].algorithm.needs and config.partition_id < 0:
        raise ConfigError(
            f"site {config.site} has no generator of images, and this run needs one. Copy it there and name its folder "
            'in the node-config: generator="/path/to/it".'
        )
    return recipe.generator if config.partition_id >= 0 else GeneratorConfig()


def _load_view(recipe: Recipe, seed: int, expected: dict[str, object], config: NodeConfig) -> views.SiteView:
    """Load the site's data and return its view of the federation, with classes numbered as in the run."""
    data_dir = config.data_dir or None
    site_hash, server_hash = build.generator_hash(recipe, data_dir), expected["generator"]
    if site_hash and server_hash and site_hash != server_hash:
        raise ConfigError(
            f"site {config.site} has another generator of images than the run's server. Copy the server's folder to "
            "the folder that the node-config names."
        )
    loaded = _load(recipe, config, columns_from_json({"columns": expected["columns"]}))
    dataset = build.without_generator_images(recipe, loaded, data_dir)
    if expected["left_out"] and dataset is loaded:
        raise ConfigError(
            f"this run keeps what its generator learned from out of its clients' data, and site {config.site} does not "
            "know these images. Copy the generator there and name its folder in the node-config: "
            'generator="/path/to/it".'
        )
    dataset = views.match_dataset(dataset, expected)
    build.check_token_ids(recipe.model, dataset)
    if config.partition_id < 0:
        tests = bool(recipe.run.client_test)
        return views.site_view(config.site, dataset, views.split_classes(recipe, seed, dataset), tests)
    rest, _ = recipe.auxiliary.split(dataset, seed)
    federation = build.split_clients(recipe, seed, rest, {})
    clients = len(federation.clients)
    if config.num_partitions not in (0, clients):
        raise ConfigError(
            f"the recipe splits its data over {clients} clients, and there are {config.num_partitions} nodes. Start as "
            f"many, or set partition.num_clients={config.num_partitions}."
        )
    return views.client_view(federation, str(config.partition_id), config.site)
