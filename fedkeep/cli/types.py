"""Types of command-line arguments: numbers, shares and names. Their errors say what is expected."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Parse a whole number from 1."""
    return _integer(text, 1)


def natural(text: str) -> int:
    """Parse a whole number from 0."""
    return _integer(text, 0)


def _integer(text: str, low: int) -> int:
    if not text.isdecimal() or int(text) < low:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} on")
    return int(text)


def width(text: str) -> float:
    """Parse a width of a figure in inches, 1 to 20."""
    try:
        inches = float(text)
    except ValueError:
        inches = float("nan")
    if not 1 <= inches <= 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of inches from 1 to 20")
    return inches


def percent(text: str) -> float:
    """Parse an accuracy in percent, 0 to 100."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not an accuracy in percent, such as 80")
    return value


def share(text: str) -> float:
    """Parse a share of the rounds, above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of the rounds, such as 0.2 (above 0, at most 1)")
    return value


def numbers(text: str) -> list[int]:
    """Parse whole numbers from 0, separated by commas."""
    return [natural(part.strip()) for part in text.split(",")]


def names(text: str) -> list[str]:
    """Parse names, separated by commas."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; give names with commas between them, such as a,b")
    return parts
