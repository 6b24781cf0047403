"""What arguments of the command line may be: numbers, shares and names, with an error that says what is expected."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    return _whole(text, 1)


def natural(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, low: int) -> int:
    if not text.isdecimal() or int(text) < low:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} on")
    return int(text)


def percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not an accuracy in percent, such as 80")
    return value


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of the rounds, such as 0.2 (above 0, at most 1)")
    return value


def numbers(text: str) -> list[int]:
    return [natural(part.strip()) for part in text.split(",")]


def names(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; give names with commas between them, such as a,b")
    return parts
