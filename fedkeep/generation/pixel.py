"""The pixel-space generator: its network, as an object, and as a folder on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from fedkeep._utils import seeds
from fedkeep._utils.files import atomic_write
from fedkeep.errors import ConfigError, RunError
from fedkeep.generation.generator import Generator, NoiseSchedule, Regime, diffusers
from fedkeep.models import Shape, Weights
from fedkeep.models.weights import hash_weights, load_weights, tensor_hash
from fedkeep.options import Options, as_table, build, option

_GROUP_SIZE = 8  # groups of group norm, and channels of an attention head


@dataclass(frozen=True)
class UNet(Options):
    """A small UNet of `diffusers` for images of 28 or 32 pixels.

    FedDCL's generator of grey images is a UNet of 7.2 M parameters: what it computes from a class code multiplies two
    of its feature maps, and the timestep's embedding is added. Here both together scale and shift every map (Dhariwal &
    Nichol, 2021).
    """

    widths: tuple[int, ...] = option(
        (16, 48, 96), "channels at each resolution, each half as fine as the last; multiples of 8", low=8
    )
    blocks: int = option(1, "residual blocks at each resolution", low=1)
    patch: int = option(1, "side of squares of pixels that are folded into channels; 2 is a quarter of the work", low=1)
    attention: int = option(1, "at how many of the coarsest resolutions pixels attend to each other", low=0)

    def check(self) -> None:
        """Raise `ConfigError` for options that contradict each other."""
        wrong = [width for width in self.widths if width % _GROUP_SIZE]
        if wrong or not self.widths:
            raise ConfigError(f"UNet.widths must be multiples of {_GROUP_SIZE}, at least one, not {list(self.widths)}.")
        if self.attention > len(self.widths):
            raise ConfigError(f"UNet.attention is {self.attention}, but there are {len(self.widths)} resolutions.")

    @property
    def conditioning_shape(self) -> tuple[int, int]:
        """What a class is: one vector beside the timestep's, of this length."""
        return (1, 4 * self.widths[0])

    def build(self, shape: Shape, classes: int) -> ClassUNet:
        """Return the network with initial weights from PyTorch's default generator.

        ``shape``: Channels, height and width of the images.
        ``classes``: Rows of the class table, without the null row.
        """
        channels, height, width = shape
        halvings = len(self.widths) - 1
        divisor = self.patch * 2**halvings
        if height != width:
            raise ConfigError(
                f"a generator makes square images, and these have {height} x {width} pixels. Cut or pad them."
            )
        if height % divisor:
            raise ConfigError(
                f"the side of {height} pixels cannot be halved {halvings} times in squares of {self.patch}: {divisor} "
                "must divide it. Give UNet.widths fewer entries; 28 pixels take up to 3, and 2 with squares of 2."
            )
        channels *= self.patch**2
        num_plain = len(self.widths) - self.attention
        config: dict[str, Any] = {
            "sample_size": height // self.patch,
            "in_channels": channels,
            "out_channels": channels,
            "block_out_channels": self.widths,
            "layers_per_block": self.blocks,
            "norm_num_groups": _GROUP_SIZE,
            "resnet_time_scale_shift": "scale_shift",  # a shift before group norm is lost in groups of one channel
            "attention_head_dim": _GROUP_SIZE,
            "class_embed_type": "identity",
            "down_block_types": ("DownBlock2D",) * num_plain + ("AttnDownBlock2D",) * self.attention,
            "up_block_types": ("AttnUpBlock2D",) * self.attention + ("UpBlock2D",) * num_plain,
        }
        return ClassUNet(diffusers().UNet2DModel(**config), classes, self)


class ClassUNet(nn.Module):
    """A UNet and the table of the classes that it was trained on.

    ``classes``: Rows of the class table, without the null row.
    ``table``: [classes + 1, 1, width], the conditioning of each class; the last row is the null conditioning.
    """

    def __init__(self, unet: nn.Module, classes: int, options: UNet) -> None:
        super().__init__()
        self.unet = unet
        self.table = nn.Parameter(torch.randn(classes + 1, *options.conditioning_shape))
        self.patch = options.patch

    def forward(self, noisy: Tensor, timesteps: Tensor, conditioning: Tensor) -> Tensor:
        """Return the noise in noisy images.

        ``noisy``: [b, channels, side, side].
        ``timesteps``: int64 [b].
        ``conditioning``: [b, 1, width].
        """
        patches = pixel_unshuffle(noisy, self.patch)
        return pixel_shuffle(self.unet(patches, timesteps, class_labels=conditioning.squeeze(1)).sample, self.patch)


