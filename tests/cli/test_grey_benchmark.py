"""FedDCL's grey benchmark whole, at toy size: a generator is trained and judged, and the recipe of table I is run."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import generator_quality
import numpy as np
import pytest

from fedkeep.cli import main
from fedkeep.generation.pixel import read_card
from fedkeep.reporting.run_folder import read_run

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pillow = pytest.importorskip("PIL.Image")

PLACES = {
    "ylecun/mnist": [str(digit) for digit in range(10)],
    "emnist_letters_a_to_j": list("ABCDEFGHIJ"),
    "zalando-datasets/fashion_mnist": [f"garment {number}" for number in range(10)],
}
TINY = ["unet.widths=[8,8]", "unet.blocks=1", "unet.patch=2", "noise_schedule.num_timesteps=20", "training.steps=4"]
FEW = [
    "images_per_new_class=3",
    "images_per_old_class=2",
    "server_images_per_class=4",
    "prototype_rounds=2",
    "prototype_steps=2",
    "prototype_batch_size=8",
]
DRAWN = ["generator.sampler=ddim", "generator.sampler_steps=2"]


def write(path: Path, names: Sequence[str], each: int, seed: int) -> None:
    """Write a Parquet file of noisy 28 x 28 images, ``each`` of every class, bright in a place of its own."""
    rng = np.random.default_rng(seed)
    images, labels = [], []
    for label in range(len(names)):
        for _ in range(each):
            pixels = rng.integers(0, 60, (28, 28), dtype=np.uint8)
            pixels[2 * label + 4 : 2 * label + 8, 4:24] += 180
            buffer = io.BytesIO()
            pillow.fromarray(pixels).save(buffer, "PNG")
            images.append({"bytes": buffer.getvalue(), "path": None})
            labels.append(label)
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": list(names)}}
    table = pyarrow.table({"image": images, "label": labels})
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    parquet.write_table(table.replace_schema_metadata(metadata), path)


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    for number, (location, names) in enumerate(PLACES.items()):
        write(tmp_path / "data" / location / "train.parquet", names, 14, number)
        write(tmp_path / "data" / location / "test.parquet", names, 1, number + 10)
    return tmp_path / "data"


@pytest.mark.slow
def test_a_generator_is_trained_and_judged_and_feddcl_learns_from_it(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(generator_quality, "CLASSIFIER_STEPS", 3)
    folder, out = tmp_path / "grey-same", tmp_path / "run"

    def call(*words: object) -> str:
        capsys.readouterr()
        program = generator_quality.main if words[0] in ("sample", "check") else main
        assert program([*map(str, words), "--data-dir", str(data_dir), "--quiet"]) == 0
        return capsys.readouterr().out

    tiny = [word for change in TINY for word in ("--set", change)]
    output = call("generator", "train", "grey", "--regime", "same_classes", "--clusters", 2, "--out", folder, *tiny)
    assert "60 images of 30 classes, 2 clusters each" in output
    card = read_card(folder)
    assert (card.data, card.regime, card.clusters_per_class, card.held_out) == ("grey", "same_classes", 2, 0.15)

    few = ["--count", 3, "--set", "sampler.steps=2", "--seed", 1]
    call("sample", folder, *few)
    assert "mnist: 0" in call("check", folder, "--model", "mlp", *few)
    quality = json.loads((folder / "quality.json").read_text())
    assert len(quality["shown"]) == 30

    options = [*(f"feddcl.{change}" for change in FEW), *DRAWN]
    options += [f"generator.name={folder}", "public.name=mnist", "public.num_images=10", "training.batch_size=32"]
    settings = [word for change in options for word in ("--set", change)]
    words = ["--methods", "feddcl", "--rounds", 1, "--seeds", 0, "--workers", 1, "--out", out, *settings]
    output = call("run", "feddcl/table1-heterogeneous/grey-0.5", *words)
    assert "(same_classes): trained on a part of each" in " ".join(output.split())
    run = read_run(out)
    assert [trial.label for trial in run.trials] == ["FedDCL", "Labels of generated images"]
    for trial in run.trials:
        assert trial.finished
        assert trial.task_sizes == [10, 10, 10]
        assert trial.task_matrix.shape == (3, 3)
        assert not trial.lost
        held = np.asarray(json.loads((trial.path / "partition.json").read_text())["counts"])
        assert held.sum(0).tolist() == [12] * 30, "2 of 14 images of each class are the generator's alone"
    assert r"(same\_classes): trained on a part of each" in (out / "table.md").read_text()
    assert "(same_classes): trained on a part of each" in (out / "report.html").read_text()
    sampled = list((tmp_path / "cache" / "generated").iterdir())
    assert len(sampled) == 60 + 30, "for the quality check, and once for both rows"
