"""``fedkeep``: what is the same for all its commands."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from rich.console import Console

from fedkeep.cli.commands import COMMANDS, Command
from fedkeep.errors import FedKeepError


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
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="fedkeep",
        description="Federated learning that keeps what it has learned: compare methods against forgetting.",
        epilog="Start with: fedkeep run",
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (says, add) in COMMANDS.items():
        add(commands.add_parser(name, help=says))
    return top


def _version() -> str:
    from importlib.metadata import version

    return version("fedkeep")
