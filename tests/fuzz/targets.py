"""What is fuzzed: five kinds of input that comes from outside. Each may be refused, and nothing else may happen.

A target takes what Hypothesis draws and counts what became of it: ``"accepted"`` or ``"refused"``. Any exception other
than those of `fedkeep.errors` is a traceback for a user, and more than five seconds of work is a hang.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args, get_origin
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import tomli_w
import torch
from safetensors.torch import save
from synthetic_run import write_run, write_trial
from torch import Tensor

from fedkeep._utils.type_hints import annotations_of
from fedkeep.cli import main
from fedkeep.cli.main import COMMANDS, parser
from fedkeep.data import DataOptions, load
from fedkeep.data.partition import schemes
from fedkeep.errors import FedKeepError, ValueRefused
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.recipe import OPTIONS, SECTIONS
from fedkeep.experiment.recipe_loader import load_recipe, parse_recipe
from fedkeep.interface import Fit, algorithms
from fedkeep.interface.codec import decode, encode
from fedkeep.models import architectures
from fedkeep.options import Options, options_of
from fedkeep.reporting.run_folder import read_run
from fedkeep.reporting.summary import summary
from fedkeep.reporting.table import latex, markdown, trials_csv

CPU_SECONDS, SECONDS = 5.0, 60.0  # a busy machine may take longer by the clock, without a hang

ODD_TEXT = st.sampled_from(
    [
        "",
        "\0",
        "a\0b",
        "é",
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        "x" * 5000,
        "/",
        "..",
        "~nobody",
        "a/b",
        "digits+digits",
        "+",
        "a.toml",
        "none",
        "nan",
        "1e999",
        "[red]",
        "{x}",
        "%s",
        "C:\\x",
        "-",
        "--",
        "a:b",
        "os:system",
    ]
) | st.text(max_size=12)
ODD_NUMBER = (
    st.sampled_from(
        [0, -1, 1, 2, 3, 2**31, 2**63, 2**64, -(2**63), 10**9, 10**18, 10**400, 0.0, -0.0, 1e-300, 1e300, 0.5, 1.5]
    )
    | st.floats()
    | st.integers(-100, 1000)
)
ODD = st.recursive(
    ODD_TEXT | ODD_NUMBER | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ODD_TEXT, inner, max_size=3),
    max_leaves=6,
)


class Hang(BaseException):
    """More time than any input is worth. Not an `Exception`, so that nobody catches it."""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Raise `Hang` after five seconds of work, or a minute by the clock."""

    def stop(number: int, frame: Any) -> None:
        raise Hang(f"more than {CPU_SECONDS:g} seconds of work, or {SECONDS:g} by the clock")

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, CPU_SECONDS), (signal.ITIMER_REAL, signal.SIGALRM, SECONDS))
    before = [signal.signal(which, stop) for _, which, _ in timers]
    for timer, _, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (timer, which, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(which, handler)


def outcome(attempt: Callable[[], Any]) -> Counter[str]:
    """Return whether an attempt was accepted or refused with a clear error, as a count of one."""
    with time_limit():
        try:
            attempt()
        except FedKeepError as error:
            output = str(error)
        else:
            return Counter(["accepted"])
    assert output.strip(), "an error without words"
    return Counter(["refused"])


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """Give a folder to work in, a cache of its own, and no network."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        own = {"FEDKEEP_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "COLUMNS": "80"}
        with mock.patch.dict(os.environ, own):
            os.environ.pop("FEDKEEP_DATA", None)
            os.chdir(folder)
            try:
                yield Path(folder)
            finally:
                os.chdir(before)


# Bytes that were something once


def damage(whole: bytes, random: Random) -> bytes:
    """Return bytes with a few of them changed, lost, repeated or added."""
    result = bytearray(whole)
    for _ in range(random.randint(0, 4)):
        start = random.randint(0, max(len(result) - 1, 0))
        end = min(start + random.choice([1, 1, 2, 8, 64, 10_000]), len(result))
        match random.choice(["flip", "flip", "cut", "lose", "repeat", "zero", "add"]):
            case "flip" if result:
                result[start] ^= 1 << random.randint(0, 7)
            case "cut":
                del result[start:]
            case "lose":
                del result[start:end]
            case "repeat":
                result[end:end] = result[start:end] * random.choice([1, 2, 50])
            case "zero":
                result[start:end] = bytes(end - start)
            case _:
                result[start:start] = random.randbytes(random.randint(0, 12))
    return bytes(result)


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """Draw damaged bytes."""
    return st.integers(0, 2**32).map(lambda seed: damage(whole, Random(seed)))


# Recipes

DEMO: dict[str, Any] = {
    "title": "fuzz",
    "seeds": [0],
    "data": {"name": "digits"},
    "partition": {"scheme": "exdir", "num_clients": 8, "classes_per_client": 2, "alpha": 0.5},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"epochs": 1, "batch_size": 64, "lr": 0.05},
    "run": {"rounds": 2, "cohort_size": 2},
    "methods": [{"algorithm": "fedavg"}, {"algorithm": "sfedkd", "teachers": 2}],
}


def _fitting(cls: type[Options], name: str) -> st.SearchStrategy[Any]:
    """Return values of an option's own type, within and outside its bounds."""
    hint, numbers = annotations_of(cls)[name], st.sampled_from([0, 1, 2, 3, 5, 8, 64]) | st.integers(-3, 10**12)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: numbers,
        float: st.floats(0, 2) | st.floats(),
        bool: st.booleans(),
        str: ODD_TEXT,
    }
    kinds = [kind for kind in (hint, *get_args(hint)) if kind in simple]
    choices = [choice for part in (hint, *get_args(hint)) if get_origin(part) is Literal for choice in get_args(part)]
    strategies = [simple[kind] for kind in kinds] + ([st.sampled_from(choices)] if choices else [])
    if get_origin(hint) is tuple:
        strategies = [st.lists(strategies[0], max_size=4)]
    return st.one_of(strategies) if strategies else ODD


