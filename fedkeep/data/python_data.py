"""Data sets that are given in Python: arrays, data frames, tables of Hugging Face, PyTorch's data sets and streams."""

import sys
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import data as torch_data

from fedkeep.data import array_store
from fedkeep.data.arrays import from_arrays
from fedkeep.data.catalog import is_known
from fedkeep.data.dataset import DataSet
from fedkeep.data.decode import picture
from fedkeep.data.loading import assemble_own
from fedkeep.data.own_files import OwnSplits
from fedkeep.data.readers import datasets_library, to_nfc
from fedkeep.data.schema import CLIENT, LABEL_NAMES, DataOptions
from fedkeep.errors import DataError, in_one_line, require_optional

STREAM_LIMIT = 1_000_000
"""The most examples that are taken from a stream, which may have no end."""


def dataset_of(data: Any, options: DataOptions | None = None) -> DataSet:
    """Return examples that were given in Python as a data set; see `fedkeep.run`.

    Raises `DataError` if they are none.
    """
    options = options or DataOptions()
    if isinstance(data, DataSet):
        return data
    splits = dict(zip(("train", "test"), data, strict=False)) if isinstance(data, tuple) and len(data) == 2 else None
    if splits and all(_is_table(part) for part in splits.values()):
        return _of_tables(splits, options)
    if _is_table(data):
        return _of_tables(dict(data) if isinstance(data, Mapping) else {"train": data}, options)
    if options != DataOptions():
        raise DataError("label, client, columns, exclude and so on are for tables and files; arrays have no columns.")
    if splits and all(isinstance(part, torch_data.Dataset) for part in splits.values()):
        return from_arrays(*(array for part in splits.values() for array in _examples(part)))
    if isinstance(data, torch_data.Dataset):
        return from_arrays(*_examples(data))
    several = isinstance(data, tuple | list) and any(map(_is_data_set, data))
    is_sized = isinstance(data, tuple | list) and all(hasattr(part, "__len__") for part in data)
    if is_sized and len(data) in (2, 4) and not several:
        return from_arrays(*data)
    what = f"{len(data)} parts" if isinstance(data, tuple | list) else f"a {type(data).__name__}"
    if several:
        what += (
            " that are data sets or loaders themselves. Of a DataLoader give loader.dataset; of clients' data sets "
            "torch.utils.data.ConcatDataset(...), with partition={name: rows}"
        )
    raise DataError(
        f"data must be (x, y, x_test, y_test), (x, y), a data frame, a data set of PyTorch, Hugging Face or FedKeep, "
        f"two of one kind as (train, test), the name of a data set or a path, not {what}. Make arrays of anything "
        "else: x = numpy.stack([x for x, y in data])."
    )


def _is_data_set(part: Any) -> bool:
    """Tell whether a part of what was given is no array: a data set, a loader, or a pair of inputs and labels."""
    axes = [getattr(one, "ndim", 0) for one in part] if isinstance(part, tuple) else []
    return isinstance(part, torch_data.Dataset | torch_data.DataLoader) or (len(axes) == 2 and axes[0] > axes[1] == 1)


def has_columns(data: Any) -> bool:
    """Tell whether data are a table, or files that may be one."""
    if isinstance(data, str | Path):
        return not (
            is_known(str(data)) or str(data).startswith(array_store.PREFIX) or Path(data).suffix.lower() == ".npz"
        )
    return all(map(_is_table, data)) if isinstance(data, tuple) else _is_table(data)


def _is_table(data: Any) -> bool:
    """Tell whether data are a table: of pandas, polars or pyarrow, or of Hugging Face `datasets`, also by split."""
    if hasattr(data, "__arrow_c_stream__") and (hasattr(data, "columns") or hasattr(data, "schema")):
        return True  # a column alone has none of them
    library = sys.modules.get("datasets")  # nobody has such a table without having imported it
    kinds = ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict")
    return library is not None and isinstance(data, tuple(getattr(library, kind) for kind in kinds))


