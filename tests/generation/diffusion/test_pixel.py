"""The pixel-space generator: what it is told, and its folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

from fedkeep.errors import ConfigError, DataError, MissingExtra, RunError, ValueRefused
from fedkeep.generation.pixel import UNet, load_generator


@pytest.mark.parametrize("unet", [toy.UNET, UNet(widths=(8, 16), blocks=1, patch=2)])
def test_the_network_is_told_the_class(unet: UNet) -> None:
    result = toy.generator(unet)
    noisy, times = torch.randn(3, 1, 8, 8), torch.tensor([0, 7, 19])
    text = result.conditioning(result.class_embeddings())
    assert text.shape == (3, *unet.conditioning_shape)
    output = result.predict_noise(noisy, times, text)
    assert output.shape == noisy.shape
    assert not torch.allclose(output, result.predict_noise(noisy, times, text.flip(0)))
    assert not torch.allclose(output, result.predict_noise(noisy, times, result.null_conditioning().expand_as(text)))


def test_a_code_names_a_class_mixes_them_or_says_nothing() -> None:
    result = toy.generator(space="code")
    assert torch.allclose(result.conditioning(torch.eye(3)), result.class_embeddings(), atol=1e-6)
    assert torch.equal(result.conditioning(torch.zeros(1, 3)), result.null_conditioning())
    assert torch.allclose(
        result.conditioning(torch.full((1, 3), 1 / 3))[0], result.class_embeddings().mean(0), atol=1e-6
    )
    assert torch.equal(result.initial_prototypes(2), torch.full((2, 3), 1 / 3))


def test_a_search_begins_at_the_mean_or_at_nothing() -> None:
    mean, null = toy.generator(), toy.generator(initial="null")
    assert torch.allclose(mean.initial_prototypes(2), mean.class_embeddings().mean(0).expand(2, 1, 32), atol=1e-6)
    assert torch.equal(null.initial_prototypes(2), null.null_conditioning().expand(2, 1, 32))


def test_pixels_to_signals_and_back() -> None:
    result = toy.generator()
    images = torch.arange(256).repeat(4)[:1024].view(16, 1, 8, 8).to(torch.uint8)
    signal = result.encode(images, torch.Generator())
    assert (signal.min(), signal.max()) == (-1, 1)
    assert torch.equal(result.decode(signal), images)
    assert result.decode(torch.tensor([-3.0, 3.0])).tolist() == [0, 255]


def test_a_generator_is_frozen_and_its_hash_tells() -> None:
    result, same, other = toy.generator(), toy.generator(), toy.generator(seed=1)
    assert result.hash() == same.hash() != other.hash()
    assert not result.network.training
    assert not any(weight.requires_grad for weight in result.network.parameters())
    result.network.table.data[0, 0, 0] += 1
    assert result.hash() != same.hash()


def test_saved_and_loaded(tmp_path: Path) -> None:
    result = toy.generator(toy.UNET, regime="disjoint", training={"steps": 7})
    result.save(tmp_path / "g")
    loaded = load_generator(tmp_path / "g")
    assert loaded.card == result.card
    assert loaded.regime == "disjoint"
    card = json.loads((tmp_path / "g" / "generator.json").read_text())
    assert loaded.hash() == result.hash() == card["hash"]


def test_half_the_size_is_nearly_the_same(tmp_path: Path) -> None:
    result = toy.generator()
    result.save(tmp_path / "whole")
    result.save(tmp_path / "half", half=True)
    whole, half = ((tmp_path / name / "weights.safetensors").stat().st_size for name in ("whole", "half"))
    assert half < 0.75 * whole
    loaded = load_generator(tmp_path / "half")
    assert loaded.hash() != result.hash()
    assert torch.allclose(loaded.class_embeddings(), result.class_embeddings(), atol=1e-2)


def _write(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_cannot_be_loaded_is_explained(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no generator in .*generator.json is missing.*fedkeep generator train"):
        load_generator(tmp_path)
    (tmp_path / "checkpoint.safetensors").touch()
    with pytest.raises(RunError, match="not trained to its end: run the command that began it again"):
        load_generator(tmp_path)
    result = toy.generator()
    card, weights = tmp_path / "generator.json", tmp_path / "weights.safetensors"
    result.save(tmp_path)
    _write(card, unet={"widths": [8, 16], "blocks": 1})
    with pytest.raises(RunError, match="does not describe its weights: these weights do not fit ClassUNet"):
        load_generator(tmp_path)
    result.save(tmp_path)
    _write(card, regime="fair")
    with pytest.raises(RunError, match="regime cannot be 'fair'"):
        load_generator(tmp_path)
    _write(card, format=99)
    with pytest.raises(RunError, match="not written by this version"):
        load_generator(tmp_path)
    result.save(tmp_path)
    toy.generator(seed=1).save(tmp_path / "other")
    weights.write_bytes((tmp_path / "other" / "weights.safetensors").read_bytes())
    with pytest.raises(RunError, match=r"is not what generator.json says"):
        load_generator(tmp_path)
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(RunError, match=r"cannot read .*weights.safetensors"):
        load_generator(tmp_path)
    weights.unlink()
    with pytest.raises(RunError, match=r"cannot read .*weights.safetensors"):
        load_generator(tmp_path)


def test_wrong_sizes_are_refused() -> None:
    result = toy.generator()
    with pytest.raises(ValueRefused, match=r"size \[1, 31\] each, and this generator takes \[1, 32\] or \[3\]"):
        result.check_prototypes(torch.zeros(2, 1, 31))
    with pytest.raises(DataError, match=r"draws uint8 images of 1 x 8 x 8, and these are torch.uint8 of 1 x 28 x 28"):
        result.encode(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.Generator())
    with pytest.raises(ConfigError, match="side of 28 pixels cannot be halved 3 times"):
        UNet(widths=(8, 8, 8, 8)).build((1, 28, 28), 3)
    with pytest.raises(ConfigError, match="halved 2 times in squares of 2: 8 must divide"):
        UNet(widths=(8, 8, 8), patch=2).build((1, 28, 28), 3)
    with pytest.raises(ConfigError, match="square images, and these have 17 x 33"):
        UNet(widths=(8,)).build((3, 17, 33), 3)
    with pytest.raises(ConfigError, match="multiples of 8"):
        UNet(widths=(12,))


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)  # an import fails then
    with pytest.raises(MissingExtra, match=r"pip install 'diffusers>=.*' 'transformers>="):
        toy.UNET.build((1, 8, 8), 3)
