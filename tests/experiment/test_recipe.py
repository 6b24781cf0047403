"""Recipes: read, changed, checked word by word, written out again."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from each import for_each

from fedkeep.algorithms.parallel.fedcad import FedCAD
from fedkeep.algorithms.sequential.cwc import CWC
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.cli.main import names
from fedkeep.data import DataOptions
from fedkeep.data.partition import DirichletPerClient, ExDir
from fedkeep.errors import ConfigError
from fedkeep.experiment.build import build_federation
from fedkeep.experiment.experiment import describe_trial
from fedkeep.experiment.recipe import ClientModel, Method, Recipe, client_architectures, select_client, select_methods
from fedkeep.experiment.recipe_files import recipe_names
from fedkeep.experiment.recipe_loader import load_recipe, parse_value
from fedkeep.experiment.runtime import Machine
from fedkeep.generation.generator_config import GeneratorConfig
from fedkeep.models.networks import MLP


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load(text: str = tiny.RECIPE, **changes: Any) -> Recipe:
        return load_recipe(tiny.write_recipe(tmp_path, text), **changes)

    return load


HEAD = '[data]\nname = "digits"\n[model]\nname = "mlp"\n'
METHOD = '[[methods]]\nalgorithm = "fedavg"\n'


def test_a_recipe_is_what_its_file_says(load: Any) -> None:
    recipe = load()
    assert (recipe.title, recipe.data, recipe.seeds) == ("tiny", "digits", (0,))
    assert recipe.partition == ExDir(num_clients=8, classes_per_client=2, alpha=0.5)
    assert recipe.model == MLP(hidden=(8,))
    assert (recipe.training.epochs, recipe.training.batch_size, recipe.training.lr) == (1, 64, 0.05)
    assert (recipe.run.rounds, recipe.run.cohort_size) == (2, 2)
    assert [(m.label, m.slug) for m in recipe.methods] == [
        ("FedAvg", "fedavg"),
        ("FedSeq", "fedseq"),
        ("SFedKD", "sfedkd"),
    ]
    assert recipe.methods[2].algorithm == SFedKD(teachers=2)


@for_each(recipe_names())
def test_the_packages_recipes_are_valid_and_survive_being_written(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    again = load_recipe(tiny.write_recipe(tmp_path, recipe.to_toml()))
    assert replace(again, name=name) == recipe
    assert again.to_toml() == recipe.to_toml()


def test_every_option_is_written_out(load: Any) -> None:
    changes = [
        "training.max_grad_norm=5.0",
        "augmentation.horizontal_flip=true",
        "run.evaluate_local_models=true",
        "sfedkd.selection=random",
        "model.hidden=[]",
        "sfedkd.label=Ours (x)",
    ]
    recipe = load(settings=changes, seeds=[3, 1])
    again = load(recipe.to_toml())
    assert again == recipe
    table = tomllib.loads(recipe.to_toml())
    assert table["training"]["max_grad_norm"] == 5.0
    assert table["methods"][2]["label"] == "Ours (x)"
    assert table["methods"][2]["tau"] == 1.0, "defaults too: they may change in a later version"
    assert "max_grad_norm" not in tomllib.loads(load().to_toml())["training"]


@pytest.mark.parametrize(
    ("setting", "get", "value"),
    [
        ("training.lr=0.5", lambda r: r.training.lr, 0.5),
        ("training.lr=1", lambda r: r.training.lr, 1.0),
        ("training.lr = 1e-3", lambda r: r.training.lr, 1e-3),
        ("run.evaluate_local_models=true", lambda r: r.run.evaluate_local_models, True),
        ("model.hidden=[3, 4]", lambda r: r.model.hidden, (3, 4)),
        ("data.name=mnist", lambda r: r.data, "mnist"),
        ('data.name="a=b"', lambda r: r.data, "a=b"),
        ("algorithm.teachers=4", lambda r: r.methods[2].algorithm.teachers, 4),
        ("sfedkd.tau=1", lambda r: r.methods[2].algorithm.tau, 1.0),
        ("SFedKD.metric=js", lambda r: r.methods[2].algorithm.metric, "js"),
        ("partition.alpha=3", lambda r: r.partition.alpha, 3.0),
        ("augmentation.crop_padding=1", lambda r: r.augmentation.crop_padding, 1),
    ],
)
def test_one_setting(setting: str, get: Any, value: Any, load: Any) -> None:
    assert get(load(settings=[setting])) == value


def test_the_last_setting_wins_and_others_stay(load: Any) -> None:
    recipe = load(settings=["training.lr=1", "training.lr=2", "run.cohort_size=3"])
    assert (recipe.training.lr, recipe.training.epochs, recipe.run.cohort_size, recipe.run.rounds) == (2.0, 1, 3, 2)


def test_another_scheme_or_model_keeps_what_both_have(load: Any) -> None:
    recipe = load(settings=["partition.scheme=iid", "partition.num_clients=5", "model.name=lenet5"])
    assert (recipe.partition.name, recipe.partition.num_clients) == ("iid", 5)
    assert recipe.model.name == "lenet5"
    text = tiny.RECIPE.replace("alpha = 0.5", "alpha = 0.05")
    recipe = load(text, settings=["partition.scheme=dirichlet-per-client"])
    assert recipe.partition == DirichletPerClient(num_clients=8, alpha=0.05), "not the default alpha, and no classes"


def test_settings_reach_a_method_by_label(load: Any) -> None:
    text = tiny.RECIPE + '\n[[methods]]\nalgorithm = "sfedkd"\nlabel = "Warm"\ntau = 9.0\n'
    recipe = load(text, settings=["warm.teachers=1"])
    assert [m.algorithm.teachers for m in recipe.methods[2:]] == [2, 1]
    recipe = load(text, settings=["algorithm.teachers=3"])
    assert [m.algorithm.teachers for m in recipe.methods[2:]] == [3, 3]


def test_a_setting_of_training_is_for_methods_with_a_training_of_their_own_too(load: Any) -> None:
    text = tiny.RECIPE + '\n[[methods]]\nalgorithm = "sfedkd"\nlabel = "Warm"\ntraining = {lr = 9.0, epochs = 2}\n'
    assert load(text).training_of(load(text).methods[-1]).lr == 9.0
    recipe = load(text, settings=["warm.training.epochs=3", "training.lr=0.5"])
    assert [recipe.training_of(method).lr for method in recipe.methods] == [0.5] * 4
    assert recipe.training_of(recipe.methods[-1]).epochs == 3
    recipe = load(text, settings=["warm.training.lr=7", "training.lr=0.5"])
    assert [recipe.training_of(method).lr for method in recipe.methods] == [0.5, 0.5, 0.5, 7.0]
    recipe = load(text, settings=["warm.teachers=1", "algorithm.teachers=3"])
    assert [method.algorithm.teachers for method in recipe.methods[2:]] == [3, 1]


def test_a_setting_takes_the_place_of_a_methods_grid(load: Any) -> None:
    grid = '[methods.grid]\n"training.lr" = [1, 2]\ntau = [3, 4]\n'
    text = f'{tiny.RECIPE}\n[[methods]]\nalgorithm = "sfedkd"\nlabel = "Many"\n{grid}'
    assert len(load(text, settings=["training.lr=0.5"]).methods) == 5
    recipe = load(text, settings=["many.training.lr=0.5", "many.tau=9"])
    assert [method.label for method in recipe.methods[3:]] == ["Many"]
    assert (recipe.training_of(recipe.methods[3]).lr, recipe.methods[3].algorithm.tau) == (0.5, 9)


def test_what_two_parents_extend_does_not_undo_what_the_first_one_changes(tmp_path: Path) -> None:
    tiny.write_recipe(tmp_path)
    (name,) = tmp_path.iterdir()
    for file, extends, options in [
        ("one", [name.name], "[training]\nlr = 0.5\n"),
        ("two", [name.name], "[run]\nrounds = 9\n"),
        ("both", ["one.toml", "two.toml"], ""),
        ("last", ["two.toml", "one.toml"], "[training]\nlr = 0.7\n"),
    ]:
        (tmp_path / f"{file}.toml").write_text(f"extends = {extends}\n{options}")
    (tmp_path / "undone.toml").write_text("extends = ['one.toml', 'two.toml', 'base.toml']\n")
    (tmp_path / "base.toml").write_text(f"extends = '{name.name}'\n")
    (tmp_path / "one.toml").write_text("extends = 'base.toml'\n[training]\nlr = 0.5\n")
    both, last, undone = (load_recipe(str(tmp_path / f"{file}.toml")) for file in ("both", "last", "undone"))
    assert undone.training.lr == load_recipe(str(name)).training.lr, "whom it names last counts"
    assert (both.training.lr, both.run.rounds, last.training.lr, last.run.rounds) == (0.5, 9, 0.7, 9)


def test_a_grid_and_a_setting_name_a_label_with_dots_and_equals_signs(load: Any) -> None:
    text = f'{tiny.RECIPE}\n[[methods]]\nalgorithm = "fedseq"\nlabel = "Seq (lr=0.1)"\n'
    recipe = load(text, grid=["Seq (lr=0.1).training.lr=0.1,0.2"])
    assert [method.label for method in recipe.methods[3:]] == ["Seq (lr=0.1) (lr 0.1)", "Seq (lr=0.1) (lr 0.2)"]


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        (HEAD, {"grid": ["training.lr=0.1,0.2"]}, "there is no method to run"),
        (
            HEAD + METHOD + "training = 5\n",
            {"settings": ["fedavg.training.lr=1"]},
            "training of a method must be",
        ),
        (HEAD + METHOD + "grid = 5\n", {"grid": ["training.lr=1,2"]}, "grid of a method must be a table"),
        (f'{HEAD}{METHOD}label = "A"\n{METHOD}label = "A, moving average"\n', {}, "as an average of 'A' is"),
    ],
)
def test_what_is_wrong_with_methods_is_told(load: Any, text: str, changes: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(text, **changes)


def test_methods_seeds_and_rounds(load: Any) -> None:
    recipe = load(methods=["SFedKD", "fedavg"], seeds=[4, 2], rounds=7)
    assert [m.label for m in recipe.methods] == ["SFedKD", "FedAvg"]
    assert recipe.methods[0].algorithm == SFedKD(teachers=2), "methods that the recipe lists keep its options"
    assert (recipe.seeds, recipe.run.rounds) == ((4, 2), 7)
    with pytest.raises(ConfigError, match="name one twice"):
        load(seeds=[4, 4, 2])
    assert load(HEAD + METHOD, methods=["fedseq"]).methods[0].algorithm == FedSeq()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("Warm, weight 3", ["Warm, weight 3"]),
        ("fedseq,warm, weight 3,FedAvg", ["FedSeq", "Warm, weight 3", "FedAvg"]),
        ("Warm, weight 3, again,warm", ["Warm, weight 3, again", "Warm"]),
    ],
)
def test_a_label_with_commas_can_be_named(words: str, expected: list[str], load: Any) -> None:
    text = tiny.RECIPE
    for label in ("Warm", "Warm, weight 3", "Warm, weight 3, again"):
        text += f'\n[[methods]]\nalgorithm = "sfedkd"\nlabel = "{label}"\n'
    assert [m.label for m in load(text, methods=names(words)).methods] == expected


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("FedSeq", ["FedSeq"]),
        ("fedseq", ["FedSeq", "FedSeq, lr 0.1"]),
        ("FEDSEQ", ["FedSeq", "FedSeq, lr 0.1"]),
        ("FedSeq, lr 0.1", ["FedSeq, lr 0.1"]),
        ("fedseq, LR 0.1", ["FedSeq, lr 0.1"]),
    ],
)
def test_a_label_as_it_is_written_is_one_row_and_a_methods_name_each_of_its_rows(
    wanted: str, expected: list[str], load: Any
) -> None:
    other = '[[methods]]\nalgorithm = "fedseq"\nlabel = "FedSeq, lr 0.1"\ntraining = { lr = 0.1 }\n'
    text = HEAD + '[[methods]]\nalgorithm = "fedseq"\n' + other

    assert [m.label for m in load(text, methods=names(wanted)).methods] == expected
    if "," not in wanted:  # from Python, too
        assert [m.label for m in select_methods(load(text), [wanted])] == expected


def test_methods_from_python(load: Any) -> None:
    methods = select_methods(load(), [SFedKD(), SFedKD(teachers=1), FedSeq()])
    assert [m.label for m in methods] == ["SFedKD", "SFedKD 2", "FedSeq"]
    assert [m.slug for m in methods] == ["sfedkd", "sfedkd-2", "fedseq"]


@pytest.mark.parametrize("seeds", [(), ("a",), (0.5,), (-1,), (True,), (2, 2), 3])
def test_seeds_from_python_are_checked_as_those_of_files(seeds: Any, load: Any) -> None:
    with pytest.raises(ConfigError, match="seeds"):
        replace(load(), seeds=seeds)


def test_a_recipe_changed_in_python_is_checked_as_one_that_was_read(load: Any) -> None:
    recipe = load()
    with pytest.raises(ConfigError, match="there is no method to run"):
        replace(recipe, methods=())
    with pytest.raises(ConfigError, match=r"a cohort of 200 cannot be drawn from \d+ clients"):
        replace(recipe, run=replace(recipe.run, cohort_size=200))
    with pytest.raises(ConfigError, match="FedCAD needs an auxiliary set"):
        replace(recipe, methods=select_methods(recipe, [FedCAD()]))
    with pytest.raises(ConfigError, match=r"\[\[methods\]\] 1 must be a table or a Method, not FedSeq\("):
        replace(recipe, methods=[FedSeq()])
    with pytest.raises(ConfigError, match="gives client '1' two networks"):
        replace(recipe, client_models=[ClientModel(("0-1",), MLP()), ClientModel(("1",), MLP())])
    assert replace(recipe, seeds=[2, 1]).seeds == (2, 1), "a list will do"


@pytest.mark.parametrize("options", [{"workers": -1}, {"stack": -1}, {"threads": 0}, {"device": 3}, {"use": [3]}])
def test_a_machine_that_cannot_be(options: Any) -> None:
    with pytest.raises(ConfigError, match=rf"Machine\.{next(iter(options))} must be"):
        Machine(**options)


def test_a_machine_takes_a_path(tmp_path: Path) -> None:
    assert Machine(data_dir=tmp_path) == Machine(data_dir=str(tmp_path))  # type: ignore[arg-type]


def test_labels_make_folder_names_of_their_own() -> None:
    slugs = [Method(label, FedSeq()).slug for label in ("Обучение", "联邦学习", "FedAvg, τ = 3", "x" * 300, "x" * 301)]
    assert len(set(slugs)) == 5
    assert all(re.fullmatch(r"[a-z0-9.-]{1,200}", slug) for slug in slugs)
    assert slugs[2] == "fedavg-3", "labels with Latin letters keep the folders they had"


# Inheritance


def test_a_recipe_extends_another(load: Any) -> None:
    recipe = load('extends = "demo"\ntitle = "mine"\n[training]\nlr = 0.125\n')
    demo = load_recipe("demo")
    assert recipe == replace(demo, name=recipe.name, title="mine", training=replace(demo.training, lr=0.125))


def test_lists_are_replaced_and_another_scheme_starts_afresh(load: Any) -> None:
    recipe = load('extends = "demo"\nseeds = [9]\n[partition]\nscheme = "iid"\nnum_clients = 11\n' + METHOD)
    assert recipe.seeds == (9,)
    assert len(recipe.methods) == 1
    assert (recipe.partition.name, recipe.partition.num_clients) == ("iid", 11)


def test_a_file_extends_its_neighbour_wherever_one_stands(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    tiny.write_recipe(tmp_path, tiny.RECIPE, "base.toml")
    tiny.write_recipe(tmp_path / "deep", 'extends = "../base.toml"\ntitle = "middle"\n', "middle.toml")
    monkeypatch.chdir("/")
    recipe = load('extends = "deep/middle.toml"\n[run]\nrounds = 9\n')
    assert (recipe.title, recipe.run.rounds, recipe.run.cohort_size) == ("middle", 9, 2)


def test_a_recipe_extends_several_and_later_ones_win(load: Any, tmp_path: Path) -> None:
    tiny.write_recipe(tmp_path, "[data]\nname = 'mnist'\n[training]\nlr = 1.0\nepochs = 3\n", "first.toml")
    tiny.write_recipe(tmp_path, tiny.RECIPE, "second.toml")
    recipe = load('extends = ["first.toml", "second.toml"]\n[run]\nrounds = 9\n')
    assert (recipe.data, recipe.training.lr, recipe.training.epochs) == ("digits", 0.05, 1)
    recipe = load('extends = ["second.toml", "first.toml"]\n[training]\nepochs = 4\n')
    assert (recipe.data, recipe.training.lr, recipe.training.epochs) == ("mnist", 1.0, 4)
    assert load("extends = []\n" + tiny.RECIPE).training.lr == 0.05


def test_data_that_are_named_again_keep_their_options_and_others_do_not(load: Any, tmp_path: Path) -> None:
    held_out = tiny.RECIPE.replace('name = "digits"', 'name = "digits"\nvalidation = 0.25')
    tiny.write_recipe(tmp_path, held_out, "a.toml")
    assert load('extends = "a.toml"\n[data]\nname = "digits"\n').validation == 0.25
    assert load('extends = "a.toml"\n[data]\nname = "mnist"\n').validation == 0.0


def test_another_papers_table_has_other_numbers(load: Any, tmp_path: Path) -> None:
    printed = '[paper]\ntable = "A"\ntarget = 65\n[paper.accuracy]\nFedAvg = [1.0]\nFedSeq = [2.0]\n'
    tiny.write_recipe(tmp_path, tiny.RECIPE + printed, "a.toml")
    assert load('extends = "a.toml"\n[paper.accuracy]\nFedSeq = [3.0]\n').paper == {
        "table": "A",
        "target": 65,
        "accuracy": {"FedAvg": [1.0], "FedSeq": [3.0]},
    }
    other = load('extends = "a.toml"\n[paper]\ntable = "B"\n[paper.accuracy]\nFedSeq = [3.0]\n')
    assert other.paper == {"table": "B", "accuracy": {"FedSeq": [3.0]}}


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_circle_of_recipes_is_an_error(length: int, tmp_path: Path) -> None:
    for number in range(length):
        tiny.write_recipe(tmp_path, f'extends = "{(number + 1) % length}.toml"\n', f"{number}.toml")
    with pytest.raises(ConfigError, match="extends"):
        load_recipe(str(tmp_path / "0.toml"))
    tiny.write_recipe(tmp_path, 'extends = ["demo", "0.toml"]\n', f"{length - 1}.toml")
    with pytest.raises(ConfigError, match="extends"):
        load_recipe(str(tmp_path / "0.toml"))


# Errors: each names what was wrong, and the nearest valid name

SETTING_ERRORS = [
    ("trainin.lr=1", "unknown section.*'training'"),
    ("sfedk.tau=1", "unknown section.*'sfedkd'"),
    ("training.epoch=1", "there is no option 'epoch'.*'epochs'"),
    ("run.round=1", "there is no option 'round'.*'rounds'"),
    ("partition.alhpa=1", "there is no option 'alhpa'.*'alpha'"),
    ("model.hiden=[1]", "there is no option 'hiden'.*'hidden'"),
    ("augmentation.horizontal_flp=true", "there is no option 'horizontal_flp'.*'horizontal_flip'"),
    ("data.nam=x", "there is no option 'nam'. Did you mean 'name'"),
    ("algorithm.teachres=1", "no method.*'teachers'"),
    ("sfedkd.teachres=1", "there is no option 'teachres'.*'teachers'"),
    ("fedavg.teachers=1", "there is no option 'teachers'"),
    ("partition.scheme=exdri", "no partition scheme 'exdri'.*'exdir'"),
    ("partition.scheme=[1]", r"partition\]\.scheme must be a text"),
    ("model.name=lenet", "no model 'lenet'.*'lenet5'"),
    ("model.name=os:system", "allow"),
    ("training.lr=-1", "Training.lr must be at least 0.0, not -1"),
    ("training.lr=fast", "Training.lr must be a number, not 'fast'"),
    ("training.lr=1" + "0" * 400, "Training.lr must be a number"),
    ("training.epochs=2.5", "Training.epochs must be an integer, not 2.5"),
    ("training.epochs=true", "Training.epochs must be an integer"),
    ("training.batch_size=0", "Training.batch_size must be at least 1"),
    ("training.momentum=1.5", "0.0 to 1.0, not 1.5"),
    ("run.cohort_size=9", "a cohort of 9 cannot be drawn from 8 clients"),
    ("run.cohort_size=0", "at least 1"),
    ("run.min_clients=3", "min_clients 3 exceeds run.cohort_size 2"),
    ("run.evaluate_local_models=1", "true or false"),
    ("sfedkd.selection=gredy", "cannot be 'gredy'.*'greedy'"),
    ("sfedkd.nontarget_weighting=fra", "cannot be 'fra'.*'far'"),
    ("training.lr", "cannot read --set 'training.lr'"),
    ("lr=1", "cannot read --set"),
    (".lr=1", "cannot read --set"),
    ("data.exclude=[age]", "is no list or table of TOML. A text needs quotes"),
    ("training.=1", "cannot read --set"),
    ("=", "cannot read --set"),
    ("seeds=[1]", "cannot read --set"),
]


@pytest.mark.parametrize(("setting", "message"), SETTING_ERRORS, ids=[s[:30] for s, _ in SETTING_ERRORS])
def test_errors_of_settings(setting: str, message: str, load: Any) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load(settings=[setting])


FILE_ERRORS = [
    ("sede = [1]\n" + HEAD + METHOD, "no option 'sede'. Did you mean 'seeds'"),
    (HEAD + METHOD + "[trainings]\n", "no option 'trainings'. Did you mean 'training'"),
    (HEAD, "there is no method to run"),
    ("methods = []\n" + HEAD, "there is no method to run"),
    ("methods = 3\n" + HEAD, "methods? "),
    ('methods = ["fedavg"]\n' + HEAD, "methods"),
    (HEAD + "[[methods]]\nlabel = 'x'\n", "needs algorithm"),
    (HEAD + "[[methods]]\nalgorithm = 'fedsq'\n", "no method 'fedsq'.*'fedseq'"),
    (HEAD + METHOD + METHOD, "two methods are labelled 'FedAvg'"),
    (
        HEAD
        + METHOD
        + "[[methods]]\nalgorithm = 'fedseq'\nlabel = 'fed avg'\n[[methods]]\nalgorithm = 'fedseq'\nlabel='Fed-Avg'\n",
        "label",
    ),
    (
        HEAD + "[[methods]]\nalgorithm = 'fedseq'\nlabel = 'a+b'\n[[methods]]\nalgorithm = 'fedavg'\nlabel = 'a-b'\n",
        "two methods are labelled 'a-b' and 'a\\+b', which would share the folder 'a-b'",
    ),
    (HEAD + METHOD + "[paper]\naccuracy = 3\n", r"\[paper.accuracy\] must give methods their mean.*not 3"),
    (HEAD + METHOD + "[paper.accuracy]\nFedAvg = 46.2\n", r"\[paper.accuracy\].*FedAvg = \[46.2\]"),
    (HEAD + METHOD + "[paper.forgetting]\nFedAvg = ['46']\n", r"\[paper.forgetting\]"),
    (HEAD + METHOD + "teachers = 3\n", "no option 'teachers'"),
    ("[model]\nname = 'mlp'\n" + METHOD, r"\[data\] needs"),
    ("[data]\nname = 3\n[model]\nname = 'mlp'\n" + METHOD, r"data\.name must be a text, not 3"),
    ("[data]\nname = 'digits'\n" + METHOD, r"\[model\] needs name: the server's network"),
    ("training = 3\n" + HEAD + METHOD, r"training must be a table"),
    ("partition = []\n" + HEAD + METHOD, r"partition must be a table"),
    ("seeds = 3\n" + HEAD + METHOD, "seeds must be a list"),
    ("seeds = [-1]\n" + HEAD + METHOD, "seeds must be at least 0, not -1"),
    ("seeds = [true]\n" + HEAD + METHOD, "seeds must be an integer, not True"),
    ("seeds = []\n" + HEAD + METHOD, "seeds must be a list"),
    ("extends = 'dmeo'\n", "no recipe 'dmeo'.*'demo'"),
    ("extends = 'missing.toml'\n", "missing.toml"),
    ("extends = ['demo', 'dmeo']\n", "no recipe 'dmeo'.*'demo'"),
    ("extends = 3\n", "no recipe '3'"),
    ("this is no TOML", "cannot read the recipe"),
    (HEAD + METHOD + "[run]\ncohort_size = 101\n", "a cohort of 101 cannot be drawn from 100 clients"),
]


@pytest.mark.parametrize(("text", "message"), FILE_ERRORS, ids=range(len(FILE_ERRORS)))
def test_errors_of_files(text: str, message: str, load: Any) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load(text)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("training = 3\n" + HEAD + METHOD, {"settings": ["training.lr=1"]}),
        ("run = 3\n" + HEAD + METHOD, {"rounds": 3}),
        ("methods = 3\n" + HEAD, {"methods": ["fedavg"]}),
        ("methods = ['fedavg']\n" + HEAD, {"methods": ["fedavg"]}),
        ("methods = 3\n" + HEAD, {"settings": ["algorithm.tau=3"]}),
        ("methods = ['fedavg']\n" + HEAD, {"settings": ["fedavg.tau=3"]}),
        (HEAD + METHOD, {"rounds": 0}),
        (HEAD + METHOD, {"seeds": []}),
        (HEAD + METHOD, {"methods": []}),
    ],
)
def test_malformed_files_and_changes_together_are_errors_too(text: str, changes: Any, load: Any) -> None:
    with pytest.raises(ConfigError):
        load(text, **changes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demmo", "no recipe 'demmo'. Did you mean 'demo'.*fedkeep recipes.*toml file"),
        ("sfedkd/tabel4", "no recipe 'sfedkd/tabel4'. Did you mean 'sfedkd/table4'"),
        ("sfedkd/table4", "one for each column of SFedKD, table 4: sfedkd/table4/cifar10-2-0.5, sfedkd/table4/cif"),
        ("sfedkd/_base", r"\[data\] needs name: a known data set, a Hub id or a path"),
        ("nowhere/x.toml", "no file 'nowhere/x.toml'.*demo"),
        ("", "no recipe"),
    ],
)
def test_errors_of_names(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_recipe(name)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.toml").mkdir()
    for name in ("x.toml", "folder.toml"):
        with pytest.raises(ConfigError, match="cannot read"):
            load_recipe(str(tmp_path / name))


def test_a_method_that_needs_what_the_recipe_lacks(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedSeq, "needs", ("auxiliary",))
    with pytest.raises(ConfigError, match="FedSeq needs an auxiliary set"):
        load()


def test_all_contradictions_are_told_at_once(load: Any) -> None:
    with pytest.raises(ConfigError) as error:
        load(settings=["run.cohort_size=9", "run.min_clients=10", "defense.loss_check=server"])
    told = str(error.value).split("\n- ")
    assert len(told) == 4, told
    for words, text in zip(
        ("cohort of 9", "run.min_clients 10", "needs examples on the server"), told[1:], strict=True
    ):
        assert words in text


def test_wrong_options_of_all_sections_are_told_at_once(load: Any) -> None:
    settings = {
        "run.rounds=0": "[run]: RunSettings.rounds must be at least 1",
        "training.lr=-1": "[training]: Training.lr must be at least 0",
        "training.momentum=2": "[training]: Training.momentum must be 0.0 to 1.0",
        "partition.nme=1": "there is no option 'nme'",
        "fedseq.nope=1": "there is no option 'nope'",
        "fedavg.training.lr=-2": "[[methods]] 1: training of FedAvg: Training.lr must be at least 0.0, not -2",
        "fedavg.wrong=1": "there is no option 'wrong'",
        "nosuch.lr=1": "--set nosuch.lr: unknown section",
        "rounds": "cannot read --set 'rounds'",
    }
    with pytest.raises(ConfigError) as error:
        load(settings=list(settings), grid=["fedseq.nope=1,2"])
    told = error.value.args[0].split("\n- ")[1:]
    assert [sum(words in text for text in told) for words in settings.values()] == [1] * len(settings), told
    assert f": {len(told)} problems.\n" in str(error.value)


def test_options_that_are_no_more_are_read_with_the_value_that_kept_recipes_give(load: Any) -> None:
    kept = HEAD + '[training]\neps = 1e-8\n[[methods]]\nalgorithm = "cwc"\nimportance = '
    assert load(kept + '"fisher"').methods[0].algorithm == CWC()
    with pytest.raises(ConfigError, match="there is no option 'importance'"):
        load(kept + '"si"')


def test_a_network_of_ones_own_takes_no_options(load: Any) -> None:
    with pytest.raises(ConfigError, match=r"'pytest:Module' is your own, and takes no width"):
        load(HEAD.replace('"mlp"', '"pytest:Module"\nwidth = 3') + METHOD, allow_code=True)


def test_values_are_read_as_toml_or_text() -> None:
    assert [parse_value(text) for text in ("1", "1.5", "true", "[1, 2]", "'x'", "exdir", "a b", "")] == [
        1,
        1.5,
        True,
        [1, 2],
        "x",
        "exdir",
        "a b",
        "",
    ]
    assert parse_value("1\nevil = 2") == "1\nevil = 2" or parse_value("1\nevil = 2") == 1


def test_a_recipe_is_json_free_of_surprises(load: Any) -> None:
    assert json.loads(json.dumps(tomllib.loads(load().to_toml())))["methods"][0]["algorithm"] == "fedavg"


OWN = """
[[client_models]]
clients = ["0"]
name = "mlp"
hidden = [9]

