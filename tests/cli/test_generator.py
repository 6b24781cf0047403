"""``fedkeep generator``: the whole way at toy size, on scikit-learn's digits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import generator_quality
import pytest
from PIL import Image

from fedkeep.cli import generator as command
from fedkeep.cli import main

QUICK = ("unet.widths=[8,8]", "unet.blocks=1", "noise_schedule.num_timesteps=20", "training.steps=4")
TINY = [word for change in QUICK for word in ("--set", change)]
FEW = ["--set", "sampler.steps=2", "--count", "2"]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))

    def call(*arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        words = [*map(str, arguments)]
        found = main(["generator", *words]) if words[0] == "train" else generator_quality.main(words)
        assert found == code
        output = capsys.readouterr()
        return output.err if code else output.out

    return call


def test_train_sample_and_check(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_quality, "CLASSIFIER_STEPS", 3)
    folder = tmp_path / "g"
    output = cli("train", "digits", "--out", folder, "--regime", "same_classes", "--half", *TINY)
    for expected in (
        "digits: 216 images of 10 classes",
        "regime same_classes",
        "which runs keep from the clients",
        "steps: step 4/4  loss",
    ):
        assert expected in output
    card = json.loads((folder / "generator.json").read_text())
    assert (card["data"], card["regime"], card["shape"]) == ("digits", "same_classes", [1, 8, 8])

    output = cli("sample", folder, *FEW)
    assert "regime same_classes" in output
    assert "20/20 images" in output
    assert (folder / "samples.png").read_bytes().startswith(b"\x89PNG")

    output = cli("check", folder, "--model", "mlp", *FEW)
    assert "20/20 images" in output
    quality = json.loads((folder / "quality.json").read_text())
    assert quality["regime"] == "same_classes"
    assert quality["generator"] == card["hash"]
    assert [len(quality[name]) for name in ("real", "shown", "learned", "label_names")] == [10] * 4

    output = cli("check", folder, "--on", "digits", "--set", "prototypes.steps=3", "--model", "mlp", *FEW)
    assert "prototypes: 3 steps, loss" in output
    assert json.loads((folder / "quality-on-digits.json").read_text())["prototypes"] == "found"


def test_photos_of_several_sizes_are_resized(cli: Any, tmp_path: Path) -> None:
    for number in range(20):
        place = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8 + number, 9), number).save(place)
    arguments = ["train", tmp_path / "photos", "--out", tmp_path / "g", *TINY]
    assert "data.size" in cli(*arguments, code=1)
    cli(*arguments, "--set", "data.size=[8,8]")
    assert json.loads((tmp_path / "g" / "generator.json").read_text())["shape"] == [1, 8, 8]
    assert "Leave all but its name" in cli("train", "grey", "--out", tmp_path / "h", "--set", "data.size=[8,8]", code=1)
    (tmp_path / "t.csv").write_text("age,label\n" + "".join(f"{row / 3},{'yn'[row % 2]}\n" for row in range(40)))
    assert "t.csv holds no images" in cli("train", tmp_path / "t.csv", "--out", tmp_path / "h", code=1)


@pytest.mark.slow
def test_a_stopped_training_goes_on(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["train", "digits", *TINY, "--set", "training.checkpoint=0"]
    cli(*arguments, "--out", tmp_path / "whole")

    class Stop(command.Display):
        def count(self, done: int, total: int, note: str = "") -> None:
            if done == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(command, "Display", Stop)
        output = cli(*arguments, "--out", tmp_path / "stopped", code=130)
    assert "stopped" in output
    assert "the command that began it again" in cli("sample", tmp_path / "stopped", code=1)
    cli(*arguments, "--out", tmp_path / "stopped")
    whole, stopped = ((tmp_path / name / "generator.json").read_text() for name in ("whole", "stopped"))
    assert stopped == whole
    assert "holds a generator already" in cli(*arguments, "--out", tmp_path / "stopped", code=1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "digits", "--out", "x", "--regime", "fair"], "there is no regime 'fair'. Known: disjoint, ldm"),
        (["train", "rgb", "--out", "x"], "nothing to train"),
        (["train", "digits", "--out", "l2\udce9"], "l2\\udce9' is not UTF-8"),
        (["train", "digits", "--out", "x", "--set", "unet.width=[8]"], "unet: there is no option 'width'"),
        (["train", "digits", "--out", "x", "--set", "net.widths=[8]"], "this command has no section 'net'"),
        (["train", "digits", "--out", "x", "--set", "widths"], "cannot read --set 'widths'"),
        (["train", "digits", "--out", "x", "--set", "unet.widths=[8,8,8,8,8]"], "cannot be halved 4 times"),
        (["sample", "nowhere"], "there is no generator in nowhere"),
        (["sample", "nowhere", "--out", "picture.gif"], "the picture is written as .png"),
        (["check", "nowhere", "--model", "cnn5"], "there is no model 'cnn5'"),
    ],
)
def test_what_cannot_be_done_is_said(cli: Any, arguments: list[str], expected: str) -> None:
    assert expected in cli(*arguments, code=1)


def test_without_the_extra(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    for arguments in (["train", "digits", "--out", tmp_path], ["sample", tmp_path], ["check", tmp_path]):
        output = cli(*arguments, code=1)
        assert output.count("\n") == 1
        assert "pip install 'diffusers>=" in output
