"""The whole of FedDCL at toy size: a generator is trained, and three sites of three networks learn two tasks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import small_extractor
import tiny
from local_transport import LocalTransport, node_configs
from toys import TINY, toy_recipe
from trial import Killed, config, killing, model, records

from fedkeep.cli import main
from fedkeep.errors import FedKeepError
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.flower import client_handler
from fedkeep.flower.config import NodeConfig
from fedkeep.flower.server import serve
from fedkeep.flower.transport import Envelope
from fedkeep.generation.generator_config import GeneratorConfig
from fedkeep.generation.training import load_training_data
from fedkeep.reporting.run_folder import read_run


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return toy_recipe(tmp_path_factory.mktemp("feddcl"))


def test_sites_of_three_networks_give_the_same_as_one_machine(recipe: str, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    assert main(["run", recipe, "--workers", "1", "--quiet", "--out", str(one)]) == 0
    transport = LocalTransport(node_configs(tmp_path / "sites", 3))
    serve(transport, config(recipe, many, (), methods="feddcl", rounds=2))
    assert tiny.equal(model(one), model(many))
    assert records(one) == records(many)
    (trial,) = read_run(one).trials
    reply = "generator (paper): trained on all training images of the clients"
    assert reply in trial.generator
    assert reply in (one / "report.html").read_text()
    steps = {envelope.head["request"]["step"] for _, kind, envelope in transport.sent if kind == "perform"}
    assert steps == {"search", "receive", "train", "feedback", "remember"}
    # After a task's first round nothing travels but logits about the server's six images of each of two new classes,
    # and their mean.
    logits = 3 * (2 * 6) * 2 * 4
    assert [(row["up"], row["down"]) for row in records(many)[1::2]] == [(logits, logits)] * 2


def test_sites_hold_no_image_that_the_generator_learned_from(tmp_path: Path) -> None:
    recipe, one, many = toy_recipe(tmp_path, regime="same_classes"), tmp_path / "one", tmp_path / "many"
    assert main(["run", recipe, "--workers", "1", "--quiet", "--out", str(one)]) == 0
    serve(LocalTransport(node_configs(tmp_path / "sites", 3)), config(recipe, many, (), methods="feddcl", rounds=2))
    assert tiny.equal(model(one), model(many))
    there = {"partition_id": -1, "num_partitions": 0, "data": "digits", "generator": str(tmp_path / "generator")}
    own = node_configs(tmp_path / "own", 3, **there)
    transport = LocalTransport(own)
    serve(transport, config(recipe, tmp_path / "real", (), methods="feddcl", rounds=1))
    book = json.loads(next((tmp_path / "real" / "trials").rglob("sites.json")).read_text())
    left = load_training_data("digits", "same_classes").unseen["label"]
    assert all(sum(examples) == int((left < 4).sum()) for examples in book["examples"].values())


def test_methods_that_draw_nothing_leave_the_same_images_out(tmp_path: Path) -> None:
    public = '\n[public]\nname = "digits"\nnum_images = 20\n'
    recipe = toy_recipe(tmp_path, ["ft-kd"], public, regime="same_classes")
    own = {"partition_id": -1, "num_partitions": 0, "data": "digits"}
    wanted = config(recipe, tmp_path / "real", (), methods="ft-kd", rounds=1)
    with pytest.raises(FedKeepError, match=r"keeps what its generator learned from out.*node-config: generator="):
        serve(LocalTransport(node_configs(tmp_path / "sites", 3, **own)), wanted)
    serve(LocalTransport(node_configs(tmp_path / "own", 3, **own, generator=str(tmp_path / "generator"))), wanted)
    book = json.loads(next((tmp_path / "real" / "trials").rglob("sites.json")).read_text())
    left = load_training_data("digits", "same_classes").unseen["label"]
    assert all(sum(examples) == int((left < 4).sum()) for examples in book["examples"].values())


def test_a_real_site_needs_a_generator_of_its_own(recipe: str, tmp_path: Path) -> None:
    own = node_configs(tmp_path / "sites", 3, partition_id=-1, num_partitions=0, data="digits")
    with pytest.raises(FedKeepError, match=r"has no generator of images.*node-config: generator="):
        serve(LocalTransport(own), config(recipe, tmp_path / "many", (), methods="feddcl", rounds=2))


def copies(recipe: str, folder: Path) -> dict[int, NodeConfig]:
    """Return three real sites, each with a copy of the run's generator."""
    sites = node_configs(folder / "sites", 3, partition_id=-1, num_partitions=0, data="digits")
    for node, node_config in sites.items():
        there = shutil.copytree(Path(recipe).parent / "generator", folder / f"generator of {node_config.site}")
        sites[node] = replace(node_config, generator=str(there))
    return sites