FORMAT = 2
CARD, WEIGHTS, CHECKPOINT = "generator.json", "weights.safetensors", "checkpoint.safetensors"
FINGERPRINTS = "seen.safetensors"

PrototypeSpace = Literal["embedding", "code"]
"""What a prototype is: the network's embedding of a class, or a class code, the weights of a mixture of embeddings.

FedDCL's grey network computes from a code what two small perceptrons give, one for each of two feature maps: its
prototypes are read as their output (``embedding``), or as the code (``code``).
"""

PrototypeInit = Literal["mean", "null"]
"""Where a search begins: at the mean of all classes that the generator knows, or at the null embedding."""


@dataclass(frozen=True)
class ModelCard(Options):
    """What is known about a generator."""

    unet: UNet = option(MISSING, "the network that was trained")
    noise_schedule: NoiseSchedule = option(MISSING, "the noise schedule of its training")
    shape: Shape = option(MISSING, "channels, height and width of its images")
    label_names: tuple[str, ...] = option(MISSING, "the classes that it was trained on")
    data: str = option(MISSING, "the name of the data set that it was trained on")
    regime: Regime = option(MISSING, "how these data relate to the clients'")
    training: Mapping[str, Any] = option(dict, "settings, seed, number of images and steps, and loss of its training")
    held_out: float = option(0.0, "in the regime same_classes, the share of each class that it was trained on")
    # The fingerprints are a file of the folder; runs keep the images from clients.
    seen: str = option("", "the hash of the fingerprints of these images")
    clusters_per_class: int = option(1, "how many subclasses each class has (see cluster_subclasses)", low=1)

    @property
    def num_embeddings(self) -> int:
        """Rows of the class table; cluster k of class c is row c * clusters_per_class + k."""
        return len(self.label_names) * self.clusters_per_class


