"""The latent text-to-image model as a generator: a prototype replaces the embedding of a word."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fedkeep.errors import ConfigError, RunError
from fedkeep.generation.diffusion.generator import (
    Generator,
    NoiseSchedule,
    Regime,
    diffusers,
    hash_weights,
    transformers,
)

CHECKPOINT = "CompVis/ldm-text2im-large-256"
"""The public checkpoint of the paper: about 1.4 G parameters, 6 GB."""

PLACEHOLDER = "*"
WORD = "sculpture"  # with whose embedding a search begins, as in DDDR
PROMPT = "a photo of *"
TRAINING_PROMPTS = (
    f"{PROMPT}, a picture of *, a photo of one *, a photo of the *, a small photo of *, a large photo of *, "
    "a good photo of *, a bad photo of *, a bright photo of *, a dark photo of *, a sharp photo of *, "
    "a blurry photo of *, a close view of *, a view of * from afar, this is *, one can see *"
).split(", ")
"""The text around a prototype during its search. DDDR uses the list of textual inversion, about five times as long,
with sentences of this kind."""


class LatentGenerator(Generator):
    """A frozen `LDMTextToImagePipeline`. Its parts are used one by one, since the pipeline itself accepts text only.

    A prototype is the input embedding of one word, [width]. It passes through the text transformer with the words
    around it, and the UNet attends to the transformer's output for all words.

    ``side``: Side in pixels of the images that go in and come out. Inside, they have the model's own size.
    """

    regime: Regime = "ldm"

    def __init__(self, pipeline: Any, side: int = 32, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.parts: dict[str, Any] = {"vae": pipeline.vqvae, "text": pipeline.bert, "unet": pipeline.unet}
        for part in self.parts.values():
            part.to(self.device).eval().requires_grad_(False)
        self.tokenizer = pipeline.tokenizer
        self.shape = (3, side, side)
        config = pipeline.scheduler.config
        self.noise_schedule = NoiseSchedule(
            config.num_train_timesteps, config.beta_schedule, config.beta_start, config.beta_end, clip_sample=False
        )
        self.side = pipeline.unet.config.sample_size * pipeline.vae_scale_factor
        self.placeholder = self.tokenizer.convert_tokens_to_ids(PLACEHOLDER)
        if self.placeholder in (None, self.tokenizer.unk_token_id):
            raise ConfigError(f"this model's tokenizer has no word {PLACEHOLDER!r}, in whose place a prototype is put.")
        with torch.no_grad():
            self._null = self._encode_text(self._tokenize([""]))

    @property
    def sample_shape(self) -> tuple[int, ...]:
        unet = self.parts["unet"].config
        return (unet.in_channels, unet.sample_size, unet.sample_size)

    def initial_prototypes(self, num_classes: int) -> Tensor:
        ids = self.tokenizer(WORD, add_special_tokens=False, return_tensors="pt").input_ids
        embedding: Tensor = self._embedding()(ids.to(self.device)).detach().mean((0, 1))
        return embedding.expand(num_classes, -1).clone()

    @property
    def prototype_shapes(self) -> Sequence[tuple[int, ...]]:
        return ((self._embedding().embedding_dim,),)

    def conditioning(self, prototypes: Tensor, rng: torch.Generator | None = None) -> Tensor:
        count = len(prototypes)
        chosen = [0] * count if rng is None else torch.randint(len(TRAINING_PROMPTS), (count,), generator=rng).tolist()
        ids = self._tokenize([TRAINING_PROMPTS[number] for number in chosen])
        embeddings = self._embedding()(ids)
        is_placeholder = (ids == self.placeholder).unsqueeze(-1)
        return self._encode_text(ids, torch.where(is_placeholder, prototypes.unsqueeze(1), embeddings))

    def null_conditioning(self) -> Tensor:
        return self._null

    def predict_noise(self, noisy: Tensor, timesteps: Tensor, conditioning: Tensor) -> Tensor:
        noise: Tensor = self.parts["unet"](noisy, timesteps, encoder_hidden_states=conditioning).sample
        return noise

    @torch.no_grad()
    def encode(self, images: Tensor, rng: torch.Generator) -> Tensor:
        self.check_images(images)
        is_flipped = torch.rand(len(images), generator=rng) < 0.5
        images = torch.where(is_flipped.view(-1, 1, 1, 1).to(images.device), images.flip(3), images)
        large = _resize(images.to(self.device).float() / 127.5 - 1, self.side).clamp(-1, 1)
        posterior = self.parts["vae"].encode(large).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=rng).to(self.device)
        latent: Tensor = posterior.mean + posterior.std * noise
        return latent * float(self.parts["vae"].config.scaling_factor)

    def decode(self, samples: Tensor) -> Tensor:
        large = self.parts["vae"].decode(samples / self.parts["vae"].config.scaling_factor).sample.clamp(-1, 1)
        small = _resize(large, self.shape[1]).clamp(-1, 1)
        return ((small + 1) * 127.5).round().to(torch.uint8)

    def hash(self) -> str:
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return hash_weights(
            {f"{name}.{key}": tensor for name, state in states.items() for key, tensor in state.items()}
        )

    def _embedding(self) -> Any:
        """Return the text transformer's embedding layer."""
        return self.parts["text"].model.embed_tokens

    def _tokenize(self, texts: list[str]) -> Tensor:
        length = self.parts["text"].config.max_position_embeddings
        ids: Tensor = self.tokenizer(
            texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids
        return ids.to(self.device)

    def _encode_text(self, ids: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """Return the output of the text transformer, [n, length, width]."""
        embeddings = self._embedding()(ids) if embeddings is None else embeddings
        encoded: Tensor = self.parts["text"](inputs_embeds=embeddings)[0]
        return encoded


def load_latent(source: str | Path = CHECKPOINT, side: int = 32, device: torch.device | str = "cpu") -> LatentGenerator:
    """Load a text-to-image pipeline from a local folder, or from the Hugging Face Hub by its name.

    Only weights stored as safetensors are read.

    ``side``: Side in pixels of the images.
    """
    transformers()  # without it `diffusers` gives a placeholder that fails only on use
    try:
        pipeline = diffusers().LDMTextToImagePipeline.from_pretrained(str(source), use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"cannot load a text-to-image model from {source}: {reason} Name a folder that "
            "LDMTextToImagePipeline.save_pretrained wrote, or connect this machine to the Hub. Weights that are not "
            "safetensors must be converted first."
        ) from error
    return LatentGenerator(pipeline, side, device)


def _resize(images: Tensor, side: int) -> Tensor:
    return interpolate(images, size=(side, side), mode="bicubic", antialias=True)
