"""Predictions of an exported model for files: images, tables, texts, arrays."""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import torch
from safetensors.torch import load
from torch import Tensor, nn

from fedkeep._utils.torch_state import plain_torch
from fedkeep.data import DataOptions
from fedkeep.data.arrays import read_inputs_of_npz
from fedkeep.data.columns import columns_from_json, transform, unknown_values
from fedkeep.data.decode import decode
from fedkeep.data.own_files import IMAGE_SUFFIXES, TABLE_SUFFIXES, find_data_files, is_hidden
from fedkeep.data.readers import Problems, Where, read_column, read_columns
from fedkeep.data.tables import is_list, parse, read_lists, tokenise
from fedkeep.errors import ConfigError, DataError, FedKeepError, RunError, did_you_mean, in_one_line
from fedkeep.experiment.python_recipe import architecture_of
from fedkeep.experiment.recipe import read_model
from fedkeep.export.trained_model import Predictor, Resizing, build_predictor
from fedkeep.models import Architecture
from fedkeep.models.custom import warn_of_other_network
from fedkeep.options import build

log = logging.getLogger(__name__)

SUFFIXES = (*TABLE_SUFFIXES, ".npz", ".txt")
"""The suffixes of the files that are read."""


def read_rows(path: Path, about: Mapping[str, Any], options: DataOptions) -> Tensor:
    """Return the rows of a file as inputs of a trained network.

    ``path``: A table (.csv, .tsv, .parquet), a text in each line (.txt), or arrays (.npz) of which ``x`` is the input.
    ``about``: ``"shape"``, ``"type"`` and ``"columns"`` of the inputs in training.
    ``options``: How the training data were read.
    Returns: ``[n, *shape]``.
    """
    suffix = path.suffix.lower()
    if suffix == ".npz":
        inputs = read_inputs_of_npz(path)
    elif suffix == ".txt":
        inputs = tokenise(_lines(path, options), str(path), options.length, options.vocabulary, Problems())
    elif suffix in TABLE_SUFFIXES:
        inputs = _read_table(path, about, options)
    else:
        raise DataError(f"{path} is none of {', '.join(SUFFIXES)}, and the model takes no images.")
    shape, kind = list(about["shape"]), str(about["type"])
    found = str(inputs.dtype).removeprefix("torch.")
    if list(inputs.shape[1:]) != shape or found != kind:
        raise DataError(
            f"{path} has {found} inputs of shape {list(inputs.shape[1:])}, and the model takes {kind} of shape {shape}."
        )
    if inputs.is_floating_point() and not bool((finite := inputs.isfinite().flatten(1).all(1)).all()):
        row = int((~finite).nonzero()[0])
        raise DataError(
            f"{path}: row {row} holds a number that is not finite. Fill in what is missing, or leave it out."
        )
    return inputs


def _lines(path: Path, options: DataOptions) -> list[str]:
    if not options.text:
        raise DataError(f"{path} holds text, and the model was trained on something else.")
    try:
        text = path.read_text(encoding="utf-8-sig")  # newlines are \n by now; splitlines() would split at others too
        return text.removesuffix("\n").split("\n") if text else []
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text ({in_one_line(error, 200)}). Save it as UTF-8.") from error


def _read_table(path: Path, about: Mapping[str, Any], options: DataOptions) -> Tensor:
    own, problems = find_data_files(path).read(), Problems()
    table, where = own.splits["train"], Where(str(path), own.lines.get("train", ()))
    columns = columns_from_json(about)
    if columns:
        values, features = {}, table.features
        raw = read_columns(table, [column.name for column in columns if column.name in features], str(where))
        for column in columns:
            with problems.collect():
                _check_column(column.name, features, where)
                values[column.name] = parse(raw[column.name], column, where, own.separator)
        problems.check(where)
        for note in unknown_values(columns, [values]):
            log.warning("%s: %s", where, note)
        return transform(columns, values)
    if options.text:
        _check_column(options.text, table.features, where)
        texts = read_column(table, options.text, str(where))
        return tokenise(texts, where, options.length, options.vocabulary, problems)
    lists = [name for name in options.columns or table.features if name in table.features and is_list(table, name)]
    if len(lists) != 1:
        raise DataError(
            f"{where}: one column of lists is the input, and there are {len(lists)}. A model that was trained on "
            "arrays (x, y) knows no columns: give it x in an .npz file, or train on the whole table with label=."
        )
    dtype = "uint8" if about["type"] == "float32" else ""
    return read_lists(read_column(table, lists[0], str(where)), where, options.length, problems, dtype)


