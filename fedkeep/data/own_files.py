"""A user's own files: one table, a folder of splits or of images, or a file or a folder for each client."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from fedkeep.data.readers import TEST_NAMES, datasets_library, parquet_table, read_column, to_nfc
from fedkeep.data.schema import CLIENT, MISSING_TEXTS, Splits
from fedkeep.data.tables import NUMBER_WITH_COMMA, DelimitedText, read_text_table
from fedkeep.errors import DataError, did_you_mean, in_one_line, require_optional

TABLE_SUFFIXES = (".parquet", ".csv", ".tsv")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".jpe", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""The suffixes of the files that are read as images."""
_OTHER_IMAGES = (".heic", ".heif", ".avif", ".jxl", ".jp2", ".svg", ".ico", ".tga", ".psd",
                 ".dng", ".cr2", ".nef", ".arw")  # fmt: skip
_DANGLING = "links to nothing"
_SYSTEM_FOLDERS = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")
_SHARD = re.compile(r"-of-(\d+)(-[0-9a-f]+)?\.parquet$")  # older copies of the Hub have a hash
_SHOWN = 5
_BESIDE = "files or folders beside the tables"

CLIENTS_FOLDER = "clients"
"""The folder in a data set's folder that holds a file or a folder for each client, named after it."""


class LeftOut:
    """Counts what a folder holds and nobody reads, and why."""

    def __init__(self) -> None:
        self.paths: dict[str, dict[Path, None]] = {}

    def add(self, why: str, *paths: Path) -> None:
        """Count paths, if there are any."""
        if paths:
            self.paths.setdefault(why, {}).update(dict.fromkeys(paths))

    def note(self) -> str:
        """Return numbers and reasons; no names, since those of files may say whose they are. Empty if nothing is."""
        found = [f"{len(paths)} {why}" for why, paths in self.paths.items()]
        return f"Left out: {'; '.join(found)}." if found else ""

    def examples(self) -> str:
        """Return the first path of each reason, for the person who has the files; empty if there is none."""
        return ", ".join(in_one_line(next(iter(paths)), 300) for paths in self.paths.values())


class ImageFile(NamedTuple):
    """An image of a class, and whose it is; the name is empty if nobody's."""

    split: str
    client: str
    label: str
    path: Path


@dataclass(frozen=True)
class OwnSplits:
    """Opened tables by split name.

    separator : that of text files, whose columns have no types; empty for others.
    lines : of each row of a split on which line it stands, in words.
    """

    splits: Splits
    separator: str = ""
    lines: Mapping[str, Sequence[str]] = field(default_factory=dict)
    note: str = ""


def split_by_column(own: OwnSplits, column: str, where: str) -> OwnSplits:
    """Return tables whose rows that a column marks as test are the test split; without such a column, as they are."""
    table, others = own.splits.get("train"), sorted({*own.splits} - {"train"})
    if not column or table is None or (others and column not in table.features):
        return own
    if others or column not in table.features:
        wrong = (
            f"there is a split {others[0]!r} too. Leave one of them out."
            if others
            else f"there is no such column.{did_you_mean(column, table.features)}"
        )
        raise DataError(f"{where}: data.split={column!r} marks test rows, and {wrong}")
    values = [str(value).strip().lower() for value in read_column(table, column, where)]
    rows = {name: [row for row, value in enumerate(values) if value == name] for name in ("train", *TEST_NAMES)}
    rows = {name: numbers for name, numbers in rows.items() if numbers}
    if odd := sorted({*values} - {*rows}):
        raise DataError(
            f"{where}: the column {column!r} (data.split) must say train or {', '.join(TEST_NAMES)}, not {odd[0]!r}."
        )
    if len(rows) < 2:
        more = "test" if values[0] == "train" else "train"
        raise DataError(
            f"{where}: the column {column!r} (data.split) says {values[0]} in all rows. Mark some as {more}."
        )
    lines = own.lines.get("train", ())
    return replace(
        own,
        splits={name: table.select(numbers).remove_columns([column]) for name, numbers in rows.items()},
        lines={name: [lines[row] for row in numbers] for name, numbers in rows.items()} if lines else {},
    )


