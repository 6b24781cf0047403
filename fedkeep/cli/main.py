"""``fedkeep``: its commands and their arguments."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from fedkeep.errors import FedKeepError

Command = Callable[[argparse.Namespace, Console], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 for an error that it explains, 130 when interrupted."""
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    options = parser().parse_args(arguments)
    console = Console(stderr=False)
    command: Command = options.command
    try:
        return command(options, console)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        sys.stderr.close()
        return 0
    except FedKeepError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False, soft_wrap=True)
        return 1
    except OSError as error:  # a full disk, a folder that may not be written
        what = f" ({error.filename})" if error.filename else ""
        Console(stderr=True).print(
            f"error: {error.strerror or error}{what}", highlight=False, markup=False, soft_wrap=True
        )
        return 1
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped.")
        return 130


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def parser() -> argparse.ArgumentParser:
    """Return the parser; commands are imported when they run, so that ``--help`` is quick."""
    top = argparse.ArgumentParser(
        prog="fedkeep",
        description="Federated learning that keeps what it has learned: compare methods against forgetting.",
        epilog="Start with: fedkeep run",
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="run a recipe: methods side by side on the same partition and seeds"))
    _add_reproduce(
        commands.add_parser("reproduce", help="reproduce a paper's table, and show it beside the paper's numbers")
    )
    _add_resume(commands.add_parser("resume", help="continue a run that was stopped, to the identical result"))
    _add_methods(
        commands.add_parser("methods", help="list the methods: paper, schedule, options, what leaves a client")
    )
    _add_datasets(commands.add_parser("datasets", help="list the known data sets and where they were found"))
    _add_partition(
        commands.add_parser("partition", help="split a data set over clients; show statistics and a heat map")
    )
    _add_compare(commands.add_parser("compare", help="show several runs in one table"))
    _add_report(commands.add_parser("report", help="write the table and the HTML report of a run again"))
    _add_flower(commands.add_parser("flower", help="run across machines, on Flower: make an app, make keys"))
    _add_generator(
        commands.add_parser("generator", help="train a diffusion model that draws images of classes, and look at it")
    )
    _add_pretrain(
        commands.add_parser("pretrain", help="train the extractor of a server that then only learns a classifier")
    )
    _add_recipes(commands.add_parser("recipes", help="list the recipes and the papers' tables, or print one"))
    return top


def _version() -> str:
    from importlib.metadata import version

    return version("fedkeep")


def _lazily(module: str, name: str) -> Command:
    def command(options: argparse.Namespace, console: Console) -> int:
        from importlib import import_module

        found: Command = getattr(import_module(f"fedkeep.cli.{module}"), name)
        return found(options, console)

    return command


def _add_machine(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("machine")
    group.add_argument(
        "--workers", type=_natural, default=0, help="processes that share the runs (default: one per core)"
    )
    _add_data(group)
    group.add_argument(
        "--allow-code", action="store_true", help="let a recipe import its model as package.module:function"
    )
    group.add_argument(
        "--use", action="append", default=[], metavar="FILE", help="import methods of your own from a .py file"
    )
    group.add_argument("--quiet", action="store_true", help="no progress")


def _add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    command.add_argument("--threads", type=_positive, default=1, help="PyTorch threads in each process (default: 1)")
    command.add_argument(
        "--stack",
        type=_positive,
        default=0,
        metavar="N",
        help="train up to N clients of a cohort as one stacked model; 1: none, the same bits every day (default: "
        "what a trial finds quickest; what was begun keeps its own)",
    )


def _add_profile(command: argparse.ArgumentParser) -> None:
    command.add_argument("--profile", action="store_true", help="show at the end where the time went")


def _add_data(group: argparse._ActionsContainer) -> None:
    group.add_argument("--data-dir", metavar="DIR", help="folder of local data sets (default: $FEDKEEP_DATA)")


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "recipe", nargs="?", default="demo", help="a recipe's name, or a path to a .toml file (default: demo)"
    )
    _add_changes(command)
    command.add_argument("--out", metavar="DIR", help="run folder (default: a new one under runs/)")
    _add_device(command)
    _add_machine(command)
    _add_profile(command)
    command.set_defaults(command=_lazily("run", "run"))


def _add_changes(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.OPTION=VALUE",
        dest="settings",
        help="change an option, such as training.lr=0.05 or algorithm.teachers=3; may be repeated",
    )
    command.add_argument("--methods", type=_names, metavar="A,B", help="methods to run instead of the recipe's")
    command.add_argument("--seeds", type=_numbers, metavar="0,1", help="seeds to run instead of the recipe's")
    command.add_argument("--rounds", type=_positive, help="rounds to run instead of the recipe's")


