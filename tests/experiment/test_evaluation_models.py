"""What a recipe serves, from ``run.evaluation_models`` to the rows of the result table and the exported model."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor

import fedkeep
from fedkeep.errors import ConfigError
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_files import recipe_names
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.models import Weights, get_architecture
from fedkeep.reporting.metric import METRICS
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.summary import Row, summary

METHODS = ("fedavg", "fedseq")
LABELS = {"last": "{}", "round": "{}, mean of the round", "moving": "{}, moving average"}
TITLES = ("FedAvg", "FedSeq")


def recipe(folder: Path, *settings: str, rounds: int = 2, methods: Sequence[str] = METHODS) -> Recipe:
    return load_recipe(tiny.write_recipe(folder), settings=settings, rounds=rounds, methods=methods)


def serving(served: Sequence[str]) -> str:
    return f"run.evaluation_models={list(served)}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Run]:
    """The same recipe, serving this and that."""
    folder = tmp_path_factory.mktemp("served")
    found = {}
    for served in [("last",), ("round",), ("moving",), ("last", "round", "moving"), ("moving", "last")]:
        found[served] = fedkeep.run(recipe(folder, serving(served)), out=folder / "-".join(served))
    return found


def rows_for(served: Sequence[str]) -> list[tuple[str, str]]:
    """Return titles and models of all rows: the mean of a parallel round is the last model, with no second row."""
    both = "last" in served and "round" in served
    return [(title, what) for title in TITLES for what in served if not (both and (title, what) == ("FedAvg", "round"))]


def rows_of(run: Run) -> dict[str, Row]:
    return {row.label: row for row in summary(run)}


def same(one: Row, other: Row) -> None:
    """Compare all that does not measure time."""
    for name in METRICS:
        if name != "train_seconds":
            a, b = one.value(name), other.value(name)
            assert a.mean == pytest.approx(b.mean, nan_ok=True), name
            assert a.n == b.n


def exported(run: Run, title: str) -> dict[str, Tensor]:
    (trial,) = (trial for trial in run.path.joinpath("trials").iterdir() if title.lower() in trial.name)
    return load_file(trial / "model.safetensors")


def accuracy(model: Weights) -> float:
    """Return a model's accuracy on the digits' test split."""
    digits = fedkeep.load("digits")
    network = get_architecture("mlp")(hidden=(8,)).build(digits.shape, digits.num_classes)  # type: ignore[call-arg]
    network.load_state_dict(dict(model))
    with torch.no_grad():
        hits: Tensor = network(digits.normalise(digits.test["input"])).argmax(1) == digits.test["label"]
    return hits.float().mean().item()


def test_every_served_model_has_its_row(runs: dict[tuple[str, ...], Run]) -> None:
    for served, run in runs.items():
        wanted = {LABELS[what].format(title) for title, what in rows_for(served)}
        assert set(rows_of(run)) == wanted
        assert set(run.labels) == wanted
        table = (run.path / "table.md").read_text()
        assert all(f"| {label} " in table for label in wanted)
        with (run.path / "results.csv").open() as file:
            assert {line["method"] for line in csv.DictReader(file)} == wanted


def test_rows_of_a_method_stand_together_in_the_order_served(runs: dict[tuple[str, ...], Run]) -> None:
    labels = [row.label for row in summary(runs["last", "round", "moving"])]
    assert labels == [LABELS[what].format(title) for title, what in rows_for(("last", "round", "moving"))]
    assert labels == ["FedAvg", "FedAvg, moving average", *(LABELS[what].format("FedSeq") for what in LABELS)]


def test_a_run_serves_its_averages_unless_it_is_a_papers(tmp_path: Path) -> None:
    assert load_recipe("demo").run.evaluation_models == ("last", "round", "moving")
    for name in recipe_names():
        if name.split("/")[0] in ("sfedkd", "fedcad", "fedadkd", "fedskf", "feddcl"):
            assert load_recipe(name).run.evaluation_models == ("last",), name


def test_last_is_what_a_run_without_averages_gives(runs: dict[tuple[str, ...], Run]) -> None:
    plain = rows_of(runs["last",])
    for served, run in runs.items():
        if "last" in served:
            for title in TITLES:
                same(rows_of(run)[title], plain[title])


def test_a_row_does_not_depend_on_what_else_is_served(runs: dict[tuple[str, ...], Run]) -> None:
    alone = {what: rows_of(runs[what,]) for what in ("last", "round", "moving")}
    for served, run in runs.items():
        for title, what in rows_for(served):
            label = LABELS[what].format(title)
            same(rows_of(run)[label], alone[what][label])
    sequence = [alone[what][LABELS[what].format("FedSeq")].value("last").mean for what in alone]
    assert len(set(sequence)) == 3, "they can be told apart here"


def test_the_first_served_is_exported(runs: dict[tuple[str, ...], Run]) -> None:
    for title in TITLES:
        alone = {what: exported(runs[what,], title) for what in ("last", "round", "moving")}
        for served, run in runs.items():
            first = served[0]
            assert tiny.equal(exported(run, title), alone[first])
            row = rows_of(run)[LABELS[first].format(title)]
            assert row.value("last").mean == pytest.approx(accuracy(exported(run, title)))
        assert tiny.equal(alone["round"], alone["last"]) is (title == "FedAvg"), "the server's mean is the round's"
        assert not tiny.equal(alone["moving"], alone["last"])


def test_the_moving_average_from_outside(tmp_path: Path) -> None:
    """Of the models that runs of one, two and three rounds export."""

    def run(rounds: int, *settings: str) -> dict[str, Tensor]:
        folder = tmp_path / f"{rounds}{''.join(settings)}"
        created = fedkeep.run(recipe(tmp_path, *settings, rounds=rounds, methods=["fedavg"]), out=folder)
        return exported(created, "fedavg")

    one, two, three = (run(rounds) for rounds in (1, 2, 3))
    for decay, settings in ((0.8, []), (0.3, ["run.ema_decay=0.3"])):
        for name, tensor in run(3, serving(["moving"]), *settings).items():
            first = decay * one[name].double() + (1 - decay) * two[name].double()
            expected = decay * first + (1 - decay) * three[name].double()
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-7)
    assert tiny.equal(run(1, serving(["moving"])), one), "it begins with the first round's model"


def test_the_mean_of_a_sequence_is_over_the_last_rounds_graduates(tmp_path: Path) -> None:
    recording = tiny.RecordFits()
    of_three = recipe(tmp_path, serving(["round"]), "run.cohort_size=3", methods=["fedseq"])
    run = fedkeep.run(of_three, out=tmp_path / "run", callbacks=[recording])
    graduates = [one.fit.model for one in recording.fits if one.round == 2]
    assert len(graduates) == 3
    for name, tensor in exported(run, "fedseq").items():
        mean = torch.stack([model[name].double() for model in graduates]).mean(0)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-5, atol=1e-7)


def test_serving_changes_no_record_of_what_was_trained(runs: dict[tuple[str, ...], Run]) -> None:
    kept = ("round", "cohort", "loss", "up", "down", "lost", "rolled_back")
    plain = {trial.label: trial for trial in runs["last",].trials}
    for run in runs.values():
        for trial in run.trials:
            reference = plain[trial.label.partition(",")[0]]
            for one, other in zip(trial.rounds, reference.rounds, strict=True):
                assert {k: v for k, v in one.items() if k in kept} == {k: v for k, v in other.items() if k in kept}


def test_rows_of_runs_that_serve_different_things_merge(runs: dict[tuple[str, ...], Run]) -> None:
    """What is served is no setting of the method: the same seed with the identical result counts once."""
    for others in (("last", "round", "moving"), ("moving", "last")):
        labels = {row.label for row in summary([runs["last",], runs[others]])}
        assert labels == {LABELS[what].format(title) for title, what in rows_for(others)}


def several(folder: Path) -> list[Row]:
    """Return the rows of a run with two seeds, and two methods of one kind."""
    text = tiny.RECIPE.replace('[[methods]]\nalgorithm = "fedavg"\n', "").replace("seeds = [0]", "seeds = [0, 1]")
    text += '\n[[methods]]\nlabel = "Alone"\nalgorithm = "fedseq"\n'
    path = tiny.write_recipe(folder, text)
    return summary(fedkeep.run(load_recipe(path, settings=[serving(["last", "moving"])]), out=folder / "run"))


def test_several_seeds_and_methods_of_one_kind(tmp_path: Path) -> None:
    rows = {row.label: row for row in several(tmp_path)}
    assert set(rows) == {LABELS[what].format(t) for t in ("FedSeq", "SFedKD", "Alone") for what in ("last", "moving")}
    assert all(row.seeds == (0, 1) for row in rows.values())
    for what in ("last", "moving"):
        same(rows[LABELS[what].format("Alone")], rows[LABELS[what].format("FedSeq")])


def test_averages_stand_beside_their_methods_in_the_recipes_order(tmp_path: Path) -> None:
    titles = ("FedSeq", "SFedKD", "Alone")
    labels = [row.label for row in several(tmp_path)]
    assert labels == [LABELS[what].format(t) for t in titles for what in ("last", "moving")]


@pytest.mark.parametrize("served", [[], ["last", "last"], ["first"], ["round", "best"]])
def test_what_cannot_be_served_is_refused(served: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="evaluation_models"):
        recipe(tmp_path, serving(served))