@dataclass(frozen=True)
class DataFiles:
    """Files that are one data set: all of them, what opens them, and what was found while looking for them."""

    files: Sequence[Path]
    read: Callable[[], OwnSplits]
    note: str = ""
    examples: str = ""  # paths of what was left out, which are told but not recorded


def find_data_files(path: Path) -> DataFiles:
    """Find the files of a data set: one table, or a folder of tables, of images or of clients.

    Raises `DataError` if there are none.
    """
    left_out = LeftOut()
    if path.is_file():
        return _tables({"train": {path: ""}}, left_out)
    clients = path / CLIENTS_FOLDER
    if clients.is_dir():
        return _files_of_clients(path, clients)
    if splits := table_files(path):
        left_out.add(_BESIDE, *unused_entries(path, chain(*splits.values())))
        return _tables({split: dict.fromkeys(files, "") for split, files in splits.items()}, left_out)
    return _images(*image_files(path, left_out), left_out)


def table_files(folder: Path) -> dict[str, list[Path]]:
    """Return a folder's tables by split name; an empty dict if there are none."""
    check_links(folder)
    found = {split: split_files(folder, split) for split in ("train", *TEST_NAMES)}
    return {split: files for split, files in found.items() if files}


def split_files(folder: Path, split: str, suffixes: Sequence[str] = TABLE_SUFFIXES) -> list[Path]:
    """Return the tables of a split, sorted; an empty list if there are none.

    A split is ``SPLIT.parquet``, shards of it, ``SPLIT.csv`` or ``SPLIT.tsv``, also as a system of capitals writes
    them: ``TEST.CSV``.
    """
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    named = [path for path in entries if path.stem.lower() == split and path.suffix.lower() in suffixes]
    # Parquet first, of which there may be shards instead.
    files = sorted(filter(Path.is_file, named), key=lambda path: path.suffix.lower() != ".parquet")
    shards = _shards(folder, split) if not files or files[0].suffix.lower() != ".parquet" else []
    if len(files) + bool(shards) > 1:
        several = ", ".join(path.name for path in [*shards[:1], *files])
        raise DataError(f"{folder} has the split {split!r} more than once: {several}. Remove all but one.")
    return shards or files


def _shards(folder: Path, split: str) -> list[Path]:
    """Return the shards of a split, ``SPLIT-*.parquet``, sorted.

    They lie in the folder or in one subfolder, as in a copy of a repository of the Hub.
    """
    shards = sorted(folder.glob(f"{split}-*.parquet")) or sorted(folder.glob(f"*/{split}-*.parquet"))
    parents = sorted({path.parent.name for path in shards})
    if len(parents) > 1:
        raise DataError(
            f"{folder}: the split {split!r} lies in several folders ({', '.join(parents)}), which are different "
            "versions of the data set. Name the one to load."
        )
    announced = {int(found[1]) for path in shards if (found := _SHARD.search(path.name))}
    if announced and announced != {len(shards)}:
        raise DataError(
            f"{folder}: {len(shards)} of {max(announced)} files of the split {split!r} are there. Copy all of them."
        )
    return shards


def _tables(splits: Mapping[str, Mapping[Path, str]], left_out: LeftOut) -> DataFiles:
    """Return tables as a data set: those of each split, with the name of the client whose each is, or none."""
    every = [path for files in splits.values() for path in files]

    def read() -> OwnSplits:
        opened = {path: parquet_table(path) for path in every if path.suffix.lower() == ".parquet"}
        texts = {path: read_text_table(path) for path in every if path not in opened}
        opened |= {path: text.table for path, text in texts.items()}
        tables = {
            split: [(path, _of_client(client, path, opened[path])) for path, client in files.items()]
            for split, files in splits.items()
        }
        if 0 < len(texts) < len(every):
            one, other = next(iter(texts)), next(path for path in every if path not in texts)
            raise DataError(
                f"{one} is text and {other} Parquet, whose cells are read in different ways. Save all tables of a data "
                "set as one of the two."
            )
        separator, lines = "", dict[str, list[str]]()
        if texts:
            separator = _common_separator(texts)
            for split, of in splits.items():
                lines[split] = [
                    f"{path.name}, line {line}" if len(of) > 1 else f"line {line}"
                    for path in of
                    for line in texts[path].lines
                ]
        notes = dict.fromkeys(text.note for text in texts.values() if text.note)
        if without := sum(not len(table) for table in opened.values()):
            notes[f"{without} of {len(every)} files have no rows."] = None
        joined = {split: to_dataset(each) for split, each in _alike(tables).items()}
        return OwnSplits(joined, separator, lines, " ".join(notes))

    return DataFiles(every, read, left_out.note(), left_out.examples())