def _add_flower(command: argparse.ArgumentParser) -> None:
    verbs = command.add_subparsers(title="commands", required=True, metavar="COMMAND")
    new = verbs.add_parser("new", help="write a small Flower app that carries out a recipe")
    new.add_argument("folder", metavar="DIR", help="where to write it; must not exist or be empty")
    new.add_argument("--recipe", default="demo", help="a recipe's name, or a path to a .toml file (default: demo)")
    new.add_argument("--sites", type=_positive, default=0, help="sites that take part (default: the recipe's clients)")
    _add_changes(new)
    new.set_defaults(command=_lazily("flower", "new"))
    keys = verbs.add_parser("keys", help="make a test authority, the SuperLink's certificate and a key pair per site")
    keys.add_argument("folder", metavar="DIR", help="where to write them; must not exist or be empty")
    keys.add_argument("--sites", type=_names, required=True, metavar="A,B,C", help="names of the sites")
    keys.add_argument(
        "--hosts",
        type=_names,
        default=["localhost", "127.0.0.1"],
        metavar="HOST,ADDRESS",
        help="names and addresses under which sites reach the SuperLink (default: localhost,127.0.0.1)",
    )
    keys.add_argument("--days", type=_positive, default=365, help="days that the certificates are valid (default: 365)")
    keys.set_defaults(command=_lazily("flower", "keys"))
    gate = verbs.add_parser("gate", help="let nodes through to a SuperLink, and nobody to its Control API")
    gate.add_argument("--keys", required=True, metavar="DIR", help="the folder that `fedkeep flower keys` wrote")
    gate.add_argument("--listen", default="0.0.0.0:8000", metavar="HOST:PORT", help="default: 0.0.0.0:8000")
    gate.add_argument("--superlink", default="127.0.0.1:8001", metavar="HOST:PORT", help="default: 127.0.0.1:8001")
    gate.set_defaults(command=_lazily("flower", "gate"))


def _add_generator(command: argparse.ArgumentParser) -> None:
    verbs = command.add_subparsers(title="commands", required=True, metavar="COMMAND")
    train = verbs.add_parser("train", help="train a generator; the same command again goes on where it was stopped")
    train.add_argument("data", help="grey or rgb, as in FedDCL, or a data set; several with + between them")
    train.add_argument("--out", required=True, metavar="DIR", help="folder of the generator")
    train.add_argument(
        "--regime",
        default="paper",
        metavar="REGIME",
        help="paper: all training images; same_classes: a part of each class; disjoint: other classes (default: paper)",
    )
    train.add_argument(
        "--codes",
        type=_positive,
        default=1,
        metavar="N",
        help="codes of each class, one for images that look alike: more to find prototypes by (default: 1)",
    )
    train.add_argument("--half", action="store_true", help="keep 16 bits a weight: half the size")
    _add_generator_options(train, "unet.widths=[64,128,128] or training.steps=5000")
    train.set_defaults(command=_lazily("generator", "train"))
    sample = verbs.add_parser("sample", help="draw real and generated images side by side")
    sample.add_argument("folder", metavar="DIR", help="folder of the generator")
    sample.add_argument("--out", metavar="FILE", help="the picture, .png (default: samples.png in the folder)")
    sample.add_argument("--count", type=_positive, default=8, help="images of each class (default: 8)")
    _add_generator_use(sample)
    sample.set_defaults(command=_lazily("generator", "sample"))
    check = verbs.add_parser("check", help="measure with classifiers how good a generator is, class by class")
    check.add_argument("folder", metavar="DIR", help="folder of the generator")
    check.add_argument("--count", type=_positive, default=200, help="generated images of each class (default: 200)")
    check.add_argument(
        "--real", type=_positive, default=1000, help="real training images of each class, at most (default: 1000)"
    )
    check.add_argument("--model", default="cnn4", help="architecture of the classifiers (default: cnn4)")
    _add_generator_use(check)
    check.set_defaults(command=_lazily("generator", "check"))


def _add_generator_use(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--on",
        metavar="DATA",
        help="draw the classes of these data, from prototypes that are found first (default: the generator's own)",
    )
    _add_generator_options(command, "sampler.guidance=1 or prototypes.steps=500")


def _add_generator_options(command: argparse.ArgumentParser, example: str) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.OPTION=VALUE",
        dest="settings",
        help=f"change an option, such as {example}; may be repeated",
    )
    command.add_argument("--seed", type=_natural, default=0)
    command.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    _add_data(command)
    command.add_argument("--quiet", action="store_true", help="no progress")


