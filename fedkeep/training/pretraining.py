"""Train an extractor on labelled images, before any federation; `fedkeep.models.Pretrained` then freezes it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedkeep._utils import seeds
from fedkeep._utils.files import atomic_write
from fedkeep.data import Augmentation, DataSet
from fedkeep.errors import ConfigError, RunError
from fedkeep.models import Shape
from fedkeep.models.pretrained import (
    BATCH,
    CARD,
    CHECKPOINT,
    READING,
    Extractor,
    InputSpec,
    library_of_extractors,
    load_extractor,
    quietly,
)
from fedkeep.models.resumable_training import OnStep, check_finite, restore_training, save_training, train_resumably
from fedkeep.models.weights import load_weights, tensor_hash
from fedkeep.options import Options, as_table, option
from fedkeep.training.evaluation import count_predictions


@dataclass(frozen=True)
class ViTForm(Options):
    """A small vision transformer (Dosovitskiy et al., 2021); 0.8 M parameters by default."""

    side: int = option(32, "pixels to which images are scaled", low=1)
    patch: int = option(4, "side of a patch, in pixels", low=1)
    width: int = option(128, "numbers of a token, and features", low=1)
    layers: int = option(6, "number of blocks of attention and two linear layers", low=1)
    heads: int = option(4, "attention heads; the width is a multiple of them", low=1)
    hidden: int = option(256, "units between the two linear layers", low=1)

    def check(self) -> None:
        """Refuse patches that do not fill the image, and a width that is not a multiple of the number of heads."""
        if self.side % self.patch or self.width % self.heads:
            raise ConfigError(
                f"patches of {self.patch} pixels must fill {self.side}, and {self.heads} heads share a width of "
                f"{self.width} evenly. Change one of them."
            )

    def config(self, shape: Shape, classes: int) -> Any:
        """Return the configuration of `transformers`.

        ``shape``: Channels, height and width of an image.
        """
        return library_of_extractors().ViTConfig(
            image_size=self.side,
            patch_size=self.patch,
            num_channels=shape[0],
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.hidden,
            num_labels=classes,
        )


@dataclass(frozen=True)
class ResNetForm(Options):
    """A small ResNet (He et al., 2016); 0.7 M parameters by default, and several times as fast as the transformer.

    Its first layers halve the side of an image twice, so that small images are scaled up first.
    """

    side: int = option(64, "pixels to which images are scaled", low=8)
    widths: tuple[int, ...] = option((32, 64, 128), "maps of each stage; those of the last are the features", low=1)
    blocks: int = option(2, "blocks of two convolutions in each stage", low=1)

    def check(self) -> None:
        """Refuse a network without stages."""
        if not self.widths:
            raise ConfigError("a ResNet needs at least one stage. Give widths=[32,64,128].")

    def config(self, shape: Shape, classes: int) -> Any:
        """Return the configuration of `transformers`.

        ``shape``: Channels, height and width of an image.
        """
        return library_of_extractors().ResNetConfig(
            num_channels=shape[0],
            embedding_size=self.widths[0],
            hidden_sizes=list(self.widths),
            depths=[self.blocks] * len(self.widths),
            layer_type="basic",
            num_labels=classes,
        )


Form: TypeAlias = ViTForm | ResNetForm
FORMS: dict[str, type[Form]] = {"vit": ViTForm, "resnet": ResNetForm}


@dataclass(frozen=True)
class Pretraining(Options):
    """Settings of AdamW on the cross-entropy; the learning rate rises linearly, then falls to zero as a cosine."""

    steps: int = option(8000, "optimiser steps", low=1)
    batch_size: int = option(128, "images in a step, chosen at random", low=1)
    lr: float = option(1e-3, "highest learning rate", low=0.0)
    warm_up: float = option(0.05, "share of the steps in which the learning rate rises", low=0.0, high=1.0)
    weight_decay: float = option(0.05, "decoupled weight decay", low=0.0)
    checkpoint: float = option(60.0, "seconds from one checkpoint to the next; changes no result", low=0.0)

    def lr_in_step(self, step: int) -> float:
        """Return the learning rate of a step."""
        rising = self.warm_up * self.steps
        if step < rising:
            return self.lr * (step + 1) / (rising + 1)
        return self.lr * (1 + math.cos(math.pi * (step - rising) / max(1.0, self.steps - rising))) / 2


def pretrain(
    form: Form,
    dataset: DataSet,
    settings: Pretraining,
    augmentation: Augmentation,
    folder: Path,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    on_step: OnStep | None = None,
) -> Extractor:
    """Train an extractor, or resume its training, and save it.

    The folder can be read by `load_extractor`, and by `transformers`. The random generator of each step is derived from
    the step's number, so that a resumed training ends with the same weights; on a CPU they are equal bit for bit.

    ``dataset``: Its training images are used. The accuracy on its test images is written into the card.
    ``folder``: Where checkpoints are saved, and the extractor when it is finished; its card is written last.
    ``on_step``: Called after every step.
    """
    if (folder / CARD).is_file():
        raise RunError(f"{folder} holds an extractor already. Name another folder, or remove this one first.")
    run, path = _PretrainingRun(form, dataset, settings, augmentation, seed, torch.device(device)), folder / CHECKPOINT
    train_resumably(run, settings.steps, path, settings.checkpoint, on_step)
    check_finite(run.network.state_dict())
    run.write(folder)
    path.unlink(missing_ok=True)
    load_extractor.cache_clear()  # the folder may have held another
    return load_extractor(str(folder))


class _PretrainingRun:
    """A training between two steps; implements `ResumableTraining`."""

    def __init__(
        self,
        form: Form,
        dataset: DataSet,
        settings: Pretraining,
        augmentation: Augmentation,
        seed: int,
        device: torch.device,
    ) -> None:
        self.dataset, self.settings, self.augmentation = dataset, settings, augmentation
        self.seed, self.device = seed, device
        self.library = library_of_extractors()
        with seeds.temporary_seed(seeds.derive(seed, "extractor weights")):
            config = form.config(dataset.shape, dataset.num_classes)
            self.network = self.library.AutoModelForImageClassification.from_config(config).to(device)
        self.input_spec = InputSpec(form.side, dataset.mean, dataset.std)
        self.optimiser = torch.optim.AdamW(
            self.network.parameters(), settings.lr, weight_decay=settings.weight_decay, fused=True
        )
        self.losses: list[float] = []
        self.identity = {
            "network": {"kind": config.model_type, **as_table(form)},
            "training": {name: value for name, value in as_table(settings).items() if name != "checkpoint"},
            "augmentation": as_table(augmentation),
            "label_names": list(dataset.label_names),
            "seed": seed,
            "data": [tensor_hash(dataset.train[name]) for name in ("input", "label")],
        }

    def step(self) -> float:
        """Take one step and return its loss."""
        number = len(self.losses)
        pixels, labels = self._sample_batch(number)
        self.network.train()
        with seeds.temporary_seed(seeds.derive(self.seed, "extractor noise", use=number), self.device):
            loss = cross_entropy(self.network(pixels.to(self.device)).logits, labels.to(self.device))
        self.optimiser.param_groups[0]["lr"] = self.settings.lr_in_step(number)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    def save(self, path: Path) -> None:
        """Save everything that the next step depends on, atomically."""
        save_training(path, self.identity, {"weights": self.network.state_dict()}, self.optimiser, self.losses)

    def restore(self, path: Path) -> None:
        """Restore a checkpoint."""
        models, self.losses = restore_training(path, self.identity, self.optimiser)
        load_weights(self.network, models["weights"])

    def write(self, folder: Path) -> None:
        """Write the extractor: the network, its input format, and its card."""
        self.network.eval()
        counts = count_predictions(self._predict, self.dataset.test, self.dataset.num_classes)
        card = {
            "data": self.dataset.name,
            "images": len(self.dataset.train["label"]),
            "test_accuracy": round(sum(counts.correct) / sum(counts.total), 4),
            "loss": round(sum(self.losses[-100:]) / len(self.losses[-100:]), 4),
            **{name: self.identity[name] for name in ("network", "training", "augmentation", "label_names", "seed")},
        }
        preprocessor = {
            "do_resize": True,
            "size": {"height": self.input_spec.side, "width": self.input_spec.side},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": self.input_spec.mean,
            "image_std": self.input_spec.std,
        }
        with quietly(self.library):
            self.network.save_pretrained(folder)
        atomic_write(folder / READING, json.dumps(preprocessor, indent=1) + "\n")
        atomic_write(folder / CARD, json.dumps(card, indent=1) + "\n")

    def _sample_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the images and labels of a step, which depend only on the step's number."""
        train, rng = self.dataset.train, seeds.rng(self.seed, "extractor step", use=step)
        rows = torch.randint(len(train["label"]), (self.settings.batch_size,), generator=rng)
        return self.augmentation(train["input"][rows], self.input_spec, rng), train["label"][rows]

    @torch.no_grad()
    def _predict(self, images: Tensor) -> Tensor:
        parts = [
            self.network(self.input_spec(part.to(self.device))).logits.cpu() for part in torch.split(images, BATCH)
        ]
        return torch.cat(parts)
