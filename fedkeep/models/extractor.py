"""A frozen feature extractor: a pre-trained network that turns images into features and never learns again.

It is a folder, or a model of the Hugging Face Hub: ``config.json``, ``model.safetensors`` and
``preprocessor_config.json``, as `transformers` writes them; ``fedkeep pretrain`` makes one.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import interpolate

from fedkeep._utils import seeds
from fedkeep._utils.libraries import require_optional
from fedkeep.errors import ConfigError, RunError
from fedkeep.models.weights import parameter_count, tensor_hash

READING, CARD, CHECKPOINT = "preprocessor_config.json", "pretraining.json", "checkpoint.safetensors"
BATCH = 64  # images a forward pass: at 224 pixels 40 MB
MEMORY = 2**28  # bytes of features that are remembered

WIDTHS = {"vit": lambda config: config.hidden_size, "resnet": lambda config: config.hidden_sizes[-1]}
"""The kinds of network that are known, and how wide their features are."""


@dataclass(frozen=True)
class InputSpec:
    """How an extractor wants images: square, of ``side`` pixels; and each channel's mean and deviation (of 0..1)."""

    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """Return uint8 images [b, channels, height, width] as float32 [b, channels, side, side].

        Raises
        ------
        ConfigError
            For anything else.
        """
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != len(self.mean):
            raise ConfigError(
                f"a pre-trained extractor reads images as they are stored, uint8 [n, {len(self.mean)}, height, width], "
                f"not {str(images.dtype).removeprefix('torch.')} {list(images.shape)}. Use it with such images, and "
                "with methods that do not change them."
            )
        pixels = images.to(torch.float32).div_(255)
        if pixels.shape[-2:] != (self.side, self.side):
            pixels = interpolate(pixels, size=(self.side, self.side), mode="bilinear", antialias=True)
        mean, std = (pixels.new_tensor(each).view(-1, 1, 1) for each in (self.mean, self.std))
        return (pixels - mean) / std


class Extractor:
    """A frozen network; asked about the same images again, it answers from memory.

    It is no `torch.nn.Module`: its weights are part of no model, so that they are neither trained, sent nor saved.

    Parameters
    ----------
    network : a ViT or ResNet of `transformers` without its classifier.
    reading : how it wants images.
    about : what it is and what it has seen, in a line.
    memory : bytes of features to remember; what was asked last stays.
    learned : the names of the classes that it was trained to tell; empty where they are not known.
    """

    def __init__(
        self,
        network: Any,
        reading: InputSpec,
        about: str = "",
        memory: int = MEMORY,
        learned: tuple[str, ...] = (),
    ) -> None:
        self.network = network.eval().requires_grad_(False)
        self.reading = reading
        self.about = about
        self.memory = memory
        self.learned = learned
        self.kind = str(network.config.model_type)
        self.width = int(WIDTHS[self.kind](network.config))
        self.read = 0  # images that went through the network
        self._known: OrderedDict[str, Tensor] = OrderedDict()

    def __call__(self, images: Tensor) -> Tensor:
        """Return the features, float32 [b, width], of uint8 images [b, channels, height, width], on their device."""
        key = f"{images.device} {tensor_hash(images)}"
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        features = self._features(images)
        self._known[key] = features
        while sum(known.nbytes for known in self._known.values()) > self.memory:
            self._known.popitem(last=False)
        return features

    @torch.no_grad()
    def _features(self, images: Tensor) -> Tensor:
        self.network.to(images.device)
        self.read += len(images)
        parts = [features_of(self.network, self.reading(part)) for part in torch.split(images, BATCH)]
        return torch.cat(parts)

    def hash(self) -> str:
        """Return a hash of all weights, computed anew: equal for equal bits only."""
        state = self.network.state_dict()
        each = "".join(f"{name} {tensor_hash(state[name])}\n" for name in sorted(state))
        return hashlib.blake2b(each.encode(), digest_size=16).hexdigest()


def features_of(network: Any, pixels: Tensor) -> Tensor:
    """Return what a classifier reads: a ViT's first token, a ResNet's mean over pixels, [b, width]."""
    said = network(pixels)
    features: Tensor = said.last_hidden_state[:, 0] if network.config.model_type == "vit" else said.pooler_output
    return features.flatten(1)


