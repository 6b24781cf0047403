"""The pixel-space generator as a value, and as a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from fedkeep._utils import seeds
from fedkeep._utils.files import atomic_write
from fedkeep.errors import RunError, did_you_mean
from fedkeep.models import Shape, Weights
from fedkeep.models.weights import load_weights, parameter_count, tensor_hash
from fedkeep.options import as_table, build
from fedkeep.synthesis.diffusion.generator import Generator, Regime, hash_of
from fedkeep.synthesis.diffusion.noise import Noise
from fedkeep.synthesis.diffusion.unet import UNet

FORMAT = 1
CARD, WEIGHTS, CHECKPOINT = "generator.json", "weights.safetensors", "checkpoint.safetensors"
SEEN = "seen.safetensors"

Space = Literal["embedding", "code"]
"""What a prototype is: what the network makes of a class code, or the code.

The first is a row of its class table; the second is the weights of a mixture of these rows. FedDCL's grey network makes
of a code what two small perceptrons say of it, one for each of two maps (read as ``mlp_out``, and ``code``).
"""

Initial = Literal["mean", "null"]
"""Where a search begins: at the mean of all classes that the generator knows, or at the row that says nothing."""


@dataclass(frozen=True)
class Card:
    """What is known about a generator.

    Attributes
    ----------
    unet, noise : what was trained.
    shape : channels, height and width of its images.
    label_names : the classes that it learned. codes : how many codes each has, for groups of images that look alike.
    data : the name of the data that it learned from.
    regime : what they have to do with the clients' data.
    training : its settings, seed, images, steps and loss; for people.
    held_out : in the regime ``same_classes``, the share of each class that it learned from.
    seen : the hash of the fingerprints of these images, which are a file of the folder: runs keep them from clients.
    """

    unet: UNet
    noise: Noise
    shape: Shape
    label_names: tuple[str, ...]
    data: str
    regime: Regime
    training: Mapping[str, Any] = field(default_factory=dict)
    held_out: float = 0.0
    seen: str = ""
    codes: int = 1

    @property
    def rows(self) -> int:
        """How many rows its class table has: code k of class c is row c * codes + k."""
        return len(self.label_names) * self.codes


class PixelGenerator(Generator):
    """A frozen UNet that draws pixels.

    Parameters
    ----------
    card : what is known about it.
    weights : of `ClassUNet`, whole.
    device : where it computes.
    space, initial : what its prototypes are, and where the search for one begins.

    A prototype is [tokens, width] in the space ``embedding``. In the space ``code`` it is [classes]: FedDCL's vector in
    the place of the one-hot code, which stands for the null row plus a sum of the differences of the classes' rows to
    it, so that zeros say nothing and one-hot vectors name the classes.
    """

    def __init__(
        self,
        card: Card,
        weights: Weights,
        device: torch.device | str = "cpu",
        *,
        space: Space = "embedding",
        initial: Initial = "mean",
    ) -> None:
        self.card = card
        self.shape, self.noise, self.regime = card.shape, card.noise, card.regime
        self.device = torch.device(device)
        self.space, self.initial = space, initial
        with seeds.temporary_seed(0):  # the initial weights are thrown away
            self.network = card.unet.build(card.shape, card.rows)
        load_weights(self.network, weights)
        self.network.to(self.device).eval().requires_grad_(False)

    @property
    def parameters(self) -> int:
        """How many numbers it learned."""
        return parameter_count(self.network)

    @property
    def drawn(self) -> tuple[int, ...]:
        return self.shape

    def rows(self) -> Tensor:
        """Return the prototypes of the codes that it learned, [classes * codes, tokens, width]."""
        return self.network.table[:-1].detach().clone()

    def start(self, classes: int) -> Tensor:
        share = 1 / self.card.rows if self.initial == "mean" else 0.0
        codes = torch.full((classes, self.card.rows), share, device=self.device)
        return codes if self.space == "code" else self.conditions(codes)

    @property
    def prototype_sizes(self) -> Sequence[tuple[int, ...]]:
        return (self.card.unet.condition_shape, (self.card.rows,))

    def conditions(self, prototypes: Tensor, rng: torch.Generator | None = None) -> Tensor:
        if prototypes.dim() == 3:
            return prototypes
        table = self.network.table
        return table[-1] + torch.einsum("nc,ctw->ntw", prototypes, table[:-1] - table[-1])

    def null(self) -> Tensor:
        return self.network.table[-1:]

    def predict(self, noisy: Tensor, times: Tensor, conditions: Tensor) -> Tensor:
        noise: Tensor = self.network(noisy, times, conditions)
        return noise

    def encode(self, images: Tensor, rng: torch.Generator) -> Tensor:
        self.check_images(images)
        return as_signal(images.to(self.device))

    def decode(self, drawn: Tensor) -> Tensor:
        return ((drawn.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)

    def hash(self) -> str:
        return hash_of(self.network.state_dict())

    def save(self, folder: Path, *, half: bool = False) -> None:
        """Write the generator as a folder: its card last, so that a folder with a card is whole.

        Parameters
        ----------
        half : store 16 bits a weight, half the size. The weights are rounded: the folder then holds another generator.
        """
        kept = {name: tensor.cpu().contiguous() for name, tensor in self.network.state_dict().items()}
        if half:
            kept = {name: tensor.half() for name, tensor in kept.items()}
        atomic_write(folder / WEIGHTS, tensor_bytes(kept))
        loaded = {name: tensor.float() for name, tensor in kept.items()}
        atomic_write(folder / CARD, json.dumps(_described(self.card) | {"hash": hash_of(loaded)}, indent=1) + "\n")


def load_generator(
    folder: str | Path, device: torch.device | str = "cpu", *, space: Space = "embedding", initial: Initial = "mean"
) -> PixelGenerator:
    """Load a generator that `PixelGenerator.save` or ``fedkeep generator train`` wrote.

    Raises
    ------
    RunError
        Where there is none, its training is not finished, or its files are damaged or do not fit together.
    MissingExtra
        Without `diffusers`.
    """
    folder = Path(folder)
    written = _read_card(folder)
    try:
        weights = {name: tensor.float() for name, tensor in read_tensors((folder / WEIGHTS).read_bytes()).items()}
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot read {folder / WEIGHTS}: {error}. Copy the generator again, or train it.") from error
    if hash_of(weights) != written.pop("hash", None):
        raise RunError(f"{folder / WEIGHTS} is not what {CARD} says. Copy the whole folder again, or train it.")
    try:
        card = _card(written)
        return PixelGenerator(card, weights, device, space=space, initial=initial)
    except (KeyError, TypeError, ValueError) as error:
        raise _undescribed(folder, error) from error


def read_card(folder: Path) -> Card:
    """Return what is known about a generator; raise `RunError` as `load_generator` does, for what its card shows."""
    written = _read_card(folder)
    try:
        return _card(written)
    except (KeyError, TypeError, ValueError) as error:
        raise _undescribed(folder, error) from error


def read_hash(folder: Path) -> str:
    """Return the hash of a generator's weights as its card has it; errors are those of `read_card`."""
    return str(_read_card(folder).get("hash"))