def _classes() -> dict[str, list[type[Options]]]:
    """Return the classes whose options a section may have."""
    sections = {section: [cls] for section, cls in OPTIONS.items()} | {"data": [DataOptions]}
    return sections | {"partition": [*schemes().values()], "model": [*architectures().values()]}


@st.composite
def recipe_tables(draw: st.DrawFn) -> dict[str, Any]:
    """Return the demo's table with at most three odd entries: some inputs must pass every check."""
    table = json.loads(json.dumps(DEMO))
    classes = _classes()
    for _ in range(draw(st.integers(0, 3))):
        match draw(st.sampled_from(["option", "option", "option", "kind", "method", "method", "odd", "drop"])):
            case "option":
                section = draw(st.sampled_from(sorted(classes)))
                now = table.get(section, {})
                cls = draw(st.sampled_from(classes[section]))
                if section in ("partition", "model") and draw(st.booleans()):  # the one that is there
                    kinds = schemes() if section == "partition" else architectures()
                    cls = kinds.get(str(now.get("scheme", now.get("name"))), cls) if isinstance(now, dict) else cls
                names = sorted(options_of(cls))
                if names and isinstance(now, dict):
                    name = draw(st.sampled_from(names))
                    table.setdefault(section, {})[name] = draw(_fitting(cls, name))
            case "kind":
                section, name, kinds = draw(
                    st.sampled_from(
                        [
                            ("partition", "scheme", sorted(schemes())),
                            ("model", "name", sorted(architectures())),
                            ("data", "name", ["digits"]),
                        ]
                    )
                )
                if isinstance(table.get(section, {}), dict):
                    table.setdefault(section, {})[name] = draw(st.sampled_from(kinds) | ODD_TEXT)
            case "method":
                entry = {"algorithm": draw(st.sampled_from(sorted(algorithms())))}
                method = algorithms()[entry["algorithm"]]
                if options_of(method) and draw(st.booleans()):
                    name = draw(st.sampled_from(sorted(options_of(method))))
                    entry[name] = draw(_fitting(method, name))
                else:
                    entry |= draw(
                        st.dictionaries(st.sampled_from(["label", "grid", "grid_of"]) | ODD_TEXT, ODD, max_size=2)
                    )
                if isinstance(table.get("methods"), list):
                    table["methods"].append(entry)
            case "odd":
                node_config = draw(
                    st.sampled_from([table, *(part for part in table.values() if isinstance(part, dict))])
                )
                keys = [
                    "title",
                    "extends",
                    "seeds",
                    "methods",
                    "client_models",
                    "paper",
                    "log",
                    *SECTIONS,
                    *node_config,
                ]
                node_config[draw(st.sampled_from([*keys, *node_config]) | ODD_TEXT)] = draw(ODD)
            case _ if table:
                del table[draw(st.sampled_from(sorted(table)))]
    return table