@lru_cache(maxsize=2)
def load_extractor(source: str) -> Extractor:
    """Load an extractor from a local folder, or from the Hugging Face Hub by its name; the same object again.

    Only weights stored as safetensors are read, and no code.

    Raises
    ------
    RunError
        Where there is none that can be read, or its training is not finished.
    ConfigError
        For a network that is neither a ViT nor a ResNet.
    MissingExtra
        Without `transformers`.
    """
    library = library_of_extractors()
    folder = Path(source)
    if (folder / CHECKPOINT).is_file() and not (folder / CARD).is_file():
        raise RunError(f"the extractor in {source} is not trained to its end: run the command that began it again.")
    try:
        with quietly(library), seeds.temporary_seed(0):  # a classifier that it lacks is drawn, and thrown away
            whole, loaded = library.AutoModelForImageClassification.from_pretrained(
                source, use_safetensors=True, output_loading_info=True
            )
        _require_whole(loaded["missing_keys"], whole.base_model_prefix)
        reading = _reading(library.utils.hub.cached_file(source, READING), whole.config)
        card = json.loads((folder / CARD).read_text()) if (folder / CARD).is_file() else {}
        about, learned = _about(source, whole, card), _learned(whole.config, card)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"cannot load a pre-trained extractor from {source}: {reason} Name a folder that fedkeep pretrain wrote, "
            "or connect this machine to the Hub. Weights that are not safetensors must be converted first."
        ) from error
    kind = str(whole.config.model_type)
    if kind not in WIDTHS:
        raise ConfigError(
            f"{source} is a network of the kind {kind!r}, and an extractor is one of {', '.join(WIDTHS)}."
        )
    return Extractor(whole.base_model, reading, about, learned=learned)


def library_of_extractors() -> Any:
    """Return the module `transformers`; raise `MissingExtra` with the install line where it is not installed."""
    return require_optional("transformers", "A pre-trained extractor", "diffusion")


@contextmanager
def quietly(library: Any) -> Iterator[None]:
    """Let `transformers` show no progress of its own, and say nothing of classifiers that are thrown away."""
    talk = library.utils.logging
    shown, level = talk.is_progress_bar_enabled(), talk.get_verbosity()
    talk.disable_progress_bar()
    talk.set_verbosity_error()
    try:
        yield
    finally:
        talk.set_verbosity(level)
        if shown:
            talk.enable_progress_bar()


def _require_whole(missing: Iterable[str], prefix: str) -> None:
    """Raise `ValueError` if weights of the extractor itself are missing, which the library would draw at random."""
    lacks = sorted(name for name in missing if name.startswith(f"{prefix}."))
    if lacks:
        raise ValueError(f"its weights lack {lacks[0]!r}" + (f" and {len(lacks) - 1} more." if lacks[1:] else "."))


def _reading(path: str, config: Any) -> InputSpec:
    """Return how a checkpoint wants images; the whole image is scaled to its square."""
    written: Mapping[str, Any] = json.loads(Path(path).read_text())
    size = written.get("size", getattr(config, "image_size", None))
    if isinstance(size, Mapping):
        size = size.get("height", size.get("shortest_edge"))
    mean, std = (tuple(map(float, written[name])) for name in ("image_mean", "image_std"))
    if not isinstance(size, int) or size < 1 or len(mean) != len(std) or not mean:
        raise ValueError(f"its {READING} gives no size, mean and deviation of images.")
    return InputSpec(size, mean, std)


def _about(source: str, whole: Any, card: Mapping[str, Any]) -> str:
    about = f"{source}: {whole.config.model_type}, {parameter_count(whole.base_model) / 1e6:.2f} M parameters, frozen"
    if not card:
        return about
    return f"{about}; pre-trained on {card['data']}, {100 * card['test_accuracy']:.1f} % of whose test images it tells"


def _learned(config: Any, card: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the classes that were learned; a public checkpoint may give one several names (``"beaver, castor"``)."""
    if "label_names" in card:
        return tuple(map(str, card["label_names"]))
    labels = [str(label) for label in config.id2label.values()]
    return tuple(name for label in labels if not label.startswith("LABEL_") for name in label.split(", "))