def _add_pretrain(command: argparse.ArgumentParser) -> None:
    command.description = "Train an extractor with labels; the same command again goes on where it was stopped."
    command.add_argument("data", help="a known data set, a Hub id or a path, such as cifar10")
    command.add_argument("--out", required=True, metavar="DIR", help="folder of the extractor")
    command.add_argument("--network", default="vit", metavar="KIND", help="vit or resnet (default: vit)")
    _add_generator_options(command, "network.layers=4 or training.steps=4000")
    command.set_defaults(command=_lazily("pretrain", "run"))


def _add_reproduce(command: argparse.ArgumentParser) -> None:
    command.add_argument("table", nargs="?", help="such as sfedkd/table1; without it the tables are listed")
    command.add_argument("--columns", type=_names, metavar="A,B", help="columns to run (default: all)")
    command.add_argument("--methods", type=_names, metavar="A,B", help="methods to run (default: all)")
    command.add_argument("--seeds", type=_numbers, metavar="0,1", help="seeds to run (default: as many as the paper)")
    command.add_argument(
        "--rounds", type=_share, default=1.0, metavar="0.2", help="share of the paper's rounds (default: 1)"
    )
    command.add_argument("--grid", action="store_true", help="also run the values that the paper tuned")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.OPTION=VALUE",
        dest="settings",
        help="change an option of every column, such as run.evaluate_every=5; may be repeated",
    )
    command.add_argument("--resume", action="store_true", help="only finish what was begun")
    command.add_argument("--dry-run", action="store_true", help="list the cells, with an estimate of time and memory")
    command.add_argument(
        "--out", default="runs/reproduce", metavar="DIR", help="folder of reproductions (default: runs/reproduce)"
    )
    command.add_argument("--page", metavar="FILE", help="write a page of all reproductions in --out, in Markdown")
    _add_device(command)
    _add_machine(command)
    command.set_defaults(command=_lazily("reproduce", "reproduce"))


def _add_resume(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", help="the run folder")
    _add_machine(command)
    _add_profile(command)
    command.set_defaults(command=_lazily("run", "resume"))


def _add_methods(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", nargs="?", help="show one method with its options")
    command.add_argument(
        "--use", action="append", default=[], metavar="FILE", help="import methods of your own from a .py file"
    )
    command.set_defaults(command=_lazily("show", "methods"))


def _add_datasets(command: argparse.ArgumentParser) -> None:
    _add_data(command)
    command.set_defaults(command=_lazily("show", "datasets"))


def _add_recipes(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "name", nargs="?", help="print this recipe with every option written out, or show the columns of this table"
    )
    command.set_defaults(command=_lazily("show", "recipes"))


def _add_partition(command: argparse.ArgumentParser) -> None:
    command.add_argument("dataset", help="a known data set, a Hub id or a path")
    command.add_argument("scheme", help="iid, exdir, dirichlet, dirichlet-per-client, shards, hybrid or column")
    command.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="options of the scheme, such as alpha=0.5")
    command.add_argument("--clients", type=_positive, help="how many clients (the same as clients=N)")
    command.add_argument("--seed", type=_natural, default=0)
    command.add_argument("--out", metavar="FILE", help="write the heat map here, as .svg, or the manifest, as .json")
    _add_data(command)
    command.set_defaults(command=_lazily("partition", "partition"))


def _add_compare(command: argparse.ArgumentParser) -> None:
    command.add_argument("runs", nargs="+", help="run folders")
    command.add_argument("--against", metavar="METHOD", help="show paired differences over seeds to this method")
    command.add_argument(
        "--target", type=_percent, metavar="PERCENT", help="also show the first round that reaches this accuracy"
    )
    command.add_argument("--format", choices=("table", "markdown", "csv"), default="table")
    command.set_defaults(command=_lazily("show", "compare"))


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", help="the run folder")
    command.add_argument("--png", metavar="FILE", help="also draw the accuracy curves as a picture")
    command.set_defaults(command=_lazily("show", "report"))


def _positive(text: str) -> int:
    return _whole(text, 1)


def _natural(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, low: int) -> int:
    if not text.isdecimal() or int(text) < low:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} on")
    return int(text)


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not an accuracy in percent, such as 80")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of the rounds, such as 0.2 (above 0, at most 1)")
    return value


def _numbers(text: str) -> list[int]:
    return [_natural(part.strip()) for part in text.split(",")]


def _names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; give names with commas between them, such as a,b")
    return names
