"""The whole of FedDCL at toy size: a generator is trained, and three sites of three networks learn two tasks."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from local_line import LocalLine, places
from trial import config, model, records

from fedkeep.cli import main
from fedkeep.errors import FedKeepError
from fedkeep.flower.server import serve
from fedkeep.reporting.run_folder import read_run

FEDDCL = """
title = "toy"
seeds = [0]

[data]
name = "digits"

[generator]
name = "{generator}"

[partition]
scheme = "dirichlet"
clients = 3
min_size = 2

[tasks]
tasks = 2
classes = 4

[model]
name = "mlp"
hidden = [12]

[[client_models]]
clients = ["0"]
name = "mlp"
hidden = [9, 7]

[[client_models]]
clients = ["1"]
name = "mlp"
hidden = [5]

[training]
epochs = 1
batch_size = 32
lr = 0.05

[run]
rounds = 2
cohort = 3

[[methods]]
algorithm = "feddcl"
cur = 4
pre = 4
server_cur = 6
server_pre = 4
proto_rounds = 2
proto_steps = 2
proto_batch = 8
sampler_steps = 2
"""
TINY = ["--set", "unet.widths=[8,8]", "--set", "unet.blocks=1", "--set", "noise.times=20", "--set", "training.steps=4"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("feddcl")
    generator = folder / "generator"
    assert main(["generator", "train", "digits", "--regime", "paper", "--out", str(generator), *TINY]) == 0
    return tiny.write_recipe(folder, FEDDCL.format(generator=generator.as_posix()))


def test_sites_of_three_networks_give_the_same_as_one_machine(recipe: str, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    assert main(["run", recipe, "--workers", "1", "--quiet", "--out", str(one)]) == 0
    line = LocalLine(places(tmp_path / "sites", 3))
    serve(line, config(recipe, many, (), methods="feddcl", rounds=2))
    assert tiny.equal(model(one), model(many))
    assert records(one) == records(many)
    (cell,) = read_run(one).cells
    said = "generator (paper): trained on all training images of the clients"
    assert said in cell.generator
    assert said in (one / "report.html").read_text()
    steps = {parcel.head["request"]["step"] for _, kind, parcel in line.sent if kind == "perform"}
    assert steps == {"search", "receive", "learn", "feedback", "remember"}


def test_a_real_site_needs_a_generator_of_its_own(recipe: str, tmp_path: Path) -> None:
    own = places(tmp_path / "sites", 3, partition_id=-1, num_partitions=0, data="digits")
    with pytest.raises(FedKeepError, match=r"has no generator of images.*node-config: generator="):
        serve(LocalLine(own), config(recipe, tmp_path / "many", (), methods="feddcl", rounds=2))