def _common_separator(files: Mapping[Path, DelimitedText]) -> str:
    """Return how the cells of all files are read; refuse decimal commas if only some files can have them."""
    by_separator = {text.separator: path for path, text in files.items()}
    if len(by_separator) == 1:
        return next(iter(by_separator))
    for path, text in files.items():
        columns = text.table.columns if text.separator != "," else ()
        cells = [[cell for one in column.to_pylist() if (cell := one.strip())] for column in columns]
        numbers = (column for column in cells if all(map(NUMBER_WITH_COMMA.fullmatch, column)))
        if comma := next((cell for column in numbers for cell in column if "," in cell), None):
            other = next(file for separator, file in by_separator.items() if separator != text.separator)
            raise DataError(
                f"{path} separates cells by {text.separator!r} and {other} by {files[other].separator!r}, so that it "
                f"is unclear whether {comma!r} has a decimal comma. Save all tables of a data set in the same way."
            )
    return ","


def to_dataset(tables: Sequence[tuple[Path, Any]]) -> Any:
    """Return tables with the same columns as one `datasets.Dataset`."""
    library = datasets_library("Reading tables")
    arrow = require_optional("pyarrow", "Reading tables", "data")
    first_path, first = tables[0]
    for path, table in tables[1:]:
        missing = {*first.column_names} - {*table.column_names}, {*table.column_names} - {*first.column_names}
        for absent, lacks, has in ((missing[0], path, first_path), (missing[1], first_path, path)):
            if absent:
                raise DataError(f"{lacks} has no column {min(absent)!r}, which {has} has. Give all the same columns.")
    try:
        parts = [table.select(first.column_names) for _, table in tables]
        return library.Dataset(arrow.concat_tables(parts, promote_options="permissive"))
    except Exception as error:  # of pyarrow, and of `datasets` for odd metadata
        names = f"{first_path}" + (f" and {len(tables) - 1} more files" if len(tables) > 1 else "")
        raise DataError(f"{names} cannot be read as one table ({in_one_line(error, 300)}).") from error


def _alike(splits: Mapping[str, Sequence[tuple[Path, Any]]]) -> dict[str, list[tuple[Path, Any]]]:
    """Return tables in which a column is text in all if it is in one, as are categories such as 1, 2 and x.

    True and False are 1 and 0 beside numbers. Numbers stand for names (`ClassLabel`) until the tables name others.
    """
    types = require_optional("pyarrow", "Reading tables", "data").types
    compute = require_optional("pyarrow.compute", "Reading tables", "data")
    fields = [field for tables in splits.values() for _, table in tables for field in table.schema]
    text = {f.name for f in fields if types.is_string(f.type) or types.is_large_string(f.type)}
    numbers = {f.name for f in fields if types.is_integer(f.type) or types.is_floating(f.type)}
    declared = {path: _declared_names(path, table) for tables in splits.values() for path, table in tables}
    ways = {column: {each.get(column) for each in declared.values()} for each in declared.values() for column in each}
    mixed = {column for column, names in ways.items() if len(names - {None}) > 1 or column in text}
    text |= mixed

    def as_text(path: Path, table: Any) -> Any:
        for column in mixed & declared[path].keys():
            table = _with_names(table, column, declared[path][column], path)
        for place, column in enumerate(table.schema):
            values = table.column(place)
            names = (
                types.is_string(column.type) or types.is_large_string(column.type) or types.is_dictionary(column.type)
            )
            if column.name in mixed - declared[path].keys() and not names:
                raise DataError(
                    f"{path}: the column {column.name!r} has numbers, and another file says which names such numbers "
                    "stand for there. Write the names here."
                )
            if types.is_boolean(column.type) and column.name in {*text, *numbers}:
                values = compute.if_else(values, "True", "False") if column.name in text else values.cast("int8")
                table = table.set_column(place, column.name, values)
            elif column.name in text and (types.is_primitive(column.type) or types.is_dictionary(column.type)):
                table = table.set_column(place, column.name, values.cast("string"))
        return table

    return {split: [(path, as_text(path, table)) for path, table in tables] for split, tables in splits.items()}


