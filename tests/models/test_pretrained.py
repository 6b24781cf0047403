"""A network whose extractor is frozen: what it reads, what is part of its model, and what cannot be loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import small_extractor
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import interpolate

from fedkeep._utils import seeds
from fedkeep.errors import ConfigError, MissingExtra, RunError
from fedkeep.experiment.recipe import resolve_pretrained
from fedkeep.models import get_architecture
from fedkeep.models.custom import split_classifier
from fedkeep.models.heads import expand_rows
from fedkeep.models.pretrained import READING, Extractor, InputSpec, Pretrained, load_extractor

GREY = (1, 12, 10)
READ = InputSpec(small_extractor.SIDE, (small_extractor.MEAN,), (small_extractor.STD,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_extractor.save(tmp_path_factory.mktemp("vit"))


def images(count: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, *GREY), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_features_are_what_the_whole_network_classifies_by(tmp_path: Path, kind: str) -> None:
    network = Pretrained(source=small_extractor.save(tmp_path, kind)).build(GREY, 3)
    whole, x = small_extractor.network(kind), images()
    pixels = interpolate(x.float() / 255, size=(8, 8), mode="bilinear", antialias=True)
    with torch.no_grad():
        expected = whole((pixels - small_extractor.MEAN) / small_extractor.STD).logits
        classifier = whole.classifier if kind == "vit" else whole.classifier[1]
        torch.testing.assert_close(classifier(network.features(x)), expected)
        assert torch.equal(network(x), network.classifier(network.features(x)))
        assert torch.equal(network(network.features(x)), network(x)), "features are taken for images"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, lambda x: (x / 255 - small_extractor.MEAN) / small_extractor.STD),
        ({"do_normalize": False}, lambda x: x / 255),
        ({"rescale_factor": 1 / 127.5}, lambda x: (x / 127.5 - small_extractor.MEAN) / small_extractor.STD),
        ({"rescale_factor": None}, lambda x: (x / 255 - small_extractor.MEAN) / small_extractor.STD),
        ({"do_rescale": False}, lambda x: (x - small_extractor.MEAN) / small_extractor.STD),
    ],
)
def test_pixels_are_read_as_the_checkpoint_says(told: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    folder = Path(small_extractor.save(tmp_path))
    file = folder / READING
    file.write_text(json.dumps(json.loads(file.read_text()) | told))
    load_extractor.cache_clear()
    x = torch.randint(0, 256, (2, 1, small_extractor.SIDE, small_extractor.SIDE), dtype=torch.uint8)
    torch.testing.assert_close(load_extractor(str(folder)).reading(x), expected(x.float()))


def test_the_classifier_is_the_whole_model(folder: str) -> None:
    network = get_architecture("pretrained")(source=folder).build(GREY, 3)  # type: ignore[call-arg]
    assert list(network.state_dict()) == ["classifier.weight", "classifier.bias"]
    assert [tuple(weight.shape) for weight in network.parameters()] == [(3, 8), (3,)]
    assert split_classifier(network)[1] is network.classifier
    wider = expand_rows(network.state_dict(), 5, seeds.rng(0, "new classes"))
    assert torch.equal(wider["classifier.weight"][:3], network.classifier.weight)


def test_networks_share_their_extractor_and_draw_their_classifier_alike(folder: str) -> None:
    load_extractor.cache_clear()
    heads = []
    for _ in range(2):  # the first loads the extractor, for which random weights are drawn
        with seeds.temporary_seed(7):
            heads.append(Pretrained(source=folder).build(GREY, 3))
    assert heads[0].extractor is heads[1].extractor
    assert torch.equal(heads[0].classifier.weight, heads[1].classifier.weight)
    assert not any(weight.requires_grad for weight in heads[0].extractor.network.parameters())
    assert not any(module.training for module in heads[0].train().extractor.network.modules())


def test_each_image_goes_through_it_once() -> None:
    extractor = Extractor(small_extractor.network().base_model, READ)
    x = images(130)
    first = extractor(x)
    assert extractor.read == 130
    assert extractor(x.clone()) is first
    assert extractor.read == 130
    extractor(images(130, seed=1))
    assert extractor.read == 260
    parts = torch.cat([Extractor(extractor.network, READ)(part) for part in x.split(1)])
    torch.testing.assert_close(first, parts)


def test_what_was_asked_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeep.models.pretrained.MEMORY", 3 * 8 * 4 * 10)  # bytes of three sets of ten images
    extractor = Extractor(small_extractor.network().base_model, READ)
    sets = [images(10, seed) for seed in range(4)]
    for x in (*sets[:3], sets[0], sets[3]):
        extractor(x)
    assert extractor.read == 40
    extractor(sets[0])
    assert extractor.read == 40
    extractor(sets[1])
    assert extractor.read == 50
    monkeypatch.setattr("fedkeep.models.pretrained.MEMORY", 0)
    nothing = Extractor(small_extractor.network().base_model, READ)
    assert torch.equal(nothing(sets[0]), extractor(sets[0]))
    nothing(sets[0])
    assert nothing.read == 20


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2, *GREY), torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.uint8)]
)
def test_it_reads_images_as_they_are_stored(folder: str, wrong: Tensor) -> None:
    with pytest.raises(ConfigError, match=r"reads images as they are stored, uint8 \[n, 1, height, width\], not"):
        load_extractor(folder)(wrong)


def test_images_of_other_channels_are_refused_with_the_network(folder: str) -> None:
    with pytest.raises(ConfigError, match="reads images of 1 channels, and these have 3"):
        Pretrained(source=folder).build((3, 8, 8), 2)


def test_a_folder_below_the_home_or_the_data_folder_is_found(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(source: str, data_dir: Path | None) -> str:
        model = resolve_pretrained(Pretrained(source=source), data_dir)
        assert isinstance(model, Pretrained)
        return model.source

    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    mine = tmp_path / "extractors" / "mine"
    small_extractor.save(mine)
    assert found("extractors/mine", tmp_path) == found("~/extractors/mine", None) == str(mine)
    assert found("extractors/mine", None) == found("extractors/mine", mine.parent) == "extractors/mine"
    assert found(folder, tmp_path) == folder
    assert all(found(odd, tmp_path) == odd for odd in ("", "x" * 300, "a\0b", "~nobody/x"))


def test_it_says_what_it_is(folder: str) -> None:
    assert Pretrained(source=folder).about == f"{folder}: vit, 0.00 M parameters, frozen"


def test_what_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RunError, match=r"cannot load a pre-trained extractor from "):
        load_extractor(str(tmp_path / "none"))
    for name, reading in (("a", {"size": 8}), ("b", {"image_mean": [0.5], "image_std": [0.5], "size": {}})):
        folder = small_extractor.save(tmp_path / name)
        (tmp_path / name / READING).write_text(json.dumps(reading))
        with pytest.raises(RunError, match="cannot load a pre-trained extractor"):
            load_extractor(folder)
    (tmp_path / "b" / READING).write_text(json.dumps({"image_mean": [0.5], "image_std": [0.5], "size": 9}))
    with pytest.raises(RunError, match="resizes images to 9, and it reads 8"):
        load_extractor(str(tmp_path / "b"))
    weights = Path(small_extractor.save(tmp_path / "c")) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(RunError, match="cannot load a pre-trained extractor"):
        load_extractor(str(tmp_path / "c"))
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(RunError, match="cannot load a pre-trained extractor"):
        load_extractor(str(tmp_path / "c"))


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_weights_that_are_missing_are_not_drawn(tmp_path: Path, kind: str) -> None:
    weights = Path(small_extractor.save(tmp_path, kind)) / "model.safetensors"
    whole = load_file(weights)
    save_file({name: t for name, t in whole.items() if not name.startswith("classifier")}, weights, {"format": "pt"})
    load_extractor(str(tmp_path))
    load_extractor.cache_clear()
    lost = next(name for name in whole if name.startswith(f"{kind}.encoder") and name.endswith("weight"))
    save_file({name: t for name, t in whole.items() if name != lost}, weights, {"format": "pt"})
    with pytest.raises(RunError, match="its weights lack"):
        load_extractor(str(tmp_path))


def test_a_network_of_another_kind(tmp_path: Path) -> None:
    folder = small_extractor.save(tmp_path)
    config = transformers.DeiTConfig(
        image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    transformers.DeiTForImageClassification(config).save_pretrained(folder)
    with pytest.raises(ConfigError, match="of the kind 'deit', and an extractor is one of vit, resnet"):
        load_extractor(folder)


def test_without_transformers(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load_extractor.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        MissingExtra, match=r"A pre-trained extractor needs .* pip install 'diffusers>=.*' 'transformers>="
    ):
        Pretrained(source=folder).build(GREY, 3)