class PixelGenerator(Generator):
    """A frozen UNet that generates pixels.

    A prototype is [tokens, width] in the space ``embedding``. In the space ``code`` it is [classes]: FedDCL's vector in
    place of the one-hot code. It stands for the null embedding plus a weighted sum of the differences of the classes'
    embeddings to it, so that zeros mean no class and a one-hot vector means its class.

    ``card``: What is known about it.
    ``initial``: Where the search for a prototype begins.
    """

    def __init__(
        self,
        card: ModelCard,
        weights: Weights,
        device: torch.device | str = "cpu",
        *,
        space: PrototypeSpace = "embedding",
        initial: PrototypeInit = "mean",
    ) -> None:
        self.card = card
        self.shape, self.noise_schedule, self.regime = card.shape, card.noise_schedule, card.regime
        self.device = torch.device(device)
        self.space, self.initial = space, initial
        with seeds.temporary_seed(0):  # the initial weights are overwritten
            self.network = card.unet.build(card.shape, card.num_embeddings)
        load_weights(self.network, weights)
        self.network.to(self.device).eval().requires_grad_(False)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return self.shape

    def class_embeddings(self) -> Tensor:
        """Return the embeddings of the subclasses that it was trained on, [classes * clusters, tokens, width]."""
        return self.network.table[:-1].detach().clone()

    def initial_prototypes(self, num_classes: int) -> Tensor:
        share = 1 / self.card.num_embeddings if self.initial == "mean" else 0.0
        codes = torch.full((num_classes, self.card.num_embeddings), share, device=self.device)
        return codes if self.space == "code" else self.conditioning(codes)

    @property
    def prototype_shapes(self) -> Sequence[tuple[int, ...]]:
        return (self.card.unet.conditioning_shape, (self.card.num_embeddings,))

    def conditioning(self, prototypes: Tensor, rng: torch.Generator | None = None) -> Tensor:
        if prototypes.dim() == 3:
            return prototypes
        table = self.network.table
        return table[-1] + torch.einsum("nc,ctw->ntw", prototypes, table[:-1] - table[-1])

    def null_conditioning(self) -> Tensor:
        return self.network.table[-1:]

    def predict_noise(self, noisy: Tensor, timesteps: Tensor, conditioning: Tensor) -> Tensor:
        noise: Tensor = self.network(noisy, timesteps, conditioning)
        return noise

    def encode(self, images: Tensor, rng: torch.Generator) -> Tensor:
        self.check_images(images)
        return to_signed(images.to(self.device))

    def decode(self, samples: Tensor) -> Tensor:
        return ((samples.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)

    def hash(self) -> str:
        return hash_weights(self.network.state_dict())

    def save(self, folder: Path, *, half: bool = False) -> None:
        """Write the generator as a folder. The card is written last, so that a folder with a card is complete.

        ``half``: Store 16 bits a weight, half the size. The weights are rounded: the folder then holds another
            generator.
        """
        stored = {name: tensor.cpu().contiguous() for name, tensor in self.network.state_dict().items()}
        if half:
            stored = {name: tensor.half() for name, tensor in stored.items()}
        atomic_write(folder / WEIGHTS, tensor_bytes(stored))
        loaded = {name: tensor.float() for name, tensor in stored.items()}
        card = {"format": FORMAT, **as_table(self.card), "hash": hash_weights(loaded)}
        atomic_write(folder / CARD, json.dumps(card, indent=1) + "\n")


def load_generator(
    folder: str | Path,
    device: torch.device | str = "cpu",
    *,
    space: PrototypeSpace = "embedding",
    initial: PrototypeInit = "mean",
) -> PixelGenerator:
    """Load a generator that `PixelGenerator.save` or ``fedkeep generator train`` wrote.

    ``space``: What its prototypes are.
    ``initial``: Where the search for a prototype begins.
    """
    folder = Path(folder)
    card = read_card(folder)
    try:
        weights = {name: tensor.float() for name, tensor in read_tensors((folder / WEIGHTS).read_bytes()).items()}
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot read {folder / WEIGHTS}: {error}. Copy the generator again, or train it.") from error
    if hash_weights(weights) != read_hash(folder):
        raise RunError(f"{folder / WEIGHTS} is not what {CARD} says. Copy the whole folder again, or train it.")
    try:
        return PixelGenerator(card, weights, device, space=space, initial=initial)
    except ValueError as error:
        raise RunError(f"{folder / CARD} does not describe its weights: {error} Train the generator again.") from error


def read_card(folder: Path) -> ModelCard:
    """Return a generator's card without loading its weights."""
    written = _read_card_json(folder)
    try:
        return build(ModelCard, {name: value for name, value in written.items() if name != "hash"})
    except ConfigError as error:
        raise RunError(f"{folder / CARD} does not describe a generator: {error} Train the generator again.") from error


def read_hash(folder: Path) -> str:
    """Return the hash of a generator's weights that its card states; errors are those of `read_card`."""
    return str(_read_card_json(folder).get("hash"))


def write_fingerprints(folder: Path, fingerprints: Tensor) -> str:
    """Write the fingerprints, int64 [m], of the images that a generator was trained on; return their hash."""
    atomic_write(folder / FINGERPRINTS, tensor_bytes({"seen": fingerprints}))
    return tensor_hash(fingerprints)


def read_fingerprints(folder: Path) -> Tensor:
    """Return the fingerprints, int64 [m], of the images that a generator of the regime ``same_classes`` learned."""
    card = read_card(folder)
    if not card.seen:
        raise RunError(
            f"the generator in {folder} does not say which images it learned from, so that a run cannot keep them from "
            "its clients. Train it again with this version of FedKeep."
        )
    try:
        fingerprints = read_tensors((folder / FINGERPRINTS).read_bytes())["seen"]
    except (OSError, SafetensorError, KeyError) as error:
        raise RunError(
            f"cannot read {folder / FINGERPRINTS}: {error}. Copy the whole folder again, or train it."
        ) from error
    if tensor_hash(fingerprints) != card.seen:
        raise RunError(f"{folder / FINGERPRINTS} is not what {CARD} says. Copy the whole folder again, or train it.")
    return fingerprints


def to_signed(images: Tensor) -> Tensor:
    """Return uint8 images as float32 in -1..1."""
    return images.to(torch.float32).div_(127.5).sub_(1)


def _read_card_json(folder: Path) -> dict[str, Any]:
    path = folder / CARD
    if not path.is_file():
        if (folder / CHECKPOINT).is_file():
            raise RunError(f"the generator in {folder} is not trained to its end: run the command that began it again.")
        raise RunError(f"there is no generator in {folder} ({CARD} is missing). Make one: fedkeep generator train.")
    try:
        written = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}. Copy the generator again, or train it.") from error
    if not isinstance(written, dict) or written.pop("format", None) != FORMAT:
        raise RunError(f"{path} was not written by this version of FedKeep. Train the generator again.")
    return written