[[client_models]]
clients = ["2-4", "6"]
name = "lenet5"
"""


class Alone(FedSeq):
    """A method whose clients may have any network."""

    title = "any network for a test"
    networks = "any"


def test_clients_may_have_networks_of_their_own(load: Any, tmp_path: Path) -> None:
    text = tiny.RECIPE[: tiny.RECIPE.index("[[methods]]")] + '[[methods]]\nalgorithm = "any-network-for-a-test"\n'
    recipe = load(text + OWN)
    own = client_architectures(recipe.client_models, [str(i) for i in range(8)])
    assert {client: model.name for client, model in own.items()} == {
        "0": "mlp",
        "2": "lenet5",
        "3": "lenet5",
        "4": "lenet5",
        "6": "lenet5",
    }
    assert own["0"] == MLP(hidden=(9,))
    again = load_recipe(tiny.write_recipe(tmp_path, recipe.to_toml(), "again.toml"))
    assert again.client_models == recipe.client_models
    assert client_architectures(select_client(recipe.client_models, "3"), ["3"]) == {"3": own["2"]}
    assert select_client(recipe.client_models, "5") == ()
    with pytest.raises(ConfigError, match="names '6', which is no client"):
        client_architectures(recipe.client_models, [str(i) for i in range(6)])


@pytest.mark.parametrize("name", ["3-1", "0-99999999999", "2023-07"])
def test_what_is_no_range_of_clients_is_a_name(name: str) -> None:
    models = [ClientModel((name,), MLP())]
    assert client_architectures(models, [name, "0"]) == {name: MLP()}
    with pytest.raises(ConfigError, match=f"names '{name}', which is no client"):
        client_architectures(models, ["0", "1", "2", "3"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[client_models]]\nname = "mlp"\n', r"\[\[client_models\]\] 1: clients is missing: a list of names"),
        ('[[client_models]]\nclients = ["1"]\n', r"\[\[client_models\]\] 1: needs name: the clients' network"),
        ('[[client_models]]\nclients = ["1"]\nname = "mpl"\n', "no model 'mpl'"),
        ('[[client_models]]\nclients = ["1"]\nname = "mlp"\nhiden = [1]\n', "no option 'hiden'"),
        ('[[client_models]]\nclients = ["1-3", "2"]\nname = "mlp"\n', "gives client '2' two networks"),
        ('[[client_models]]\nclients = ["1"]\nname = "mlp"\n', "FedAvg exchanges weights"),
    ],
)
def test_client_models_that_cannot_be(load: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tiny.RECIPE + text)


def test_a_recipe_that_is_evaluated_on_training_images_says_so(load: Any) -> None:
    recipe = load(settings=["data.validation=0.1"])
    assert recipe.validation == 0.1
    assert recipe.title == "tiny (changed: data.validation=0.1) (evaluated on 10% of the training images)"
    again = load(recipe.to_toml())
    assert (again.title, again.validation) == (recipe.title, 0.1)
    assert load().validation == 0
    assert "validation" not in load().to_toml()
    other = load(recipe.to_toml(), settings=["data.name=mnist"])
    assert other.validation == 0, "known data have nothing in common with others"
    assert load(settings=["data.validation=0.1", "data.name=mnist"]).validation == 0.1, "in any order"


def test_columns_stay_where_other_files_are_named(load: Any) -> None:
    text = load(settings=["data.name=a.csv", "data.label=ill", "data.client=ward", "data.validation=0.1"]).to_toml()
    recipe = load(text, settings=["data.name=clean.csv"])
    assert (recipe.data, recipe.data_options.label, recipe.data_options.client) == ("clean.csv", "ill", "ward")
    assert recipe.validation == 0.1
    assert load(text, settings=["data.name=digits"]).data_options == DataOptions(), "of a known data set they are known"


@pytest.mark.parametrize(
    ("share", "expected"), [("0.6", "0.0 to 0.5"), ("-0.1", "0.0 to 0.5"), ("true", "a number"), ("'much'", "a number")]
)
def test_a_share_for_validation_is_a_share(load: Any, share: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"data.validation must be {expected}, not "):
        load(settings=[f"data.validation={share}"])


def test_validation_images_are_the_test_set_of_a_federation(load: Any) -> None:
    whole, part = (build_federation(load(settings=s), 0) for s in ([], ["data.validation=0.1"]))
    train, test = part.dataset.train["label"], part.dataset.test["label"]
    assert len(train) + len(test) == len(whole.dataset.train["label"])
    assert sum(part.num_examples(client) for client in part.clients) == len(train)
    assert torch.equal(build_federation(load(settings=["data.validation=0.1"]), 1).dataset.test["label"], test)
    described = describe_trial(load(), load().methods[0], 0, part)
    assert "held out; the test images are not used" in described["dataset_note"]
    assert sum(described["test_total"]) == len(test)


def test_a_section_that_is_no_table_in_a_recipe_that_is_extended_is_named(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("partition = 3")
    (tmp_path / "own.toml").write_text('extends = ["demo", "base.toml"]')
    with pytest.raises(ConfigError, match=r"partition must be a table, \[partition\], .*not 3"):
        load_recipe(str(tmp_path / "own.toml"))


@pytest.mark.parametrize("settings", [{"training.lr": 0.5}, [("training.lr", 0.5)], "training.lr=0.5"])
def test_settings_are_a_list_of_texts(settings: Any, load: Any) -> None:
    with pytest.raises(ConfigError, match=r"settings are a list of texts, such as \['training\.lr=0\.05'\], not"):
        load(settings=settings)


def test_another_generator_or_public_set_keeps_how_it_is_used() -> None:
    grey = "feddcl/table1-heterogeneous/grey-0.5"
    before, other = load_recipe(grey), load_recipe(grey, settings=["generator.name=mine"])
    assert other.generator == replace(before.generator, name="mine")
    settings = ["generator.sampler_steps=7", "public.num_images=11", "generator.name=mine", "public.name=mnist"]
    given = load_recipe(grey, settings=settings)
    assert (given.generator.sampler_steps, given.public.num_images) == (7, 11), "in any order"
    latent = load_recipe(grey, settings=["generator.name=ldm"]).generator
    assert latent == GeneratorConfig(name="ldm"), "what suits a generator of grey images does not suit this one"
    assert load_recipe("fedkeep/feddcl-grey/paper", settings=["public.name=mnist"]).public.num_images == 2000
    none = load_recipe("fedkeep/feddcl-grey/paper", methods=["feddcl"], settings=["public.name="])
    assert none.public.num_images == 0


def test_a_grid_of_one_method_comes_before_that_of_all() -> None:
    own, every = "fedseq.training.lr=0.5,1", "training.lr=0.01,0.1"
    labels = [
        [m.label for m in load_recipe("demo", grid=g, methods=["fedseq"]).methods] for g in ([own, every], [every, own])
    ]
    assert labels == [["FedSeq (lr 0.5)", "FedSeq (lr 1)"]] * 2
    order = load_recipe("demo", grid=["sfedkd.tau=1", "training.lr=0.1"], methods=["sfedkd"]).methods
    assert [method.label for method in order] == ["SFedKD (tau 1, lr 0.1)"]
    with pytest.raises(ConfigError, match=r"the grid names SFedKD.tau twice, with other letters"):
        load_recipe("demo", grid=["sfedkd.tau=1,2", "SFedKD.tau=3,4"], methods=["sfedkd"])


def test_a_point_of_a_grid_keeps_what_its_label_says(tmp_path: Path) -> None:
    points = load_recipe("demo", grid=["sfedkd.tau=1,4"], methods=["sfedkd"])
    (tmp_path / "recipe.toml").write_text(points.to_toml())
    with pytest.raises(ConfigError, match=r"SFedKD \(tau 1\) is a point of a grid over tau"):
        load_recipe(str(tmp_path / "recipe.toml"), settings=["sfedkd.tau=3"])
    with pytest.raises(ConfigError, match=r"the grid of sfedkd.tau: SFedKD \(tau 1\) is a point of a grid over tau"):
        load_recipe(str(tmp_path / "recipe.toml"), grid=["sfedkd.tau=2,3"])
    rates = load_recipe("demo", grid=["training.lr=0.5,1"], methods=["fedseq"])
    (tmp_path / "rates.toml").write_text(rates.to_toml())
    for change in ({"settings": ["training.lr=0.1"]}, {"grid": ["training.lr=2,3"]}):
        with pytest.raises(ConfigError, match=r"FedSeq \(lr 0.5\) is a point of a grid over lr"):
            load_recipe(str(tmp_path / "rates.toml"), **change)
    points = load_recipe("demo", grid=["fedavgm.momentum=0.1,0.9"], methods=["fedavgm"])
    (tmp_path / "other.toml").write_text(points.to_toml())
    other = load_recipe(str(tmp_path / "other.toml"), settings=["fedavgm.training.momentum=0.5"])
    assert [method.training for method in other.methods] == [{"momentum": 0.5}] * 2
    changed = load_recipe(str(tmp_path / "recipe.toml"), settings=["sfedkd.teachers=3"])
    assert [method.algorithm.teachers for method in changed.methods] == [3, 3]  # type: ignore[attr-defined]
