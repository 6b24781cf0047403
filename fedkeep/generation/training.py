"""Training of a pixel-space generator: its images, their subclasses, and steps that resume after any kill."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as tensor_bytes
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate, mse_loss

from fedkeep._utils import seeds
from fedkeep._utils.files import atomic_write, make_folder
from fedkeep._utils.process import Terminated, raising_terminated
from fedkeep.data import Data, DataSet, load
from fedkeep.data.combine import concatenate, select_classes
from fedkeep.data.dataset import format_shape
from fedkeep.data.holdout import hold_out, image_hashes
from fedkeep.data.schema import DataOptions
from fedkeep.errors import ConfigError, DataError, RunError
from fedkeep.generation import pixel
from fedkeep.generation.generator import Regime
from fedkeep.models.weights import check_finite, diverged, hash_weights, load_weights, state_dict_copy
from fedkeep.options import Options, as_table, option

GREY = "mnist+emnist-letters-a-to-j+fashion-mnist"
HELD_OUT = 0.15
"""Share of each class's training images that only the generator sees, in the regime ``same_classes``."""

DataDir = str | Path | None
OnStep = Callable[[int, float], None]
"""Called after every step with the number of steps that are done, and the loss of the step."""


@dataclass(frozen=True, eq=False)
class GeneratorData:
    """A data set, and which of its training images a generator is trained on.

    ``name``: The name on the command line and in a generator's card.
    ``regime``: How the generator's images relate to the clients'.
    ``dataset``: The whole data set. A generator is never trained on test images.
    ``is_seen``: bool [n], true for the training images that the generator is trained on.
    """

    name: str
    regime: Regime
    dataset: DataSet
    is_seen: Tensor

    @property
    def held_out(self) -> float:
        """The share of each class that only the generator sees; 0 if it sees all of them, or other classes."""
        return HELD_OUT if self.regime == "same_classes" else 0.0

    @property
    def seen(self) -> Data:
        """The training images that the generator is trained on."""
        return {name: column[self.is_seen] for name, column in self.dataset.train.items()}

    @property
    def unseen(self) -> Data:
        """The training images that the generator does not see."""
        return {name: column[~self.is_seen] for name, column in self.dataset.train.items()}


def load_benchmark(name: str, data_dir: DataDir = None, options: DataOptions | None = None) -> DataSet:
    """Return the clients' data: ``grey`` or ``rgb`` as in FedDCL, or any data set by its name.

    ``name``: ``grey`` is MNIST, EMNIST letters A to J and Fashion-MNIST as one set of 30 classes. ``rgb`` is the first
        30 classes of CIFAR-100. Other names, and errors, are those of `fedkeep.data.load`.
    ``options``: How a user's own files are read.
    """
    if name == "grey":
        return load(GREY, data_dir=data_dir, options=options)
    if name == "rgb":
        whole = load("cifar100", data_dir=data_dir, options=options)
        return select_classes(whole, whole.label_names[:30])
    return load(name, data_dir=data_dir, options=options)


def load_training_data(
    name: str, regime: Regime, data_dir: DataDir = None, options: DataOptions | None = None
) -> GeneratorData:
    """Return what a generator is trained on under a regime.

    ``name``: As in `load_benchmark`. For ``disjoint``, ``grey`` stands for FEMNIST's letters from K on, transformed to
        look like EMNIST's, and CIFAR-10 in grey for its texture; ``rgb`` stands for CIFAR-10; other names for
        themselves.
    ``regime``: How the generator's images relate to the clients'.
    ``options``: How a user's own files are read.
    """
    if regime == "ldm" or (name, regime) == ("rgb", "paper"):
        raise ConfigError(
            f"{name} under the regime {regime!r} has nothing to train: it is the public text-to-image model, which is "
            "loaded (fedkeep.generation.generator_config). Train with the regime same_classes or disjoint."
        )
    dataset = load_benchmark("cifar10" if (name, regime) == ("rgb", "disjoint") else name, data_dir, options)
    if (name, regime) == ("grey", "disjoint"):
        dataset = concatenate(
            [load("femnist-letters", data_dir=data_dir), _to_grey(load("cifar10", data_dir=data_dir))]
        )
    labels = dataset.train["label"].cpu()
    is_seen = hold_out(labels, HELD_OUT) if regime == "same_classes" else torch.ones_like(labels, dtype=torch.bool)
    return GeneratorData(name, regime, dataset, is_seen)


