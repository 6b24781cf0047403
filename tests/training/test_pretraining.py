"""Extractors are trained with labels, go on after a kill to the same bits, and are loaded by what loads public ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeep.data import Augmentation, DataSet, load
from fedkeep.errors import ConfigError, RunError
from fedkeep.models.pretrained import CARD, CHECKPOINT, READING, Extractor
from fedkeep.training.pretraining import Pretraining, ResNetForm, ViTForm, pretrain

transformers = pytest.importorskip("transformers", reason="the extra diffusion is not installed")

SMALL = ViTForm(side=8, patch=4, width=16, layers=1, heads=2, hidden=16)
SETTINGS = Pretraining(steps=6, batch_size=16, checkpoint=0.0)


@pytest.fixture(scope="module")
def digits() -> DataSet:
    return load("digits")


def trained(digits: DataSet, folder: Path, **changes: Any) -> Extractor:
    given = {"form": SMALL, "settings": SETTINGS, "augmentation": Augmentation(crop_padding=1)} | changes
    return pretrain(given.pop("form"), digits, given.pop("settings"), given.pop("augmentation"), folder, **given)


@pytest.mark.parametrize(
    ("form", "steps"),
    [(ViTForm(side=8, patch=2, width=32, layers=2, heads=2, hidden=32), 150), (ResNetForm(16, (8, 16), 1), 60)],
)
def test_it_learns(digits: DataSet, tmp_path: Path, form: Any, steps: int) -> None:
    settings = Pretraining(steps=steps, batch_size=64, lr=5e-3, weight_decay=0.0)
    extractor = trained(digits, tmp_path, form=form, settings=settings, augmentation=Augmentation())
    card = json.loads((tmp_path / CARD).read_text())
    assert card["test_accuracy"] > 0.6
    assert f"pre-trained on digits, {100 * card['test_accuracy']:.1f} %" in extractor.about
    # The card's accuracy is that of what was saved, with the classifier that the extractor is loaded without.
    whole = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    classifier = whole.classifier if card["network"]["kind"] == "vit" else whole.classifier[1]
    with torch.no_grad():
        hits = classifier(extractor(digits.test["input"])).argmax(-1) == digits.test["label"]
    assert round(hits.double().mean().item(), 4) == card["test_accuracy"]


def test_how_it_reads_images_is_written_as_transformers_does(digits: DataSet, tmp_path: Path) -> None:
    extractor = trained(digits, tmp_path)
    assert extractor.reading.side == 8
    assert (extractor.reading.mean, extractor.reading.std) == (digits.mean, digits.std)
    written = json.loads((tmp_path / READING).read_text())
    assert written["size"] == {"height": 8, "width": 8}
    assert written["rescale_factor"] == 1 / 255


def test_a_stopped_training_ends_in_the_same_bits(digits: DataSet, tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(done: int, loss: float) -> None:
        if done == 4:
            raise Stopped

    whole = trained(digits, tmp_path / "whole").hash()
    with pytest.raises(Stopped):
        trained(digits, tmp_path / "stopped", on_step=stop)
    assert (tmp_path / "stopped" / CHECKPOINT).is_file()
    with pytest.raises(RunError, match="belongs to another training: it has another 'seed'"):
        trained(digits, tmp_path / "stopped", seed=1)
    steps: list[int] = []
    assert trained(digits, tmp_path / "stopped", on_step=lambda done, loss: steps.append(done)).hash() == whole
    assert steps == [5, 6]
    assert not (tmp_path / "stopped" / CHECKPOINT).exists()
    with pytest.raises(RunError, match="holds an extractor already"):
        trained(digits, tmp_path / "stopped")
    assert trained(digits, tmp_path / "other", seed=1).hash() != whole


@pytest.mark.parametrize("steps", [6, 1])
def test_a_training_that_diverges_leaves_no_extractor(digits: DataSet, tmp_path: Path, steps: int) -> None:
    # After one step the weights are spoiled, and the loss is still that of the initial ones.
    output = "the loss of step [2-6] is" if steps > 1 else "has numbers that are not finite"
    settings = replace(SETTINGS, steps=steps, lr=1e38, warm_up=0.0)
    with pytest.raises(RunError, match=rf"diverged: .*{output}.*lower learning rate"):
        trained(digits, tmp_path, settings=settings)
    assert not (tmp_path / CARD).exists()


def test_the_learning_rate_rises_and_falls() -> None:
    settings = Pretraining(steps=100, lr=1.0, warm_up=0.1)
    rates = [settings.lr_in_step(step) for step in range(100)]
    assert rates[:2] == pytest.approx([1 / 11, 2 / 11])
    assert rates[10] == max(rates) == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert 0 < rates[-1] < 1e-3
    assert Pretraining(steps=1, warm_up=0.0).lr_in_step(0) == Pretraining().lr


def test_forms_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="patches of 5 pixels must fill 32"):
        ViTForm(patch=5)
    with pytest.raises(ConfigError, match="3 heads share a width of 128"):
        ViTForm(heads=3)
    with pytest.raises(ConfigError, match="at least one stage"):
        ResNetForm(widths=())