def exchange(folder: str) -> None:
    """Put another generator in the place of one, such as a site's own."""
    shutil.rmtree(folder)
    assert main(["generator", "train", "digits", "--seed", "1", "--out", folder, "--quiet", *TINY]) == 0
    client_handler._build.cache_clear()  # a SuperNode answers each call in a process of its own


def test_another_generator_than_the_servers_is_refused(recipe: str, tmp_path: Path) -> None:
    sites = copies(recipe, tmp_path)
    exchange(sites[101].generator)
    with pytest.raises(FedKeepError, match="site 1 has another generator of images than the run's server"):
        serve(LocalTransport(sites), config(recipe, tmp_path / "run", (), methods="feddcl", rounds=2, min_clients=3))


@pytest.mark.slow
def test_a_site_that_changed_its_generator_between_stop_and_resume_is_noticed(recipe: str, tmp_path: Path) -> None:
    sites, wanted = copies(recipe, tmp_path), config(recipe, tmp_path / "run", (), methods="feddcl", rounds=2)
    first_round = 2 * 3 + 3 * 3  # prototypes twice, then images, training, feedback
    with pytest.raises(Killed):
        serve(LocalTransport(sites, killing(first_round)), wanted)
    exchange(sites[101].generator)
    serve(LocalTransport(sites), wanted)
    lost = [row["lost"] for row in records(tmp_path / "run")]
    assert [list(each) for each in lost] == [[], ["1"], ["1"], ["1"]]
    assert "has another generator of images than the run's server" in lost[1]["1"]


def test_a_run_without_a_generator_does_not_know_that_of_a_site(recipe: str, tmp_path: Path) -> None:
    (node_config,) = node_configs(tmp_path, 1, partition_id=-1, data="digits", generator="of/this/site").values()
    assert client_handler._generator(load_recipe(recipe), node_config).name == "of/this/site"
    assert client_handler._generator(load_recipe(tiny.write_recipe(tmp_path)), node_config) == GeneratorConfig()


def frozen(recipe: str, folder: Path, sites: str) -> str:
    """Return the recipe with a server whose extractor is frozen, and a network of their own for some sites."""
    source = small_extractor.save(folder / "extractor")
    text = Path(recipe).read_text().replace('name = "mlp"\nhidden = [12]', f'name = "pretrained"\nsource = "{source}"')
    return tiny.write_recipe(folder, text.replace('clients = ["1"]', f"clients = {sites}"))


def test_sites_with_networks_of_their_own_never_see_the_servers_extractor(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulations, build = [], client_handler.build_simulation
    monkeypatch.setattr(
        client_handler, "build_simulation", lambda *given: simulations.append(build(*given)) or simulations[-1]
    )
    toy = frozen(recipe, tmp_path, '["1-2"]')
    one, many = tmp_path / "one", tmp_path / "many"
    assert main(["run", toy, "--workers", "1", "--quiet", "--out", str(one)]) == 0
    serve(LocalTransport(node_configs(tmp_path / "sites", 3)), config(toy, many, (), methods="feddcl", rounds=2))
    assert tiny.equal(model(one), model(many))
    assert set(model(one)) == {"classifier.weight", "classifier.bias"}
    assert records(one) == records(many)
    assert len(simulations) == 3
    assert all(simulation.context.runner.extractor is None for simulation in simulations)


def test_a_real_site_cannot_name_an_extractor_yet(recipe: str, tmp_path: Path) -> None:
    has = {"data": "digits", "generator": str(Path(recipe).parent / "generator")}
    real = node_configs(tmp_path / "sites", 3, partition_id=-1, num_partitions=0, **has)
    asked = config(frozen(recipe, tmp_path, '["1"]'), tmp_path / "many", (), methods="feddcl", min_clients=3)
    transport = LocalTransport(real)
    with pytest.raises(FedKeepError, match="would need a copy of the pre-trained extractor"):
        serve(transport, asked)
    head = transport.sent[0][2].head  # of a server that names a folder as a site's own network
    text, own = str(head["recipe"]).split("[[client_models]]")[0], f'name = "pretrained"\nsource = "{tmp_path}"\n'
    lie = Envelope({**head, "recipe": f'{text}[[client_models]]\nclients = ["0-2"]\n{own}'})
    told = client_handler.handle_message("introduce", lie, real[100]).head["error"]
    assert f"would need a copy of the pre-trained extractor '{tmp_path}'" in told
