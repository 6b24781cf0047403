"""What a generator has seen decides what clients may hold: same_classes takes images away, disjoint refuses classes."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedkeep
from fedkeep.cli import main
from fedkeep.data import DataSet, load
from fedkeep.data.holdout import image_hashes
from fedkeep.errors import ConfigError, DataError, MissingExtra, RunError
from fedkeep.experiment import build as setup
from fedkeep.experiment.build import SEEN_BY_GENERATOR, build_federation, check_generator, load_data
from fedkeep.experiment.experiment import Experiment, describe_trial
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.run import open_run, prepare_run
from fedkeep.experiment.runtime import Machine
from fedkeep.experiment.trial_runner import write_description
from fedkeep.generation.generator import REGIMES
from fedkeep.generation.generator_config import GeneratorConfig
from fedkeep.generation.pixel import CARD, FINGERPRINTS, read_card, read_fingerprints
from fedkeep.generation.training import HELD_OUT, load_training_data

QUICK = ["unet.widths=[8,8]", "unet.blocks=1", "noise_schedule.num_timesteps=20", "training.steps=2"]


def trained(folder: Path, regime: str) -> Path:
    words = [word for change in QUICK for word in ("--set", change)]
    assert main(["generator", "train", "digits", "--regime", regime, "--out", str(folder), "--quiet", *words]) == 0
    return folder


@pytest.fixture(scope="module")
def same_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("generators") / "same", "same_classes")


@pytest.fixture(scope="module")
def disjoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("generators") / "disjoint", "disjoint")


LAST = 'run.evaluation_models=["last"]'


def recipe(generator: Path, *methods: str, settings: tuple[str, ...] = ()) -> Recipe:
    changes = (
        f"generator.name={generator}",
        "partition.num_clients=6",
        "run.cohort_size=2",
        LAST,
        "generator.sampler_steps=20",
        *settings,
    )
    return load_recipe("demo", settings=changes, methods=methods or ["feddcl", "fedavg"], rounds=1, seeds=[0])


def test_no_client_holds_an_image_that_the_generator_learned_from(same_classes: Path) -> None:
    whole = load("digits")
    seen = read_fingerprints(same_classes)
    sampled = load_training_data("digits", "same_classes")
    assert torch.equal(seen, image_hashes(sampled.seen["input"]).unique())
    assert read_card(same_classes).held_out == HELD_OUT
    for settings in ((), ("tasks.num_tasks=2",)):
        federation = build_federation(recipe(same_classes, settings=settings), 0)
        held = []
        for task in range(1, federation.num_tasks + 1):
            there = federation.for_task(task)
            held += [image_hashes(there.data(client)["input"]) for client in there.clients]
        theirs = torch.cat(held)
        assert not torch.isin(theirs, seen).any(), "no overlap"
        assert torch.equal(theirs.sort().values, image_hashes(sampled.unseen["input"]).sort().values), (
            "and nothing else"
        )
    assert len(theirs) + sampled.is_seen.sum() == len(whole.train["label"])


def test_no_held_out_image_is_one_that_the_generator_learned_from(same_classes: Path, tmp_path: Path) -> None:
    held_out, seen = ("data.validation=0.3",), read_fingerprints(same_classes)
    test = build_federation(recipe(same_classes, settings=held_out), 0).dataset.test["input"]
    chosen = load_data("digits", None, 0.3).test["input"]
    is_seen = torch.isin(image_hashes(chosen), seen)
    assert 0 < is_seen.sum() < len(chosen)
    assert torch.equal(test, chosen[~is_seen])
    paper = trained(tmp_path / "paper", "paper")
    dataset = build_federation(recipe(paper, settings=held_out), 0).dataset
    assert torch.equal(dataset.test["input"], chosen)
    assert dataset.note.count(SEEN_BY_GENERATOR) == 1
    assert SEEN_BY_GENERATOR not in build_federation(recipe(paper), 0).dataset.note


def test_methods_without_a_generator_hold_the_same_and_need_no_folder(same_classes: Path, tmp_path: Path) -> None:
    both, one = (build_federation(recipe(same_classes, *methods), 0) for methods in (("feddcl", "fedavg"), ("fedavg",)))
    assert torch.equal(both.partition.rows, one.partition.rows)
    all_images = build_federation(recipe(tmp_path / "nowhere", "fedavg"), 0)
    assert len(all_images.partition.rows) == len(load("digits").train["label"])
    with pytest.raises(RunError, match="there is no generator in"):
        build_federation(recipe(tmp_path / "nowhere", "feddcl"), 0)


def test_a_resume_finds_what_the_run_began_with_or_is_refused(
    same_classes: Path, disjoint: Path, tmp_path: Path
) -> None:
    folder, out = tmp_path / "generator", tmp_path / "run"
    shutil.copytree(same_classes, folder)
    (trial,) = fedkeep.run(recipe(folder, "fedavg"), out=out).trials
    (trial.path / "result.json").unlink()
    shutil.rmtree(folder)
    with pytest.raises(RunError, match=r"read its generator from .*, which is not what"):
        fedkeep.resume(out)
    shutil.copytree(same_classes, folder)
    (again,) = fedkeep.resume(out).trials
    assert again.rounds == trial.rounds
    drawing = recipe(folder).methods[0]
    first, *_, last = (
        describe_trial(recipe(name), drawing, 0, build_federation(recipe(name), 0)) for name in (folder, disjoint)
    )
    write_description(trial.path, first)
    with pytest.raises(RunError, match="begun with another training data and generator than"):
        write_description(trial.path, last)


def test_other_data_than_the_generator_learned_from_are_refused(
    same_classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def others(name: str, *_: object) -> DataSet:
        dataset = load(name)
        return replace(dataset, train={**dataset.train, "input": 255 - dataset.train["input"]})

    monkeypatch.setattr(setup, "load_data", others)
    with pytest.raises(DataError, match="none of those images is in digits"):
        build_federation(recipe(same_classes), 0)


def test_a_folder_that_does_not_say_what_it_saw_is_refused(same_classes: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(same_classes, tmp_path / "copy")
    (folder / FINGERPRINTS).write_bytes((folder / FINGERPRINTS).read_bytes()[:-1] + b"?")
    with pytest.raises(RunError, match=r"is not what generator\.json says"):
        build_federation(recipe(folder), 0)
    (folder / FINGERPRINTS).unlink()
    with pytest.raises(RunError, match="Copy the whole folder again"):
        build_federation(recipe(folder), 0)
    card = json.loads((folder / CARD).read_text())
    del card["seen"], card["held_out"]  # as an earlier version wrote it
    (folder / CARD).write_text(json.dumps(card))
    with pytest.raises(RunError, match="does not say which images it learned from"):
        build_federation(recipe(folder), 0)


def test_a_disjoint_generator_must_not_know_a_class_of_the_run(disjoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"regime 'disjoint', and yet it learned .* '0' \('0' there\).* and 7 more"):
        fedkeep.run(recipe(disjoint), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    plain = recipe(disjoint, "fedavg")
    check_generator(plain, build_federation(plain, 0))  # no method asks it for anything


@pytest.mark.parametrize("name", ["", "ldm"])
def test_a_generator_of_another_size_is_refused_before_anything_runs(
    name: str, same_classes: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(same_classes, tmp_path / "copy")
    card = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps(card | {"shape": [1, 28, 28]}))
    sampled = "3 x 8 x 8" if name else "1 x 28 x 28"
    changed = (f"generator.name={name}",) if name else ()
    with pytest.raises(ConfigError, match=f"draws images of {sampled}, and this run's are 1 x 8 x 8"):
        fedkeep.run(recipe(folder, "feddcl", settings=changed), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_the_extra_nothing_is_begun(
    same_classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)  # an import fails then
    with pytest.raises(MissingExtra, match=r"pip install 'diffusers>=.*' 'transformers>="):
        fedkeep.run(recipe(same_classes, "feddcl"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("theirs", "refused"), [("mnist: 3", True), ("K", False), ("Seven", False), ("ABC", True)])
def test_classes_are_known_by_their_own_names(disjoint: Path, tmp_path: Path, theirs: str, refused: bool) -> None:
    folder = shutil.copytree(disjoint, tmp_path / "copy")
    card = json.loads((folder / CARD).read_text())
    card["label_names"] = [theirs]
    (folder / CARD).write_text(json.dumps(card))
    choice = recipe(folder).generator
    if refused:
        with pytest.raises(ConfigError, match="learned classes of this run"):
            choice.check_classes(["emnist: 3", "abc"])
    else:
        choice.check_classes(["emnist: 3", "abc"])


def test_classes_that_never_arrive_may_be_known(disjoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(disjoint, tmp_path / "copy")
    card = json.loads((folder / CARD).read_text())
    card["label_names"] = list("56789")
    (folder / CARD).write_text(json.dumps(card))
    first = recipe(folder, settings=("tasks.num_tasks=2", "tasks.num_classes=4"))
    check_generator(first, build_federation(first, 0))


def test_a_pipeline_of_ones_own_is_not_called_the_public_model() -> None:
    assert GeneratorConfig(name="ldm").describe() == f"ldm (ldm): {REGIMES['ldm']}"
    own = GeneratorConfig(name="ldm", checkpoint="my/pipeline").describe()
    assert own == "ldm (ldm): the text-to-image pipeline my/pipeline: what it has seen is not known here"


def test_what_kept_recipes_name_and_is_no_more_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    text = 'extends = "demo"\n[generator]\nby_task = '
    path.write_text(text + "[]\n")
    assert load_recipe(str(path)).generator == GeneratorConfig()
    path.write_text(text + '["a", "b"]\n')
    with pytest.raises(ConfigError, match="there is no option 'by_task'"):
        load_recipe(str(path))


def test_more_steps_than_the_generator_has_timesteps_are_refused_before_anything_runs(same_classes: Path) -> None:
    given = recipe(same_classes, settings=("generator.sampler_steps=21",))
    with pytest.raises(ConfigError, match=r"generator.sampler_steps is 21, and .* was trained with 20 timesteps"):
        check_generator(given, build_federation(given, 0))


def test_another_generator_of_the_same_name_is_not_taken(
    same_classes: Path, disjoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, generator in (("here", same_classes), ("there", disjoint)):
        shutil.copytree(generator, tmp_path / place / "generator")
    monkeypatch.chdir(tmp_path / "here")
    prepare_run(Experiment(recipe(Path("generator"), "fedavg"), Machine()), tmp_path / "run")
    monkeypatch.chdir(tmp_path / "there")
    with pytest.raises(RunError, match=r"read its generator from .*here/generator, which is not what generator is"):
        open_run(tmp_path / "run", Machine())
    (tmp_path / "here").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    assert open_run(tmp_path / "run", Machine()).recipe.generator.name == "generator"
