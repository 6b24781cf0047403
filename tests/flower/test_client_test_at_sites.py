"""Sites that test models on their own examples, with a server that has no data at all."""

from __future__ import annotations

import re
import shutil
import socket
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from local_transport import LocalTransport, node_configs
from trial import Killed, config, embedded, killing, model, records

from fedkeep._utils.digests import read_json
from fedkeep.cli import main
from fedkeep.data import DataOptions, load
from fedkeep.data.columns import TableColumn, columns_to_json
from fedkeep.data.federation import hold_out_client_test
from fedkeep.data.holdout import with_held_out
from fedkeep.errors import ConfigError, DataError, FedKeepError, RunError
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.export.trained_model import export_model
from fedkeep.flower.client_handler import _load
from fedkeep.flower.config import NodeConfig
from fedkeep.flower.server import _usable, data_of_form, pool, serve
from fedkeep.flower.transport import Envelope
from fedkeep.flower.views import describe_dataset, server_view, site_view, with_true_deviations
from fedkeep.reporting.run_folder import read_run

SHARE = ("run.cohort_size=4", "run.client_test=0.25")
OPTIONS = ("data.label=outcome", """'data.exclude=["patient"]'""")
AT_SITES = ("run.cohort_size=3", "run.client_test=own", "model.hidden=[4]", *OPTIONS)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    return tiny.write_recipe(tmp_path)


