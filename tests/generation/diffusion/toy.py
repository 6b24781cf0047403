"""A generator so small that a step takes milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedkeep._utils import seeds
from fedkeep.generation.generator import NoiseSchedule
from fedkeep.generation.pixel import ModelCard, PixelGenerator, UNet
from fedkeep.generation.training import GeneratorTraining

CLASSES = 3
UNET = UNet(widths=(8, 8), blocks=1, attention=1)
NOISE = NoiseSchedule(num_timesteps=20, beta_end=0.4)
TRAINING = GeneratorTraining(steps=6, batch_size=8, lr=5e-3, ema=0.9, checkpoint=0.0)


def card(unet: UNet = UNET, **changes: Any) -> ModelCard:
    return ModelCard(**{
        "unet": unet, "noise_schedule": NOISE, "shape": (1, 8, 8), "label_names": tuple("abc"), "data": "toys",
        "regime": "paper", **changes,
    })  # fmt: skip


def data(count: int = 30, classes: int = CLASSES, side: int = 8, seed: int = 0) -> dict[str, Tensor]:
    """Return grey images with a bright third: top, middle or bottom, by class."""
    rng = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % classes
    image = torch.randint(0, 60, (count, 1, side, side), generator=rng)
    for row, c in enumerate(label.tolist()):
        image[row, 0, c * side // classes : (c + 1) * side // classes] += 180
    return {"input": image.to(torch.uint8), "label": label}


def generator(unet: UNet = UNET, seed: int = 0, device: str = "cpu", **changes: Any) -> PixelGenerator:
    """Return an untrained generator."""
    space = {name: changes.pop(name) for name in ("space", "initial") if name in changes}
    result = card(unet, **changes)
    with seeds.temporary_seed(seed):
        network = result.unet.build(result.shape, len(result.label_names))
    return PixelGenerator(result, network.state_dict(), device, **space)