def _declared_names(path: Path, table: Any) -> dict[str, tuple[str, ...]]:
    """Return the names that a file of `datasets` declares for numbers, by column."""
    library = datasets_library("Reading tables")
    try:
        features = library.Features.from_arrow_schema(table.schema)
    except Exception as error:  # of pyarrow, and of `datasets` for odd metadata
        raise DataError(f"{path} cannot be read as one table ({in_one_line(error, 300)}).") from error
    return {column: tuple(of.names) for column, of in features.items() if isinstance(of, library.ClassLabel)}


def _with_names(table: Any, column: str, names: Sequence[str], path: Path) -> Any:
    """Return a table whose column holds names instead of the numbers that stand for them; -1 is an empty cell."""
    library = datasets_library("Reading tables")
    values = table.column(column).to_pylist()
    if wrong := [value for value in values if value is not None and not -1 <= value < len(names)]:
        raise DataError(
            f"{path}: the column {column!r} has the number {wrong[0]}, and declares {len(names)} classes. Write the "
            "file again."
        )
    features = library.Features.from_arrow_schema(table.schema)
    features[column] = library.Value("string")
    named = [[None if value is None or value < 0 else names[value] for value in values]]
    table = table.set_column(table.column_names.index(column), column, named)
    return table.replace_schema_metadata(features.arrow_schema.metadata)


