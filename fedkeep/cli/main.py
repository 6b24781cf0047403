"""The entry point of ``fedkeep``: the commands and their arguments as values; errors are explained.

A command's code is imported when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import errno
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from typing import Any, Literal, get_args, get_origin

from rich.console import Console

from fedkeep._utils.process import keep_freed_memory
from fedkeep._utils.type_hints import annotations_of
from fedkeep.cli.text import Parser, Terminal, TerminalHandler, forget_odd_width, say_error, show_unknown_characters
from fedkeep.errors import FedKeepError
from fedkeep.experiment.runtime import Machine
from fedkeep.options import Options, options_of

Argument = tuple[str, dict[str, Any]]
"""The name of an argument, and how argparse describes it; its ``group`` is that of the help."""


def arg(
    flag: str, help: str, kind: Callable[[str], Any] | None = None, metavar: str | None = None, **more: Any
) -> Argument:
    """Describe an argument: its name, help text, type and placeholder; the help text ends in the default."""
    default = more.get("default")
    if default and not isinstance(default, list | tuple):
        help += f" (default: {default})"
    elif default:
        help += f" (default: {','.join(map(str, default))})"
    options = {"help": help, "type": kind, "metavar": metavar, **more}
    return flag, {name: value for name, value in options.items() if value is not None}


def switch(flag: str, help: str, **more: Any) -> Argument:
    """Describe an argument without a value."""
    return arg(flag, help, action="store_true", **more)


def several(flag: str, help: str, metavar: str, **more: Any) -> Argument:
    """Describe an argument that may be given more than once."""
    return arg(flag, f"{help}; may be repeated", metavar=metavar, action="append", default=[], **more)


def add_arguments(command: argparse.ArgumentParser, arguments: Iterable[Argument]) -> None:
    """Add arguments to a command."""
    groups: dict[str, argparse._ActionsContainer] = {"": command}
    for flag, options in arguments:
        group = options.get("group", "")
        if group not in groups:
            groups[group] = command.add_argument_group(group)
        groups[group].add_argument(flag, **{name: value for name, value in options.items() if name != "group"})


def number(kind: Callable[[str], Any], low: float, high: float, what: str) -> Callable[[str], Any]:
    """Return what reads a number in a range; errors say what it must be."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return read


natural = number(int, 0, math.inf, "a whole number from 0 on")
positive = number(int, 1, math.inf, "a whole number from 1 on")
percent = number(float, 0, 100, "an accuracy in percent, such as 80")
share = number(float, sys.float_info.min, 1, "a share, such as 0.2 (above 0, at most 1)")
inches = number(float, 1, 20, "a number of inches from 1 to 20")


def names(text: str) -> list[str]:
    """Read names, separated by commas; a comma with a space behind it is part of a name, such as ``FedSeq, lr 0.1``."""
    if found := [part.strip() for part in re.split(r",(?! )", text) if part.strip(" ,")]:
        return found
    raise argparse.ArgumentTypeError(f"{text!r} names nothing; give names with commas between them, such as a,b")


def numbers(text: str) -> list[int]:
    """Read whole numbers from 0, separated by commas."""
    return [natural(part.strip()) for part in text.split(",")]


def declared(cls: type[Options], *wanted: str, group: str = "", **defaults: Any) -> list[Argument]:
    """Return the arguments of options, as their class declares them.

    ``**defaults``: Defaults of the command line that are not those of the class.
    """
    found = []
    for name in wanted:
        field, hint, flag = options_of(cls)[name], annotations_of(cls)[name], f"--{name.replace('_', '-')}"
        text, default, metavar = field.metadata["doc"], defaults.get(name, field.default), name.split("_")[-1].upper()
        text += f" (default: {default})" if name in defaults and not default else ""
        if hint is bool:
            found.append(switch(flag, text, group=group))
        elif get_origin(hint) is tuple:
            found.append(several(flag, text, "FILE", group=group))
        elif get_origin(hint) is Literal:
            found.append(arg(flag, text, default=default, choices=get_args(hint), group=group))
        else:
            kind = None if hint is not int else positive if field.metadata["low"] else natural
            found.append(arg(flag, text, kind, metavar, default=default, group=group))
    return found


