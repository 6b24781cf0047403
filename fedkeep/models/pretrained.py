"""A pre-trained network whose features are frozen: only the classifier is trained."""

import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import interpolate

from fedkeep._utils import seeds
from fedkeep.errors import ConfigError, RunError, first_line, require_optional
from fedkeep.models.base import Architecture, Network, Shape, image_shape
from fedkeep.models.weights import dtype_name, hash_weights, parameter_count, tensor_hash
from fedkeep.options import option

READING = "preprocessor_config.json"
BATCH = 64  # images in a forward pass; 40 MB at 224 pixels
MEMORY = 2**28  # bytes of cached features, of which the most recently used are kept

WIDTHS = {"vit": lambda config: config.hidden_size, "resnet": lambda config: config.hidden_sizes[-1]}
"""The supported kinds of network, and functions from their configuration to the number of features."""


@dataclass(frozen=True)
class InputSpec:
    """The images that an extractor expects; calling it converts images.

    ``side``: Side of the square images, in pixels.
    ``mean``: Mean of each channel, for pixels from 0 to 1.
    ``std``: Standard deviation of each channel.
    """

    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """Resize and normalise images.

        ``images``: Images, uint8 [b, channels, height, width].
        Returns: Images, float32 [b, channels, side, side].
        """
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != len(self.mean):
            raise ConfigError(
                f"a pre-trained extractor reads images as they are stored, uint8 [n, {len(self.mean)}, height, width], "
                f"not {dtype_name(images)} {list(images.shape)}. Use it with such images, and with methods that do not "
                "change them."
            )
        pixels = images.to(torch.float32).div_(255)
        if pixels.shape[-2:] != (self.side, self.side):
            pixels = interpolate(pixels, size=(self.side, self.side), mode="bilinear", antialias=True)
        mean, std = (pixels.new_tensor(numbers).view(-1, 1, 1) for numbers in (self.mean, self.std))
        return (pixels - mean) / std


class Extractor:
    """A frozen network that caches its features.

    It is not a `torch.nn.Module`: its weights are not part of any model, so that they are not trained, sent or saved.

    ``network``: A ViT or ResNet of `transformers` without its classifier.
    ``about``: A line about the network and its training data.
    ``learned``: Names of the classes on which it was trained; empty if they are not known.
    ``kind``: The kind of network, a key of `WIDTHS`.
    ``width``: Number of features.
    ``read``: Number of images that the network has processed.
    """

    def __init__(self, network: Any, reading: InputSpec, about: str = "", learned: tuple[str, ...] = ()) -> None:
        self.network = network.eval().requires_grad_(False)
        self.reading = reading
        self.about = about
        self.learned = learned
        self.kind = str(network.config.model_type)
        self.width = int(WIDTHS[self.kind](network.config))
        self.read = 0
        self._known: OrderedDict[str, Tensor] = OrderedDict()

    def __call__(self, images: Tensor) -> Tensor:
        """Compute features, or take them from the cache.

        ``images``: Images, uint8 [b, channels, height, width].
        Returns: Features, float32 [b, width], on the images' device.
        """
        key = f"{images.device} {tensor_hash(images)}"
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        features = self._features(images)
        self._known[key] = features
        while sum(known.nbytes for known in self._known.values()) > MEMORY:
            self._known.popitem(last=False)
        return features

    @torch.no_grad()
    def _features(self, images: Tensor) -> Tensor:
        """Compute features: the first token of a ViT, or a ResNet's mean over pixels."""
        self.network.to(images.device)
        self.read += len(images)
        parts = []
        for part in torch.split(images, BATCH):
            outputs = self.network(self.reading(part))
            features: Tensor = outputs.last_hidden_state[:, 0] if self.kind == "vit" else outputs.pooler_output
            parts.append(features.flatten(1))
        return torch.cat(parts)

    def hash(self) -> str:
        """Return a hash of the bits of all weights."""
        return hash_weights(self.network.state_dict())


@lru_cache(maxsize=2)
def load_extractor(source: str) -> Extractor:
    """Load an extractor from a local folder, or by its name from the Hugging Face Hub; the two last ones are cached.

    Only weights in safetensors are read, and no code is run.
    """
    library = require_optional("transformers", "A pre-trained extractor", "diffusion")
    try:
        with quietly(library), seeds.temporary_seed(0):  # a missing classifier is initialised at random; it is not used
            whole, loaded = library.AutoModelForImageClassification.from_pretrained(
                source, use_safetensors=True, output_loading_info=True
            )
        _require_whole(loaded["missing_keys"], whole.base_model_prefix)
        reading = _reading(library.utils.hub.cached_file(source, READING), whole.config)
        size = whole.config.image_size if whole.config.model_type == "vit" else reading.side
        if size not in (reading.side, [reading.side] * 2, (reading.side,) * 2):
            sizes = f"its {READING} resizes images to {reading.side}, and it reads {whole.config.image_size}."
            raise ValueError(f"{sizes} Make both the same.")
        kind, millions = str(whole.config.model_type), parameter_count(whole.base_model) / 1e6
        learned = _learned(whole.config)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise RunError(
            f"cannot load a pre-trained extractor from {source}: {first_line(error)} Name a folder that "
            "save_pretrained of a ViT or ResNet wrote, or connect this machine to the Hub. Weights that are not "
            "safetensors must be converted first."
        ) from error
    if kind not in WIDTHS:
        raise ConfigError(f"{source} is of the kind {kind!r}, and an extractor is one of {', '.join(WIDTHS)}.")
    about = f"{source}: {kind}, {millions:.2f} M parameters, frozen"
    return Extractor(whole.base_model, reading, about, learned=learned)


