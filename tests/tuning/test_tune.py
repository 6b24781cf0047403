"""Options chosen on held-out training examples: grids, what they write, and what they refuse."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import fedkeep
from fedkeep.cli import main
from fedkeep.data import array_store
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.recipe_loader import load_recipe, read_grid
from fedkeep.reporting.metric import METRICS
from fedkeep.reporting.run_folder import read_run
from fedkeep.tuning import Tuning

GRID = ["sfedkd.tau=1,4", "sfedkd.teachers=1,2"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def tuning(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    out = tmp_path_factory.mktemp("tuning") / "out"
    arguments = [word for line in GRID for word in ("--grid", line)]
    assert main(["tune", recipe, *arguments, "--validation", "0.2", "--out", str(out), "--workers", "1"]) == 0
    return fedkeep.tune(recipe, GRID, validation=0.2, out=out)  # which finds everything finished


def test_a_grid_is_run_by_one_command_with_readable_labels(tuning: Tuning) -> None:
    labels = [f"SFedKD (tau {tau}, teachers {teachers})" for tau in (1, 4) for teachers in (1, 2)]
    assert [tuned.label for tuned in tuning.points] == labels
    assert all(len(tuned.values) == 2 for tuned in tuning.points)
    rows = list(csv.DictReader((tuning.path / "run" / "results.csv").open()))
    assert [row["method"] for row in rows] == [label for label in labels for _ in range(2)]
    assert [float(row["window_mean"]) for row in rows] == [v for tuned in tuning.points for v in tuned.values]
    assert (tuning.path / "table.md").read_text().count("| best |") == 1


def test_the_best_becomes_a_recipe_for_the_test_examples_and_the_reported_seeds(tuning: Tuning, recipe: str) -> None:
    (best,) = tuning.best.values()
    assert best.spread.mean == max(tuned.spread.mean for tuned in tuning.points)
    written = load_recipe(str(tuning.path / "best.toml"))
    assert written.seeds == load_recipe(recipe).seeds
    assert written.validation == 0
    assert [method.label for method in written.methods] == ["FedAvg", "FedSeq", "SFedKD"]
    options = written.methods[-1].algorithm
    assert options == best.method.algorithm


def test_the_test_examples_have_no_influence(tuning: Tuning, recipe: str, tmp_path: Path) -> None:
    digits = fedkeep.load("digits")
    without_test = {key: torch.zeros_like(column) for key, column in digits.test.items()}
    settings = ["sfedkd.teachers=1", f"data.name={array_store.keep(replace(digits, test=without_test))}"]
    again = fedkeep.tune(recipe, GRID[:1], settings=settings, validation=0.2, out=tmp_path / "out")
    assert [tuned.values for tuned in again.points] == [tuned.values for tuned in tuning.points[::2]]
    trial = read_run(tmp_path / "out" / "run").trials[0]
    assert "held out" in trial.info["dataset_note"]


def test_a_stopped_tuning_continues(tuning: Tuning, recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def stop(report: Any) -> None:
        if "tau-4" in report.trial:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedkeep.tune(recipe, GRID, validation=0.2, out=out, on_progress=stop)
    finished = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    assert 0 < len(finished) < 8
    renamed = replace(load_recipe(recipe), title="By another title, it goes on")
    again = fedkeep.tune(renamed, GRID, validation=0.2, out=out)
    assert [tuned.values for tuned in again.points] == [tuned.values for tuned in tuning.points]
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    with pytest.raises(RunError, match="another recipe"):
        fedkeep.tune(recipe, GRID[:1], validation=0.2, out=out)


TUNED = """
from fedkeep import FedAvg
from fedkeep.options import option
from dataclasses import dataclass

@dataclass(frozen=True)
class Tuned(FedAvg):
    strength: float = option(0.1, "weight", low=0.0)