ODD_TOML = st.sampled_from(
    [
        "x = " + "[" * 20_000,
        "x = " + "{a = " * 20_000,
        "x = " + "9" * 5000,
        "[" + "a." * 20_000 + "a]",
        "x = 1_0",
        "\0",
        '[data]\nname = "\\u0000"',
        "seeds = [" + "0," * 1000 + "]",
        "x = 0x" + "f" * 5000,
        "date = 1979-05-27T07:32:00Z",
        "run = 07:32:00",
        "data = 1979-05-27",
    ]
)


@st.composite
def recipes(draw: st.DrawFn) -> bytes:
    """Return a file that may be a recipe."""
    try:
        text = tomli_w.dumps(draw(recipe_tables()))
    except (TypeError, ValueError, AttributeError):  # what TOML cannot say
        text = tomli_w.dumps(DEMO)
    match draw(st.sampled_from(["whole", "whole", "whole", "odd beginning", "damaged"])):
        case "whole":
            return text.encode("utf-8", "replace")
        case "odd beginning":
            return f"{draw(ODD_TOML)}\n{text}".encode()
        case _:
            return draw(damaged(text.encode("utf-8", "replace")))


def check_recipe(content: bytes) -> Counter[str]:
    """Load a recipe, write it and read it again, and check the whole experiment."""

    def attempt() -> None:
        recipe = load_recipe("recipe.toml")
        assert parse_recipe(recipe.to_toml(), "again").to_toml() == recipe.to_toml()
        Experiment(recipe).check()

    with workplace() as folder:
        (folder / "recipe.toml").write_bytes(content)
        return outcome(attempt)


# The command line