def class_of_folder(path: Path) -> str:
    """Return the class of the model of Hugging Face that a folder holds; empty if it holds none."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return str(config["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def load_state_dict(path: Path, class_name: str, shown: str) -> dict[str, Tensor]:
    """Return the weights of a folder of Hugging Face by the names of its module, which may differ from the file's."""
    library = require_optional("transformers", f"{shown}, a folder of Hugging Face,", "diffusion")
    cls: Any = getattr(library, class_name, None)
    is_model = isinstance(cls, type) and issubclass(cls, library.PreTrainedModel)
    try:
        if not is_model:
            raise ValueError(f"transformers {library.__version__} has no model {class_name}.")
        with quietly(library), seeds.temporary_seed(0):  # what is missing is drawn, and left out here
            module, loaded = cls.from_pretrained(path, use_safetensors=True, output_loading_info=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"{shown}: cannot read a model of Hugging Face: {first_line(error)} Give a folder that save_pretrained "
            "wrote, with weights in safetensors."
        ) from error
    state = module.state_dict()
    return {name: state[name].clone() for name in state if name not in loaded["missing_keys"]}


@contextmanager
def quietly(library: Any) -> Iterator[None]:
    """Turn off the progress bars and warnings of `transformers` within the block."""
    logging = library.utils.logging
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _require_whole(missing: Iterable[str], prefix: str) -> None:
    """Raise `ValueError` if weights of the extractor itself are missing; the library would make random ones."""
    absent = sorted(name for name in missing if name.startswith(f"{prefix}."))
    if absent:
        raise ValueError(f"its weights lack {absent[0]!r}" + (f" and {len(absent) - 1} more." if absent[1:] else "."))


def _reading(path: str, config: Any) -> InputSpec:
    """Return the images that a checkpoint expects; the whole image is scaled to its square."""
    preprocessor: Mapping[str, Any] = json.loads(Path(path).read_text())
    size = preprocessor.get("size", getattr(config, "image_size", None))
    if isinstance(size, Mapping):
        size = size.get("height", size.get("shortest_edge"))
    normalises = preprocessor.get("do_normalize", True)
    channels = len(preprocessor.get("image_mean", ())) or getattr(config, "num_channels", 3)
    told = preprocessor if normalises else {"image_mean": [0.0] * channels, "image_std": [1.0] * channels}
    mean, std = (tuple(map(float, told[name])) for name in ("image_mean", "image_std"))
    if not isinstance(size, int) or size < 1 or len(mean) != len(std) or not mean:
        raise ValueError(f"its {READING} gives no size, mean and deviation of images.")
    factor = (preprocessor.get("rescale_factor") or 1 / 255) if preprocessor.get("do_rescale", True) else 1
    largest = round(255 * float(factor), 9) or 1.0  # pixels are from 0 to this, and here from 0 to 1
    return InputSpec(size, tuple(number / largest for number in mean), tuple(number / largest for number in std))


def _learned(config: Any) -> tuple[str, ...]:
    """Return the classes of the training data; public checkpoints may join several names (``"beaver, castor"``)."""
    labels = [str(label) for label in config.id2label.values()]
    return tuple(name for label in labels if not label.startswith("LABEL_") for name in label.split(", "))


class FrozenNetwork(Network):
    """A classifier on the features of a frozen extractor; its state dict contains only the classifier.

    ``extractor``: Computes the features; several networks may share it.
    """

    def __init__(self, extractor: Extractor, classes: int) -> None:
        super().__init__(nn.Identity(), extractor.width, classes)
        self.extractor = extractor

    def features(self, images: Tensor) -> Tensor:
        """Compute the input of the classifier.

        ``images``: Images, uint8 [b, channels, height, width], or features, [b, width], which are returned unchanged.
        Returns: Features, [b, width].
        """
        return images if images.ndim == 2 else self.extractor(images)


@dataclass(frozen=True)
class Pretrained(Architecture):
    """A pre-trained ViT or ResNet of `transformers` with a frozen extractor: only the classifier is trained.

    FedDCL uses this in its RGB benchmark; the paper names neither variant nor resolution. Images are processed with the
    extractor's resolution and normalisation, and without augmentation, so that each image is processed only once. A
    model contains only the classifier: nothing else is trained, sent or saved. A ViT-B/16 has 768 features, and its
    classifier 7,690 parameters for 10 classes.
    """

    name: ClassVar[str] = "pretrained"

    source: str = option(
        "google/vit-base-patch16-224",
        "a folder, relative to the working directory or the data folder, or a name on the Hugging Face Hub",
    )

    def build(self, shape: Shape, classes: int) -> FrozenNetwork:
        """Build the network.

        ``shape``: Channels, height and width of an image.
        Returns: The network (see `load_extractor` for what may be raised).
        """
        channels, *_ = image_shape(self.name, shape)
        extractor = load_extractor(self.source)
        if channels != (expected := len(extractor.reading.mean)):
            raise ConfigError(f"{self.source} reads images of {expected} channels, and these have {channels}.")
        return FrozenNetwork(extractor, classes)

    @property
    def about(self) -> str:
        """A line about the extractor and its training data."""
        return load_extractor(self.source).about

    @property
    def learned(self) -> tuple[str, ...]:
        """Names of the classes on which the extractor was trained; empty if they are not known."""
        return load_extractor(self.source).learned

    def hash(self) -> str:
        """Return the hash of the extractor's weights."""
        return load_extractor(self.source).hash()

    def located(self, places: Iterable[Path]) -> Self:
        """Return the model with the first of these folders that exists; unchanged if none does."""
        found = (str(place) for place in places if self.source and os.path.isdir(place))  # False for odd names
        return replace(self, source=next(found, self.source))