def settings(example: str) -> Argument:
    """Return ``--set``."""
    return several("--set", f"change an option, such as {example}", "SECTION.OPTION=VALUE", dest="settings")


def grid(example: str) -> Argument:
    """Return ``--grid``."""
    return several("--grid", f"try several values of an option, such as {example}", "METHOD.OPTION=A,B")


QUIET = switch("--quiet", "show no progress")
DATA, USE, CODE = declared(Machine, "data_dir"), declared(Machine, "use"), declared(Machine, "allow_code", "use")
DEVICE = declared(Machine, "device", "threads", "stack")
MACHINE = [
    *declared(Machine, "workers", "executor", "address", "data_dir", "allow_code", "use", group="machine", workers=0),
    QUIET,
]
RECIPE = "a recipe's name, or a path to a .toml file"
CHANGES = [
    settings("training.lr=0.05 or algorithm.teachers=3"),
    arg(
        "--methods",
        "methods to run instead of the recipe's; a label as the recipe writes it, such as FedSeq, is one row, a "
        "method's name, such as fedseq, each of its rows",
        names,
        "A,B",
    ),
    arg("--seeds", "seeds to run instead of the recipe's", numbers, "0,1"),
    arg("--rounds", "rounds to run instead of the recipe's", positive),
]


@dataclass
class Command:
    """A command: ``module.function`` of `fedkeep.cli`, its help text, of which a list shows the first sentence."""

    function: str
    help: str
    arguments: tuple[Argument, ...]
    verbs: dict[str, Command] = field(default_factory=dict)

    def __call__(self, options: argparse.Namespace, console: Console) -> int:
        """Run the command with its arguments, and return the exit code."""
        module, _, name = self.function.partition(".")
        function: Callable[[argparse.Namespace, Console], int] = getattr(import_module(f"fedkeep.cli.{module}"), name)
        return function(options, console)


COMMANDS: dict[str, Command] = {}
"""The commands, in the order in which they are listed."""


def _command(name: str, function: str, help: str, *arguments: Argument) -> None:
    """Add a command, or a verb of one, such as "flower new"."""
    parent, _, verb = name.rpartition(" ")
    (COMMANDS[parent].verbs if parent else COMMANDS)[verb] = Command(function, help, arguments)


def add_commands(parser: argparse.ArgumentParser, commands: dict[str, Command]) -> None:
    """Add commands to a parser."""
    group = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, command in commands.items():
        added = group.add_parser(name, help=command.help.partition(". ")[0], description=command.help)
        add_arguments(added, command.arguments)
        added.set_defaults(command=command)
        if command.verbs:
            add_commands(added, command.verbs)


_NEW_RUN = arg("--out", "run folder (default: a new one under runs/)", metavar="DIR")
_RUN = arg("run", "a run folder, or an archive of one", metavar="RUN")
_RUNS = arg("runs", "run folders, or archives of them", metavar="RUN", nargs="+")
_SEED = arg("--seed", "the seed (default: 0)", natural, default=0)
_DEMO = arg("recipe", RECIPE, nargs="?", default="demo")
_FOLDER = arg("folder", "a new or an empty folder", metavar="DIR")
_ON_DEVICE = [_SEED, DEVICE[0], *DATA, QUIET]
_FORMATS = ("table", "markdown", "latex", "csv", "html")
_SHOWN = [
    arg("--against", "method to which a table shows differences (default: the first)", metavar="METHOD"),
    arg("--target", "in tables, also the first round that reaches this accuracy", percent, "PERCENT"),
    several("--figure", "draw curves as .pdf, .svg or .png", "FILE"),
    arg("--curve", "what --figure draws: accuracy, forgetting, balanced, loss, or a metric such as auroc"),
    arg("--width", "width of --figure (default: 3.3, a column)", inches, "INCHES"),
    *USE,
]