NEVER = {"generator", "reproduce", "tune", "flower", "predict", "export"}
"""Commands that work for minutes or open ports when they are given what they want."""


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Return a command with some of its own options, values that may fit, and odd ones."""
    name = draw(st.sampled_from(sorted(COMMANDS.keys() - NEVER)))
    (commands,) = (action for action in parser()._actions if hasattr(action, "choices") and action.choices)
    actions = commands.choices[name]._actions  # type: ignore[union-attr, call-overload]
    fitting = st.sampled_from(
        [
            "demo",
            "digits",
            "0",
            "1",
            "2",
            "fedavg",
            "fedavg,sfedkd",
            "training.lr=0.1",
            "sfedkd.tau=2",
            "cpu",
            "run",
            "x.csv",
        ]
    )
    setting = st.builds(
        "{}.{}={}".format,
        st.sampled_from(["training", "run", "model", "algorithm"]) | ODD_TEXT,
        st.sampled_from(["lr", "rounds", "hidden", "teachers"]) | ODD_TEXT,
        ODD_TEXT | ODD.map(str) | st.sampled_from(["9" * 5000, "[" * 5000, "[1, 2", "{a=1}"]),
    )
    words: list[str] = []
    for action in draw(st.lists(st.sampled_from(actions), max_size=5)):
        if action.dest in ("help", "use", "profile"):
            continue
        words += [draw(st.sampled_from(action.option_strings))] if action.option_strings else []
        if action.nargs != 0:
            words.append(draw(setting if action.dest == "settings" else fitting | ODD_TEXT | ODD_NUMBER.map(str)))
    return [name, *words]


def check_command_line(words: Sequence[str]) -> Counter[str]:
    """Run a command; a run stops where its rounds would begin."""

    def attempt() -> None:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                code = main(list(words))
            except SystemExit as stop:  # argparse has said what is wrong
                code = stop.code  # type: ignore[assignment]
        assert code in (0, 1, 2), code
        assert "Traceback" not in printed.getvalue()
        if code:
            assert printed.getvalue().strip(), "an error without words"

    with workplace(), mock.patch("fedkeep.cli.run._run_and_show", return_value=0):
        return outcome(attempt)


# Data files


def _png() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(buffer, "PNG")
    return buffer.getvalue()


def _image(kind: str) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (9, 7), "red").save(buffer, kind)
    return buffer.getvalue()


def _parquet(columns: Mapping[str, Any], metadata: bytes | None = None) -> bytes:
    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    table = pyarrow.table(dict(columns))
    table = table if metadata is None else table.replace_schema_metadata({"huggingface": metadata})
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


def _npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, x=np.arange(40.0).reshape(20, 2), y=np.arange(20) % 2)
    return buffer.getvalue()


def valid_files() -> dict[str, bytes]:
    """Return one small file of each kind that is read, by the name under which it is tried."""
    csv = "age,sex,label,client\n" + "".join(f"{i},{'mf'[i % 2]},{'xy'[i % 2]},c{i % 3}\n" for i in range(20))
    png = {"bytes": _png(), "path": None}
    return {
        "d/train.csv": csv.encode(),
        "d/train.tsv": csv.replace(",", "\t").encode(),
        "d/clients/a.csv": csv.replace(",client", "").replace(",c0", "").replace(",c1", "").replace(",c2", "").encode(),
        "table.parquet": _parquet({"a": [0.5, 1.5] * 10, "b": ["u", "v"] * 10, "label": [0, 1] * 10}),
        "d/train.parquet": _parquet({"image": [png] * 20, "label": [0, 1] * 10}),
        "d/a/0.png": _png(),
        **{f"d/a/1.{kind}": _image(kind) for kind in ("jpeg", "webp", "bmp", "gif", "tiff", "ppm")},
        "arrays.npz": _npz(),
    }


CELLS = st.sampled_from(
    ["1", "2.5", "", "x", "nan", "inf", "1e999", "9" * 400, '"', "a b", "\0", "-1", "true", "2020-01-01"]
)
METADATA = st.recursive(
    st.sampled_from([None, 3, "x", "Image", "ClassLabel", "Value", "string"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["info", "features", "image", "label", "_type", "names", "dtype", "feature"]), inner
        )
    ),
    max_leaves=8,
)


@st.composite
def data_files(draw: st.DrawFn) -> tuple[str, bytes, dict[str, Any]]:
    """Return a file's name and content, and the options with which it is read."""
    name, content = draw(st.sampled_from(sorted(FILES.items())))
    if name.endswith(("csv", "tsv")) and draw(st.booleans()):
        rows = draw(st.lists(st.lists(CELLS | st.text(max_size=4), min_size=2, max_size=3), max_size=6))
        content = "\n".join(",".join(row) for row in [["a", "b", "label"], *rows]).encode("utf-8", "replace")
    elif name == "d/train.parquet" and draw(st.booleans()):
        png = {
            "bytes": draw(damaged(_png())),
            "path": draw(st.none() | ODD_TEXT.filter(lambda text: "\ud800" not in text)),
        }
        metadata = json.dumps(
            {"info": {"features": draw(METADATA)}} if draw(st.booleans()) else draw(METADATA)
        ).encode()
        content = _parquet({"image": [{"bytes": _png(), "path": None}] * 8 + [png], "label": [0, 1, 0] * 3}, metadata)
    else:
        content = draw(damaged(content))
    columns = st.sampled_from(["a", "b", "age", "sex", "label", "client", "image", "nothing"])
    options = (
        draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "label": columns,
                    "client": columns,
                    "group": columns,
                    "text": columns,
                    "columns": st.lists(columns, max_size=2),
                    "size": st.sampled_from([[8, 8], [1, 64]]),
                    "scaling": st.sampled_from(["standard", "none"]),
                    "length": st.sampled_from([1, 5]),
                    "vocabulary": st.sampled_from([2, 100]),
                },
            )
        )
        if draw(st.booleans())
        else {}
    )
    return name, content, options


FILES = valid_files()


def check_data_file(given: tuple[str, bytes, dict[str, Any]]) -> Counter[str]:
    """Load a file as a data set."""
    name, content, options = given

    def attempt() -> None:
        dataset = load(name.split("/")[0], options=DataOptions(**options))
        assert len(dataset.train["label"]) > 0

    with workplace() as folder:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        if path.parent.name == "a":  # a class needs another beside it
            (folder / "d" / "b").mkdir()
            for number in range(4):
                (folder / "d" / "b" / f"{number}.png").write_bytes(FILES["d/a/0.png"])
                (folder / "d" / "a" / f"{number + 5}.png").write_bytes(FILES["d/a/0.png"])
        return outcome(attempt)


# Messages

MODEL = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.int64)}
VALUES: list[tuple[Any, Any]] = [
    (Fit(model=MODEL, num_examples=3, num_steps=2, loss=0.5), Fit),
    ({"x": [1, 2], "y": []}, dict[str, list[int]]),
    ([("a", 1.5), ("b", float("inf"))], list[tuple[str, float]]),
    ({0: MODEL, 1: None}, dict[int, dict[str, Tensor] | None]),
]
NODES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.sampled_from(
        [{"tensor": "0"}, {"tensor": "a"}, {"tensor": 3}, {"float": "nan"}, {"float": "9" * 400}, 10**400]
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.builds(
            lambda key, value: {key: value},
            st.sampled_from(["list", "tuple", "dict", "tensor", "float", "class"]),
            inner,
        )
        | st.builds(
            lambda name, fields: {"class": name, "fields": fields},
            st.sampled_from([f"{Fit.__module__}.{Fit.__qualname__}", "builtins.dict", "os.system", "Fit", ""]),
            st.dictionaries(st.sampled_from(["model", "num_examples", "loss", "num_steps", "x"]), inner),
        )
    ),
    max_leaves=10,
)