def _check_column(column: str, columns: Any, where: Where) -> None:
    if column not in columns:
        raise DataError(f"{where}: there is no column {column!r}.{did_you_mean(column, columns)}")


BATCH = 64
"""Examples that are predicted at once."""
Places: TypeAlias = Sequence[tuple[Path, int | None]]
"""Of each example its file, and its row of a table."""


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
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(_unreadable(folder, error)) from None
    if wrong := _faults(config):
        raise RunError(_unreadable(folder, "config.json: " + "; ".join(wrong)))
    try:
        weights = (folder / "model.safetensors").read_bytes()
        if config.get("weights_sha256", found := hashlib.sha256(weights).hexdigest()) != found:
            raise RunError(_unreadable(folder, "model.safetensors is not the one that config.json was written for"))
        named = config["network"], folder / "config.json", allow_code
        model = _architecture(*named) if network is None else architecture_of(network)
        warn_of_other_network(model, config.get("trained"), str(folder))
        classes, rows = config["first_classes"], config["rows_per_class"]
        predictor = build_predictor(model, load(weights), config["input"], classes, rows)
    except FedKeepError:
        raise
    except Exception as error:  # PyTorch raises almost anything for a network that cannot be
        raise RunError(_unreadable(folder, f"{type(error).__name__}: {error}")) from None
    return predictor, config


def _unreadable(folder: Path, why: object) -> str:
    return f"cannot read the model in {folder}: {in_one_line(why, 500)}. Export it again."


