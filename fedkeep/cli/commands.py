"""The arguments of each command. A command's code is imported when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rich.console import Console

from fedkeep.cli.shared import (
    add_changes,
    add_data,
    add_device,
    add_grid,
    add_machine,
    add_profile,
    add_quiet,
    add_settings,
    add_use,
)
from fedkeep.cli.types import names, natural, numbers, percent, positive, share, width

Command = Callable[[argparse.Namespace, Console], int]
"""Runs a command with its arguments and returns the exit code."""


def _lazily(module: str, name: str) -> Command:
    """Return a command that imports its function when it is called."""

    def command(options: argparse.Namespace, console: Console) -> int:
        from importlib import import_module

        function: Command = getattr(import_module(f"fedkeep.cli.{module}"), name)
        return function(options, console)

    return command


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "recipe", nargs="?", default="demo", help="a recipe's name, or a path to a .toml file (default: demo)"
    )
    add_changes(command)
    add_grid(command, "sfedkd.tau=1,2,4; each combination is a method of the run")
    command.add_argument(
        "--log", type=names, metavar="A,B", help="log metrics too: csv, tensorboard, wandb (offline), mlflow"
    )
    command.add_argument("--title", metavar="TEXT", help="title of the run (default: the recipe's)")
    command.add_argument("--out", metavar="DIR", help="run folder (default: a new one under runs/)")
    command.add_argument(
        "--trial",
        type=positive,
        metavar="K",
        help="run only the K-th method and seed, counted from 1, into --out; other processes may run the others "
        "meanwhile, and fedkeep gather puts them together",
    )
    add_device(command)
    add_machine(command)
    add_profile(command)
    command.set_defaults(command=_lazily("run", "run"))


def _add_tune(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Try values of options on a held-out part of the training examples, with seeds that are not reported, and "
        "write the recipe with the best. The test examples are never used. With the same --out it goes on."
    )
    command.add_argument("recipe", help="a recipe's name, or a path to a .toml file")
    add_grid(command, "sfedkd.tau=1,2,4 or training.lr=0.01,0.1")
    add_changes(command)
    command.set_defaults(seeds=[100, 101])
    command.add_argument(
        "--validation",
        type=float,
        metavar="0.1",
        help="share of each class's training examples that decides (default: the recipe's, or 0.1)",
    )
    command.add_argument("--metric", help="what decides, such as window_forgetting (default: window_mean, accuracy)")
    command.add_argument(
        "--search",
        type=natural,
        default=0,
        metavar="N",
        help="N points that Optuna chooses, instead of all; the grid may have ranges such as training.lr=0.001..0.1",
    )
    command.add_argument("--reported-seeds", action="store_true", help="allow the recipe's own seeds")
    command.add_argument("--out", metavar="DIR", help="folder (default: a new one under runs/)")
    add_device(command)
    add_machine(command)
    command.set_defaults(command=_lazily("tune", "run"))


def _add_flower(command: argparse.ArgumentParser) -> None:
    verbs = command.add_subparsers(title="commands", required=True, metavar="COMMAND")
    new = verbs.add_parser("new", help="write a small Flower app that runs a recipe")
    new.add_argument("folder", metavar="DIR", help="the app's folder; must not exist or be empty")
    new.add_argument("--recipe", default="demo", help="a recipe's name, or a path to a .toml file (default: demo)")
    new.add_argument("--sites", type=positive, default=0, help="sites that take part (default: the recipe's clients)")
    add_changes(new)
    new.set_defaults(command=_lazily("flower", "new"))
    keys = verbs.add_parser("keys", help="make a test authority, the SuperLink's certificate and a key pair per site")
    keys.add_argument("folder", metavar="DIR", help="the keys' folder; must not exist or be empty")
    keys.add_argument("--sites", type=names, required=True, metavar="A,B,C", help="names of the sites")
    keys.add_argument(
        "--hosts",
        type=names,
        default=["localhost", "127.0.0.1"],
        metavar="HOST,ADDRESS",
        help="names and addresses under which sites reach the SuperLink (default: localhost,127.0.0.1)",
    )
    keys.add_argument("--days", type=positive, default=365, help="days that the certificates are valid (default: 365)")
    keys.set_defaults(command=_lazily("flower", "keys"))
    clock = verbs.add_parser("clock", help="compare a site's clock with the server's")
    clock.add_argument("superlink", metavar="HOST:PORT", help="the address that the site's SuperNode is given")
    clock.add_argument("--root-certificates", metavar="FILE", help="the authority's certificate; without it: no TLS")
    clock.set_defaults(command=_lazily("flower", "clock"))


def _add_generator(command: argparse.ArgumentParser) -> None:
    verbs = command.add_subparsers(title="commands", required=True, metavar="COMMAND")
    train = verbs.add_parser("train", help="train a generator; the same command again continues a stopped training")
    train.add_argument("data", help="grey or rgb, as in FedDCL, or a data set; several with + between them")
    train.add_argument("--out", required=True, metavar="DIR", help="folder of the generator")
    train.add_argument(
        "--regime",
        default="paper",
        metavar="REGIME",
        help="paper: all training images; same_classes: a part of each class; disjoint: other classes (default: paper)",
    )
    train.add_argument(
        "--clusters",
        type=positive,
        default=1,
        metavar="N",
        help="subclasses of each class, by similarity of the images: more to condition prototypes on (default: 1)",
    )
    train.add_argument("--half", action="store_true", help="save 16 bits a weight: half the size")
    _add_generator_options(train, "unet.widths=[64,128,128] or training.steps=5000")
    train.set_defaults(command=_lazily("generator", "train"))


def _add_generator_options(command: argparse.ArgumentParser, example: str) -> None:
    add_settings(command, f"change an option, such as {example}")
    command.add_argument("--seed", type=natural, default=0)
    command.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add_data(command)
    add_quiet(command)


def _add_pretrain(command: argparse.ArgumentParser) -> None:
    command.description = "Train an extractor with labels; the same command again continues a stopped training."
    command.add_argument("data", help="a known data set, a Hub id or a path, such as cifar10")
    command.add_argument("--out", required=True, metavar="DIR", help="folder of the extractor")
    command.add_argument("--network", default="vit", metavar="KIND", help="vit or resnet (default: vit)")
    _add_generator_options(command, "network.layers=4 or training.steps=4000")
    command.set_defaults(command=_lazily("pretrain", "run"))


def _add_reproduce(command: argparse.ArgumentParser) -> None:
    command.add_argument("table", nargs="?", help="such as sfedkd/table1; without it the tables are listed")
    command.add_argument("--columns", type=names, metavar="A,B", help="columns to run (default: all)")
    command.add_argument("--methods", type=names, metavar="A,B", help="methods to run (default: all)")
    command.add_argument("--seeds", type=numbers, metavar="0,1", help="seeds to run (default: as many as the paper)")
    command.add_argument(
        "--rounds", type=share, default=1.0, metavar="0.2", help="share of the paper's rounds (default: 1)"
    )
    command.add_argument("--grid", action="store_true", help="also run the values that the paper tuned")
    add_settings(command, "change an option of every column, such as run.evaluate_every=5")
    command.add_argument("--resume", action="store_true", help="only finish the trials that were begun")
    command.add_argument("--dry-run", action="store_true", help="list the trials, with an estimate of time and memory")
    command.add_argument(
        "--out", default="runs/reproduce", metavar="DIR", help="folder of reproductions (default: runs/reproduce)"
    )
    command.add_argument("--page", metavar="FILE", help="write a page of all reproductions in --out, in Markdown")
    add_device(command)
    add_machine(command)
    command.set_defaults(command=_lazily("reproduce", "reproduce"))


def _add_resume(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", help="the run folder")
    add_machine(command)
    add_profile(command)
    command.set_defaults(command=_lazily("run", "resume"))


def _add_gather(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Write the table and the report of a run whose trials were run one by one (fedkeep run --trial), and show its "
        "results. If trials are missing, they are named, and the exit code is 1."
    )
    command.add_argument("run", help="the run folder")
    add_data(command)
    _add_code(command)
    command.set_defaults(command=_lazily("run", "gather"))


def _add_methods(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", nargs="?", help="show one method with its options")
    add_use(command)
    command.set_defaults(command=_lazily("show", "methods"))


def _add_new_method(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", metavar="NAME", help="the name of the class, such as MyMethod")
    command.add_argument(
        "--sequential", action="store_true", help="clients train one after the other, and the server keeps a state"
    )
    command.add_argument("--out", default=".", metavar="DIR", help="where to write (default: here)")
    command.set_defaults(command=_lazily("new_method", "write"))


def _add_completion(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Print a script that completes commands and options. Load it in every shell: "
        "fedkeep completion bash >> ~/.bashrc"
    )
    command.add_argument("shell", choices=("bash", "zsh"))
    command.set_defaults(command=_lazily("completion", "completion"))


def _add_datasets(command: argparse.ArgumentParser) -> None:
    add_data(command)
    command.set_defaults(command=_lazily("show", "datasets"))


def _add_recipes(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "name", nargs="?", help="print this recipe with every option written out, or show the columns of this table"
    )
    command.set_defaults(command=_lazily("show", "recipes"))


def _add_partition(command: argparse.ArgumentParser) -> None:
    command.add_argument("dataset", help="a known data set, a Hub id or a path")
    command.add_argument(
        "scheme", help="iid, exdir, dirichlet, dirichlet-per-client, shards, hybrid, column, or your own"
    )
    command.add_argument(
        "options", nargs="*", default=[], metavar="OPTION=VALUE", help="options of the scheme, such as alpha=0.5"
    )
    command.add_argument("--clients", type=positive, help="how many clients (the same as num_clients=N)")
    command.add_argument("--seed", type=natural, default=0)
    command.add_argument("--out", metavar="FILE", help="write the heat map here, as .svg, or the manifest, as .json")
    add_settings(command, "set an option of [data], such as data.label=species")
    add_data(command)
    add_use(command)
    command.set_defaults(command=_lazily("partition", "partition"))


def _add_compare(command: argparse.ArgumentParser) -> None:
    command.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or archives of them")
    command.add_argument(
        "--against", metavar="METHOD", help="method to which the others' differences are shown (default: the first)"
    )
    command.add_argument(
        "--target", type=percent, metavar="PERCENT", help="also show the first round that reaches this accuracy"
    )
    command.add_argument(
        "--format",
        choices=("table", "markdown", "latex", "csv", "html"),
        default="table",
        metavar="FORMAT",
        help="table, markdown, latex, csv or html (default: table)",
    )
    command.add_argument("--out", metavar="FILE", help="write the text or the page here (default: print the text)")
    _add_figure(command)
    add_use(command)
    command.set_defaults(command=_lazily("show", "compare"))


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help="a run folder, or an archive of one")
    command.add_argument(
        "--out", metavar="DIR", help="where to write (default: the run folder; of an archive, a folder under runs/)"
    )
    command.add_argument(
        "--format",
        choices=("markdown", "latex", "csv", "html"),
        metavar="FORMAT",
        help="markdown, latex or csv: print only this table, or write it into --out; html: write only the page "
        "(default: write all)",
    )
    command.add_argument(
        "--against", metavar="METHOD", help="method to which a table shows differences (default: the first)"
    )
    command.add_argument(
        "--target", type=percent, metavar="PERCENT", help="in a table, also the first round that reaches this accuracy"
    )
    _add_figure(command)
    add_use(command)
    command.set_defaults(command=_lazily("show", "report"))


def _add_figure(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--figure",
        action="append",
        default=[],
        metavar="FILE",
        help="draw curves as .pdf, .svg or .png; may be repeated",
    )
    command.add_argument(
        "--curve",
        choices=("accuracy", "forgetting", "balanced", "loss"),
        metavar="CURVE",
        help="what --figure draws over rounds: accuracy (default), forgetting, balanced (mean over classes) or loss",
    )
    command.add_argument("--width", type=width, metavar="INCHES", help="width of --figure (default: 3.3, a column)")


def _add_verify(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Check every file of a run against the SHA-256 that was recorded as it was written: records, descriptions, "
        "models, checkpoints. The exit code is 1 if a file is damaged."
    )
    command.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or archives of them")
    command.set_defaults(command=_lazily("verify", "verify"))


def _add_archive(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Write the records of a run into one compressed file, without models and checkpoints. fedkeep compare and "
        "fedkeep report read it like the run folder. A reproduction becomes one archive with a folder for each column, "
        "which fedkeep reproduce --page reads. With --out NAME.zip several runs share an archive; NAME.zip/RUN is "
        "one of them."
    )
    command.add_argument("run", metavar="RUN", help="a run folder, or the folder of a reproduction")
    command.add_argument(
        "--out", default="results", metavar="DIR", help="where to write, or the archive to add to (default: results)"
    )
    command.set_defaults(command=_lazily("archive", "archive"))


def _add_export(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Write a trained model for use without FedKeep: weights (safetensors), a PyTorch program, ONNX, a model card, "
        "and the names, shape and normalisation that belong to it."
    )
    command.add_argument("run", metavar="RUN", help="a run folder")
    command.add_argument("--method", metavar="LABEL", help="whose model, where a run has several methods")
    command.add_argument("--seed", type=natural, help="the trial's seed (default: the first)")
    which = command.add_mutually_exclusive_group()
    which.add_argument(
        "--average",
        dest="evaluation_model",
        action="store_const",
        const="moving",
        help="the moving average of the models (the default, if run.evaluation_models names it)",
    )
    which.add_argument("--last", dest="evaluation_model", action="store_const", const="last", help="the last model")
    command.add_argument("--out", metavar="DIR", help="where to write (default: in the run folder, under export/)")
    _add_code(command)
    command.set_defaults(command=_lazily("export", "export"))


def _add_predict(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="the folder that fedkeep export wrote")
    command.add_argument(
        "files", nargs="+", metavar="FILE", help="image files, tables, texts (.txt), arrays (.npz), or folders of them"
    )
    command.add_argument("--format", choices=("table", "csv"), default="table")
    _add_code(command)
    command.set_defaults(command=_lazily("export", "predict_files"))


def _add_code(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--allow-code", action="store_true", help="let the model import its network as package.module:function"
    )
    add_use(command)


def _add_doctor(command: argparse.ArgumentParser) -> None:
    command.description = "Show versions, processor, GPU, data, cache and extras, and what to do about what is missing."
    add_data(command)
    command.set_defaults(command=_lazily("doctor", "doctor"))


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "run": ("run a recipe: methods side by side on the same partition and seeds", _add_run),
    "reproduce": ("reproduce a paper's table, and show it beside the paper's numbers", _add_reproduce),
    "resume": ("continue a run that was stopped, to the identical result", _add_resume),
    "gather": ("put together a run whose trials were run one by one", _add_gather),
    "tune": ("try values of options on held-out training examples, and write the best recipe", _add_tune),
    "methods": ("list the methods: paper, schedule, options, what leaves a client", _add_methods),
    "new-method": ("write a method of your own and its test, to be changed", _add_new_method),
    "datasets": ("list the known data sets and which are available locally", _add_datasets),
    "partition": ("split a data set over clients; show statistics and a heat map", _add_partition),
    "compare": ("show several runs in one table", _add_compare),
    "report": ("write the table and the HTML report of a run again", _add_report),
    "export": ("write a trained model for use without FedKeep: safetensors, PyTorch, ONNX, model card", _add_export),
    "predict": ("predict classes with an exported model: of images, tables, texts", _add_predict),
    "verify": ("check the files of a run against their digests", _add_verify),
    "archive": ("write the records of a run, or of a reproduction, into a compressed file", _add_archive),
    "flower": ("run across machines, on Flower: make an app, make keys, protect the server", _add_flower),
    "generator": ("train a diffusion model that generates images of classes", _add_generator),
    "pretrain": ("train the extractor of a server that then only learns a classifier", _add_pretrain),
    "doctor": ("show what this machine has for FedKeep, and what to do about what it lacks", _add_doctor),
    "recipes": ("list the recipes and the papers' tables, or print one", _add_recipes),
    "completion": ("print a script that completes commands in a shell", _add_completion),
}
"""By command, its help text and the function that adds its arguments; in the order in which they are listed."""