def write_seen(folder: Path, seen: Tensor) -> str:
    """Write the fingerprints, int64 [m], of the images that a generator learned from; return their hash."""
    atomic_write(folder / SEEN, tensor_bytes({"seen": seen}))
    return tensor_hash(seen)


def read_seen(folder: Path) -> Tensor:
    """Return the fingerprints of the images that a generator of the regime ``same_classes`` learned from, int64 [m].

    Raises
    ------
    RunError
        Where it is not known what these were.
    """
    card = read_card(folder)
    if not card.seen:
        raise RunError(
            f"the generator in {folder} does not say which images it learned from, so that a run cannot keep them from "
            "its clients. Train it again with this version of FedKeep."
        )
    try:
        seen = read_tensors((folder / SEEN).read_bytes())["seen"]
    except (OSError, SafetensorError, KeyError) as error:
        raise RunError(f"cannot read {folder / SEEN}: {error}. Copy the whole folder again, or train it.") from error
    if tensor_hash(seen) != card.seen:
        raise RunError(f"{folder / SEEN} is not what {CARD} says. Copy the whole folder again, or train it.")
    return seen


def as_signal(images: Tensor) -> Tensor:
    """Return uint8 images as float32 in -1..1."""
    return images.to(torch.float32).div_(127.5).sub_(1)


def _undescribed(folder: Path, error: Exception) -> RunError:
    reason = f"it lacks {error}." if isinstance(error, KeyError) else str(error)
    return RunError(f"{folder / CARD} does not describe its weights: {reason} Train the generator again.")


def _read_card(folder: Path) -> dict[str, Any]:
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


def _described(card: Card) -> dict[str, Any]:
    return {
        "format": FORMAT,
        **asdict(card),
        "unet": as_table(card.unet),
        "noise": as_table(card.noise),
    }


def _card(written: Mapping[str, Any]) -> Card:
    regime = written["regime"]
    if regime not in get_args(Regime):
        raise ValueError(f"there is no regime {regime!r}.{did_you_mean(str(regime), get_args(Regime))}")
    channels, height, width = map(int, written["shape"])
    return Card(
        unet=build(UNet, written["unet"], "unet"),
        noise=build(Noise, written["noise"], "noise"),
        shape=(channels, height, width),
        label_names=tuple(map(str, written["label_names"])),
        data=str(written["data"]),
        regime=regime,
        training=dict(written["training"]),
        held_out=float(written.get("held_out", 0.0)),  # cards of earlier versions do not say
        seen=str(written.get("seen", "")),
        codes=int(written.get("codes", 1)),
    )