"""


def test_a_tuning_does_not_go_on_with_an_edited_method(recipe: str, tmp_path: Path) -> None:
    path, machine = tmp_path / "tuned_method.py", fedkeep.Machine(use=(str(tmp_path / "tuned_method.py"),))
    path.write_text(TUNED)

    def tune() -> Tuning:
        grid, settings = "tuned.strength=0.5", "training.lr=0.1"
        given = {"methods": "tuned", "settings": settings, "seeds": [7], "rounds": 1, "machine": machine}
        return fedkeep.tune(Path(recipe), grid, out=tmp_path / "out", **given)

    assert [tuned.label for tuned in tune().points] == ["Tuned (strength 0.5)"]
    assert fedkeep.read_run(tmp_path / "out" / "run").info["use"] == ["code/tuned_method.py"]
    path.write_text(f"{TUNED}# edited")
    with pytest.raises(RunError, match=r"tuned_method\.py was changed since"):
        tune()


def test_a_recipe_with_held_out_examples_and_a_network_of_ones_own_is_tuned(recipe: str, tmp_path: Path) -> None:
    settings = ["training.lr=0.1", "data.validation=0.2"]
    loaded = load_recipe(recipe, methods=["fedavg"], rounds=1, seeds=[0], settings=settings)
    net = fedkeep.custom(lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10)))
    with pytest.raises(ConfigError, match="seeds 0 are the recipe's own"):
        fedkeep.tune(loaded, {"training.lr": [0.5]}, seeds=2)
    tuned = fedkeep.tune(replace(loaded, model=net), {"training.lr": [0.5]}, seeds=[7], out=tmp_path / "out")
    assert tuned.recipe.title == "tiny (changed: training.lr=0.1)"
    best = tuned.best_recipe
    assert (best.title, best.validation, best.model) == (tuned.recipe.title, 0.0, net)
    assert read_run(tmp_path / "out" / "run").settings["data"]["validation"] == 0.2
    assert load_recipe(recipe, settings=settings[1:]).title.endswith("(evaluated on 20% of the training images)")


def test_sections_vary_for_each_method(recipe: str, tmp_path: Path) -> None:
    result = fedkeep.tune(recipe, {"training.lr": [0.5, 1e-6]}, methods=["fedavg", "fedseq"], seeds=[7], out=tmp_path)
    labels = [tuned.label for tuned in result.points]
    assert labels == [f"{method} (lr {lr})" for method in ("FedAvg", "FedSeq") for lr in ("0.5", "1e-06")]
    best = load_recipe(str(tmp_path / "best.toml"))
    assert [best.training_of(method).lr for method in best.methods] == [0.5, 0.5]
    assert [method.label for method in best.methods] == ["FedAvg", "FedSeq"]
    one = fedkeep.tune(recipe, ["fedseq.training.lr=0.5,1"], seeds=[7], rounds=1, out=tmp_path / "one")
    assert [tuned.label for tuned in one.points] == ["FedSeq (lr 0.5)", "FedSeq (lr 1)"]
    assert [method.label for method in one.best_recipe.methods] == ["FedAvg", "FedSeq", "SFedKD"]


def test_a_point_that_has_learned_nothing_does_not_win_by_forgetting_nothing(recipe: str, tmp_path: Path) -> None:
    grid = {"training.lr": [1e-6, 0.5]}
    result = fedkeep.tune(
        recipe, grid, methods=["fedseq"], seeds=[7], rounds=6, metric="window_forgetting", out=tmp_path
    )
    guessing, learning = result.points
    assert guessing.spread.mean < learning.spread.mean, "a model that only guesses forgets less"
    assert not guessing.learned
    assert result.best["FedSeq"] is learning
    assert [row[-1] for row in result.table.lines] == ["has not learned", "best"]
    accuracy = replace(result, metric=METRICS["window_mean"], points=(guessing,))
    assert accuracy.best["FedSeq"] is guessing, "its accuracy flatters nobody"
    assert [row[-1] for row in accuracy.table.lines] == ["best, has not learned"]
    better = replace(guessing, values=(0.99,))
    assert replace(accuracy, points=(better, learning)).best["FedSeq"] is learning


def test_of_equals_the_first_is_best(tuning: Tuning) -> None:
    first, second, *others = tuning.points
    equal = (replace(first, values=(0.5908045977011493,)), replace(second, values=(0.5908045977011495,)))
    found = replace(tuning, points=(*equal, *(replace(other, values=(0.1,)) for other in others)))
    assert found.best["SFedKD"] is equal[0]


def test_a_diverged_point_is_never_best(tuning: Tuning) -> None:
    first, *others = tuning.points
    broken = replace(first, values=(1.0, float("nan")))
    assert replace(tuning, points=(broken, *others)).best["SFedKD"] is not broken


@pytest.mark.parametrize(
    ("grid", "options", "message"),
    [
        (GRID, {"seeds": [0, 100]}, "seeds 0 are the recipe's own"),
        (GRID, {"validation": 0}, "held-out training examples"),
        ([], {}, "nothing to tune"),
        (["sfedkd.tau"], {}, "write method.option=values"),
        (["sfedkd.tau=1,1"], {}, "names a value twice"),
        (["sfedkd.taw=1,2"], {}, "Did you mean 'tau'"),
        (["fedprox.mu=1,2"], {}, r"the grid of fedprox.mu: unknown section"),
        (["partition.alpha=1,2"], {}, "share \\[partition\\]"),
        (["training.lr=-1,2"], {}, "lr must be"),
        ({"sfedkd.tau": 3}, {}, "must be a list of values"),
        (["sfedkd.tau=1,-2"], {}, "tau"),
        (GRID, {"metric": "train_seconds"}, "not ranked"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_runs(
    recipe: str, tmp_path: Path, grid: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fedkeep.tune(recipe, grid, out=tmp_path / "out", **options)
    assert not list(tmp_path.rglob("run.json"))


def test_a_run_expands_grids(recipe: str, tmp_path: Path) -> None:
    text = tiny.RECIPE.replace("teachers = 2", "teachers = 2\ngrid = { tau = [1.0, 4.0] }")
    written = load_recipe(tiny.write_recipe(tmp_path, text))
    assert [method.label for method in written.methods[2:]] == ["SFedKD (tau 1)", "SFedKD (tau 4)"]
    out = tmp_path / "run"
    arguments = ["--grid", "algorithm.tau=1,2,4", "--methods", "sfedkd", "--rounds", "1", "--workers", "1", "--quiet"]
    assert main(["run", recipe, *arguments, "--out", str(out)]) == 0
    assert read_run(out).labels == tuple(f"SFedKD (tau {tau})" for tau in (1, 2, 4))
    paper = "sfedkd/table1/cifar10-2-0.5"
    assert len(load_recipe(paper).methods) < len(load_recipe(paper, grid=True).methods)
    varied = load_recipe(recipe, grid=["training.lr=0.1,0.2"])
    assert [varied.training_of(method).lr for method in varied.methods] == [0.1, 0.2] * 3
    (dims,) = read_grid(["model.hidden=[8, 8],[16]"]).values()
    assert dims == [[8, 8], [16]]


def test_values_that_differ_late_have_labels_of_their_own(recipe: str) -> None:
    labels = [method.label for method in load_recipe(recipe, grid=["fedseq.training.lr=0.1234567,0.12345671"]).methods]
    assert labels[1:3] == ["FedSeq (lr 0.1234567)", "FedSeq (lr 0.12345671)"]


def test_a_label_may_hold_an_equals_sign(recipe: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f'extends = "{recipe}"\n[[methods]]\nalgorithm = "sfedkd"\nlabel = "SFedKD tau=2"\n')
    loaded = load_recipe(str(path), settings=["SFedKD tau=2.tau=3", "SFedKD tau=2.training.lr=0.25"])
    method = loaded.method("SFedKD tau=2")
    assert (method.algorithm.tau, method.training["lr"]) == (3.0, 0.25)
    with pytest.raises(ConfigError, match=r"write section\.option=value"):
        load_recipe(str(path), settings=["SFedKD tau=2"])


def test_a_score_that_decides_is_measured(recipe: str, tmp_path: Path) -> None:
    found = fedkeep.tune(recipe, {"training.lr": [0.05, 0.5]}, methods="fedavg", metric="auroc", out=tmp_path / "auroc")
    assert all(0 < value <= 1 for point in found.points for value in point.values)
    assert load_recipe(str(tmp_path / "auroc" / "best.toml")).run.metric == ""
    with pytest.raises(ConfigError, match=r"client_mean is of clients' own tests, and they test nothing"):
        fedkeep.tune(recipe, {"training.lr": [0.05]}, metric="client_mean", out=tmp_path / "clients")
    with pytest.raises(RunError, match=r"no point has a value of kold_out, so none is the best: .*table\.md"):
        fedkeep.tune(recipe, {"training.lr": [0.05]}, methods="fedavg", metric="kold_out", out=tmp_path / "kold")
    assert not (tmp_path / "kold" / "best.toml").exists()


def test_metrics_of_ones_own_may_be_called_after_clients(recipe: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            METRICS, "client_gap", fedkeep.Metric("client_gap", "gap", better=-1, compute=lambda trial: trial.down)
        )
        found = fedkeep.tune(
            recipe, {"training.lr": [0.1]}, methods="fedavg", metric="client_gap", out=tmp_path / "gap"
        )
    assert found.points[0].values[0] > 0
