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
from fedkeep.generation.diffusion.generator import check_frozen
from fedkeep.generation.diffusion.pixel import load_generator
from fedkeep.generation.diffusion.unet import UNet

TOKENS = UNet(widths=(8, 8), blocks=1, attention=1, condition="tokens", tokens=2, token_width=12)


@pytest.mark.parametrize("unet", [toy.UNET, TOKENS, UNet(widths=(8, 16), blocks=1, patch=2)])
def test_the_network_is_told_the_class(unet: UNet) -> None:
    made = toy.generator(unet)
    noisy, times = torch.randn(3, 1, 8, 8), torch.tensor([0, 7, 19])
    told = made.conditioning(made.class_embeddings())
    assert told.shape == (3, *unet.conditioning_shape)
    said = made.predict_noise(noisy, times, told)
    assert said.shape == noisy.shape
    assert not torch.allclose(said, made.predict_noise(noisy, times, told.flip(0)))
    assert not torch.allclose(said, made.predict_noise(noisy, times, made.null_conditioning().expand_as(told)))


def test_a_code_names_a_class_mixes_them_or_says_nothing() -> None:
    made = toy.generator(space="code")
    assert torch.allclose(made.conditioning(torch.eye(3)), made.class_embeddings(), atol=1e-6)
    assert torch.equal(made.conditioning(torch.zeros(1, 3)), made.null_conditioning())
    assert torch.allclose(made.conditioning(torch.full((1, 3), 1 / 3))[0], made.class_embeddings().mean(0), atol=1e-6)
    assert torch.equal(made.initial_prototypes(2), torch.full((2, 3), 1 / 3))


def test_a_search_begins_at_the_mean_or_at_nothing() -> None:
    mean, null = toy.generator(), toy.generator(initial="null")
    assert torch.allclose(mean.initial_prototypes(2), mean.class_embeddings().mean(0).expand(2, 1, 32), atol=1e-6)
    assert torch.equal(null.initial_prototypes(2), null.null_conditioning().expand(2, 1, 32))


def test_pixels_to_signals_and_back() -> None:
    made = toy.generator()
    images = torch.arange(256).repeat(4)[:1024].view(16, 1, 8, 8).to(torch.uint8)
    signal = made.encode(images, torch.Generator())
    assert (signal.min(), signal.max()) == (-1, 1)
    assert torch.equal(made.decode(signal), images)
    assert made.decode(torch.tensor([-3.0, 3.0])).tolist() == [0, 255]


def test_a_generator_is_frozen_and_its_hash_tells() -> None:
    made, same, other = toy.generator(), toy.generator(), toy.generator(seed=1)
    assert made.hash() == same.hash() != other.hash()
    assert not made.network.training
    assert not any(weight.requires_grad for weight in made.network.parameters())
    with pytest.raises(RunError, match="must stay frozen"), check_frozen(made):
        made.network.table.data[0, 0, 0] += 1


@pytest.mark.parametrize("unet", [toy.UNET, TOKENS])
def test_saved_and_loaded(unet: UNet, tmp_path: Path) -> None:
    made = toy.generator(unet, regime="disjoint", training={"steps": 7})
    made.save(tmp_path / "g")
    loaded = load_generator(tmp_path / "g")
    assert loaded.card == made.card
    assert loaded.regime == "disjoint"
    assert loaded.hash() == made.hash() == json.loads((tmp_path / "g" / "generator.json").read_text())["hash"]


def test_half_the_size_is_nearly_the_same(tmp_path: Path) -> None:
    made = toy.generator()
    made.save(tmp_path / "whole")
    made.save(tmp_path / "half", half=True)
    whole, half = ((tmp_path / name / "weights.safetensors").stat().st_size for name in ("whole", "half"))
    assert half < 0.75 * whole
    loaded = load_generator(tmp_path / "half")
    assert loaded.hash() != made.hash()
    assert torch.allclose(loaded.class_embeddings(), made.class_embeddings(), atol=1e-2)


def _write(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_cannot_be_loaded_is_explained(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no generator in .*generator.json is missing.*fedkeep generator train"):
        load_generator(tmp_path)
    (tmp_path / "checkpoint.safetensors").touch()
    with pytest.raises(RunError, match="not trained to its end: run the command that began it again"):
        load_generator(tmp_path)
    made = toy.generator()
    card, weights = tmp_path / "generator.json", tmp_path / "weights.safetensors"
    made.save(tmp_path)
    _write(card, unet={"widths": [8, 16], "blocks": 1})
    with pytest.raises(RunError, match="does not describe its weights: these weights do not fit ClassUNet"):
        load_generator(tmp_path)
    made.save(tmp_path)
    _write(card, regime="fair")
    with pytest.raises(RunError, match="there is no regime 'fair'"):
        load_generator(tmp_path)
    _write(card, format=99)
    with pytest.raises(RunError, match="not written by this version"):
        load_generator(tmp_path)
    made.save(tmp_path)
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
    made = toy.generator()
    with pytest.raises(ValueRefused, match=r"size \[1, 31\] each, and this generator takes \[1, 32\] or \[3\]"):
        made.check_prototypes(torch.zeros(2, 1, 31))
    with pytest.raises(DataError, match=r"draws uint8 images of 1 x 8 x 8, and these are torch.uint8 of 1 x 28 x 28"):
        made.encode(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.Generator())
    with pytest.raises(ConfigError, match="28 x 28 pixels cannot be halved 3 times"):
        UNet(widths=(8, 8, 8, 8)).build((1, 28, 28), 3)
    with pytest.raises(ConfigError, match="halved 2 times in squares of 2: they must be square, and 8 must divide"):
        UNet(widths=(8, 8, 8), patch=2).build((1, 28, 28), 3)
    with pytest.raises(ConfigError, match="multiples of 8"):
        UNet(widths=(12,))
    with pytest.raises(ConfigError, match="tokens, which need attention"):
        UNet(condition="tokens", attention=0)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)  # an import fails then
    with pytest.raises(MissingExtra, match=r"pip install 'diffusers>=.*' 'transformers>="):
        toy.UNET.build((1, 8, 8), 3)
