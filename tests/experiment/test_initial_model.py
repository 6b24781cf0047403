"""Rounds that begin from given weights or from pooled training: the same model for all, exact, named, and refused."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from each import for_each
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedkeep
from fedkeep.errors import ConfigError, MissingExtra, RunError
from fedkeep.experiment.build import build_federation
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.initial_model import _with_classes_of, fit_weights, initial_model, read_weights
from fedkeep.experiment.recipe_loader import load_recipe, parse_recipe
from fedkeep.interface import algorithms, get_algorithm
from fedkeep.models.heads import BIAS, WEIGHT
from fedkeep.models.networks import MLP
from fedkeep.reporting.figures import history
from fedkeep.reporting.run_folder import read_run
from fedkeep.reporting.summary import summary
from fedkeep.reporting.table import caption
from fedkeep.training import pooled

TRAIN = "fedkeep.experiment.initial_model.train_on_pool"

POOLED = ("model.pretraining.passes=2", "model.pretraining.lr=0.3")
CPU = torch.device("cpu")
TASKS = "\n[tasks]\nnum_tasks = 2\nnum_classes = 10\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, so that each test trains what it asks for."""
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return tiny.write_recipe(tmp_path)


def made(recipe: fedkeep.Recipe, seed: int = 0) -> Mapping[str, Tensor]:
    found = initial_model(recipe, seed, build_federation(recipe, seed), CPU)
    assert found is not None
    return found.weights


def trial_info(folder: Path, name: str = "fedavg-seed0") -> dict[str, Any]:
    info: dict[str, Any] = json.loads((folder / "trials" / name / "trial.json").read_text())
    return info


