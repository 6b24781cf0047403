"""``fedkeep pretrain`` and a run with what it made: the whole way at toy size, on scikit-learn's digits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny

from fedkeep.cli import main
from fedkeep.models.pretrained import CARD

TINY = [f"network.{name}" for name in ("side=8", "patch=4", "width=8", "layers=1", "heads=2", "hidden=8")]
SET = [
    word for setting in (*TINY, "training.steps=3", "augmentation.horizontal_flip=false") for word in ("--set", setting)
]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "250")

    def call(*arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*map(str, arguments)]) == code
        output = capsys.readouterr()
        return output.err if code else output.out

    return call


def test_an_extractor_is_trained_and_serves_in_a_run(cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "extractors" / "mine"
    output = cli("pretrain", "digits", "--out", folder, *SET)
    assert "digits: 1,438 images of 10 classes" in output
    assert "steps: step 3/3  loss" in output
    assert "vit, 0.00 M parameters, frozen; pre-trained on digits, " in output
    card = json.loads((folder / CARD).read_text())
    assert card["augmentation"]["crop_padding"] == 4
    assert not card["augmentation"]["horizontal_flip"]

    recipe = tiny.write_recipe(tmp_path)
    model = ["--set", "model.name=pretrained", "--set", "model.source=extractors/mine"]
    cli("run", recipe, *model, "--methods", "fedavg", "--out", tmp_path / "run", "--data-dir", tmp_path / "data")
    trial = json.loads((tmp_path / "run" / "trials" / "fedavg-seed0" / "trial.json").read_text())
    assert trial["extractor"].startswith(f"{folder}: vit")
    for name in ("report.html", "table.md"):
        output = (tmp_path / "run" / name).read_text()
        assert "pre-trained on digits" in output, name
        assert "by their names it learned 10 of this run" in output, name
    assert (tmp_path / "run" / "trials" / "fedavg-seed0" / "model.safetensors").stat().st_size < 1000

    (tmp_path / "run" / "trials" / "fedavg-seed0" / "result.json").unlink()
    (folder / CARD).unlink()
    cli("pretrain", "digits", "--out", folder, *SET, "--seed", 1)
    output = cli("resume", tmp_path / "run", "--data-dir", tmp_path / "data", code=1)
    assert "begun with another extractor than there is now" in output


def test_what_is_wrong_is_said_before_anything_runs(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no network 'vitt' here. Did you mean 'vit'?" in cli(
        "pretrain", "digits", "--out", tmp_path, "--network", "vitt", code=1
    )
    assert "there is no option 'widths'" in cli(
        "pretrain", "digits", "--out", tmp_path, "--set", "network.widths=[8]", code=1
    )
    # The variable of the environment is read when the library is imported; without this, it tries for 23 seconds.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    recipe, model = tiny.write_recipe(tmp_path), ["--set", "model.name=pretrained", "--set", "model.source=none/there"]
    assert "cannot load a pre-trained extractor from none/there" in cli("run", recipe, *model, code=1)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'diffusers>=" in cli("pretrain", "digits", "--out", tmp_path, code=1)
