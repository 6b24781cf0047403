"""The latent text-to-image model, as a tiny one of the same classes with random weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeep.errors import DataError, MissingExtra, RunError, ValueRefused
from fedkeep.generation.generator import Sampler, diffusers, transformers
from fedkeep.generation.generator_config import TRAINING_PROMPTS, LatentGenerator, load_latent
from fedkeep.generation.prototypes import PrototypeSearch, sample, search_prototypes

WIDTH = 16


def pipeline(folder: Path) -> Any:
    library = diffusers()
    from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel

    words = sorted({word for text in TRAINING_PROMPTS for word in text.split()} | {"sculpture"})
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    tokenizer = transformers().BertTokenizer(str(vocabulary))
    text = LDMBertModel(LDMBertConfig(
        vocab_size=len(words) + 5, max_position_embeddings=12, encoder_layers=1, encoder_ffn_dim=16,
        encoder_attention_heads=2, head_dim=8, d_model=WIDTH,
    ))  # fmt: skip
    vae = library.AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4, sample_size=16,
    )  # fmt: skip
    unet = library.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=WIDTH, attention_head_dim=4,
    )  # fmt: skip
    scheduler = library.DDIMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    return library.LDMTextToImagePipeline(vqvae=vae, bert=text, tokenizer=tokenizer, unet=unet, scheduler=scheduler)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    location = tmp_path_factory.mktemp("latent")
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        pipeline(location).save_pretrained(location / "model")
    return location / "model"


@pytest.fixture(scope="module")
def result(folder: Path) -> LatentGenerator:
    return load_latent(folder, side=12)


def images(count: int = 6) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, 12, 12), generator=torch.Generator().manual_seed(1)).to(torch.uint8)


def test_what_was_loaded(result: LatentGenerator, folder: Path) -> None:
    assert (
        result.noise_schedule.beta_schedule,
        result.noise_schedule.num_timesteps,
        result.noise_schedule.clip_sample,
    ) == (
        "scaled_linear",
        1000,
        False,
    )
    assert (result.shape, result.sample_shape, result.side, result.regime) == ((3, 12, 12), (4, 8, 8), 16, "ldm")
    assert result.hash() == load_latent(folder, side=12).hash()


def test_a_prototype_takes_the_place_of_a_word(result: LatentGenerator) -> None:
    tokenizer, text = result.tokenizer, result.parts["text"]
    own = result._embedding().weight[tokenizer.convert_tokens_to_ids("sculpture")]
    assert torch.equal(result.initial_prototypes(2), own.expand(2, -1))
    output = tokenizer(["a photo of sculpture"], padding="max_length", max_length=12, return_tensors="pt").input_ids
    assert torch.allclose(result.conditioning(result.initial_prototypes(1)), text(output)[0], atol=1e-6)
    rng = torch.Generator().manual_seed(0)
    shown = result.conditioning(result.initial_prototypes(8), rng)
    assert shown.shape == (8, 12, WIDTH)
    assert not torch.allclose(shown[0], shown[1:], atol=1e-6)
    empty = tokenizer([""], padding="max_length", max_length=12, return_tensors="pt").input_ids
    assert torch.allclose(result.null_conditioning(), text(empty)[0], atol=1e-6)


def test_prototypes_learn_and_nothing_else_does(result: LatentGenerator) -> None:
    before, state = result.hash(), torch.get_rng_state()
    labels = torch.tensor([0, 0, 2, 2, 0, 2])
    found, losses = search_prototypes(
        result,
        result.initial_prototypes(3),
        images(),
        labels,
        PrototypeSearch(steps=3, batch_size=4),
        torch.Generator().manual_seed(2),
    )
    assert result.hash() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found[1], result.initial_prototypes(3)[1])
    assert not torch.equal(found[0], result.initial_prototypes(3)[0])
    assert len(losses) == 3


def test_images_from_prototypes(result: LatentGenerator) -> None:
    sampler = Sampler(steps=2, guidance=3.0)
    sampled = sample(result, result.initial_prototypes(2), [0, 1, 1], [1, 2, 1], sampler)
    assert sampled.shape == (3, 3, 12, 12)
    assert sampled.dtype == torch.uint8
    assert torch.equal(sampled[0], sampled[2])  # same seed, same prototype
    assert not torch.equal(sampled[0], sampled[1])


def test_encoding_turns_some_over_and_is_drawn_by_the_generator(result: LatentGenerator) -> None:
    first, again = (result.encode(images(), torch.Generator().manual_seed(4)) for _ in range(2))
    assert first.shape == (6, 4, 8, 8)
    assert torch.equal(first, again)
    assert not torch.equal(first, result.encode(images(), torch.Generator().manual_seed(5)))


def test_what_does_not_fit(result: LatentGenerator, tmp_path: Path) -> None:
    with pytest.raises(ValueRefused, match=r"of size \[5\] each, and this generator takes \[16\]"):
        result.check_prototypes(torch.zeros(2, 5))
    with pytest.raises(DataError, match="draws uint8 images of 3 x 12 x 12"):
        result.encode(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.Generator())
    with pytest.raises(RunError, match=r"cannot load a text-to-image model from .*save_pretrained"):
        load_latent(tmp_path / "nothing")


def test_without_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'diffusers>=.*' 'transformers>="):
        load_latent(folder)
