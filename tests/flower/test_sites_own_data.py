"""Where a site's data come from: a folder of images, and a Hub id on a machine that cannot reach the Hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from local_transport import LocalTransport
from trial import Killed, config, killing, records

from fedkeep.data import load
from fedkeep.errors import DataError, RunError
from fedkeep.flower.config import NodeConfig
from fedkeep.flower.server import serve

HELD = {"a": (3, 7, 1), "b": (0, 2), "c": (9, 8, 3, 5)}  # classes of each site
IMAGES = 5  # of each class
SETTINGS = ("run.cohort_size=3",)


def write_images(folder: Path, classes: tuple[int, ...]) -> Path:
    """Write some of the digits as a folder of images, those of each split and class in a folder of their own."""
    pillow = pytest.importorskip("PIL.Image")
    digits = load("digits")
    for split, data in (("train", digits.train), ("test", digits.test)):
        for c in classes:
            node_config = folder / split / digits.label_names[c]
            node_config.mkdir(parents=True)
            for number, image in enumerate(data["input"][data["label"] == c][:IMAGES]):
                pillow.fromarray(image[0].numpy()).save(node_config / f"{number}.png")
    return folder


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    return tiny.write_recipe(tmp_path)


def line_to(folder: Path, data: dict[str, str]) -> LocalTransport:
    return LocalTransport(
        {
            number: NodeConfig(site=site, data=source, state_dir=str(folder / "states"))
            for number, (site, source) in enumerate(data.items())
        }
    )


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_folder_of_images_is_a_sites_data(tasks: int, recipe: str, tmp_path: Path) -> None:
    own = {site: str(write_images(tmp_path / site, classes)) for site, classes in HELD.items()}
    settings = [*SETTINGS, f"tasks.num_tasks={tasks}", 'tasks.class_order="source"'] if tasks > 1 else list(SETTINGS)
    serve(line_to(tmp_path, own), config(recipe, tmp_path / "run", settings, methods="fedavg", rounds=1, sites=3))
    found = records(tmp_path / "run")
    assert [record["lost"] for record in found] == [{}] * tasks
    old = 10 // tasks
    arriving = [range(10)] if tasks == 1 else [range(old), range(old, 10)]
    held = [sum(IMAGES * (c in task) for classes in HELD.values() for c in classes) for task in arriving]
    assert [record["examples"] for record in found] == held
    log = (tmp_path / "run" / "server.log").read_text()
    held_by_b = "10" if tasks == 1 else "10 + 0"
    assert f"site b is connected, with {held_by_b} examples" in log


def test_a_site_may_have_examples_of_one_class_only_but_a_run_needs_two(recipe: str, tmp_path: Path) -> None:
    own = {site: str(write_images(tmp_path / site, classes)) for site, classes in {"a": (3,), "b": (0, 2)}.items()}
    settings = ["run.cohort_size=2"]
    serve(line_to(tmp_path, own), config(recipe, tmp_path / "run", settings, methods="fedavg", rounds=1, sites=2))
    (record,) = records(tmp_path / "run")
    assert (record["lost"], record["examples"]) == ({}, 3 * IMAGES)
    alone = config(recipe, tmp_path / "alone", settings, methods="fedavg", rounds=1, sites=2, data=own["a"])
    with pytest.raises(DataError, match=r"at least 2 classes to tell apart, and there is only '3'.*data\.label"):
        serve(line_to(tmp_path, own), alone)


def write_visits(folder: Path, counts: dict[str, int], first: int = 0) -> LocalTransport:
    """Write tables of so many rows, and return the line to those sites that are not the server."""
    for name, count in counts.items():
        rows = [f"{n / 7},{'no' if n % 2 else 'yes'},p{n // 4}" for n in range(first, first + count)]
        (folder / f"{name}.csv").write_text("\n".join(["age,outcome,patient", *rows]))
    return line_to(folder, {name: str(folder / f"{name}.csv") for name in counts if name != "server"})


VISITS = ["data.label=outcome", "model.hidden=[4]", "run.cohort_size=2"]


@pytest.mark.parametrize(
    "how", ["'data.exclude=[\"patient\"]'", "data.group=patient", "data.group=patient data.validation=0.2"]
)
def test_a_small_site_trains_on_all_its_rows(how: str, recipe: str, tmp_path: Path) -> None:
    line = write_visits(tmp_path, {"server": 40, "large": 30, "small": 2 if "group" in how else 1})
    given: dict[str, Any] = {"methods": "fedavg", "rounds": 1, "sites": 2, "data": str(tmp_path / "server.csv")}
    run = serve(line, config(recipe, tmp_path / "run", [*VISITS, how], **given))
    assert run.trials[0].info["examples"] == {"large": 30, "small": 2 if "group" in how else 1}


def test_a_server_that_has_other_data_now_does_not_go_on(recipe: str, tmp_path: Path) -> None:
    line = write_visits(tmp_path, {"server": 40, "a": 30, "b": 30})
    settings = [*VISITS, "'data.exclude=[\"patient\"]'", "data.scaling=none"]
    given: dict[str, Any] = {"methods": "fedavg", "rounds": 2, "sites": 2, "data": str(tmp_path / "server.csv")}
    with pytest.raises(Killed):
        serve(LocalTransport(line.node_configs, killing(2)), config(recipe, tmp_path / "run", settings, **given))
    write_visits(tmp_path, {"server": 60}, first=2)
    with pytest.raises(RunError, match="begun with other data at the server"):
        serve(line, config(recipe, tmp_path / "run", settings, **given))


def test_a_server_begun_with_other_data_does_not_blame_the_sites(
    recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = write_visits(tmp_path, {"server": 40, "a": 30, "b": 30})
    settings = [*VISITS, "'data.exclude=[\"patient\"]'", "run.client_test=own"]
    given: dict[str, Any] = {"methods": "fedavg", "rounds": 1, "sites": 2, "data": str(tmp_path / "server.csv")}
    at_server = config(recipe, tmp_path / "run", settings, **given)
    at_sites = config(recipe, tmp_path / "other", settings, **(given | {"data": "none"}))
    for begun in (at_server, at_sites):
        with pytest.raises(Killed):  # before its first checkpoint
            serve(LocalTransport(line.node_configs, killing(0)), begun)
    assert "it tests on 8 of their 40 examples" in caplog.text
    with pytest.raises(RunError, match="run was begun with data at the server"):
        serve(line, replace(at_server, data="none"))
    with pytest.raises(RunError, match='other was begun with data="none"'):
        serve(line, replace(at_sites, data=at_server.data))
    write_visits(tmp_path, {"server": 60}, first=2)
    with pytest.raises(RunError, match="begun with other data at the server: their classes, columns, mean or scale"):
        serve(line, at_server)


def test_a_site_without_classes_of_the_first_task_takes_part_and_tests_later(recipe: str, tmp_path: Path) -> None:
    own = {"a": str(write_images(tmp_path / "a", tuple(range(10)))), "b": str(write_images(tmp_path / "b", (7, 8)))}
    settings = ["run.cohort_size=2", "run.client_test=own", "tasks.num_tasks=2", 'tasks.class_order="source"']
    run = serve(line_to(tmp_path, own), config(recipe, tmp_path / "run", settings, methods="fedavg", rounds=1, sites=2))
    assert run.trials[0].info["examples"] == {"a": 10 * IMAGES, "b": 2 * IMAGES}
    assert [record["clients"].get("b", (0, 0))[1] for record in records(tmp_path / "run")] == [0, 2 * IMAGES]


@pytest.fixture
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fail)
    # Another test may have set HF_HUB_OFFLINE when these were imported first.
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.mark.usefixtures("_no_hub")
def test_a_site_that_cannot_reach_the_hub_is_told_of_at_both_ends(
    recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transport = line_to(tmp_path, {"a": "someone/clinic", "b": "digits", "c": "digits"})
    reply = "'someone/clinic' was not found locally, and the Hugging Face Hub cannot be reached (no route to host)"
    serve(transport, config(recipe, tmp_path / "run", SETTINGS, methods="fedavg", sites=3, rounds=1))
    assert f"is rejected: The data set {reply}" in (tmp_path / "run" / "server.log").read_text()
    (output,) = (message for message in caplog.messages if message.startswith("site a cannot answer"))
    assert "no route to host" in output
    assert "someone/clinic/train.parquet" in output, "what to do instead"


def test_a_site_without_its_data_is_told_of_at_both_ends(recipe: str, tmp_path: Path) -> None:
    transport = line_to(tmp_path, {"a": "nowhere.csv", "b": "digits", "c": "digits"})
    serve(transport, config(recipe, tmp_path / "run", SETTINGS, methods="fedavg", sites=3, rounds=1))
    assert "is rejected: There is no data set 'nowhere.csv'" in (tmp_path / "run" / "server.log").read_text()


@pytest.mark.usefixtures("_no_hub")
def test_a_server_that_cannot_reach_the_hub_asks_nobody(recipe: str, tmp_path: Path) -> None:
    transport = line_to(tmp_path, {"a": "digits"})
    with pytest.raises(DataError, match=r"cannot be reached \(no route to host\)"):
        serve(transport, config(recipe, tmp_path / "run", methods="fedavg", data="someone/clinic"))
    assert "someone/clinic" in (tmp_path / "run" / "server.log").read_text()
    assert not transport.sent
