"""What was read is told before a run, in its report and beside the model that is taken away."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
import tiny
from PIL import Image

import fedkeep
from fedkeep.cli import main
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.reporting.trial import data_read

SPLIT = 'scheme = "exdir"\nnum_clients = 8\nclasses_per_client = 2\nalpha = 0.5'
BY_COLUMN = 'scheme = "column"\ncolumn = "client"'


def recipe_for(folder: Path, data: Path, scheme: str) -> Path:
    text = tiny.RECIPE.replace('name = "digits"', f'name = "{data}"').replace(SPLIT, scheme)
    return tiny.write_recipe(folder, text)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of two hospitals: 20 cats and 10 dogs, 10 cats and 20 dogs, and what nobody can read."""
    root = tmp_path_factory.mktemp("photos") / "photos"
    for client, counts in {"north": {"cat": 20, "dog": 10}, "south": {"cat": 10, "dog": 20}}.items():
        for number, (name, count) in enumerate(counts.items()):
            (root / "clients" / client / name).mkdir(parents=True)
            for row in range(count):
                Image.new("L", (8, 8), 100 * number + row).save(root / "clients" / client / name / f"{row}.png")
    (root / "clients" / "south" / "dog" / "Jane Doe.heic").write_bytes(b"")
    (root / "clients" / "__MACOSX").mkdir()
    return root


def test_all_places_tell_it(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("datasets")
    recipe = recipe_for(tmp_path, photos, BY_COLUMN)
    arguments = ["--methods", "fedavg", "--rounds", "1", "--seeds", "0", "--set", "run.cohort_size=2"]
    assert main(["run", str(recipe), *arguments, "--out", str(tmp_path / "run"), "--workers", "1"]) == 0
    console = " ".join(capsys.readouterr().out.split())
    report = " ".join(unescape(re.sub(r"<[^>]*>", " ", (tmp_path / "run" / "report.html").read_text())).split())
    folder = fedkeep.export_model(tmp_path / "run", onnx=False, evaluation_model="last")
    card = (folder / "README.md").read_text()
    examples = "48 at 2 clients (24 to 24 each) for training, 12 for testing"
    for text in (console, report, card):
        assert "images of 1 x 8 x 8" in text
        assert re.search(r"at 2 clients \(\d+ to \d+ each\) for training, \d+ for testing", text), examples
        assert "1 .heic images that are not read here: save them as JPEG or PNG" in text.replace("\\", "")
        assert "20% of each class held out" in text
        assert "Jane" not in text
    for text in (console, report):
        assert re.search(r"cat \d+ \+ \d+, dog \d+ \+ \d+", text)
        assert re.search(r"north: \d+, south: \d+", text)
    assert re.search(r"\| cat \| \d+ \| \d+ \| .* % \|", card)


@pytest.mark.parametrize("scheme", [BY_COLUMN, 'scheme = "iid"\nnum_clients = 2'])
def test_clients_that_the_data_name_and_nobody_takes_are_told(photos: Path, tmp_path: Path, scheme: str) -> None:
    experiment = Experiment(load_recipe(recipe_for(tmp_path, photos, scheme), settings=["run.cohort_size=2"]))
    note = experiment.describe(experiment.recipe.methods[0], 0)["dataset_note"]
    assert ("The data name 2 clients, and iid makes others" in note) == (scheme != BY_COLUMN)


def test_numbers_are_those_of_the_federation(tmp_path: Path) -> None:
    experiment = Experiment(load_recipe(tiny.write_recipe(tmp_path)))
    federation = experiment.federation(0)
    info = experiment.describe(experiment.recipe.methods[0], 0)
    read = data_read(info, experiment.describe_partition(0))
    held = [
        len(federation.partition.rows[a:b])
        for a, b in zip(federation.partition.offsets, federation.partition.offsets[1:], strict=False)
    ]
    assert [size for _, size in read.clients] == held
    assert [name for name, _, _ in read.classes] == [str(number) for number in range(10)]
    assert sum(train or 0 for _, train, _ in read.classes) == sum(held)
    assert [test for _, _, test in read.classes] == federation.dataset.test["label"].bincount().tolist()
    assert read.num_clients == len(federation.clients)
    assert dict(read.facts())["inputs"] == "images of 1 x 8 x 8"


def test_long_lists_are_cut_and_what_was_not_recorded_is_no_error() -> None:
    info = {
        "test_total": [1] * 100,
        "num_clients": 5000,
        "input": {"shape": [30], "type": "float32", "features": ["age"]},
    }
    facts = dict(data_read(info, {}).facts(3))
    assert facts["classes, training + testing"] == "0 ? + 1, 1 ? + 1, 2 ? + 1 and 97 more"
    assert facts["examples"] == "5000 clients for training, 100 for testing"
    assert facts["inputs"] == "1 features: age"
    assert dict(data_read({}, {}).facts())["noted"] == ""
