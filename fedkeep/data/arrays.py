"""Data sets from arrays in memory, and from .npz files of them."""

from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.data.dataset import DataSet, channel_statistics, select_rows
from fedkeep.data.holdout import hold_out
from fedkeep.data.readers import check_filled, to_nfc
from fedkeep.data.schema import CLIENT, SINGLE_LABEL, check_classes, check_spelling, number_names
from fedkeep.errors import DataError, did_you_mean, in_one_line

TEST_SHARE = 0.2
"""The share of each class that is held out if no test examples are given."""

_ARRAYS = ("x", "y", "x_test", "y_test", "client", "label_names")


def from_arrays(
    x: Any,
    y: Any,
    x_test: Any = None,
    y_test: Any = None,
    *,
    client: Any = None,
    label_names: Sequence[str] | None = None,
    name: str = "arrays",
) -> DataSet:
    """Return a data set of arrays: NumPy arrays, PyTorch tensors, or lists of numbers.

    ``x``: Training inputs: uint8 images ``[n, height, width]`` or ``[n, channels, height, width]``; other integers
        ``[n, length]``, which are token ids; or floating point ``[n, ...]``, which should be scaled already.
    ``y``: Their classes ``[n]``: integers or text, numbered in sorted order.
    ``x_test``, ``y_test``: Test examples; by default a fifth of each class of the training examples is held out.
    ``client``: Whose each training example is, ``[n]``: integers or text. ``partition.scheme = "column"`` splits by it.
    ``label_names``: The names of the classes 0, 1, ..., if ``y`` holds integers.
    """
    if (x_test is None) != (y_test is None):
        raise DataError(f"{name}: x_test and y_test belong together: give both or none.")
    inputs = _to_input(x, f"{name}, x", varied=True)
    labels = _to_column(y, f"{name}, y", len(inputs))
    tested = None if x_test is None else _to_input(x_test, f"{name}, x_test")
    test_labels = None if tested is None else _to_column(y_test, f"{name}, y_test", len(tested))
    train, names = _number_labels(labels, test_labels, label_names, name)
    columns = {"input": inputs, "label": train[: len(labels)]}
    values = {}
    if client is not None:
        number, owners = number_names(_to_column(client, f"{name}, client", len(inputs)))
        check_spelling(map(str, owners), f"{name}, client")
        columns[CLIENT] = torch.from_numpy(number)
        values[CLIENT] = tuple(map(str, owners))
    if tested is None:
        chosen = hold_out(columns["label"], TEST_SHARE)
        columns, test = (select_rows(columns, rows) for rows in (~chosen, chosen))
        note = f"No test examples were given: {TEST_SHARE:.0%} of each class held out."
    else:
        test, note = {"input": tested, "label": train[len(labels) :]}, ""
        if client is not None:
            test[CLIENT] = torch.full_like(test["label"], -1)
    mean, std = channel_statistics(columns["input"]) if inputs.dtype == torch.uint8 and inputs.ndim == 4 else ((), ())
    return DataSet(name, columns, test, names, mean, std, note, values, test_held_out=tested is None)


def read_npz(path: Path) -> dict[str, Any]:
    """Return the arrays of a .npz file as arguments of `from_arrays`; pickled objects are refused.

    ``path``: A file with the arrays ``x`` and ``y``, and maybe ``x_test``, ``y_test``, ``client`` and ``label_names``.
    """
    arrays = _open_npz(path)
    for key in arrays:
        if key not in _ARRAYS:
            raise DataError(f"{path} has an array {key!r}.{did_you_mean(key, _ARRAYS)}")
    if missing := [key for key in ("x", "y") if key not in arrays]:
        raise DataError(f"{path} has no array {missing[0]!r}. Write it with numpy.savez(path, x=x, y=y).")
    if "label_names" in arrays:
        arrays["label_names"] = arrays["label_names"].reshape(-1).tolist()
    return arrays


def read_inputs_of_npz(path: Path) -> Tensor:
    """Return the array ``x`` of a .npz file as `from_arrays` takes it.

    ``path``: The file; its other arrays are not used.
    """
    arrays = _open_npz(path)
    if "x" not in arrays:
        raise DataError(f"{path} has no array 'x'.{did_you_mean('x', arrays)} Write it with numpy.savez(path, x=x).")
    return _to_input(arrays["x"], f"{path}, x")


