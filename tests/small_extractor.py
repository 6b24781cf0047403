"""Pre-trained extractors as folders, so small that they see an image in a millisecond; their weights are random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedkeep._utils import seeds
from fedkeep.models.pretrained import READING

transformers = pytest.importorskip("transformers", reason="the extra diffusion is not installed")

SIDE, MEAN, STD = 8, 0.4, 0.3


def network(kind: str = "vit", channels: int = 1, classes: int = 4) -> Any:
    """Return a network of `transformers` with a classifier; its features are 8 wide."""
    common = {"num_channels": channels, "num_labels": classes}
    if kind == "vit":
        config = transformers.ViTConfig(
            image_size=SIDE, patch_size=4, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=8, **common,
        )  # fmt: skip
    else:
        config = transformers.ResNetConfig(
            embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", **common
        )
    with seeds.temporary_seed(0):
        return transformers.AutoModelForImageClassification.from_config(config).eval()


def save(folder: Path, kind: str = "vit", channels: int = 1) -> str:
    """Write one as `transformers` does; return the folder's name."""
    network(kind, channels).save_pretrained(folder)
    reading = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [MEAN] * channels, "image_std": [STD] * channels}
    (folder / READING).write_text(json.dumps(reading))
    return str(folder)