def _faults(config: Any) -> list[str]:
    """Return what is wrong with a ``config.json``, which somebody else may have written; all of it."""
    if not isinstance(config, dict):
        return [f"it should be a table, not {type(config).__name__}"]
    network, about = (part if isinstance(part := config.get(name), dict) else {} for name in ("network", "input"))
    shape, mean, std, names = about.get("shape"), about.get("mean"), about.get("std"), config.get("label_names")
    sized = _is_list(shape, int) and min(shape, default=0) > 0 and math.prod(shape) < 2**31
    real, scaling = (int, float), [math.nan]
    if _is_list(mean, real) and _is_list(std, real) and len(mean) == len(std):
        scaling = [*mean, *std]
    checks = {
        "network should be a table with a name": isinstance(network.get("name"), str),
        "input.shape should list sizes from 1 on, whose product is below 2^31": sized,
        "input.type should be uint8, int64 or float32": about.get("type") in ("uint8", "int64", "float32"),
        "input.mean and input.std should list as many numbers, the latter above 0": all(map(math.isfinite, scaling))
        and min(scaling[len(scaling) // 2 :], default=1) > 0,
        "input.features should list texts": _is_list(about.get("features", []), str),
        "first_classes should be the number of classes, from 1 to 2^20": _is_count(config.get("first_classes")),
        "rows_per_class should be a number, from 1 to 2^20": _is_count(config.get("rows_per_class")),
        "label_names should list the names of the classes": _is_list(names, str) and len(names) > 0,
        "data should be a table": isinstance(config.get("data", {}), dict),
        "resizing should be whole, middle or none": config.get("resizing", "none") in ("whole", "middle", "none"),
    }
    return [said for said, right in checks.items() if not right]


def _is_list(value: Any, kind: type | tuple[type, ...]) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and all(isinstance(each, kind) and not isinstance(each, bool) for each in value)


def _is_count(value: Any) -> bool:
    return _is_list([value], int) and 1 <= value <= 2**20


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


def predict(
    folder: str | Path, files: str | Path | Sequence[str | Path], *, allow_code: bool = False, network: Any = None
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
    files : str or Path or Sequence[str or Path]
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
    if hasattr(files, "columns") or hasattr(files, "ndim"):
        raise ConfigError(
            f"predict reads files, not a {type(files).__name__}. For examples in memory, fedkeep.load_model(folder) "
            "gives the network."
        )
    predictor, config = load_model(folder, allow_code=allow_code, network=network)
    about, names = config["input"], config["label_names"]
    shape = about["shape"]
    images = about["type"] == "uint8" and len(shape) == 3 and shape[0] in (1, 3)
    options = build(DataOptions, config.get("data", {}), f"{folder}/config.json, data")
    # An older export does not say how images were resized: to data.size, if there was one, as a whole.
    resizing = config.get("resizing", "whole" if options.size else "middle")
    read = partial(read_image, shape, options.size, resizing) if images else None
    vocabulary = _vocabulary(predictor, torch.ones(1, *shape, dtype=torch.int64)) if about["type"] == "int64" else None
    paths = _paths(files, IMAGE_SUFFIXES if images else SUFFIXES)
    for places, inputs in _batches(paths, about, options, read):
        if vocabulary is not None:
            _check_token_ids(places, inputs, vocabulary)
        found = iter(places)
        for start in range(0, len(inputs), BATCH):
            with plain_torch(), torch.no_grad():
                best = predictor(inputs[start : start + BATCH]).softmax(-1).max(-1)
            for label, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                if label >= len(names):
                    raise RunError(_unreadable(Path(folder), f"it has no name of class {label}"))
                path, row = next(found)
                yield Prediction(path, names[label], probability, row)


def read_image(shape: Sequence[int], size: tuple[int, ...], resizing: Resizing, path: Path) -> Tensor:
    """Return an image file as an input, prepared as in training, [1, *shape]."""
    channels, height, width = shape
    side = height if resizing == "middle" and height == width else None
    image = decode([[str(path)]], 1, str(path), channels, side, size)
    if tuple(image.shape[2:]) != (height, width):
        raise DataError(
            f"{path} has {image.shape[3]} x {image.shape[2]} pixels, and the model takes {width} x {height}: all "
            "images of its training had this size. Resize it as those were."
        )
    return image


def _vocabulary(predictor: nn.Module, ids: Tensor) -> int | None:
    """Return how many token ids the layer has that reads the inputs; None if none does.

    ``ids``: An input of ones, which positions and kinds of tokens are not.
    """
    rows: list[int] = []

    def note(layer: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        read = given[0] if given else named.get("input")
        if isinstance(read, Tensor) and read.numel() == ids.numel() and bool((read == 1).all()):
            rows.append(int(layer.num_embeddings))  # type: ignore[arg-type]

    layers = [layer for layer in predictor.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        predictor(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return min(rows, default=None)


def _check_token_ids(places: Places, inputs: Tensor, vocabulary: int) -> None:
    unknown = ((inputs < 0) | (inputs >= vocabulary)).flatten(1).any(1).nonzero().flatten().tolist()
    if unknown:
        path, row = places[unknown[0]]
        raise DataError(f"{path}: row {row} has a token id outside 0 to {vocabulary - 1}, which the model knows.")


def _batches(
    paths: Iterable[Path], about: Mapping[str, Any], options: DataOptions, read: Callable[[Path], Tensor] | None
) -> Iterator[tuple[Places, Tensor]]:
    """Yield images, some at a time, and each file of rows."""
    for are_images, group in groupby(paths, lambda path: read is not None and path.suffix != ".npz"):
        if read is not None and are_images:
            while some := list(islice(group, BATCH)):
                yield [(path, None) for path in some], torch.cat(list(map(read, some)))
            continue
        for path in group:
            rows = read_rows(path, about, options)
            yield [(path, row) for row in range(len(rows))], rows


def _paths(files: str | Path | Sequence[str | Path], suffixes: Sequence[str]) -> Iterator[Path]:
    for given in map(Path, [files] if isinstance(files, str | Path) else files):
        if given.is_dir():
            found = sorted(
                path
                for path in given.rglob("*")
                if path.suffix.lower() in suffixes and not any(map(is_hidden, path.relative_to(given).parts))
            )
            if not found:
                raise DataError(f"the folder {given} holds none of {', '.join(sorted(suffixes))}.")
            yield from found
        elif given.is_file():
            yield given
        else:
            raise DataError(f"there is no file {given}.")
