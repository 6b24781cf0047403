"""The latent text-to-image model as a generator: a prototype takes the place of a word (FedDCL's colour images)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fedkeep.errors import ConfigError, RunError
from fedkeep.synthesis.generator import Generator, Regime, hash_of
from fedkeep.synthesis.libraries import diffusers, transformers
from fedkeep.synthesis.noise import Noise

CHECKPOINT = "CompVis/ldm-text2im-large-256"
"""The public checkpoint of the paper: about 1.5 G parameters, 6 GB."""

PLACEHOLDER = "*"
DRAWN = f"a photo of {PLACEHOLDER}"
LEARNED = (
    DRAWN,
    f"a picture of {PLACEHOLDER}",
    f"a photo of one {PLACEHOLDER}",
    f"a photo of the {PLACEHOLDER}",
    f"a small photo of {PLACEHOLDER}",
    f"a large photo of {PLACEHOLDER}",
    f"a good photo of {PLACEHOLDER}",
    f"a bad photo of {PLACEHOLDER}",
    f"a bright photo of {PLACEHOLDER}",
    f"a dark photo of {PLACEHOLDER}",
    f"a sharp photo of {PLACEHOLDER}",
    f"a blurry photo of {PLACEHOLDER}",
    f"a close view of {PLACEHOLDER}",
    f"a view of {PLACEHOLDER} from afar",
    f"this is {PLACEHOLDER}",
    f"one can see {PLACEHOLDER}",
)
"""What is said around a prototype while it is learned; DDDR takes the list of textual inversion, about five times as
long, with sentences of this kind."""


class LatentGenerator(Generator):
    """A frozen `LDMTextToImagePipeline`, whose parts are used one by one: the pipeline itself takes nothing but text.

    A prototype is the input embedding of one word, [width]. It passes through the text transformer with the words
    around it; what comes out of all words is what the UNet attends to.

    Parameters
    ----------
    pipeline : of `diffusers`.
    side : of the images that go in and come out, in pixels; inside they are as large as the model draws.
    word : whose embedding a search begins with, as in DDDR.
    """

    regime: Regime = "ldm"

    def __init__(
        self, pipeline: Any, side: int = 32, device: torch.device | str = "cpu", *, word: str = "sculpture"
    ) -> None:
        self.device = torch.device(device)
        self.parts: dict[str, Any] = {"vae": pipeline.vqvae, "text": pipeline.bert, "unet": pipeline.unet}
        for part in self.parts.values():
            part.to(self.device).eval().requires_grad_(False)
        self.tokenizer = pipeline.tokenizer
        self.shape = (3, side, side)
        found = pipeline.scheduler.config
        self.noise = Noise(
            found.num_train_timesteps, found.beta_schedule, found.beta_start, found.beta_end, bounded=False
        )
        self.side = pipeline.unet.config.sample_size * pipeline.vae_scale_factor
        self.word = word
        self.mark = self.tokenizer.convert_tokens_to_ids(PLACEHOLDER)
        if self.mark in (None, self.tokenizer.unk_token_id):
            raise ConfigError(f"this model's tokenizer has no word {PLACEHOLDER!r}, in whose place a prototype is put.")
        with torch.no_grad():
            self._null = self._read(self._words([""]))

    @property
    def drawn(self) -> tuple[int, ...]:
        unet = self.parts["unet"].config
        return (unet.in_channels, unet.sample_size, unet.sample_size)

    def start(self, classes: int) -> Tensor:
        ids = self.tokenizer(self.word, add_special_tokens=False, return_tensors="pt").input_ids
        embedding: Tensor = self._table()(ids.to(self.device)).detach().mean((0, 1))
        return embedding.expand(classes, -1).clone()

    @property
    def prototype_sizes(self) -> Sequence[tuple[int, ...]]:
        return ((self._table().embedding_dim,),)

    def conditions(self, prototypes: Tensor, rng: torch.Generator | None = None) -> Tensor:
        count = len(prototypes)
        chosen = [0] * count if rng is None else torch.randint(len(LEARNED), (count,), generator=rng).tolist()
        ids = self._words([LEARNED[number] for number in chosen])
        words = self._table()(ids)
        return self._read(ids, torch.where((ids == self.mark).unsqueeze(-1), prototypes.unsqueeze(1), words))

    def null(self) -> Tensor:
        return self._null

    def predict(self, noisy: Tensor, times: Tensor, conditions: Tensor) -> Tensor:
        noise: Tensor = self.parts["unet"](noisy, times, encoder_hidden_states=conditions).sample
        return noise

    @torch.no_grad()
    def encode(self, images: Tensor, rng: torch.Generator) -> Tensor:
        self.check_images(images)
        turned = torch.rand(len(images), generator=rng) < 0.5
        images = torch.where(turned.view(-1, 1, 1, 1).to(images.device), images.flip(3), images)
        large = _resized(images.to(self.device).float() / 127.5 - 1, self.side).clamp(-1, 1)
        found = self.parts["vae"].encode(large).latent_dist
        latent: Tensor = found.mean + found.std * torch.randn(found.mean.shape, generator=rng).to(self.device)
        return latent * float(self.parts["vae"].config.scaling_factor)

    def decode(self, drawn: Tensor) -> Tensor:
        large = self.parts["vae"].decode(drawn / self.parts["vae"].config.scaling_factor).sample.clamp(-1, 1)
        small = _resized(large, self.shape[1]).clamp(-1, 1)
        return ((small + 1) * 127.5).round().to(torch.uint8)

    def hash(self) -> str:
        each = {name: part.state_dict() for name, part in self.parts.items()}
        return hash_of({f"{name}.{key}": tensor for name, state in each.items() for key, tensor in state.items()})

    def _table(self) -> Any:
        """Return the embedding of words."""
        return self.parts["text"].model.embed_tokens

    def _words(self, texts: list[str]) -> Tensor:
        length = self.parts["text"].config.max_position_embeddings
        ids: Tensor = self.tokenizer(
            texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids
        return ids.to(self.device)

    def _read(self, ids: Tensor, words: Tensor | None = None) -> Tensor:
        """Return what the text transformer makes of words, [n, length, width]."""
        read: Tensor = self.parts["text"](inputs_embeds=self._table()(ids) if words is None else words)[0]
        return read


def load_latent(
    source: str | Path = CHECKPOINT, side: int = 32, device: torch.device | str = "cpu", *, word: str = "sculpture"
) -> LatentGenerator:
    """Load a text-to-image pipeline from a local folder, or from the Hugging Face Hub by its name.

    Only weights stored as safetensors are read.

    Raises
    ------
    RunError
        Where there is none that can be read.
    MissingExtra
        Without `diffusers` and `transformers`.
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
    return LatentGenerator(pipeline, side, device, word=word)


def _resized(images: Tensor, side: int) -> Tensor:
    return interpolate(images, size=(side, side), mode="bicubic", antialias=True)
