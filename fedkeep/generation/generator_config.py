"""The generator of a run, the recipe's section ``[generator]``, and the latent text-to-image model that it may name.

There a prototype replaces the embedding of a word.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fedkeep._utils.files import check_path
from fedkeep.data.catalog import local_paths
from fedkeep.data.combine import shared_classes
from fedkeep.data.dataset import format_shape
from fedkeep.errors import ConfigError, RunError, first_line
from fedkeep.generation import pixel
from fedkeep.generation.generator import (
    REGIMES,
    Generator,
    NoiseSchedule,
    Regime,
    Sampler,
    SamplerMethod,
    diffusers,
    transformers,
)
from fedkeep.models import Shape
from fedkeep.models.weights import hash_weights
from fedkeep.options import Options, option

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
        return hash_weights({f"{name}.{key}": tensor for name, part in states.items() for key, tensor in part.items()})

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
        raise RunError(
            f"cannot load a text-to-image model from {source}: {first_line(error)} Name a folder that "
            "LDMTextToImagePipeline.save_pretrained wrote, or connect this machine to the Hub. Weights that are not "
            "safetensors must be converted first."
        ) from error
    return LatentGenerator(pipeline, side, device)


def _resize(images: Tensor, side: int) -> Tensor:
    return interpolate(images, size=(side, side), mode="bicubic", antialias=True)


@dataclass(frozen=True)
class GeneratorConfig(Options):
    """The frozen generator that every party has before the run begins."""

    name: str = option("", "its folder, from here or in the data folder, or ldm for the text-to-image model; or none")
    space: pixel.PrototypeSpace = option(
        "embedding", "what a prototype is: the network's embedding of a class, or a class code, a mixture of classes"
    )
    initial: pixel.PrototypeInit = option(
        "mean", "where the search for a prototype begins: at the mean of the classes, or at the null class"
    )
    checkpoint: str = option(CHECKPOINT, "of ldm: a folder, or a Hub id")
    sampler: SamplerMethod = option("ddim", "how images are sampled from it")
    sampler_steps: int = option(50, "steps of the sampler", low=1)
    guidance_scale: float = option(2.0, "weight of classifier-free guidance; 1: none", low=0.0)

    def check(self) -> None:
        """Raise `ConfigError` if the name can be no folder's."""
        check_path(self.name, "generator.name")

    def describe(self, data_dir: str | Path | None = None) -> str:
        """Return what is printed with results: the name, and what the generator was trained on."""
        regime = self.regime(data_dir)
        seen = REGIMES[regime]
        if regime == "ldm" and self.checkpoint != CHECKPOINT:
            seen = f"the text-to-image pipeline {self.checkpoint}: what it has seen is not known here"
        return f"{self.name} ({regime}): {seen}"

    def load(self, side: int, device: torch.device, data_dir: str | Path | None = None) -> Generator:
        """Return the generator.

        ``side``: Side in pixels of the data set's images, to which the text-to-image model's are resized.
        """
        if not self.name:
            raise ConfigError("the recipe names no generator. Train one with fedkeep generator train, and name it.")
        generator: Generator
        if self.name == "ldm":
            generator = load_latent(self.checkpoint, side, device)
        else:
            generator = pixel.load_generator(self.folder(data_dir), device, space=self.space, initial=self.initial)
        generator.sampler = Sampler(self.sampler, self.sampler_steps, self.guidance_scale)
        return generator

    def exists(self, data_dir: str | Path | None = None) -> bool:
        """Tell whether a generator is named and its folder exists."""
        return bool(self.name) and (self.folder(data_dir) / pixel.CARD).is_file()

    def regime(self, data_dir: str | Path | None = None) -> Regime:
        """Return the regime without loading the weights; errors are those of `load`."""
        return "ldm" if self.name == "ldm" else pixel.read_card(self.folder(data_dir)).regime

    def hash(self, data_dir: str | Path | None = None) -> str:
        """Return the hash of the weights without loading them; for the text-to-image model, its checkpoint's name."""
        return self.checkpoint if self.name == "ldm" else pixel.read_hash(self.folder(data_dir))

    def image_hashes(self, data_dir: str | Path | None = None) -> Tensor:
        """Return fingerprints of the images that a run must keep from its clients, int64 [m].

        A generator of the regime ``same_classes`` was trained on these images. For other regimes there are none. Errors
        are those of `load`.
        """
        is_excluded = self.regime(data_dir) == "same_classes"
        return pixel.read_fingerprints(self.folder(data_dir)) if is_excluded else torch.zeros(0, dtype=torch.int64)

    def check_shape(self, shape: Shape, data_dir: str | Path | None = None) -> None:
        """Raise `ConfigError` if the generator's images have another shape (channels, height, width) than the run's."""
        side = shape[-1]  # the text-to-image model's images are resized
        theirs = (3, side, side) if self.name == "ldm" else pixel.read_card(self.folder(data_dir)).shape
        if theirs != shape:
            raise ConfigError(
                f"the generator {self.name} draws images of {format_shape(theirs)}, and this run's are "
                f"{format_shape(shape)} (channels, height, width). Name one that was trained on such images."
            )

    def check_sampler(self, data_dir: str | Path | None = None) -> None:
        """Raise `ConfigError` if the sampler has more steps than the generator has timesteps."""
        known = math.inf if self.name == "ldm" else pixel.read_card(self.folder(data_dir)).noise_schedule.num_timesteps
        if self.sampler_steps > known:
            raise ConfigError(
                f"generator.sampler_steps is {self.sampler_steps}, and the generator {self.name} was trained with "
                f"{known} timesteps. Set it to {known} or less."
            )

    def check_classes(self, label_names: Sequence[str], data_dir: str | Path | None = None) -> None:
        """Raise `ConfigError` if a generator of the regime ``disjoint`` was trained on some of these classes."""
        if self.regime(data_dir) != "disjoint":
            return
        card = pixel.read_card(self.folder(data_dir))
        both = shared_classes(label_names, card.label_names)
        shared = [f"{name!r} ({other!r} there)" for name, other in both.items()]
        if shared:
            more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
            raise ConfigError(
                f"the generator {self.name} is of the regime 'disjoint', and yet it learned classes of this run, from "
                f"{card.data}: {', '.join(shared[:3])}{more}. Train one on other classes, or with the regime "
                "same_classes or paper, so that results say what it has seen."
            )

    def folder(self, data_dir: str | Path | None) -> Path:
        """Return where the generator lies, from here or in the data folder."""
        places = local_paths(self.name, data_dir)
        return next((place for place in places if (place / pixel.CARD).is_file()), places[0])