@st.composite
def messages(draw: st.DrawFn) -> tuple[bytes, Any]:
    """Return a message, and what it is expected to be."""
    value, hint = draw(st.sampled_from(VALUES))
    match draw(st.sampled_from(["damaged", "structure", "text"])):
        case "damaged":
            return draw(damaged(encode(value))), hint
        case "structure":
            text = json.dumps(draw(NODES)).encode()
        case _:
            text = draw(
                st.binary(max_size=30) | st.sampled_from([b"[" * 100_000, b"9" * 5000, b"NaN", b'{"list":' * 5000])
            )
    return save({**MODEL, "structure": torch.tensor(list(text), dtype=torch.uint8)}), hint


def check_message(given: tuple[bytes, Any]) -> Counter[str]:
    """Decode a message, and forty that are the same but for some damage. Whatever comes out can be encoded again."""
    blob, hint = given
    random = Random(blob)
    found: Counter[str] = Counter()
    for number in range(41):
        message = damage(blob, random) if number else blob
        try:
            found += outcome(partial(_decode_and_encode, message, hint))
        except BaseException as error:
            error.add_note(f"The message was {message!r}.")
            raise
    return found


def _decode_and_encode(message: bytes, hint: Any) -> None:
    try:
        encode(decode(message, hint))
    except ValueRefused:
        raise
    except FedKeepError as error:
        raise TypeError("a message is refused with ValueRefused only") from error


# Run folders

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ODD_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def run_folders(draw: st.DrawFn) -> tuple[str, bytes]:
    """Return the name of one file of a run, and what it holds now."""
    name, content = draw(st.sampled_from(sorted(run_files().items())))
    if name.endswith(".toml") or draw(st.booleans()):
        return name, draw(damaged(content))
    lines = content.decode().splitlines()
    number = draw(st.integers(0, len(lines) - 1))
    value = json.loads(lines[number])
    if value and draw(st.booleans()):
        value[draw(st.sampled_from(sorted(value)))] = draw(JSON)
    else:
        value = draw(JSON)
    lines[number] = json.dumps(value)
    return name, "\n".join(lines).encode("utf-8", "replace")


def write_small_run(folder: Path) -> None:
    """Write a run of two methods."""
    write_run(folder)
    for label in ("FedAvg", "SFedKD"):
        write_trial(folder, label, 0, [[3, 4], [5, 6]])


def run_files() -> dict[str, bytes]:
    """Return the files of a small run, by their names in its folder."""
    if not _RUN:
        with tempfile.TemporaryDirectory() as folder:
            write_small_run(Path(folder))
            paths = [path for path in Path(folder).rglob("*") if path.is_file()]
            _RUN.update({path.relative_to(folder).as_posix(): path.read_bytes() for path in paths})
    return _RUN


_RUN: dict[str, bytes] = {}


def check_run_folder(given: tuple[str, bytes]) -> Counter[str]:
    """Read a run and write its table."""
    name, content = given

    def attempt() -> None:
        rows = summary(read_run("run"))
        markdown(rows)
        latex(rows)
        trials_csv(rows)

    with workplace() as folder:
        for each, bytes_of in run_files().items():
            path = folder / "run" / each
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if each == name else bytes_of)
        return outcome(attempt)


VALID: dict[str, Any] = {
    "recipes": tomli_w.dumps(DEMO).encode(),
    "command lines": ["methods"],
    "data files": ("arrays.npz", FILES["arrays.npz"], {}),
    "messages": (encode(VALUES[0][0]), VALUES[0][1]),
    "run folders": ("run.json", run_files()["run.json"]),
}
"""An input of each kind that is accepted: what refuses it refuses everything."""

TARGETS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Counter[str]]]] = {
    "recipes": (recipes(), check_recipe),
    "command lines": (command_lines(), check_command_line),
    "data files": (data_files(), check_data_file),
    "messages": (messages(), check_message),
    "run folders": (run_folders(), check_run_folder),
}
"""What is drawn and what is done with it, by name."""
