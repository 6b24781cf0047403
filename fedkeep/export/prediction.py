"""Predictions of an exported model for images in files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedkeep.data.decode import decode
from fedkeep.errors import DataError, FedKeepError, RunError
from fedkeep.experiment.model_config import read_model
from fedkeep.models.predictor import Predictor, build_predictor

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
"""The suffixes of the files that are read in a folder."""
BATCH = 64
"""Files that are decoded and predicted at once."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one file.

    Attributes
    ----------
    path : Path
        The file.
    label : str
        The name of the class with the highest score.
    probability : float
        Its softmax, 0 to 1.
    """

    path: Path
    label: str
    probability: float


def load_model(folder: str | Path, *, allow_code: bool = False) -> tuple[Predictor, dict[str, Any]]:
    """Load an exported model.

    Parameters
    ----------
    folder : str or Path
        What `fedkeep.export_model` wrote.
    allow_code : bool
        Let it import its network, if that is the user's own.

    Returns
    -------
    predictor : Predictor
        The network, which takes inputs as they are stored.
    config : dict
        Its ``config.json``: input shape, normalisation, class names.

    Raises
    ------
    FedKeepError
        If there is no model, or it cannot be read.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        hint = " Export it first: fedkeep export RUN" if (folder / "run.json").is_file() else ""
        raise RunError(f"{folder} is no exported model: it has no config.json.{hint}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        about = config["input"]
        predictor = build_predictor(
            read_model(config["network"], f"{folder / 'config.json'}, network", allow_code),
            load_file(folder / "model.safetensors"),
            shape=tuple(about["shape"]),
            classes=config["first_classes"],
            mean=about["mean"],
            std=about["std"],
            rows_per_class=config["rows_per_class"],
        )
    except FedKeepError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunError(
            f"cannot read the model in {folder}: {type(error).__name__}: {error}. Export it again."
        ) from None
    return predictor, config


@torch.no_grad()
def predict(folder: str | Path, files: Sequence[str | Path], *, allow_code: bool = False) -> Iterator[Prediction]:
    """Predict the classes of images in files.

    Images are converted to the model's channels. Those of another size are cut to their middle and resized.

    Parameters
    ----------
    folder : str or Path
        What `fedkeep.export_model` wrote.
    files : Sequence[str or Path]
        Image files, and folders of them.
    allow_code : bool
        Let the model import its network.

    Yields
    ------
    Prediction
        The prediction for each file, in order.

    Raises
    ------
    FedKeepError
        If the model does not take images, or a file is missing or no image.
    """
    predictor, config = load_model(folder, allow_code=allow_code)
    about, names = config["input"], config["label_names"]
    if about["type"] != "uint8" or len(about["shape"]) != 3 or about["shape"][0] not in (1, 3):
        raise DataError(
            f"the model in {folder} takes {about['type']} inputs of shape {about['shape']}, which are no image files. "
            "Call it from Python: fedkeep.load_model."
        )
    paths = list(_image_paths(files))
    for start in range(0, len(paths), BATCH):
        part = paths[start : start + BATCH]
        scores = predictor(torch.cat([_read(path, about["shape"]) for path in part]))
        best = scores.softmax(-1).max(-1)
        for path, probability, place in zip(part, best.values.tolist(), best.indices.tolist(), strict=True):
            yield Prediction(path, names[place], probability)


def _read(path: Path, shape: Sequence[int]) -> Tensor:
    channels, height, width = shape
    image = decode([[str(path)]], 1, str(path), channels, height if height == width else None)
    if tuple(image.shape[2:]) != (height, width):
        found = f"{image.shape[3]} x {image.shape[2]}"
        raise DataError(f"{path} has {found} pixels, and the model takes {width} x {height}. Resize it first.")
    return image


def _image_paths(files: Sequence[str | Path]) -> Iterator[Path]:
    for given in map(Path, files):
        if given.is_dir():
            found = sorted(path for path in given.rglob("*") if path.suffix.lower() in IMAGES)
            if not found:
                raise DataError(f"the folder {given} holds no image.")
            yield from found
        elif given.is_file():
            yield given
        else:
            raise DataError(f"there is no file {given}.")