def _files_of_clients(path: Path, clients: Path) -> DataFiles:
    """Return the files of a folder that holds a file or a folder for each client."""
    check_links(clients)
    visible = [entry for entry in sorted(clients.iterdir()) if not is_hidden(entry.name)]
    tables: dict[str, dict[Path, str]] = {}
    images: list[ImageFile] = []
    notes: list[str] = []
    left_out = LeftOut()
    unread = [e for e in unused_entries(path, [clients]) if re.split(r"[.-]", e.name)[0] not in TEST_NAMES]
    left_out.add(f"files or folders beside {CLIENTS_FOLDER}", *unread)
    for folder in (path, clients):
        leave_out_system_folders(folder, left_out)
    for entry in visible:
        if entry.is_file() and entry.suffix.lower() in TABLE_SUFFIXES:
            tables.setdefault("train", {})[entry] = entry.stem
        elif entry.is_dir():
            splits = table_files(entry)
            for split, files in splits.items():
                tables.setdefault(split, {}).update(dict.fromkeys(files, entry.name))
            left_out.add(_BESIDE, *unused_entries(entry, chain(*splits.values())) if splits else ())
            if not splits:
                found, empty = image_files(entry, left_out, entry.name)
                images += found
                notes += [f"{CLIENTS_FOLDER}/{entry.name}/{name}" for name in empty]
        else:
            left_out.add("files that are no table and no folder of a client", entry)
    if bool(tables) == bool(images):
        what = "both tables and images" if tables else "neither tables nor images"
        raise DataError(
            f"{clients} holds {what}. Expected is NAME.csv (or .tsv, .parquet) for each client, or a folder NAME with "
            "train.csv and test.csv, or with CLASS/*.png."
        )
    # The shards of a client's folder lie in one folder; files of one client beside each other are two sources.
    owners = tables.get("train", {}).items()
    sources = {file if file.parent == clients else file.parent: to_nfc(name).strip() for file, name in owners}
    sources |= {clients / image.client: to_nfc(image.client).strip() for image in images if image.client}
    twice = next((name for name, count in Counter(sources.values()).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"{clients} has two sources of client {twice!r}. Remove one.")
    if images:
        return _image_clients(path, images, notes, left_out)
    return _table_clients(path, tables, left_out)


def _table_clients(path: Path, tables: Mapping[str, Mapping[Path, str]], left_out: LeftOut) -> DataFiles:
    shared = {split: dict.fromkeys(files, "") for split, files in table_files(path).items() if split != "train"}
    own = {split: files for split, files in tables.items() if split == "train" or not shared}
    for split in tables.keys() - own.keys():
        left_out.add(f"clients' own {split} files, since there is one for all", *tables[split])
    return _tables(own | shared, left_out)


def _of_client(name: str, path: Path, table: Any) -> Any:
    """Return a client's table with a column that names it; any other table as it is."""
    if not name:
        return table
    if CLIENT in table.column_names:
        raise DataError(
            f"{path} has a column {CLIENT!r}, but its name says already whose examples these are. Rename the column."
        )
    if path.suffix.lower() != ".parquet" and name.lower() in MISSING_TEXTS:
        raise DataError(f"{path}: a client called {name!r} would be an empty cell. Rename the file or its folder.")
    return table.append_column(CLIENT, [[name] * table.num_rows])


def _image_clients(path: Path, images: list[ImageFile], notes: Sequence[str], left_out: LeftOut) -> DataFiles:
    shared = next((path / name for name in TEST_NAMES if (path / name).is_dir()), None)
    if shared is not None:
        found, empty = image_files(shared, left_out)
        notes = [*notes, *(f"{shared.name}/{name}" for name in empty)]
        own = [file.path for file in images if file.split == "test"]
        left_out.add("test images of clients, since there are some for all", *own)
        images = [file for file in images if file.split == "train"]
        images += [file._replace(split="test") for file in found if file.split == "train"]
    return _images(sorted(images, key=lambda file: file.split != "train"), notes, left_out)


def _images(images: Sequence[ImageFile], empty: Sequence[str], left_out: LeftOut) -> DataFiles:
    """Return images as a data set, and a note on classes without images and on what was left out."""
    named = f"{', '.join(empty[:5])}{', ...' if len(empty) > 5 else ''}"
    about_empty = f"No images in {named}: no class is made of an empty folder." if empty else ""
    note = " ".join(filter(None, (about_empty, left_out.note())))
    files = [file.path for file in images]
    return DataFiles(files, lambda: OwnSplits(read_images(images)), note, left_out.examples())


def read_images(images: Sequence[ImageFile]) -> dict[str, Any]:
    """Return images as tables with the columns ``"image"`` and ``"label"``, and ``"client"`` if they are somebody's.

    The "imagefolder" reader of `datasets` is not used: it takes 0.5 ms a file to list them, 20 times as long as
    `image_files`, and orders ``cat-2/`` before ``cat/``.
    """
    library = datasets_library("Reading a folder of images")
    names = library.ClassLabel(names=sorted({file.label for file in images}))
    features = library.Features({"image": library.Image(), "label": names})
    tables = {}
    for split in dict.fromkeys(file.split for file in images):
        files = sorted((file for file in images if file.split == split), key=lambda file: file.label)
        columns = {"image": [str(file.path) for file in files], "label": [file.label for file in files]}
        table = library.Dataset.from_dict(columns, features=features)
        owners = [file.client for file in files]  # test images that are there for all clients are nobody's
        tables[split] = table.add_column(CLIENT, owners) if any(owners) else table
    return tables


def image_files(root: Path, left_out: LeftOut, client: str = "") -> tuple[list[ImageFile], list[str]]:
    """Return the images of a folder by split and class, all in sorted order, and the classes without images.

    The folder holds ``train/CLASS/*.png`` and ``test/CLASS/*.png`` (or ``valid``, ``val``, ``validation``), or
    ``CLASS/*.png`` alone. What is not read is counted in ``left_out``.
    """
    folders = _subfolders(root, left_out)
    of_classes = [path for path in folders.values() if any(entry.is_dir() for entry in path.iterdir())]
    named = {path.name.lower().removesuffix("ing"): path for path in of_classes} | folders  # Train, testing
    splits = {"train": root}
    if "train" in named:
        test = [named[name] for name in TEST_NAMES if name in named][:1]
        splits = dict(zip(("train", "test"), [named["train"], *test], strict=False))
        beside = [path for path in folders.values() if path not in splits.values()]
        left_out.add("folders beside train and test", *beside)
        left_out.add("files beside train and test", *(path for path in unused_entries(root, ()) if path.is_file()))
    found: list[ImageFile] = []
    empty: list[str] = []
    for split, folder in splits.items():
        loose = [path for path in unused_entries(folder, ()) if not path.is_dir()]
        images = [path for path in loose if path.suffix.lower() in (*IMAGE_SUFFIXES, *_OTHER_IMAGES)]
        left_out.add("images outside the folders of classes", *images)
        left_out.add("other files outside the folders of classes", *(path for path in loose if path not in images))
        for name, path in sorted((to_nfc(path.name), path) for path in _subfolders(folder, left_out).values()):
            unread = {file: _unread(file) for file in sorted(path.iterdir())}
            for why, files in unread.values():
                left_out.add(why, *files)
            of_class = [ImageFile(split, client, name, file) for file, (why, _) in unread.items() if not why]
            found += of_class
            empty += [] if of_class else [path.relative_to(root).as_posix()]
    if dangling := list(left_out.paths.pop(_DANGLING, {})):
        raise DataError(
            f"{root}: {len(dangling)} of {len(dangling) + len(found)} images are links to files that are not there, "
            f"such as {dangling[0]}. Fetch the files (git annex get, dvc pull, git lfs pull), or remove the links."
        )
    if without := [split for split in splits if not any(file.split == split for file in found)]:
        raise DataError(
            f"{root}: the split {without[0]!r} has no images. Expected are train/CLASS/*.png and test/CLASS/*.png, or "
            f"CLASS/*.png alone (file types: {', '.join(IMAGE_SUFFIXES)}), or the Parquet files train.parquet and "
            f"test.parquet (or .csv). {left_out.note()}".rstrip()
        )
    return found, empty


def _unread(path: Path) -> tuple[str, list[Path]]:
    """Return why what lies in the folder of a class is not read, and which files these are; no reason for an image."""
    suffix = path.suffix.lower()
    if is_hidden(path.name):
        return "hidden images", _images_in(path)
    if path.is_dir():
        return "images in subfolders of classes: move them up, into the folder of their class", _images_in(path, "**/*")
    if suffix not in IMAGE_SUFFIXES:
        unread = "images that are not read here: save them as JPEG or PNG"
        return f"{suffix} {unread if suffix in _OTHER_IMAGES else 'other files'}".lstrip(), [path]
    if path.is_file():
        return "", []
    return _DANGLING if path.is_symlink() else "that are no files, such as pipes", [path]


def _images_in(path: Path, pattern: str = "*") -> list[Path]:
    """Return the images in a folder, or the image itself."""
    files = sorted(path.glob(pattern)) if path.is_dir() else [path]
    return [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is the system's, such as what macOS adds to archives."""
    return name.startswith(".") or name in _SYSTEM_FOLDERS


def unused_entries(folder: Path, used: Iterable[Path]) -> list[Path]:
    """Return what a folder holds beside the used files and may hold examples; no texts such as README.md, LICENSE."""
    known = {part for path in used for part in (path, path.parent)}
    return [path for path in sorted(folder.iterdir()) if not is_hidden(path.name) and path not in known
            and (path.is_dir() or path.suffix.lower() not in ("", ".md"))]  # fmt: skip


def check_links(folder: Path) -> None:
    """Raise `DataError` if a folder has links to nothing: they may stand for a class, a client or a test split."""
    gone = [path for path in sorted(folder.iterdir()) if not is_hidden(path.name) and not path.exists()]
    if gone:
        raise DataError(
            f"{folder}: {', '.join(path.name for path in gone[:_SHOWN])} {'are links' if gone[1:] else 'is a link'} to "
            "what is not there. Fetch it (git annex get, dvc pull), or remove the link."
        )


def check_utf8(paths: Iterable[Path]) -> None:
    """Raise `DataError` for a path that is no UTF-8, as in archives of old systems."""
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise DataError(
                f"the name {os.fsencode(path)!r} is not UTF-8. Rename it; convmv -r -f latin1 -t utf8 --notest does so."
            ) from None


def leave_out_system_folders(root: Path, left_out: LeftOut) -> None:
    """Count what systems add to folders and archives."""
    of_system = (root / name for name in _SYSTEM_FOLDERS if (root / name).is_dir())
    left_out.add("folders of the system (__MACOSX and such)", *of_system)


def _subfolders(root: Path, left_out: LeftOut) -> dict[str, Path]:
    check_links(root)
    leave_out_system_folders(root, left_out)
    folders = {path.name: path for path in sorted(root.iterdir()) if path.is_dir()}
    hidden = [path for name, path in folders.items() if name.startswith(".")]
    left_out.add("hidden images", *(image for path in hidden for image in _images_in(path)))
    return {name: path for name, path in folders.items() if not is_hidden(name)}
