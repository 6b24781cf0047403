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
from fedkeep.errors import ConfigError, DataError, FedKeepError, RunError
from fedkeep.experiment.model_config import read_model
from fedkeep.experiment.python_recipe import architecture_of
from fedkeep.export.trained_model import Resizing
from fedkeep.models import Architecture
from fedkeep.models.predictor import Predictor, build_predictor
from fedkeep.options import build

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
"""The suffixes of the files that are read in a folder."""
BATCH = 64
"""Examples that are predicted at once."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image, or for one row of a file.

    ``label``: The name of the class with the highest score.
    ``probability``: Its softmax, 0 to 1.
    ``row``: The row of the file, from 0; None for an image.
    """

    path: Path
    label: str
    probability: float
    row: int | None = None


def load_model(
    folder: str | Path, *, allow_code: bool = False, network: Any = None
) -> tuple[Predictor, dict[str, Any]]:
    """Load an exported model.

    Parameters
    ----------
    folder : str or Path
        What `fedkeep.export_model` wrote.
    allow_code : bool
        Let it import its network, if that is the user's own.
    network : nn.Module or type or Callable, optional
        The user's own network, if it cannot be imported.

    Returns
    -------
    predictor : Predictor
        The network, which takes inputs as they are stored.
    config : dict
        Its ``config.json``: input shape, normalisation, how images are resized, class names.

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
            _architecture(config["network"], folder / "config.json", allow_code)
            if network is None
            else architecture_of(network),
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


def _architecture(table: Mapping[str, Any], path: Path, allow_code: bool) -> Architecture:
    try:
        return read_model(table, f"{path}, network", allow_code)
    except ConfigError as error:
        if ":" not in table["name"]:
            raise
        raise ConfigError(
            f"{error} An exported model gets its network as in fedkeep.predict(FOLDER, FILES, network=...), and its "
            "model.pt2 needs none."
        ) from None


@torch.no_grad()
def predict(
    folder: str | Path, files: Sequence[str | Path], *, allow_code: bool = False, network: Any = None
) -> Iterator[Prediction]:
    """Predict the classes of images, or of the rows of tables, texts and arrays.

    Images are prepared as in training: turned upright, converted to the model's channels, and resized as ``data.size``
    says. A model that was trained on a known data set gets the middle square of an image of another size; any other
    one refuses it. Columns of a table are found by their names, and scaled as in training; columns that the model does
    not know are left out.

    Parameters
    ----------
    folder : str or Path
        What `fedkeep.export_model` wrote.
    files : Sequence[str or Path]
        Image files; tables (.csv, .tsv, .parquet), texts (.txt, one in each line), arrays (.npz, ``x``); folders of
        them.
    allow_code : bool
        Let the model import its network.
    network : nn.Module or type or Callable, optional
        The user's own network, if it cannot be imported.

    Yields
    ------
    Prediction
        The prediction for each image or row, in order.

    Raises
    ------
    FedKeepError
        If a file is missing, or is not what the model takes.
    """
    predictor, config = load_model(folder, allow_code=allow_code, network=network)
    about, names = config["input"], config["label_names"]
    shape = about["shape"]
    images = about["type"] == "uint8" and len(shape) == 3 and shape[0] in (1, 3)
    options = build(DataOptions, config.get("data", {}), f"{folder}/config.json, data")
    # An older export does not say how images were resized: to data.size, if there was one, as a whole.
    resizing = config.get("resizing", "whole" if options.size else "middle")
    preparation = _Preparation(shape, options.size, resizing) if images else None
    vocabulary = min((m.num_embeddings for m in predictor.modules() if isinstance(m, nn.Embedding)), default=None)
    paths = _paths(files, IMAGES if images else frozenset(SUFFIXES))
    for part in _batches(paths, about, options, preparation):
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


@dataclass(frozen=True)
class _Preparation:
    """How an image file becomes an input, as in training."""

    shape: Sequence[int]
    size: tuple[int, ...]
    resizing: Resizing

    def read(self, paths: Sequence[Path]) -> _Batch:
        return _Batch([(path, None) for path in paths], torch.cat([self._read(path) for path in paths]))

    def _read(self, path: Path) -> Tensor:
        channels, height, width = self.shape
        side = height if self.resizing == "middle" and height == width else None
        image = decode([[str(path)]], 1, str(path), channels, side, self.size)
        if tuple(image.shape[2:]) != (height, width):
            raise DataError(
                f"{path} has {image.shape[3]} x {image.shape[2]} pixels, and the model takes {width} x {height}: all "
                "images of its training had this size. Resize it as those were."
            )
        return image


def _check_token_ids(part: _Batch, vocabulary: int) -> None:
    unknown = ((part.inputs < 0) | (part.inputs >= vocabulary)).flatten(1).any(1).nonzero().flatten().tolist()
    if unknown:
        path, row = part.places[unknown[0]]
        raise DataError(
            f"{path}: row {row} has a token id outside 0 to {vocabulary - 1}, which the model was trained on."
        )


def _batches(
    paths: Iterable[Path], about: Mapping[str, Any], options: DataOptions, images: _Preparation | None
) -> Iterator[_Batch]:
    """Yield images, some at a time, and each file of rows."""
    pictures: list[Path] = []
    for path in paths:
        if images is not None and path.suffix != ".npz":
            pictures.append(path)
            if len(pictures) == BATCH:
                yield images.read(pictures)
                pictures = []
        else:
            if images is not None and pictures:
                yield images.read(pictures)
                pictures = []
            rows = read_rows(path, about, options)
            yield _Batch([(path, row) for row in range(len(rows))], rows)
    if images is not None and pictures:
        yield images.read(pictures)


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