def test_pooled_training_equals_plain_sgd_by_hand() -> None:
    recipe = load_recipe("demo", settings=["model.pretraining.passes=3", "model.pretraining.batch_size=50"])
    federation = build_federation(recipe, 5)
    begun = Experiment(replace(recipe, pretraining=pooled.PooledTraining())).simulation(recipe.methods[0], 5)
    network = MLP().build((1, 8, 8), 10)
    network.load_state_dict(dict(begun.server.model))
    optimiser = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    images, labels = federation.dataset.train["input"], federation.dataset.train["label"]
    steps = 3 * -(-len(labels) // 50)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for number in range(3):
        order = torch.randperm(len(labels), generator=pooled.seeds.rng(5, "pooled order", use=number))
        for rows in order.split(50):
            loss = nn.functional.cross_entropy(network(federation.dataset.normalise(images[rows])), labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    for name, tensor in made(recipe, 5).items():
        torch.testing.assert_close(tensor, network.state_dict()[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_all_methods_and_workers_begin_from_one_model_that_is_made_once(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    train = pooled.train_on_pool
    monkeypatch.setattr(TRAIN, lambda *given: calls.append(given) or train(*given))
    chosen = load_recipe(recipe, settings=POOLED, seeds=[0, 1])
    one = fedkeep.run(chosen, out=tmp_path / "one")
    assert len(calls) == 2, "once for each seed, not for each method"
    fedkeep.run(chosen, out=tmp_path / "two", machine=fedkeep.Machine(workers=2))
    digests = {}
    for trial in one.trials:
        name = f"{trial.algorithm}-seed{trial.seed}"
        begun = trial_info(tmp_path / "one", name)
        digests.setdefault(trial.seed, set()).add(begun["dependencies"]["initial model"])
        assert trial_info(tmp_path / "two", name)["initial_model"] == begun["initial_model"]
        lines = [(tmp_path / run / "trials" / name / "rounds.jsonl").read_text() for run in ("one", "two")]
        assert lines[0] == lines[1]
    assert [len(of_seed) for of_seed in digests.values()] == [1, 1]
    assert digests[0] != digests[1]


@pytest.mark.parametrize("settings", [(), ("data.validation=0.2",)])
def test_held_out_and_test_examples_are_never_in_it(
    settings: tuple[str, ...], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Mapping[str, Tensor]] = []
    train = pooled.train_on_pool
    watched = lambda runner, data, *rest: seen.append(data) or train(runner, data, *rest)  # noqa: E731
    monkeypatch.setattr(TRAIN, watched)
    chosen = load_recipe(recipe, settings=[*POOLED, *settings, "auxiliary.images_per_class=3"])
    federation = build_federation(chosen, 0)
    initial_model(chosen, 0, federation, CPU)
    held = sorted(row for client in federation.clients for row in federation.partition[int(client)].tolist())
    assert seen[0]["label"].tolist() == federation.dataset.train["label"][held].tolist()
    assert len(held) == len(federation.dataset.train["label"])
    for part in (federation.dataset.test, federation.server_data):
        others = {image.numpy().tobytes() for image in part["input"]}
        assert not others & {image.numpy().tobytes() for image in seen[0]["input"]}


def test_with_tasks_it_knows_the_classes_of_the_first_alone(recipe: str, tmp_path: Path) -> None:
    text = Path(recipe).read_text().replace('algorithm = "sfedkd"\nteachers = 2', 'algorithm = "fedpass"')
    path = tiny.write_recipe(tmp_path, text + TASKS, "tasks.toml")
    chosen = load_recipe(path, settings=POOLED)
    assert len(made(chosen)["classifier.weight"]) == 5
    run = fedkeep.run(chosen, methods=["fedavg", "fedpass"], out=tmp_path / "run")
    begun = trial_info(tmp_path / "run")["initial_model"]
    assert "of the first task: no federated method" in begun["made_by"]
    assert len(begun["correct"]) == len(begun["total"]) == 5
    assert begun["correct"] == trial_info(tmp_path / "run", "fedpass-seed0")["initial_model"]["correct"]
    assert len(run.trials[0].evaluations[-1]["correct"]) == 10


@pytest.mark.slow
def test_tables_report_and_cards_say_what_it_is(recipe: str, tmp_path: Path) -> None:
    run = fedkeep.run(recipe, settings=[*POOLED], methods=["fedavg", "fedseq"], seeds=2, out=tmp_path / "run")
    accuracies = sorted({f"{100 * trial.initial_accuracy:.1f}" for trial in run.trials})
    said = (
        f"2 passes of pooled training on the clients' images: no federated method; accuracy {' to '.join(accuracies)} %"
    )
    assert f"Initial model: {said}." in caption(summary(read_run(tmp_path / "run")))
    assert said in (tmp_path / "run" / "table.md").read_text()
    assert said.replace("'", "&#39;") in (tmp_path / "run" / "report.html").read_text()
    fedkeep.export_model(tmp_path / "run", tmp_path / "model", method="FedAvg", seed=0)
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| initial model | 2 passes of pooled training on the clients' images: no federated method" in card
    assert "- their training examples, all of them, for the pooled training of the initial model" in card
    trial = run.trials[0]
    rounds, values = history([trial], "accuracy")
    assert (rounds[0], values[0, 0]) == (0, 100 * trial.initial_accuracy)
    assert trial.evaluated[0] == 1, "no metric takes it for a round"


def test_a_cold_and_a_warm_run_are_not_averaged(recipe: str, tmp_path: Path) -> None:
    fedkeep.run(recipe, methods=["fedavg"], seeds=[0], out=tmp_path / "cold")
    fedkeep.run(recipe, settings=POOLED[:1], methods=["fedavg"], seeds=[1], out=tmp_path / "warm")
    rows = summary([read_run(tmp_path / name) for name in ("cold", "warm")])
    assert [row.label for row in rows] == ["FedAvg (passes=0)", "FedAvg (passes=2)"]


@pytest.mark.parametrize(
    "section",
    ["pretraining = { passes = 6, lr = 0.05 }\n", "[model.pretraining]\npasses = 6\nlr = 0.05\n"],
)
def test_toml_settings_and_python_say_the_same(section: str, recipe: str, tmp_path: Path) -> None:
    text = tiny.RECIPE.replace("hidden = [8]\n", "hidden = [8]\n" + section)
    path = tiny.write_recipe(tmp_path, text, "warm.toml")
    written = load_recipe(path)
    assert written.pretraining == pooled.PooledTraining(passes=6, lr=0.05)
    by_setting = load_recipe(recipe, settings=["model.pretraining.passes=6", "model.pretraining.lr=0.05"])
    assert by_setting.pretraining == load_recipe(recipe, settings=["model.pretraining={passes=6, lr=0.05}"]).pretraining
    assert by_setting.pretraining == written.pretraining == parse_recipe(written.to_toml(), "it").pretraining
    assert load_recipe(path, settings=["model.name=lenet5"]).pretraining == written.pretraining
    assert load_recipe(path, settings=["model.pretraining.passes=0"]).pretraining.passes == 0
    assert load_recipe(path, settings=["model.pretraining.momentum=0"]).pretraining.lr == 0.05


def test_a_model_that_is_given_in_python(tmp_path: Path) -> None:
    network = MLP(hidden=(8,)).build((1, 8, 8), 10)
    given = {"model": MLP(hidden=(8,)), "methods": ["fedavg", "fedseq"], "rounds": 2, "seeds": 2}
    run = fedkeep.run("demo", **given, weights=network.state_dict(), out=tmp_path / "dict")
    save_file(network.state_dict(), tmp_path / "file.safetensors")
    other = fedkeep.run("demo", **given, weights=tmp_path / "file.safetensors", out=tmp_path / "file")
    assert [trial.rounds for trial in run.trials] == [trial.rounds for trial in other.trials]
    assert len({trial.info["dependencies"]["initial model"] for trial in run.trials}) == 1, "seeds begin from it too"
    assert run.trials[0].initial_model == "the weights of a state dict"
    assert other.trials[0].initial_model == "the weights of file.safetensors"
    merged = summary([read_run(tmp_path / "dict"), read_run(tmp_path / "file")])
    assert [row.label for row in merged if "(" in row.label] == [], "equal weights, wherever they lie"
    pretrained = fedkeep.run("demo", **given, pretraining={"passes": 1}, out=tmp_path / "pooled")
    assert pretrained.trials[0].initial_model.startswith("1 pass of pooled training")


def test_an_exported_model_and_a_trial_are_weights(recipe: str, tmp_path: Path) -> None:
    fedkeep.run(recipe, methods=["fedavg"], out=tmp_path / "run")
    fedkeep.export_model(tmp_path / "run", tmp_path / "exported", method="FedAvg", seed=0)
    trained = load_file(tmp_path / "exported" / "model.safetensors")
    for folder in ("exported", "run/trials/fedavg-seed0"):
        assert tiny.equal(made(load_recipe(recipe, settings=[f"model.weights={tmp_path / folder}"])), trained)
    with pytest.raises(ConfigError, match="the folder of a run, which has a model for each method and seed"):
        made(load_recipe(recipe, settings=[f"model.weights={tmp_path / 'run'}"]))


def test_an_exported_model_fits_the_data_that_it_has_learned_from(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [(number % 9 / 3, number % 5, ("no", "yes", "maybe")[number % 3]) for number in range(60)]

    def write(name: str, order: tuple[int, ...] = (0, 1, 2), head: str = "age,dose,outcome", **names: str) -> None:
        lines = [",".join(str(names.get(str(row[place]), row[place])) for place in order) for row in rows]
        Path(f"{name}.csv").write_text("\n".join([",".join(head.split(",")[place] for place in order), *lines]))

    def first(name: str) -> fedkeep.Run:
        given = {"data": f"{name}.csv", "weights": "exported", "methods": ["fedavg"], "rounds": 1, "model": "mlp"}
        settings = ["data.label=outcome", "model.hidden=[4]", "training.lr=1e-9", "partition.num_clients=2"]
        given |= {} if name != "own" or Path("exported").exists() else {"weights": None}
        return fedkeep.run("demo", settings=[*settings, "partition.scheme=iid", "run.cohort_size=2"], out=name, **given)

    write("own")
    first("own")
    fedkeep.export_model("own", "exported", method="FedAvg", seed=0)
    write("turned", order=(1, 0, 2))
    write("others", head="height,weight,outcome")
    for name, order in {"turned": "in this order", "others": "no others"}.items():
        with pytest.raises(ConfigError, match=f"trained on the features age, dose, and the data have .*{order}"):
            first(name)
    write("renamed", maybe="zzz")
    assert first("renamed").trials[0].initial_model == "the weights of exported with a new classifier"
    write("permuted", maybe="yes", yes="maybe")
    assert first("permuted").trials[0].initial_model == "the weights of exported"
    save_file(
        {name: tensor * 0 for name, tensor in load_file("exported/model.safetensors").items()}, "zero.safetensors"
    )
    Path("zero.safetensors").replace("exported/model.safetensors")
    write("again")
    with pytest.raises(ConfigError, match=r"model\.safetensors is not the one that config\.json was written for"):
        first("again")


def test_an_exported_classifier_takes_the_order_of_the_datas_classes() -> None:
    weights = {WEIGHT: torch.tensor([[1.0], [2.0], [3.0]]), BIAS: torch.tensor([1.0, 2.0, 3.0])}
    fitted, note = _with_classes_of({"label_names": ["a", "b", "c"]}, ["c", "a", "b"], weights, weights, "it")
    assert fitted[WEIGHT].flatten().tolist() == fitted[BIAS].tolist() == [3.0, 1.0, 2.0]
    assert note == "with its classes in the data's order"


def test_an_exported_classifier_takes_the_order_of_the_first_tasks_classes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(4, 6)) * 3

    def data(labels: list[int], count: int) -> tuple[Any, Any, Any, Any]:
        found = []
        for _ in range(2):
            y = rng.choice(labels, count)
            found += [(centres[y] + rng.normal(size=(count, 6))).astype(np.float32), np.array([*"abcd"])[y]]
        return found[0], found[1], found[2], found[3]

    usual: dict[str, Any] = {"partition": fedkeep.IID(num_clients=4), "model": "mlp", "methods": ["fedavg"], "seeds": 1}
    usual |= {"cohort_size": 2, "training": fedkeep.SGD(lr=0.1)}
    fedkeep.run(data=data([0, 1], 200), out=tmp_path / "own", rounds=3, **usual)
    exported = fedkeep.export_model(tmp_path / "own", tmp_path / "exported", onnx=False)

    def initial(order: str) -> tuple[str, float]:
        settings = ["tasks.num_tasks=2", f"tasks.class_order={order}"]
        out = tmp_path / order
        run = fedkeep.run(data=data([0, 1, 2, 3], 400), weights=exported, out=out, rounds=1, settings=settings, **usual)
        told = run.trials[0].info["initial_model"]
        return told["made_by"], sum(told["correct"]) / sum(run.trials[0].test_total[:2])

    assert initial("[1,0,2,3]")[0] == "the weights of exported with its classes in the data's order"
    assert initial("[2,3,0,1]")[0] == "the weights of exported with a new classifier"


@pytest.mark.parametrize(
    ("known", "names", "note"),
    [
        ("012", "123", "with a new classifier"),
        ("123", "012", "with a new classifier"),
        ("012", "abc", ""),
        ("210", "abc", "with a new classifier"),
    ],
)
def test_numbers_are_names_of_classes_unless_the_others_are_none(known: str, names: str, note: str) -> None:
    weights = {WEIGHT: torch.ones(3, 1), BIAS: torch.ones(3)}
    assert _with_classes_of({"label_names": list(known)}, list(names), weights, weights, "it")[1] == note


@pytest.mark.parametrize(
    ("known", "first", "every", "note"),
    [
        ("01", "23", "0123", "with a new classifier"),
        ("01", "10", "0123", "with its classes in the data's order"),
        ("ab", "23", "0123", ""),
        ("01", "cd", "abcd", ""),
    ],
)
def test_numbers_name_classes_in_tasks_too(known: str, first: str, every: str, note: str) -> None:
    weights = {WEIGHT: torch.ones(2, 1), BIAS: torch.ones(2)}
    assert _with_classes_of({"label_names": [*known]}, [*first], weights, weights, "it", [*every])[1] == note


def test_a_resumed_run_finds_its_weights_from_elsewhere_and_notices_others(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = MLP(hidden=(8,)).build((1, 8, 8), 10)
    save_file(network.state_dict(), tmp_path / "mine.safetensors")
    monkeypatch.chdir(tmp_path)

    class Stop(fedkeep.Callback):
        def on_round_end(self, state: Any, result: Any) -> None:
            raise KeyboardInterrupt

    chosen = load_recipe(recipe, settings=["model.weights=mine.safetensors"], methods=["fedavg"])
    whole = fedkeep.run(chosen, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedkeep.run(chosen, out=tmp_path / "run", callbacks=[Stop()])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    save_file({name: tensor + 1 for name, tensor in network.state_dict().items()}, tmp_path / "mine.safetensors")
    with pytest.raises(RunError, match="was begun with another initial model"):
        fedkeep.resume(tmp_path / "run")
    save_file(network.state_dict(), tmp_path / "mine.safetensors")
    assert fedkeep.resume(tmp_path / "run").trials[0].rounds == whole.trials[0].rounds


class Backbone(nn.Module):
    """As of somebody else: its own names, and a last layer for other classes."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU())
        self.head = nn.Linear(6, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(images))
        return logits


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Backbone()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.inner(images)
        return logits


@pytest.mark.parametrize("network", [Backbone, Wrapped])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_weights_of_another_head_and_with_prefixes(network: type[nn.Module], prefix: str, caplog: Any) -> None:
    other = {prefix + name: tensor.half() for name, tensor in Backbone(classes=7).state_dict().items()}
    built = fedkeep.custom(network).build((1, 8, 8), 10)
    fitted, note = fit_weights(other, built, built.state_dict(), "mine")
    assert note == "with a new classifier"
    assert "'" + prefix + "head.weight' and 1 more are not used" in caplog.text
    assert torch.equal(fitted["classifier.weight"], built.state_dict()["classifier.weight"])
    name = next(name for name in fitted if name.endswith("encoder.1.weight"))
    assert torch.equal(fitted[name], other[prefix + "encoder.1.weight"].float())


def test_the_state_dict_of_a_runs_model_fits_whole_whatever_the_head_is_called(caplog: Any) -> None:
    built = fedkeep.custom(Backbone).build((1, 8, 8), 10)
    given = {f"network.{name}": tensor + 1 for name, tensor in built.state_dict().items()}
    fitted, note = fit_weights(given, built, built.state_dict(), "mine")
    assert note == caplog.text == ""
    assert all(torch.equal(fitted[name], given[f"network.{name}"]) for name in fitted)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((self.hidden(x) + self.mask).softmax(-1))


def test_a_mask_that_stays_out_of_the_model_is_not_told_of(caplog: Any) -> None:
    built = fedkeep.custom(Masked).build((4,), 2)
    fit_weights({**built.state_dict(), "mask": torch.zeros(4)}, built, built.state_dict(), "mine")
    assert caplog.text == ""


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_a_folder_of_hugging_face_has_the_names_of_its_module(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import small_extractor

    saved = small_extractor.network(kind)
    saved.save_pretrained(tmp_path / "whole")
    saved.half().save_pretrained(tmp_path / "parts", max_shard_size="2KB")
    saved.base_model.save_pretrained(tmp_path / "base")
    for folder, note in {"whole": "", "parts": "", "base": "with a new classifier"}.items():
        built = fedkeep.custom(small_extractor.network(kind)).build((1, 8, 8), 4)
        empty = {name: torch.zeros_like(tensor) for name, tensor in built.state_dict().items()}
        fitted, said = fit_weights(read_weights(tmp_path / folder), built, empty, "mine")
        assert said == note
        built.load_state_dict(dict(fitted))
        own = built.body.base_model.state_dict()
        for name, tensor in saved.base_model.state_dict().items():
            assert torch.equal(own[name].half(), tensor.half()), name
    (tmp_path / "whole" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"cannot read a model of Hugging Face.*that save_pretrained wrote"):
        read_weights(tmp_path / "whole")
    (tmp_path / "whole" / "config.json").write_text('{"architectures": ["pipeline"]}')
    with pytest.raises(ConfigError, match="has no model pipeline"):
        read_weights(tmp_path / "whole")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"a folder of Hugging Face, needs packages that are not installed.*pip"):
        read_weights(tmp_path / "base")


def test_weights_that_cannot_be_used_are_refused_before_training(recipe: str, tmp_path: Path) -> None:
    network = MLP(hidden=(9,)).build((1, 8, 8), 10).state_dict()
    save_file(network, tmp_path / "other.safetensors")
    torch.save(network, tmp_path / "model.pt")
    save_file({name: tensor * torch.nan for name, tensor in tiny_state().items()}, tmp_path / "nan.safetensors")
    save_file({"nothing": torch.zeros(1)}, tmp_path / "none.safetensors")
    for file, reason in {
        "other.safetensors": r"is float32 \[9, 64\], and the network's is float32 \[8, 64\]",
        "model.pt": r"cannot read weights from model.pt.*safetensors.torch.save_file\(module.state_dict",
        "nan.safetensors": "has numbers that are not finite",
        "none.safetensors": "does not fit the network Network: it has no 'body",
        "missing.safetensors": "there is no such file or folder",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            fedkeep.run(recipe, settings=[f"model.weights={tmp_path / file}"], out=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def tiny_state() -> dict[str, Tensor]:
    state: dict[str, Tensor] = MLP(hidden=(8,)).build((1, 8, 8), 10).state_dict()
    return state


OTHERS = '\n[[client_models]]\nclients = ["1"]\nname = "mlp"\nhidden = [4]\n'


@pytest.mark.parametrize(
    ("settings", "more", "reason"),
    [
        (["model.weights=x.safetensors"], "", "rounds begin from one model"),
        ([], OTHERS, "makes the initial model of one network"),
        (["privacy.noise_multiplier=1.0"], "", r"without noise, and privacy\.noise_multiplier promises"),
        (["privacy.secure_aggregation=true"], "", r"privacy\.secure_aggregation promises"),
        (
            ["auxiliary.images_per_class=1", "auxiliary.source=train_shared", "privacy.secure_aggregation=true"],
            "",
            r"train_shared gives the server clients' examples, and privacy\.secure_aggregation promises",
        ),
        (["model.pretraining=6"], "", r"model\.pretraining\] must be a table"),
        (["model.pretraining.epochs=6"], "", r"\[model.pretraining\]: there is no option 'epochs'"),
        (["model.pretraining.passes=-1"], "", "passes must be at least 0"),
        (["model.weights=3"], "", r"model\.weights must be a text"),
    ],
)
def test_what_contradicts_it_is_refused(settings: list[str], more: str, reason: str, tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path, tiny.RECIPE + more)
    with pytest.raises(ConfigError, match=reason):
        load_recipe(path, settings=[*POOLED, *settings], methods=["fedmd"] if more else None)


def test_batch_norm_needs_two_examples_in_pooled_training_too(recipe: str) -> None:
    settings = ["model.name=resnet18", "model.pretraining.passes=1", "model.pretraining.batch_size=1"]
    with pytest.raises(ConfigError, match=r"model\.pretraining\.batch_size is 1"):
        Experiment(load_recipe(recipe, settings=settings)).check()


def test_a_training_that_diverges_says_so(recipe: str) -> None:
    with pytest.raises(RunError, match="diverged"):
        made(load_recipe(recipe, settings=["model.pretraining.passes=2", "model.pretraining.lr=1e30"]))


@for_each(algorithms())
def test_methods_whose_clients_read_the_initial_model_say_so(name: str) -> None:
    cls = get_algorithm(name)
    sources = [inspect.getsource(base) for base in cls.__mro__ if "fedkeep.algorithms" in base.__module__]
    assert cls.clients_read_initial_model == any("client.initial_model" in source for source in sources)


def flip(file: Path) -> None:
    """Change a number of a file of tensors."""
    content = bytearray(file.read_bytes())
    content[8 + int.from_bytes(content[:8], "little") + 3] ^= 0x40
    file.write_bytes(content)


def test_a_damaged_initial_model_is_made_again(recipe: str, cache: Path, caplog: Any) -> None:
    loaded = fedkeep.load_recipe(recipe, settings=["model.pretraining.passes=1"])
    whole = made(loaded)
    (file,) = cache.glob("initial-model-*.safetensors")
    flip(file)
    assert tiny.equal(made(loaded), whole)
    assert f"The initial model {file} is damaged" in caplog.text


def test_damaged_weights_that_were_given_in_python_are_refused(recipe: str, cache: Path, tmp_path: Path) -> None:
    state = tiny_state()
    run = fedkeep.run(recipe, methods=["fedavg"], weights=state, rounds=1, out=tmp_path / "run")
    (file,) = cache.glob("state-dict-*.safetensors")
    flip(file)
    with pytest.raises(ConfigError, match=r"weights that were given in Python, is damaged. Give them again"):
        made(fedkeep.load_recipe(str(run.path / "recipe.toml")))