def rgb_to_grey(images: Tensor, side: int = 28) -> Tensor:
    """Return colour images, uint8 [n, 3, height, width], in grey (ITU-R BT.601), uint8 [n, 1, side, side]."""
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    chunks = []
    for chunk in torch.split(images, 1000):
        grey = (chunk * weights).sum(1, keepdim=True)
        small = interpolate(grey, size=(side, side), mode="bilinear", antialias=True)
        chunks.append(small.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(chunks)


def _to_grey(dataset: DataSet) -> DataSet:
    """Return a data set with grey images; its normalisation no longer applies."""
    train, test = ({**half, "input": rgb_to_grey(half["input"])} for half in (dataset.train, dataset.test))
    return replace(dataset, train=train, test=test, mean=(0.0,), std=(1.0,))


SIDE = 8  # images are compared at 8 x 8 pixels: where something is and its colour, no detail


def cluster_subclasses(images: Tensor, labels: Tensor, clusters_per_class: int, seed: int) -> Tensor:
    """Return the subclass of every image: label * clusters_per_class + its cluster within the class.

    Clusters are found by k-means on the images at 8 x 8 pixels. The pseudo-labels need no network, and the same
    arguments give the same clusters.

    ``images``: uint8 [n, channels, height, width].
    ``labels``: int64 [n].
    Returns: int64 [n].
    """
    from sklearn.cluster import KMeans  # its import takes as long as that of PyTorch

    subclasses = torch.zeros_like(labels)
    for c in torch.unique(labels).tolist():
        rows = (labels == c).nonzero().flatten()
        if len(rows) < clusters_per_class:
            raise DataError(
                f"class {c} has {len(rows)} images, too few for {clusters_per_class} clusters. Ask for fewer clusters."
            )
        small = adaptive_avg_pool2d(images[rows].cpu().float(), SIDE).flatten(1)
        if len(torch.unique(small, dim=0)) < clusters_per_class:  # no image would teach what some subclasses mean
            raise DataError(
                f"the images of class {c} look too much alike for {clusters_per_class} clusters. Ask for fewer "
                "clusters."
            )
        drawn = seeds.derive(seed, f"clusters of class {c}") % 2**32
        found = KMeans(clusters_per_class, n_init=1, random_state=drawn).fit_predict(small.numpy())
        subclasses[rows] = c * clusters_per_class + torch.from_numpy(found).to(subclasses)
    return subclasses


@dataclass(frozen=True)
class GeneratorTraining(Options):
    """Adam on the mean squared error of the noise, with a linearly decaying learning rate."""

    steps: int = option(20000, "optimizer steps", low=1)
    batch_size: int = option(128, "images a step; classes are drawn evenly, whatever their number of images", low=1)
    lr: float = option(1e-3, "learning rate of the first step", low=0.0)
    lr_end: float = option(0.01, "share of it that is left at the last step", low=0.0, high=1.0)
    null: float = option(0.1, "probability that an image gets the null class, for guidance", low=0.0, high=1.0)
    ema: float = option(0.999, "decay of the weights' moving average, which is what is saved", low=0.0, high=1.0)
    checkpoint: float = option(60.0, "seconds from one checkpoint to the next; changes no result", low=0.0)

    def lr_in_step(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.lr * (1 - (1 - self.lr_end) * step / max(1, self.steps - 1))


@raising_terminated()
def train_generator(
    card: pixel.ModelCard,
    data: Data,
    settings: GeneratorTraining,
    folder: Path,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    half: bool = False,
    on_step: OnStep = lambda done, loss: None,
) -> pixel.PixelGenerator:
    """Train a generator and save it into a folder; continue from the folder's checkpoint if there is one.

    Every step draws from random generators of its own, so that a resumed training ends in the same weights, on a CPU to
    the bit.

    ``card``: The network, its schedule and its classes; ``training`` is filled in.
    ``data``: ``"input"``, uint8 [n, channels, height, width] of the card's shape, ``"label"``, int64 [n], and, if the
        card has several clusters per class, ``"subclass"``, int64 [n].
    ``settings``: Steps, batch size and learning rate.
    ``folder``: Receives checkpoints, and the generator when it is done; in the regime ``same_classes`` also the
        fingerprints of the images, so that runs keep these from their clients.
    ``half``: Save 16 bits a weight; the returned generator is what was saved.
    ``on_step``: Called after every step with its number and loss.
    """
    make_folder(folder)  # before the training: it may have a name that cannot be used
    path = folder / pixel.CHECKPOINT
    if (folder / pixel.CARD).is_file() and not path.is_file():
        raise RunError(f"{folder} holds a generator already. Name another folder, or remove this one first.")
    run = _TrainingRun(card, data, settings, seed, torch.device(device))
    if path.is_file():
        run.restore(path)
    if (folder / pixel.CARD).is_file():  # it was stopped between its last two steps on the disk
        finished = pixel.load_generator(folder, device)
        path.unlink()
        return finished
    if card.regime == "same_classes":
        run.card = replace(card, seen=pixel.write_fingerprints(folder, torch.unique(image_hashes(data["input"]))))
    saved = time.monotonic()
    try:
        while len(run.losses) < settings.steps:
            loss = run.step()
            if not math.isfinite(loss):
                raise diverged(f"the loss of step {len(run.losses)} is {loss}")
            if time.monotonic() - saved >= settings.checkpoint:
                run.save(path)
                saved = time.monotonic()
            on_step(len(run.losses), loss)
        check_finite(run.average)
        run.result().save(folder, half=half)
    except (KeyboardInterrupt, Terminated):
        if run.is_whole and run.losses:
            run.save(path)
        raise
    path.unlink(missing_ok=True)
    return pixel.load_generator(folder, device)


class _TrainingRun:
    """A training between two steps.

    ``is_whole``: Whether it is between two; False while weights, optimizer and average are those of two.
    """

    def __init__(
        self, card: pixel.ModelCard, data: Data, settings: GeneratorTraining, seed: int, device: torch.device
    ) -> None:
        self.card, self.settings, self.seed, self.device = card, settings, seed, device
        with seeds.temporary_seed(seeds.derive(seed, "generator weights")):
            self.network = card.unet.build(card.shape, card.num_embeddings)
        self.network.to(device).train()
        self.average = state_dict_copy(self.network)
        self.optimizer = torch.optim.Adam(self.network.parameters(), settings.lr, fused=True)
        self.losses: list[float] = []
        self.is_whole = True
        self.batches = _Batches(data, card, settings, seed)
        self.identity = {
            "unet": as_table(card.unet),
            "schedule": as_table(card.noise_schedule),
            "training": {name: value for name, value in as_table(settings).items() if name != "checkpoint"},
            "label_names": list(card.label_names),
            "seed": seed,
            "data": hash_weights({name: data[name] for name in ("input", "label", "subclass") if name in data}),
        }

    def step(self) -> float:
        """Take one step; return its loss."""
        number = len(self.losses)
        images, rows, timesteps, noise = (tensor.to(self.device) for tensor in self.batches(number))
        noisy = self.card.noise_schedule.add_noise(images, noise, timesteps)
        loss = mse_loss(self.network(noisy, timesteps, self.network.table[rows]), noise)
        self.optimizer.param_groups[0]["lr"] = self.settings.lr_in_step(number)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        found = loss.item()
        self.is_whole = False
        self.optimizer.step()
        # The average is short at first, so that the initial weights do not stay in it.
        decay = min(self.settings.ema, (1 + number) / (10 + number))
        new = state_dict_copy(self.network)
        torch._foreach_lerp_(list(self.average.values()), [new[name] for name in self.average], 1 - decay)
        self.losses.append(found)
        self.is_whole = True
        return self.losses[-1]

    def result(self) -> pixel.PixelGenerator:
        """Return the moving average as a generator."""
        last = self.losses[-100:]
        training = as_table(self.settings) | {
            "seed": self.seed,
            "images": len(self.batches.labels),
            "loss": round(sum(last) / len(last), 6),
        }
        return pixel.PixelGenerator(replace(self.card, training=training), self.average, self.device)

    def save(self, path: Path) -> None:
        """Write all that the next step depends on, as one file, atomically."""
        models = {"weights": self.network.state_dict(), "average": self.average}
        tensors = {f"{kind}.{name}": tensor for kind, model in models.items() for name, tensor in model.items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in moments.items()}
        tensors["losses"] = torch.tensor(self.losses, dtype=torch.float64)
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        about = {"training": json.dumps(self.identity), "digest": hash_weights(whole)}
        atomic_write(path, tensor_bytes(whole, metadata=about))

    def restore(self, path: Path) -> None:
        """Return to where a checkpoint was taken."""
        try:
            with safe_open(path, framework="pt") as opened:
                about = opened.metadata()
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            saved = about["training"]
            if about.get("digest", digest := hash_weights(tensors)) != digest:  # earlier versions wrote none
                raise OSError("its numbers are not those that were written")
        except (OSError, SafetensorError, KeyError, TypeError) as error:
            raise RunError(f"cannot read the checkpoint {path}: {error}. Remove it to begin again.") from error
        if saved != json.dumps(self.identity):
            other = [name for name, value in self.identity.items() if value != json.loads(saved).get(name)]
            raise RunError(
                f"{path} belongs to another training: {', '.join(f'it has another {name!r}' for name in other)}. Use "
                "the same options and data, or another folder."
            )
        self.losses = tensors.pop("losses").tolist()
        parts: dict[str, dict[str, Tensor]] = {"weights": {}, "average": {}}
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "optimizer":
                index, moment = rest.split(".", 1)
                moments.setdefault(int(index), {})[moment] = tensor
            else:
                parts[kind][rest] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        load_weights(self.network, parts["weights"])
        self.average = {name: tensor.to(self.device) for name, tensor in parts["average"].items()}


class _Batches:
    """The batch of each step: images with their subclasses, timesteps and noise, a function of the step's number."""

    def __init__(self, data: Data, card: pixel.ModelCard, settings: GeneratorTraining, seed: int) -> None:
        self.images, self.labels = data["input"].cpu(), data["label"].cpu()
        if ("subclass" in data) != (card.clusters_per_class > 1):
            raise DataError(
                f"the card has {card.clusters_per_class} clusters a class. Give a column 'subclass' if these are "
                "several, else none."
            )
        self.subclasses, self.null_row = data.get("subclass", self.labels).cpu(), card.num_embeddings
        if tuple(self.images.shape[1:]) != card.shape:
            raise DataError(
                f"these images are {format_shape(tuple(self.images.shape[1:]))}, and the generator shall draw "
                f"{format_shape(card.shape)} (channels, height, width). Give it images of one size."
            )
        counts = torch.bincount(self.labels, minlength=len(card.label_names))
        empty = [name for name, count in zip(card.label_names, counts.tolist(), strict=True) if not count]
        if empty:
            raise DataError(f"there are no images of {', '.join(map(repr, empty))}. Leave such classes out.")
        self.counts = counts
        self.order = self.labels.argsort(stable=True)
        self.first = torch.tensor([0, *accumulate(counts.tolist())])[:-1]
        self.batch_size, self.p_null, self.seed = settings.batch_size, settings.null, seed
        self.num_timesteps = card.noise_schedule.num_timesteps

    def __call__(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return images in -1..1 [b, ...], rows of the class table [b], timesteps [b] and noise [b, ...]."""
        rng = seeds.rng(self.seed, "generator step", use=step)
        classes = torch.randint(len(self.counts), (self.batch_size,), generator=rng)
        share = torch.rand(self.batch_size, generator=rng, dtype=torch.float64)
        position = (share * self.counts[classes]).long()
        chosen = self.order[self.first[classes] + position]
        images = pixel.to_signed(self.images[chosen])
        timesteps = torch.randint(self.num_timesteps, (self.batch_size,), generator=rng)
        noise = torch.randn(images.shape, generator=rng)
        has_class = torch.rand(self.batch_size, generator=rng) >= self.p_null
        return images, torch.where(has_class, self.subclasses[chosen], self.null_row), timesteps, noise