def write_table(folder: Path, site: int) -> Path:
    """Write the examples of a hospital: 40 to train on, and 8 + 2 site to test with."""
    draw = np.random.default_rng(site)
    folder.mkdir(parents=True)
    for split, rows in (("train", 40), ("test", 8 + 2 * site)):
        lines = ["patient,age,ward,outcome"]
        for number in range(rows):
            sick = number % 2
            ward = "abc"[number // 2 % (2 + (site > 0))]
            lines.append(f"p{number},{draw.normal(50 + 9 * site + 20 * sick, 5):.2f},{ward},{['no', 'yes'][sick]}")
        (folder / f"{split}.csv").write_text("\n".join(lines))
    return folder


@pytest.fixture
def hospitals(tmp_path: Path) -> dict[int, NodeConfig]:
    return {
        number: NodeConfig(
            site="abc"[number],
            data=str(write_table(tmp_path / f"data-{number}", number)),
            state_dir=str(tmp_path / "s"),
        )
        for number in range(3)
    }


def at_sites(recipe: str, out: Path, *more: str, **changes: Any) -> Any:
    given: dict[str, Any] = {"methods": "fedavg", "rounds": 2, "sites": 3, "data": "none"}
    return config(recipe, out, [*AT_SITES, *more], **(given | changes))


def test_three_sites_test_and_the_server_has_no_data(
    recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path
) -> None:
    run = serve(LocalTransport(hospitals), at_sites(recipe, tmp_path / "run", "run.metric=auroc"))
    found = records(tmp_path / "run")
    assert [record["lost"] for record in found] == [{}, {}]
    assert {site: of for site, (_, of) in found[-1]["clients"].items()} == {"a": 8, "b": 10, "c": 12}
    assert found[-1]["total"] == [15, 15]
    (trial,) = run.trials
    assert trial.info["label_names"] == ["no", "yes"]
    assert trial.info["input"]["features"] == ["age", "ward=a", "ward=b", "ward=c"]
    assert set(trial.client_accuracy) == {"a", "b", "c"}
    assert set(trial.client_scores("auroc")) == {"a", "b", "c"}
    page = (tmp_path / "run" / "report.html").read_text()
    assert re.search(r"\d+ at 3 clients .* for training, 30 for testing", page)
    assert "fedkeep flower new again --recipe run/recipe.toml --sites 3\nflwr run again" in page
    assert "worst client" in page
    assert "accuracy 0." in (tmp_path / "run" / "server.log").read_text()
    export_model(tmp_path / "run", tmp_path / "model", method="fedavg")
    assert "ward=c" in (tmp_path / "model" / "config.json").read_text()


def rewrite(site: NodeConfig, old: str, new: str) -> None:
    """Change a hospital's files."""
    for file in Path(site.data).iterdir():
        file.write_text(file.read_text().replace(old, new))


def test_sites_that_spell_a_class_in_two_ways_are_told_of(
    recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path
) -> None:
    rewrite(hospitals[1], "yes", "Yes")
    with pytest.raises(DataError, match=r"names that differ in .* 'Yes' and 'yes'.*site b has 'Yes', 'no'"):
        serve(LocalTransport(hospitals), at_sites(recipe, tmp_path / "run", rounds=1))


def test_a_site_of_other_columns_does_not_stop_the_others(
    recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(hospitals[1], "age,ward", "years,ward")
    run = serve(LocalTransport(hospitals), at_sites(recipe, tmp_path / "run", "run.min_clients=1", rounds=1))
    assert run.trials[0].info["num_clients"] == 2
    assert (
        "site b lacks the column 'age' of site a and also has 'years': what it tells of its data is left out"
        in caplog.text
    )
    with pytest.raises(DataError, match=r"site b lacks the column 'age' of site a and also has 'years'\. Give"):
        pool(*descriptions({1: hospitals[0], 2: hospitals[1]}))


def descriptions(sites: dict[int, NodeConfig]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return what sites tell of their data, and their examples."""
    options = DataOptions(label="outcome", exclude=("patient",))
    loaded = {site.site: load(site.data, options=options) for site in sites.values()}
    told = {name: describe_dataset(data, left_out=False, generator="") for name, data in loaded.items()}
    return told, {name: len(data.train["label"]) for name, data in loaded.items()}


def test_a_site_is_told_how_many_of_its_cells_the_run_does_not_know(
    recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in Path(hospitals[2].data).iterdir():
        file.write_text(re.sub(r",[abc],", ",z,", file.read_text()))
    server = write_table(tmp_path / "server", 5)
    serve(LocalTransport(hospitals), at_sites(recipe, tmp_path / "run", rounds=1, data=str(server)))
    assert "site c: 52 of 52 cells of 'ward' have a value that is rare in the run, or unknown to it." in caplog.text


def test_sites_tell_the_form_of_their_data_once_in_a_run(
    recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path
) -> None:
    line = LocalTransport(hospitals)
    serve(line, at_sites(recipe, tmp_path / "run", methods="fedavg,fedseq", rounds=1))
    asked = [envelope.head["data"] for _, kind, envelope in line.sent if kind == "introduce"]
    assert len(asked) == 9
    assert asked.count(None) == 3, "the second method has the form that the first was told"


def test_nothing_but_counts_and_scores_leaves_a_site(
    recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path
) -> None:
    """A reply to the test holds no tensor, and no more numbers than classes and scores have."""
    seen: list[Any] = []

    def tamper(node: Any, kind: str, asked: Any, reply: Any) -> Any:
        if kind == "perform" and asked.head["request"]["step"] == "client_test":
            seen.append(reply)
        return reply

    serve(LocalTransport(hospitals, tamper), at_sites(recipe, tmp_path / "run", rounds=1))
    assert len(seen) == 3, "all models in one call"
    for reply in seen:
        assert not reply.tensors
        assert len(str(reply.head["answer"])) < 900


def test_a_server_that_starts_again_asks_for_nothing_twice(
    recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path
) -> None:
    whole = serve(LocalTransport(hospitals), at_sites(recipe, tmp_path / "whole"))
    again = {n: NodeConfig(site=one.site, data=one.data, state_dir=str(tmp_path / "t")) for n, one in hospitals.items()}
    stopped = at_sites(recipe, tmp_path / "run")
    with pytest.raises(Killed):
        serve(LocalTransport(again, killing(after=7)), stopped)
    line = LocalTransport(again)
    serve(line, stopped)
    asked = [envelope.head for _, kind, envelope in line.sent if kind == "introduce"]
    assert all(head["data"] is not None for head in asked), "it knows the form of the sites' data"
    assert read_run(tmp_path / "run").trials[0].rounds == whole.trials[0].rounds


@pytest.mark.parametrize("tasks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sites_and_a_simulation_test_on_the_same_examples(tasks: int, recipe: str, tmp_path: Path) -> None:
    """Also with state at the sites (FedAvg has none), whose calls a test counts too."""
    settings = [*SHARE, *([f"tasks.num_tasks={tasks}"] if tasks > 1 else [])]
    for method in ("fedavg", "scaffold"):
        embedded(recipe, method, tmp_path / method, 2, settings)
        transport = LocalTransport(node_configs(tmp_path / f"states-{method}"))
        serve(transport, config(recipe, tmp_path / f"{method}-sites", settings, methods=method, rounds=2))
        assert records(tmp_path / f"{method}-sites") == records(tmp_path / method)
        assert tiny.equal(model(tmp_path / f"{method}-sites"), model(tmp_path / method))


def test_what_a_server_without_data_cannot_do_is_refused(recipe: str, tmp_path: Path) -> None:
    for settings, said in (
        (["run.client_test=0"], r"a server without data cannot test. Let sites: settings=\"run.client_test=own\""),
        (["auxiliary.images_per_class=2"], r"\[auxiliary\] need examples that the server knows"),
    ):
        with pytest.raises(ConfigError, match=said):
            serve(LocalTransport({}), at_sites(recipe, tmp_path / "run", *settings))


def describe(folder: Path) -> dict[str, Any]:
    options = DataOptions(label="outcome", exclude=("patient",))
    return describe_dataset(load(str(folder), options=options), left_out=False, generator="")


def test_statistics_are_those_of_all_sites_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    folders = [write_table(tmp_path / str(site), site) for site in range(2)]
    both = tmp_path / "both"
    both.mkdir()
    for split in ("train", "test"):
        first, second = ((folder / f"{split}.csv").read_text().splitlines() for folder in folders)
        (both / f"{split}.csv").write_text("\n".join([*first, *second[1:]]))
    pooled = pool({"a": describe(folders[0]), "b": describe(folders[1])}, {"a": 40, "b": 40})
    (age, ward), (known, _) = pooled.columns, data_of_form(describe(both)).columns
    assert (age.mean, age.scale, age.fill) == pytest.approx((known.mean, known.scale, known.fill))
    assert ward.values == ("a", "b", "c")
    assert pooled.shape == (4,)


def test_columns_may_have_more_values_together_than_one_site_may_tell() -> None:
    def told(names: Iterable[int]) -> dict[str, Any]:
        column = TableColumn("code", "category", values=tuple(map(str, names)))
        size = len(column.features)
        about = {"shape": [size], "kind": "numbers", "label_names": ["n", "y"], "mean": [], "std": []}
        return {**about, "columns": columns_to_json([column])}

    pooled = pool({"a": told(range(600)), "b": told(range(400, 1100))}, {"a": 40, "b": 40})
    again = data_of_form(describe_dataset(pooled, left_out=False, generator=""))
    assert again.columns == pooled.columns
    assert len(again.columns[0].values) == 1100
    with pytest.raises(DataError, match="site a tells of a column of more than 1000 values"):
        _usable({"a": told(range(1100))}, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": [3], "kind": "numbers", "columns": []}, "site a has numbers of 4, and site b numbers of 3"),
        (
            {"columns": [{"name": "age", "kind": "category", "values": list("abcd")}]},
            "site b lacks the column 'ward' of site a and reads 'age' as category, and site a as number",
        ),
        (
            {"shape": [1], "columns": [{"name": "age", "kind": "date", "date": "%d"}]},
            r"'age' as date \(%d\), and site a as number",
        ),
        ({"shape": [10**12]}, "site b: this is no description of data"),
        ({"label_names": 3}, "site b: this is no description of data"),
        ({"kind": "sounds"}, "site b: this is no description of data"),
        ({"columns": [{"name": "age", "unit": ["years"]}]}, "site b: this is no description of data"),
    ],
)
def test_sites_whose_data_do_not_go_together_are_named(
    change: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    about = describe(write_table(tmp_path / "1", 1))
    with pytest.raises(DataError, match=said):
        pool({"a": about, "b": about | change}, {"a": 4, "b": 4})


def test_a_unit_that_one_site_writes_is_cut_off_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    one, other = describe(write_table(tmp_path / "0", 0)), describe(write_table(tmp_path / "1", 1))

    def in_unit(about: dict[str, Any], unit: str) -> dict[str, Any]:
        return about | {"columns": [c | ({"unit": unit} if c["name"] == "age" else {}) for c in about["columns"]]}

    pooled = pool({"a": one, "b": in_unit(other, "%")}, {"a": 4, "b": 4})
    assert {column.name: column.unit for column in pooled.columns}["age"] == "%"
    with pytest.raises(DataError, match=r"site b reads 'age' as number \(€\), and site a as number \(%\)"):
        pool({"a": in_unit(one, "%"), "b": in_unit(other, "€")}, {"a": 4, "b": 4})


def test_columns_of_another_order_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    one, other = describe(write_table(tmp_path / "0", 0)), describe(write_table(tmp_path / "1", 1))
    turned = other | {"columns": other["columns"][::-1]}
    expected = pool({"a": one, "b": other}, {"a": 4, "b": 4})
    assert pool({"a": one, "b": turned}, {"a": 4, "b": 4}).columns == expected.columns


def test_column_that_is_constant_at_a_site_adds_no_deviation(
    recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path
) -> None:
    for number, hospital in hospitals.items():
        for file in Path(hospital.data).iterdir():
            rows = file.read_text().splitlines()
            doses = ("dose", *(f"{0.001 if number else 0.002 * (row % 2)}" for row in range(len(rows) - 1)))
            file.write_text("\n".join(f"{dose},{row}" for dose, row in zip(doses, rows, strict=True)))
    run = serve(LocalTransport(hospitals), at_sites(recipe, tmp_path / "run"))
    dose = run.trials[0].info["input"]["columns"][0]
    assert (dose["mean"], dose["scale"]) == pytest.approx((0.001, 0.001 / 3**0.5))


def test_columns_are_told_as_all_training_rows_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is held out when a site's table is read, and trains after all if the server tests."""
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    file = write_table(tmp_path / "own", 1) / "train.csv"
    dataset = load(str(file), options=DataOptions(label="outcome", exclude=("patient",)))
    train = {name: torch.cat([rows, dataset.test[name]]) for name, rows in dataset.train.items()}
    ages = [float(row.split(",")[1]) for row in file.read_text().splitlines()[1:]]
    told = with_true_deviations(replace(dataset, train=train)).columns[0]
    assert dataset.columns[0].mean != pytest.approx(np.mean(ages))
    assert (told.mean, told.scale) == pytest.approx((np.mean(ages), np.std(ages)))


def test_classes_of_all_sites_are_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    about = describe(write_table(tmp_path / "1", 1))
    parts = {"a": about | {"label_names": ["10", "9"]}, "b": about | {"label_names": ["2", "9"]}}
    assert pool(parts, {"a": 4, "b": 4}).label_names == ("2", "9", "10")


class Overheard(LocalTransport):
    """Keeps what sites tell the server."""

    def __init__(self, sites: dict[int, NodeConfig]) -> None:
        super().__init__(sites, self.keep)
        self.told = ""

    def keep(self, node: Any, kind: str, asked: Any, reply: Any) -> Any:
        self.told += str(reply.head)
        return reply


@pytest.mark.parametrize(
    "lie",
    [
        None,
        {"label_names": 3},
        {"mean": [0.0, 0.0], "std": [1.0]},
        {"kind": "images", "shape": [1, 8, 8], "columns": []},
        {"columns": [{"name": "age", "mean": 1e200}, {"name": "ward", "kind": "category", "values": list("abc")}]},
        {"columns": [{"name": "age"}, {"name": "ward", "kind": "category", "values": [*map(str, range(5000))]}]},
    ],
)
def test_a_description_that_cannot_be_used_stops_nobody_else(
    lie: dict[str, Any] | None,
    recipe: str,
    hospitals: dict[int, NodeConfig],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def tamper(node: Any, kind: str, asked: Any, reply: Any) -> Any:
        if kind != "introduce" or asked.head["data"] is not None or node.site != "c":
            return reply
        return Envelope({**reply.head, "data": lie and reply.head["data"] | lie})

    serve(LocalTransport(hospitals, tamper), at_sites(recipe, tmp_path / "run", "run.min_clients=2", rounds=1))
    assert re.search("site c.* left out", caplog.text)
    told = read_json(next((tmp_path / "run" / "trials").iterdir()) / "sites.json")
    honest, sizes = descriptions({number: site for number, site in hospitals.items() if site.site != "c"})
    (age, ward), (known, _) = told["data"]["columns"], pool(honest, sizes).columns
    assert (age["mean"], age["scale"]) == pytest.approx((known.mean, known.scale))
    assert ward["values"] == ["a", "b", "c"]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("data", ["none", "server"])
def test_what_stands_in_a_cell_is_told_to_the_sites_own_log_alone(
    data: str,
    several: bool,
    recipe: str,
    hospitals: dict[int, NodeConfig],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = Path(hospitals[1].data) / "train.csv"
    file.write_text(re.sub(r"(?m)^p3,[^,]*", "p3,Erika Mustermann", file.read_text()))
    if several:
        hospitals[1] = replace(hospitals[1], data=f"{hospitals[1].data}+{write_table(tmp_path / 'more', 5)}")
    server = data if data == "none" else str(write_table(tmp_path / "own", 7))
    transport = Overheard(hospitals)
    serve(transport, at_sites(recipe, tmp_path / "run", data=server))
    assert "Erika" in caplog.text
    assert "site b cannot read its data as the recipe says. Its own log says why" in transport.told
    assert "Erika" not in transport.told


def test_cell_in_the_wrong_column_is_no_class_that_the_server_is_told(
    recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Path(hospitals[1].data) / "train.csv"
    file.write_text(re.sub(r"(?m)^(p\d,.*),[a-z]+$", r"\1,Erika Mustermann", file.read_text()))
    transport = Overheard(hospitals)
    serve(
        transport,
        at_sites(recipe, tmp_path / "run", data=str(write_table(tmp_path / "own", 7))),
    )
    assert "'Erika Mustermann'" in caplog.text
    assert "3 classes, and 1 of them are not among the run's 2" in transport.told
    assert "Erika" not in transport.told


def test_text_of_an_unforeseen_error_stays_at_the_site(
    recipe: str,
    hospitals: dict[int, NodeConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = Overheard(hospitals)

    def fail(*arguments: Any) -> Any:
        raise ValueError("could not convert string to float: 'Erika Mustermann'")

    monkeypatch.setattr("fedkeep.flower.client_handler.load_data", fail)
    with pytest.raises(FedKeepError, match="ValueError: its own log says why"):
        serve(transport, at_sites(recipe, tmp_path / "run"))
    assert "Erika" in caplog.text
    assert "Erika" not in transport.told


@pytest.mark.parametrize(("client_test", "examples"), [(0.0, 40), (0.25, 30)])
def test_sites_train_on_all_rows_of_a_table_without_a_test_split(
    client_test: float, examples: int, recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path
) -> None:
    for site in hospitals.values():
        (Path(site.data) / "test.csv").unlink()
    settings = [f"run.client_test={client_test}"]
    serve(
        LocalTransport(hospitals),
        at_sites(recipe, tmp_path / "run", *settings, data=str(write_table(tmp_path / "own", 7))),
    )
    assert [record["examples"] for record in records(tmp_path / "run")] == [3 * examples] * 2


@pytest.mark.parametrize("client_test", ["own", "0.2"])
def test_a_site_with_too_few_examples_to_hold_some_out_trains_and_tests_nothing(
    client_test: str, recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path
) -> None:
    small = Path(hospitals[2].data)
    (small / "test.csv").unlink()
    small.joinpath("train.csv").write_text("\n".join((small / "train.csv").read_text().splitlines()[:4]))
    began = time.monotonic()
    serve(LocalTransport(hospitals), at_sites(recipe, tmp_path / "run", f"run.client_test={client_test}", wait=60.0))
    assert time.monotonic() - began < 50, "nobody waits for a site that is small"
    for record in records(tmp_path / "run"):
        assert record["clients"].keys() == {"a", "b"}
        assert not record["lost"]
    assert read_json(tmp_path / "run" / "trials" / "fedavg-seed0" / "sites.json")["examples"]["c"] == [3]


def test_all_trials_have_the_sites_of_the_first(recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path) -> None:
    table, away = Path(hospitals[2].data), tmp_path / "away"
    table.rename(away)

    def mended(site: NodeConfig, kind: str, asked: Envelope, reply: Envelope) -> Envelope:
        if kind == "perform" and away.exists():
            away.rename(table)
        return reply

    given = at_sites(
        recipe, tmp_path / "run", "run.cohort_size=2", "run.min_clients=2", methods="fedavg,fedseq", rounds=1
    )
    run = serve(LocalTransport(hospitals, mended), given)
    assert [trial.info["examples"] for trial in run.trials] == [{"a": 40, "b": 40}] * 2
    assert (tmp_path / "run" / "server.log").read_text().count("the run begins with 2 of 3 sites") == 1


def test_a_spare_site_takes_the_place_of_one_that_does_not_fit(
    recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(hospitals[1], "age,ward", "years,ward")
    spare = NodeConfig(site="d", data=str(write_table(tmp_path / "spare", 1)), state_dir=str(tmp_path / "s"))
    run = serve(LocalTransport(hospitals | {3: spare}), at_sites(recipe, tmp_path / "run", "run.min_clients=2"))
    assert run.trials[0].info["examples"].keys() == {"a", "c", "d"}
    assert "began without" not in caplog.text


def test_a_site_that_leaves_between_its_two_questions_stops_no_run(
    recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Leaves(LocalTransport):
        def send(self, node: int, kind: Any, envelope: Envelope, *more: Any) -> Any:
            if kind == "introduce" and envelope.head["data"] is not None:
                self.node_configs.pop(2, None)
            return super().send(node, kind, envelope, *more)

    given = at_sites(recipe, tmp_path / "run", "run.cohort_size=2", "run.min_clients=2", rounds=1, wait=1.0)
    assert serve(Leaves(hospitals), given).trials[0].info["examples"] == {"a": 40, "b": 40}
    assert "begins with 2 of 3 sites" in caplog.text


def test_a_run_whose_sites_are_all_refused_does_not_wait(
    recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path
) -> None:
    def refused(site: NodeConfig, kind: str, asked: Envelope, reply: Envelope) -> Envelope:
        return Envelope({"error": "no."}) if kind == "introduce" and asked.head["data"] is not None else reply

    began = time.monotonic()
    with pytest.raises(RunError, match="0 of 3 sites are connected") as told:
        serve(LocalTransport(hospitals, refused), at_sites(recipe, tmp_path / "run", wait=60.0))
    assert time.monotonic() - began < 30
    assert "are saved" not in str(told.value)


def test_the_log_tells_of_sites_whose_data_change_between_seeds(
    recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path(recipe).write_text(Path(recipe).read_text().replace("seeds = [0]", "seeds = [0, 1]"))

    def shortened(site: NodeConfig, kind: str, asked: Envelope, reply: Envelope) -> Envelope:
        if kind == "perform" and (table := Path(site.data) / "train.csv").exists():
            table.write_text("\n".join(table.read_text().splitlines()[:31]))
        return reply

    serve(LocalTransport(hospitals, shortened), at_sites(recipe, tmp_path / "run", rounds=1))
    assert "the sites have 90 examples in all, and in the trial fedavg-seed0 they had 120" in caplog.text


@pytest.mark.parametrize("rows", [(4, 3), (9, 7)])
def test_rows_that_a_small_site_holds_out_are_its_tests(rows: tuple[int, int], tmp_path: Path) -> None:
    count, trained = rows
    lines = ["age,outcome", *(f"{number * 1.5 + 0.1},{'xy'[number % 2]}" for number in range(count))]
    (tmp_path / "small.csv").write_text("\n".join(lines))
    dataset = load(str(tmp_path / "small.csv"), options=DataOptions(label="outcome"), columns=())
    view = site_view("s", hold_out_client_test(with_held_out(dataset), 0.25), None, True)
    assert (len(view.examples[0]["label"]), len(view.tests[0]["label"])) == (trained, count - trained)


def test_sites_of_a_trial_on_one_machine_read_their_table_as_the_run_does(recipe: str, tmp_path: Path) -> None:
    table = write_table(tmp_path / "all", 0)
    own = load(str(write_table(tmp_path / "server", 4)), options=DataOptions(label="outcome", exclude=("patient",)))
    options = ["data.label=outcome", 'data.exclude=["patient"]']
    settings = [f"data.name={table}", *options, "partition.num_clients=3", "run.cohort_size=3"]
    site = NodeConfig(site="0", partition_id=0, num_partitions=3, state_dir=str(tmp_path / "s"))
    loaded = _load(load_recipe(recipe, settings=settings, methods=["fedavg"]), site, own.columns)
    assert loaded.columns == own.columns
    assert loaded.features == ("age", "ward=a", "ward=b", "ward=c")


def test_a_run_of_sites_is_not_continued_as_a_simulation(
    recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Killed):
        serve(LocalTransport(hospitals, killing(after=7)), at_sites(recipe, tmp_path / "run"))
    before = sorted((tmp_path / "run").rglob("*"))
    assert main(["resume", str(tmp_path / "run")]) == 1
    assert "is run at sites, and its data are there. Continue it with flwr run" in capsys.readouterr().err
    assert sorted((tmp_path / "run").rglob("*")) == before


@pytest.mark.parametrize("seed", range(6))
def test_a_server_without_data_has_tasks_of_any_order(seed: int, recipe: str) -> None:
    given = ["tasks.num_tasks=2", "run.client_test=own", "partition.num_clients=3", "run.cohort_size=3"]
    about = {"shape": [3], "kind": "numbers", "columns": [], "label_names": list("abcd"), "mean": [], "std": []}
    loaded = load_recipe(recipe, settings=given, methods=["fedavg"], seeds=[seed])
    view = server_view(loaded, seed, data_of_form(about), {}, {site: [20, 20] for site in "xyz"})
    assert view.num_tasks == 2


def test_an_attack_of_no_site_is_refused(recipe: str, hospitals: dict[int, NodeConfig], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"attack.share=0.1 of 3 clients is less than one"):
        serve(
            LocalTransport(hospitals),
            at_sites(recipe, tmp_path / "run", "attack.kind=sign_flip", "attack.share=0.1"),
        )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_three_supernodes_on_one_host_and_a_superlink_without_data(
    hospitals: dict[int, NodeConfig], tmp_path: Path
) -> None:
    pytest.importorskip("flwr")
    import federation as hosts

    settings = ["partition.scheme=iid", *AT_SITES[1:3], "data.label=outcome", 'data.exclude=["patient"]']
    words = ["--methods", "fedavg", "--seeds", "0", "--rounds", "1", "--sites", "3"]
    sets = [word for setting in settings for word in ("--set", setting)]
    app, out = tmp_path / "app", tmp_path / "out"
    assert main(["flower", "new", str(app), "--set", "data.name=nowhere.csv", *words, *sets]) == 0
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    names = [site.site for site in hospitals.values()]
    with hosts.federation(tmp_path, names, port=port) as running:
        running.make_keys(names)
        running.start_superlink()
        running.start_proxy()
        for site in hospitals.values():
            running.register(site.site)
            config = f'site="{site.site}" data="{site.data}" state-dir="{site.state_dir}"'
            running.start_supernode(site.site, config)
        running.start_run(app, f'out="{out}" data="none"').wait(timeout=600)
        reported = running.link.log("run.log")
    assert (out / "report.html").is_file(), reported
    assert set(read_run(out).trials[0].client_accuracy) == {"a", "b", "c"}
