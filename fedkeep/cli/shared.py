"""Arguments that several commands share."""

from __future__ import annotations

import argparse

from fedkeep.cli.types import names, natural, numbers, positive


def add_machine(command: argparse.ArgumentParser) -> None:
    """Add the arguments of a machine: workers, data, user code."""
    group = command.add_argument_group("machine")
    group.add_argument(
        "--workers", type=natural, default=0, help="processes that share the trials (default: one per core)"
    )
    group.add_argument(
        "--executor",
        choices=["processes", "ray"],
        default="processes",
        help="what trains the clients: processes of this machine, or workers on a Ray cluster (default: processes)",
    )
    group.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="of the Ray cluster (default: auto, the one that this machine belongs to)",
    )
    add_data(group)
    group.add_argument(
        "--allow-code", action="store_true", help="let a recipe import its model as package.module:function"
    )
    add_use(group)
    add_quiet(group)


def add_device(command: argparse.ArgumentParser) -> None:
    """Add the arguments of a device: device, threads, stacking, compiling."""
    command.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    command.add_argument("--threads", type=positive, default=1, help="PyTorch threads in each process (default: 1)")
    command.add_argument(
        "--stack",
        type=positive,
        default=0,
        metavar="N",
        help="train up to N clients of a cohort as one stacked model; 1: no stacking, reproducible bit for bit "
        "(default: the quickest in a measurement before round 1; a resumed trial keeps its own)",
    )
    command.add_argument(
        "--compile",
        choices=["auto", "on", "off"],
        default="auto",
        help="compile the steps of local training with torch.compile; off: reproducible bit for bit (default: auto, "
        "where a measurement before round 1 finds it quicker, in runs of ten minutes and more; a resumed trial keeps "
        "its own)",
    )


def add_profile(command: argparse.ArgumentParser) -> None:
    """Add ``--profile``."""
    command.add_argument("--profile", action="store_true", help="show at the end how the time was spent")


def add_data(group: argparse._ActionsContainer) -> None:
    """Add ``--data-dir``.

    ``group``: The command's parser or a group of its arguments.
    """
    group.add_argument("--data-dir", metavar="DIR", help="folder of local data sets (default: $FEDKEEP_DATA)")


def add_quiet(group: argparse._ActionsContainer) -> None:
    """Add ``--quiet``.

    ``group``: The command's parser or a group of its arguments.
    """
    group.add_argument("--quiet", action="store_true", help="show no progress")


def add_use(group: argparse._ActionsContainer) -> None:
    """Add ``--use``.

    ``group``: The command's parser or a group of its arguments.
    """
    group.add_argument(
        "--use",
        action="append",
        default=[],
        metavar="FILE",
        help="import methods, metrics or partitions of your own from a .py file; may be repeated",
    )


def add_settings(command: argparse.ArgumentParser, help_text: str) -> None:
    """Add ``--set``.

    ``help_text``: The help text, which should give an example.
    """
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.OPTION=VALUE",
        dest="settings",
        help=f"{help_text}; may be repeated",
    )


def add_grid(command: argparse.ArgumentParser, example: str) -> None:
    """Add ``--grid``."""
    command.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="METHOD.OPTION=A,B",
        help=f"try several values of an option, such as {example}; may be repeated",
    )


def add_changes(command: argparse.ArgumentParser) -> None:
    """Add the arguments that change a recipe."""
    add_settings(command, "change an option, such as training.lr=0.05 or algorithm.teachers=3")
    command.add_argument(
        "--methods",
        type=names,
        metavar="A,B",
        help="methods to run instead of the recipe's; a label as the recipe writes it, such as FedSeq, is one row, "
        "a method's name, such as fedseq, each of its rows",
    )
    command.add_argument("--seeds", type=numbers, metavar="0,1", help="seeds to run instead of the recipe's")
    command.add_argument("--rounds", type=positive, help="rounds to run instead of the recipe's")