def _open_npz(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as opened:
            if not isinstance(opened, np.lib.npyio.NpzFile):
                raise ValueError("it is a single array")
            return {key: opened[key] for key in opened.files}
    except Exception as error:  # damaged archives make NumPy raise almost anything
        raise DataError(
            f"{path} cannot be read as a .npz file ({in_one_line(error, 300)}). Write it with "
            "numpy.savez(path, x=x, y=y)."
        ) from error


_OF_PANDAS = " Of nullable columns of pandas, to_numpy('float64') makes numbers."


def _to_array(values: Any, where: str) -> np.ndarray[Any, np.dtype[Any]]:
    if np.ma.is_masked(values):
        raise DataError(f"{where} has masked (missing) values. Fill or remove them: networks read what is behind.")
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise DataError(f"{where} is no array of numbers ({in_one_line(error, 200)}).") from error
    if array.dtype.kind == "S":
        try:
            array = np.char.decode(array, "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{where} holds bytes that are no text in UTF-8 ({error}).") from error
    if array.dtype.kind not in "biufU" and not (
        array.dtype.kind == "O" and all(isinstance(v, str | int) for v in array.flat)
    ):
        raise DataError(
            f"{where} must hold numbers or text, not {array.dtype}.{_OF_PANDAS * (array.dtype.kind == 'O')}"
        )
    return array


def _to_input(values: Any, where: str, varied: bool = False) -> Tensor:
    array = _to_array(values, where)
    if array.dtype.kind == "O" and not any(isinstance(value, str) for value in array.flat):
        raise DataError(f"{where} must hold numbers of one type, not objects.{_OF_PANDAS}")
    if array.dtype.kind not in "biuf":
        raise DataError(f"{where} must hold numbers, not text. Text becomes token ids first; see docs/data.md.")
    if array.ndim == 4 and array.shape[3] <= 4 and min(array.shape[1:3]) > 4:
        raise DataError(
            f"{where} has its channels last, {list(array.shape)}: x.transpose(0, 3, 1, 2) puts them first. If they "
            "are no images, give each example fewer axes: x.reshape(len(x), -1)."
        )
    if array.dtype == np.uint8:
        images = array[:, None] if array.ndim == 3 else array
        return torch.from_numpy(np.ascontiguousarray(images))
    if array.dtype.kind in "fb":
        return torch.from_numpy(to_float32(array, where, varied))
    if array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{where} has {array.max()}, which int64 cannot hold. Give numbers as floating point.")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))


def to_float32(array: np.ndarray[Any, np.dtype[Any]], where: str, varied: bool) -> np.ndarray[Any, np.dtype[Any]]:
    """Return numbers as float32, which must hold them and, if asked, keep a column's different ones apart."""
    with np.errstate(over="ignore", under="ignore"):
        found = np.ascontiguousarray(array, dtype=np.float32)
    if array.dtype.itemsize <= found.dtype.itemsize or not array.size or not array.ndim:
        return found
    if (beyond := np.isfinite(array) & np.isinf(found)).any():
        raise DataError(f"{where} has {array[beyond][0]:g}, which float32 cannot hold. Scale the inputs first.")
    merged = (found == found[:1]).all(0) & ~np.isclose(array, array[:1], rtol=1e-9, atol=np.finfo(np.float32).tiny)
    if varied and merged.any():
        raise DataError(
            f"{where} has numbers such as {array[merged][0]!s}, and float32 makes one of all that stand in its place. "
            "Subtract their mean and divide by their standard deviation first."
        )
    return found


def _to_column(values: Any, where: str, rows: int) -> list[Any]:
    """Return integers or names, one for each row."""
    hint = "" if where.endswith(CLIENT) else f" {SINGLE_LABEL}"
    try:
        array = _to_array(values, where)
    except DataError as error:
        raise DataError(f"{error}{hint}") from error
    if array.ndim != 1 or len(array) != rows:
        raise DataError(
            f"{where} must be one integer or text for each of the {rows} examples, not {array.dtype} "
            f"{list(array.shape)}.{hint}"
        )
    found = array.tolist()
    if array.dtype.kind in "biuf":
        if (odd := next((value for value in found if not float(value).is_integer()), None)) is not None:
            raise DataError(f"{where} must be one integer or text for each example, not {odd}.{hint}")
        return list(map(int, found))
    check_filled(found, where.rpartition(", ")[2], where)
    if all(isinstance(value, Integral) and not isinstance(value, bool) for value in found):  # of pandas, as objects
        return list(map(int, found))
    if len({isinstance(value, str) for value in found}) > 1:
        raise DataError(f"{where} has numbers and text, such as {found[0]!r}: give one kind.{hint}")
    return [to_nfc(str(value)) for value in found]


def _number_labels(
    labels: list[Any], test_labels: list[Any] | None, label_names: Sequence[Any] | None, name: str
) -> tuple[Tensor, tuple[str, ...]]:
    """Return the labels of training and test examples, one after the other, and their names."""
    together = [*labels, *(test_labels or [])]
    if len({isinstance(label, str) for label in together}) > 1:
        raise DataError(f"{name}: y and y_test must both be integers or both be text.")
    if label_names is not None:
        if any(isinstance(label, str) for label in together):
            raise DataError(f"{name}: y holds the names of the classes already: leave label_names out.")
        decoded = [one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one) for one in label_names]
        if (largest := max(together, default=0)) > np.iinfo(np.int64).max:
            raise DataError(
                f"{name}: y has the class {largest}, and label_names names the classes 0 to {len(decoded) - 1}. Number "
                "the classes from 0, or leave label_names out."
            )
        return torch.tensor(together, dtype=torch.int64), tuple(map(to_nfc, decoded))
    check_spelling({*map(str, together)}, f"{name}, y")
    check_classes(together, f"{name}, y")
    number, found = number_names(together)
    return torch.from_numpy(number), tuple(map(str, found))
