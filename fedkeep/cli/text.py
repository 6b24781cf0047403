"""Text that fits the terminal: sentences break between words, and commands stay whole, so that they can be copied."""

import argparse
import io
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from fedkeep._utils.escaping import printable
from fedkeep._utils.process import Terminated
from fedkeep.errors import nearest

_COMMAND = re.compile(r"\s*(?:\S*/)?(?:fedkeep|flwr|export|nginx|python) ")
_OWN_COMMAND = re.compile(r"(?<![\w./-])fedkeep (?=[a-z]|-)|(?<![\w./-])pip install (?=['\"])")


def forget_odd_width() -> None:
    """Take a width of the terminal that cannot be one out of the environment, such as the 0 of containers."""
    width = os.environ.get("COLUMNS", "80")
    if not (width.isdecimal() and 20 <= int(width[:9]) <= 10_000):
        del os.environ["COLUMNS"]


def show_unknown_characters() -> None:
    """Let an output that lacks a character show its number in its place, as errors do."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class Terminal(Console):
    """A console that shows names of others without obeying them, and its own commands as they can be run here."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the parts of what is shown; Rich's own controls pass."""
        for part in super().render(renderable, options):
            yield part if part.control else part._replace(text=printable(part.text))

    def on_broken_pipe(self) -> None:
        """Stop the command, as nobody reads its output any more, such as after ``| head``."""
        with suppress(OSError, ValueError):  # it may be no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        raise Terminated(getattr(signal, "SIGPIPE", signal.SIGTERM))  # which Windows lacks

    def print(self, *objects: Any, **options: Any) -> None:
        """Print text, or what Rich draws."""
        super().print(*(runnable(one) if isinstance(one, str) else one for one in objects), **options)


@cache
def program() -> tuple[str, str]:
    """Return the words by which this program, and pip beside it, were and can be started: of the shell that did it."""
    begun, python = Path(sys.argv[0]), _from_here(Path(sys.executable))
    if begun.name == "__main__.py" and begun.parent.name == "fedkeep":
        return f"{python} -m fedkeep", f"{python} -m pip"
    if begun.stem != "fedkeep" or _is_found(begun):
        return "fedkeep", "pip"
    return _from_here(begun), f"{python} -m pip"


def _is_found(path: Path) -> bool:
    """Return whether the shell finds a program by its name alone."""
    found = shutil.which(path.name)
    return found is not None and Path(found).absolute() == path.absolute()


def _from_here(path: Path) -> str:
    """Return a program as a shell in the working directory starts it."""
    if _is_found(path):
        return path.name
    path, here = path.absolute(), Path.cwd()
    near = str(path.relative_to(here) if path.is_relative_to(here) else path)
    return shlex.quote(near if os.sep in near else os.path.join(".", near))


def runnable(text: str) -> str:
    """Return text whose commands begin as this program was started."""
    own, pip = program()
    return _OWN_COMMAND.sub(lambda found: f"{own} " if found[0].startswith("fedkeep") else f"{pip} install ", text)


def say(console: Console, text: str, style: str = "", *, paragraphs: bool = False) -> None:
    """Print text as it is, without markup.

    A line that is wider than the terminal breaks between words, unless it is a command: a terminal breaks it itself,
    and copies it whole. In a file or a pipe lines stay as they are, so that they can be searched.

    ``paragraphs``: Join the lines of each paragraph first; indented ones, such as formulas, stay.
    """
    if paragraphs:
        text = re.sub(r"(?<=\S)\n(?! {4}|- |\n)(?<!:\n) *(?=\S)", " ", text)
    for line in _lines(runnable(text), console):
        console.print(Text(line, style), soft_wrap=True)


def _lines(text: str, console: Console) -> Iterator[str]:
    for line in text.split("\n"):
        words = line.lstrip(" ")
        if _COMMAND.match(words) or not (console.is_terminal or "COLUMNS" in os.environ):
            yield line
        else:
            indent = line[: len(line) - len(words)]
            yield from textwrap.wrap(
                words, console.width, initial_indent=indent, subsequent_indent=indent, break_long_words=False,
                break_on_hyphens=False,
            ) or [""]  # fmt: skip


def say_error(message: str) -> None:
    """Print an error to the standard error stream."""
    console = Terminal(stderr=True)
    for number, line in enumerate(_lines(runnable(f"error: {message}"), console)):
        text = Text(line)
        text.stylize("bold red", 0, 0 if number else len("error:"))
        console.print(text, soft_wrap=True)


class TerminalHandler(logging.Handler):
    """Prints the messages of a log on the standard error stream."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        say(Terminal(stderr=True), f"{record.levelname} {record.getMessage()}")


class Parser(argparse.ArgumentParser):
    """A parser of arguments whose errors fit the terminal and name the word that may have been meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what this command does not know, instead of leaving it to the parser of all commands."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            known = re.findall(r"--[\w-]+", self.format_help())
            hint = nearest(flags[0], known) if flags and flags[0] not in known else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}.{hint}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Print how the command is used and what was wrong, and exit with code 2."""
        if found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message, flags=re.S):
            choices = re.findall(r"[^\s,']+", found[2])
            message += f".{nearest(found[1], choices)}"
        self.print_usage(sys.stderr)
        say(Terminal(stderr=True), f"{self.prog}: error: {message}")
        raise SystemExit(2)
