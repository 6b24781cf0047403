"""A generator for each task: what a recipe may say, what is told of them, and what a run keeps from its clients."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

import fedkeep
from fedkeep._utils import escaping
from fedkeep._utils.digests import read_sealed
from fedkeep.data import load
from fedkeep.data.holdout import image_hashes
from fedkeep.errors import ConfigError, DataError, RunError
from fedkeep.experiment.build import build_federation, build_simulation, check_generator, generator_hash
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.generation.diffusion.generator import REGIMES
from fedkeep.generation.diffusion.generator_config import GeneratorConfig
from fedkeep.generation.diffusion.pixel import write_fingerprints

TASKS = ("tasks.num_tasks=2", "tasks.class_order=source")
SMALL = (
    "images_per_new_class=2",
    "images_per_old_class=2",
    "server_images_per_class=2",
    "prototype_rounds=1",
    "prototype_steps=1",
)


def saved(folder: Path, digits: str, seed: int = 0, **card: Any) -> Path:
    """Save an untrained generator that says it learned these digits."""
    if card.get("regime") == "same_classes":
        train = load("digits").train
        mine = torch.isin(train["label"], torch.tensor([int(digit) for digit in digits]))
        card["seen"] = write_fingerprints(folder, image_hashes(train["input"][mine][:5]))
    toy.generator(seed=seed, label_names=tuple(digits), **card).save(folder)
    return folder


def recipe(*folders: Path, settings: tuple[str, ...] = (), methods: tuple[str, ...] = ("feddcl",)) -> Recipe:
    names = json.dumps([str(folder) for folder in folders])
    few = [f"feddcl.{one}" for one in SMALL if "feddcl" in methods]
    changes = (
        f"generator.by_task={names}",
        "generator.sampler_steps=2",
        *TASKS,
        "partition.num_clients=3",
        "run.cohort_size=2",
        'run.evaluation_models=["last"]',
        *few,
        *settings,
    )
    return load_recipe("demo", settings=changes, methods=list(methods), rounds=1, seeds=[0])


def test_what_each_has_seen_is_told(tmp_path: Path) -> None:
    first = saved(tmp_path / "first", "01234")
    second, other = saved(tmp_path / "second", "56789", seed=1), saved(tmp_path / "other", "abc", regime="disjoint")
    both = GeneratorConfig(by_task=(str(first), str(second)))
    assert both.describe() == f"{first} in task 1, {second} in task 2 (paper, each for its task): {REGIMES['paper']}"
    mixed = GeneratorConfig(by_task=(str(first), str(other)))
    assert mixed.describe() == (
        f"{first} in task 1 (paper, each for its task): {REGIMES['paper']}; "
        f"{other} in task 2 (disjoint, each for its task): {REGIMES['disjoint']}"
    )
    assert GeneratorConfig(name=str(first)).describe() == f"{first} (paper): {REGIMES['paper']}"
    with pytest.raises(ConfigError, match="an empty name"):
        GeneratorConfig(by_task=("a", "", "c"))
    assert both.at_site("x, y").by_task == ("x", "y")
    assert both.for_task(2) == GeneratorConfig(name=str(second))
    assert GeneratorConfig(name="one", space="code").for_task(2) == GeneratorConfig(name="one", space="code")
    assert GeneratorConfig(name="one", by_task=("a", "b")).for_task(1) == GeneratorConfig(name="a"), (
        "in the place of name"
    )


def test_a_run_draws_each_task_by_its_own_and_tells_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    first, second = saved(tmp_path / "first", "01234"), saved(tmp_path / "second", "56789x", seed=1)
    chosen = recipe(first, second, settings=("generator.space=code",))
    simulation = build_simulation(chosen, chosen.methods[0], 0, build_federation(chosen, 0))
    one, two, again = (simulation.context.load_generator(task) for task in (1, 2, 1))
    assert one is again
    assert one.hash() != two.hash()
    assert generator_hash(chosen) == f"{one.hash()} {two.hash()}"

    out = tmp_path / "run"
    (trial,) = fedkeep.run(chosen, out=out).trials
    output = f"{first} in task 1, {second} in task 2 (paper, each for its task): {REGIMES['paper']}"
    assert trial.generator == output
    assert escaping.markdown(output) in (out / "table.md").read_text()
    keys = [json.loads(key) for key in cached(tmp_path / "cache" / "generated")]
    assert {key["class"]: key["generator"] for key in keys} == {c: (one if c < 5 else two).hash() for c in range(10)}

    (trial.path / "result.json").unlink()
    shutil.rmtree(second)
    saved(second, "56789x", seed=2)
    with pytest.raises(RunError, match="begun with another generator than there is now"):
        fedkeep.resume(out)


def cached(folder: Path) -> list[str]:
    """Return what was generated: the key in the header of each file, behind its digest is a safetensors file."""
    found = []
    for path in folder.iterdir():
        content = bytes(read_sealed(path))
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        found.append(header["__metadata__"]["key"])
    return found


def test_what_any_of_them_learned_from_is_kept_from_clients(tmp_path: Path) -> None:
    first = saved(tmp_path / "first", "01234", regime="same_classes")
    second = saved(tmp_path / "second", "56789", regime="same_classes")
    train = load("digits").train
    seen = torch.cat([GeneratorConfig(name=str(folder)).image_hashes() for folder in (first, second)])
    assert len(seen) == 10
    for methods in (("feddcl",), ("fedavg",)):
        federation = build_federation(recipe(first, second, methods=methods), 0)
        held = [image_hashes(federation.for_task(task).data(c)["input"]) for task in (1, 2) for c in federation.clients]
        assert not torch.isin(torch.cat(held), seen).any()
        assert len(torch.cat(held)) == len(train["label"]) - torch.isin(image_hashes(train["input"]), seen).sum()
    toy.generator(
        label_names=tuple("56789"), regime="same_classes", seen=write_fingerprints(second, torch.arange(3))
    ).save(second)
    with pytest.raises(DataError, match=f"the generator {second} says that it learned from a part.*none of those"):
        build_federation(recipe(first, second), 0)


def test_each_must_have_learned_its_own_tasks_classes(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "first", "01234"), saved(tmp_path / "second", "56789")
    for folders, settings in (((second, first), ()), ((first, second), ("tasks.class_order=[5,6,7,8,9,0,1,2,3,4]",))):
        swapped = recipe(*folders, settings=settings)
        with pytest.raises(
            ConfigError, match=rf"{folders[0]} to task 1, of whose classes it did not learn '[05]', .*order"
        ):
            check_generator(swapped, build_federation(swapped, 0))
    other = saved(tmp_path / "other", "ab", regime="disjoint")
    fair = recipe(other, other)
    check_generator(fair, build_federation(fair, 0))
    known = recipe(other, saved(tmp_path / "known", "ab3", regime="disjoint"))
    with pytest.raises(ConfigError, match="known is of the regime 'disjoint', and yet it learned"):
        check_generator(known, build_federation(known, 0))


def test_there_must_be_one_for_each_task(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generator\.by_task names 1 generators for 2 tasks. Name one for each task"):
        recipe(tmp_path / "one")
    with pytest.raises(ConfigError, match=r"names 2 generators for 1 tasks"):
        recipe(tmp_path / "one", tmp_path / "two", settings=("tasks.num_tasks=1",))
    with pytest.raises(RunError, match=r"there is no generator in .*two"):
        build_federation(recipe(saved(tmp_path / "one", "01234"), tmp_path / "two"), 0)
    assert build_federation(recipe(tmp_path / "one", tmp_path / "two", methods=("fedavg",)), 0).clients


def test_a_pipeline_of_ones_own_is_not_called_the_public_model() -> None:
    assert GeneratorConfig(name="ldm").describe() == f"ldm (ldm): {REGIMES['ldm']}"
    own = GeneratorConfig(name="ldm", checkpoint="my/pipeline").describe()
    assert own == "ldm (ldm): the text-to-image pipeline my/pipeline: what it has seen is not known here"