def _of_tables(splits: Mapping[str, Any], options: DataOptions) -> DataSet:
    library, arrow = datasets_library("Reading tables"), require_optional("pyarrow", "Reading tables", "data")
    opened: dict[str, Any] = {}
    wanted = {options.label, options.client, options.group, options.text, options.split, CLIENT, *LABEL_NAMES}
    wanted |= {*options.columns, *options.exclude}
    notes: dict[str, None] = {}
    for split, table in splits.items():
        index = getattr(getattr(table, "index", None), "names", ())  # of a data frame of pandas
        if left_out := [name for name in index if name is not None and not {name, to_nfc(str(name))} & wanted]:
            table = table.reset_index(level=left_out, drop=True)
            notes[f"Left out: the index {', '.join(map(repr, left_out))}; reset_index() makes it a column."] = None
        if isinstance(table, library.Dataset):
            if table.format["type"] == "custom":
                raise DataError(
                    "the data set has a transform (set_transform, with_transform), which would not be applied. Write "
                    "down what it gives, with .map(...), or give arrays (x, y)."
                )
            hidden = {*table.column_names} - {*table.format["columns"]} - wanted
            if hidden and not table.format["output_all_columns"]:
                table = table.remove_columns(sorted(hidden))
        else:
            try:
                if isinstance(table, library.IterableDataset):
                    table = _read_stream(table, library, arrow)
                else:
                    table = library.Dataset(_without_categories(arrow.table(table), arrow, wanted - {*options.columns}))
            except DataError:
                raise
            except Exception as error:  # of the libraries of the table, pyarrow and `datasets`
                raise DataError(
                    f"the table cannot be read ({in_one_line(error, 300)}). Give each column a name of its own, and "
                    "values of one kind: numbers, dates or texts."
                ) from error
        opened[split] = table
    return assemble_own("table", OwnSplits(opened, note=" ".join(notes)), "the table", options)


def _read_stream(stream: Any, library: Any, arrow: Any) -> Any:
    """Return the rows of a stream as a table, in one pass: the next one may have another order."""
    batches, rows = [], 0
    for batch in stream.with_format("arrow").iter(batch_size=500):  # images stay encoded
        _check_limit(rows := rows + len(batch))
        batches.append(batch)
    if not batches:
        raise DataError("the stream has no examples.")
    joined = arrow.concat_tables(batches, promote_options="permissive")
    info = library.DatasetInfo(features=stream.features)
    return library.Dataset(joined, info=info, fingerprint="stream")  # without one, a copy of all is hashed


def _without_categories(table: Any, arrow: Any, plain: Set[str]) -> Any:
    """Return a table whose categories, as those of pandas, are texts; numbers stay numbers in plain columns."""
    for place, field in enumerate(table.schema):
        if arrow.types.is_dictionary(field.type):
            values = table.column(place).cast(field.type.value_type)
            is_number = arrow.types.is_integer(values.type) or arrow.types.is_floating(values.type)
            texts = is_number and to_nfc(field.name) not in plain
            table = table.set_column(place, field.name, values.cast("string") if texts else values)
    return table


def _examples(data: Any) -> tuple[Any, Any]:
    """Return the inputs and the labels of a data set of PyTorch, all of them in memory."""
    if isinstance(data, torch_data.TensorDataset) and len(data.tensors) == 2:
        return data.tensors
    stream = data if isinstance(data, torch_data.IterableDataset) else (data[row] for row in range(len(data)))
    inputs, labels = [], []
    for number, example in enumerate(stream):
        if not isinstance(example, tuple | list) or len(example) != 2:
            raise DataError(
                f"an example of the data set must be a pair (input, class), not {type(example).__name__}: "
                f"{example!r:.60}. Give arrays: (x, y)."
            )
        _check_limit(number + 1)
        inputs.append(_array(example[0], number).copy())  # some data sets fill one array again and again
        labels.append(example[1].item() if isinstance(example[1], Tensor) and example[1].ndim == 0 else example[1])
    if not inputs:
        raise DataError("the data set has no examples.")
    if shapes := {one.shape for one in inputs} - {inputs[0].shape}:
        raise DataError(f"inputs of the data differ in shape: {inputs[0].shape} and {min(shapes)}. Make them alike.")
    return np.stack(inputs), labels


def _array(value: Any, number: int) -> Any:
    """Return an input as an array; a picture of Pillow is read as one of a file is."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if not hasattr(value, "getbands") or value.mode == "F":  # Pillow's pictures of float32
        return np.asarray(value)
    try:
        return picture(value)
    except DataError as error:
        raise DataError(f"example {number} of the data set {error}") from error


def _check_limit(count: int) -> None:
    if count > STREAM_LIMIT:
        raise DataError(
            f"the stream has more than {STREAM_LIMIT:,} examples, and all are kept in memory. Give fewer, such as "
            "itertools.islice(stream, 100_000) as a list, or write them into a file."
        )