_command(
    "run",
    "run.run",
    "run a recipe: methods side by side on the same partition and seeds",
    _DEMO,
    *CHANGES,
    grid("sfedkd.tau=1,2,4; each combination is a method of the run"),
    arg("--log", "log metrics too: tensorboard, wandb (offline)", names, "A,B"),
    _NEW_RUN,
    switch("--dry-run", "run nothing: say what time, memory and bytes the run would take"),
    arg("--trial", "run only the K-th method and seed, from 1, into --out; then: fedkeep resume", positive, "K"),
    *DEVICE,
    *MACHINE,
)
_command(
    "reproduce",
    "reproduce.reproduce",
    "reproduce a paper's table, and show it beside the paper's numbers",
    arg("table", "such as sfedkd/table1; the tables are listed by fedkeep recipes", nargs="?"),
    arg("--columns", "columns to run (default: all)", names, "A,B"),
    arg("--methods", "methods to run (default: all)", names, "A,B"),
    arg("--seeds", "seeds to run (default: as many as the paper)", numbers, "0,1"),
    arg("--rounds", "share of the paper's rounds", share, "0.2", default=1.0),
    switch("--grid", "also run the values that the paper tuned"),
    settings("run.evaluate_every=5, in every column"),
    switch("--dry-run", "list the trials, with an estimate of time and memory"),
    arg("--out", "folder of reproductions", metavar="DIR", default="runs/reproduce"),
    arg("--page", "write a page of all reproductions in --out, in Markdown", metavar="FILE"),
    *DEVICE,
    *MACHINE,
)
_command(
    "resume",
    "run.resume",
    "continue a run that was stopped, to the identical result",
    arg("run", "the run folder"),
    *MACHINE,
)
_command(
    "tune",
    "run.tune",
    "try values of options on held-out training examples, and write the best recipe. The seeds are not those that are "
    "reported, and the test examples are never used. With the same --out it goes on.",
    arg("recipe", RECIPE),
    grid("sfedkd.tau=1,2,4 or training.lr=0.01,0.1"),
    *(each for each in CHANGES if each[0] != "--seeds"),
    arg("--seeds", "seeds to run instead of the recipe's", numbers, "0,1", default=[100, 101]),
    arg("--validation", "share of the training examples that decides (default: the recipe's, or 0.1)", float, "0.1"),
    switch("--reported-seeds", "allow the recipe's own seeds"),
    _NEW_RUN,
    *DEVICE,
    *MACHINE,
)
_command(
    "methods",
    "show.methods",
    "list the methods: paper, schedule, options, what leaves a client",
    arg("name", "show one method with its options", nargs="?"),
    *USE,
)
_command(
    "new-method",
    "new_method.write",
    "write a method of your own and its test, to be changed",
    arg("name", "the name of the class, such as MyMethod", metavar="NAME"),
    switch("--sequential", "clients train one after the other, and the server keeps a state"),
    arg("--out", "where to write", metavar="DIR", default="."),
)
_command("datasets", "show.datasets", "list the known data sets and which are available locally", *DATA)
_command(
    "compare",
    "show.compare",
    "show several runs in one table",
    _RUNS,
    arg("--format", ", ".join(_FORMATS), metavar="FORMAT", choices=_FORMATS, default="table"),
    arg("--out", "write the text or the page here (default: print the text)", metavar="FILE"),
    *_SHOWN,
)
_command(
    "report",
    "show.report",
    "write the table and the HTML report of a run again",
    _RUN,
    arg("--out", "where to write (default: the run folder; of an archive, a folder under runs/)", metavar="DIR"),
    arg("--format", f"write only one: {', '.join(_FORMATS[1:])}", metavar="FORMAT", choices=_FORMATS[1:]),
    *_SHOWN,
)
_command(
    "export",
    "export.export",
    "write a trained model for use without FedKeep: safetensors, PyTorch, ONNX, model card. The names, shape and "
    "normalisation that belong to it are beside it.",
    arg("run", "a run folder", metavar="RUN"),
    arg("--method", "whose model, where a run has several methods", metavar="LABEL"),
    arg("--seed", "the trial's seed (default: the first)", natural),
    arg(
        "--model",
        "which: the moving average (default, if run.evaluation_models names it), the mean of the last round's, or the "
        "last",
        choices=("moving", "round", "last"),
        dest="evaluation_model",
    ),
    arg("--out", "where to write (default: in the run folder, under export/)", metavar="DIR"),
    *CODE,
)
_command(
    "predict",
    "export.predict_files",
    "predict classes with an exported model: of images, tables, texts",
    arg("model", "the folder that fedkeep export wrote", metavar="MODEL"),
    arg("files", "images, tables, texts (.txt), arrays (.npz), or folders of them", metavar="FILE", nargs="+"),
    arg("--format", "of what is printed", choices=("table", "csv"), default="table"),
    *CODE,
)
_command(
    "verify",
    "export.verify",
    "check the files of a run against their digests. These are the SHA-256 that were recorded as the files were "
    "written: records, descriptions, models, checkpoints. The exit code is 1 if a file is damaged.",
    _RUNS,
)
_command(
    "archive",
    "export.archive",
    "write the records of a run, or of a reproduction, into a compressed file. Models and checkpoints stay out. "
    "fedkeep compare and fedkeep report read it like the run folder. A reproduction becomes one "
    "archive with a folder for each column, which fedkeep reproduce --page reads.",
    arg("run", "a run folder, or the folder of a reproduction", metavar="RUN"),
    arg("--out", "where to write, or NAME.zip, an archive that several runs share", metavar="DIR", default="results"),
)
_command("flower", "", "run across machines, on Flower: make an app, make keys, compare clocks")
_command(
    "flower new",
    "flower.new",
    "write a small Flower app that runs a recipe",
    _FOLDER,
    arg("--recipe", RECIPE, default="demo"),
    arg("--sites", "sites that take part (default: the recipe's clients)", positive, default=0),
    *CHANGES,
)
_command(
    "flower keys",
    "flower.keys",
    "make a test authority, the SuperLink's certificate and a key pair per site",
    _FOLDER,
    arg("--sites", "names of the sites", names, "A,B,C", required=True),
    arg("--hosts", "how sites reach the SuperLink", names, "HOST,ADDRESS", default=["localhost", "127.0.0.1"]),
)
_command(
    "flower clock",
    "flower.clock",
    "compare a site's clock with the server's",
    arg("superlink", "the address that the site's SuperNode is given", metavar="HOST:PORT"),
    arg("--root-certificates", "the authority's certificate; without it: no TLS", metavar="FILE"),
)
_command("generator", "", "train a diffusion model that generates images of classes")
_command(
    "generator train",
    "generator.train_diffusion",
    "train a generator; the same command again continues a stopped training",
    arg("data", "grey or rgb, as in FedDCL, or a data set; several with + between them"),
    arg("--out", "folder of the generator", metavar="DIR", required=True),
    arg("--regime", "paper: all images; same_classes: a part of each class; disjoint: other classes", default="paper"),
    arg("--clusters", "subclasses of each class, by similarity, for prototypes", positive, "N", default=1),
    switch("--half", "save 16 bits a weight: half the size"),
    settings("unet.widths=[64,128,128], training.steps=5000, or data.size=[32,32] of a folder of images"),
    *_ON_DEVICE,
)
_command(
    "recipes",
    "recipes.recipes",
    "list the recipes and the papers' tables, or print one",
    arg("name", "print this recipe with its options written out, or show the columns of this table", nargs="?"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    ``arguments``: The command line without the program's name; default: the process's.
    Returns: The exit code: 0, 1 for an error that was explained, 128 plus the number of a signal that stopped the
        command.
    """
    forget_odd_width()
    show_unknown_characters()
    logging.basicConfig(handlers=[TerminalHandler()], level=logging.WARNING)
    options = parser().parse_args(arguments)
    console = Terminal()
    keep_freed_memory()
    try:
        return int(options.command(options, console))
    except FedKeepError as error:
        say_error(" ".join([str(error), *getattr(error, "__notes__", ())]))
        return 1
    except OSError as error:  # such as a full disk, or a folder without write permission
        what = f" ({error.filename})" if error.filename else ""
        full = ". Free space there, then repeat the command, or go on with a run that was begun: fedkeep resume."
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        say_error(f"{error.strerror or error}{what}{full * is_full}")
        return 1
    except KeyboardInterrupt:
        Terminal(stderr=True).print("stopped.")
        return 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = Parser(
        prog="fedkeep",
        description="Federated learning that keeps what it has learned: compare methods against forgetting.",
        epilog="Start with: fedkeep run",
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {version('fedkeep')}")
    add_commands(top, COMMANDS)
    return top
