"""Predictions of an exported model for files: images, tables, texts, arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedkeep.data.data_options import DataOptions
from fedkeep.data.decode import decode
from fedkeep.data.inputs import SUFFIXES, read_rows
from fedkeep.errors import DataError, FedKeepError, RunError
from fedkeep.experiment.model_config import read_model
from fedkeep.models.predictor import Predictor, build_predictor
from fedkeep.options import build

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
"""The suffixes of the files that are read in a folder."""
BATCH = 64
"""Examples that are predicted at once."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image, or for one row of a file.

    Attributes
    ----------
    path : Path
        The file.
    label : str
        The name of the class with the highest score.
    probability : float
        Its softmax, 0 to 1.
    row : int or None
        The row of the file, from 0; None for an image.
    """

    path: Path
    label: str
    probability: float
    row: int | None = None


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
    """Predict the classes of images, or of the rows of tables, texts and arrays.

    Images are converted to the model's channels. Those of another size are cut to their middle and resized. Columns of
    a table are found by their names, and scaled as in training; columns that the model does not know are left out.

    Parameters
    ----------
    folder : str or Path
        What `fedkeep.export_model` wrote.
    files : Sequence[str or Path]
        Image files; tables (.csv, .tsv, .parquet), texts (.txt, one in each line), arrays (.npz, ``x``); folders of
        them.
    allow_code : bool
        Let the model import its network.

    Yields
    ------
    Prediction
        The prediction for each image or row, in order.

    Raises
    ------
    FedKeepError
        If a file is missing, or is not what the model takes.
    """
    predictor, config = load_model(folder, allow_code=allow_code)
    about, names = config["input"], config["label_names"]
    shape = about["shape"]
    images = about["type"] == "uint8" and len(shape) == 3 and shape[0] in (1, 3)
    options = build(DataOptions, config.get("data", {}), f"{folder}/config.json, data")
    vocabulary = min((m.num_embeddings for m in predictor.modules() if isinstance(m, nn.Embedding)), default=None)
    for part in _batches(_paths(files, IMAGES if images else frozenset(SUFFIXES)), about, options, images):
        if vocabulary is not None:
            _check_token_ids(part, vocabulary)
        for start in range(0, len(part.inputs), BATCH):
            best = predictor(part.inputs[start : start + BATCH]).softmax(-1).max(-1)
            for place, label, probability in zip(
                part.places[start : start + BATCH], best.indices.tolist(), best.values.tolist(), strict=True
            ):
                yield Prediction(place[0], names[label], probability, place[1])


@dataclass(frozen=True)
class _Batch:
    places: Sequence[tuple[Path, int | None]]
    inputs: Tensor


def _check_token_ids(part: _Batch, vocabulary: int) -> None:
    unknown = ((part.inputs < 0) | (part.inputs >= vocabulary)).flatten(1).any(1).nonzero().flatten().tolist()
    if unknown:
        path, row = part.places[unknown[0]]
        raise DataError(
            f"{path}: row {row} has a token id outside 0 to {vocabulary - 1}, which the model was trained on."
        )


def _batches(paths: Iterable[Path], about: Mapping[str, Any], options: DataOptions, images: bool) -> Iterator[_Batch]:
    """Yield images, some at a time, and each file of rows."""
    pictures: list[Path] = []
    for path in paths:
        if images and path.suffix != ".npz":
            pictures.append(path)
            if len(pictures) == BATCH:
                yield _decode(pictures, about["shape"])
                pictures = []
        else:
            if pictures:
                yield _decode(pictures, about["shape"])
                pictures = []
            rows = read_rows(path, about, options)
            yield _Batch([(path, row) for row in range(len(rows))], rows)
    if pictures:
        yield _decode(pictures, about["shape"])


def _decode(paths: Sequence[Path], shape: Sequence[int]) -> _Batch:
    return _Batch([(path, None) for path in paths], torch.cat([_read(path, shape) for path in paths]))


def _read(path: Path, shape: Sequence[int]) -> Tensor:
    channels, height, width = shape
    image = decode([[str(path)]], 1, str(path), channels, height if height == width else None)
    if tuple(image.shape[2:]) != (height, width):
        found = f"{image.shape[3]} x {image.shape[2]}"
        raise DataError(f"{path} has {found} pixels, and the model takes {width} x {height}. Resize it first.")
    return image


def _paths(files: Sequence[str | Path], suffixes: frozenset[str]) -> Iterator[Path]:
    for given in map(Path, files):
        if given.is_dir():
            found = sorted(path for path in given.rglob("*") if path.suffix.lower() in suffixes)
            if not found:
                raise DataError(f"the folder {given} holds none of {', '.join(sorted(suffixes))}.")
            yield from found
        elif given.is_file():
            yield given
        else:
            raise DataError(f"there is no file {given}.")
