"""The entry point of ``fedkeep``: parse the arguments, run a command, explain its errors."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version

from fedkeep._utils.process import keep_freed_memory
from fedkeep.cli.commands import COMMANDS, add_commands
from fedkeep.cli.text import Parser, Terminal, TerminalHandler, forget_odd_width, say_error
from fedkeep.errors import FedKeepError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    ``arguments``: The command line without the program's name; default: the process's.
    Returns: The exit code: 0, 1 for an error that was explained, 128 plus the number of a signal that stopped the
        command.
    """
    forget_odd_width()
    logging.basicConfig(handlers=[TerminalHandler()], level=logging.WARNING)
    options = parser().parse_args(arguments)
    console = Terminal()
    keep_freed_memory()
    try:
        return int(options.command(options, console))
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        sys.stderr.close()
        return 0
    except FedKeepError as error:
        say_error(" ".join([str(error), *getattr(error, "__notes__", ())]))
        return 1
    except OSError as error:  # such as a full disk, or a folder without write permission
        what = f" ({error.filename})" if error.filename else ""
        say_error(f"{error.strerror or error}{what}")
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
