"""Arguments that options declare: one description for Python and the command line."""

from __future__ import annotations

import argparse

import pytest

from fedkeep.cli.main import DEVICE, MACHINE, add_arguments, natural, percent, share
from fedkeep.experiment.runtime import Machine
from fedkeep.options import options_of


def machine(*words: str) -> Machine:
    parser = argparse.ArgumentParser()
    add_arguments(parser, [*DEVICE, *MACHINE])
    options = vars(parser.parse_args(words))
    assert options.keys() - options_of(Machine).keys() == {"quiet"}
    assert options_of(Machine).keys() <= options.keys(), "an option of a machine is no argument"
    return Machine(**{name: value for name, value in options.items() if name != "quiet"})


def test_a_machines_arguments_are_its_options() -> None:
    assert machine() == Machine(workers=0)
    words = "--threads 2 --stack 3 --data-dir x --allow-code --use a.py --use b.py"
    given = Machine(threads=2, stack=3, workers=0, data_dir="x", allow_code=True, use=("a.py", "b.py"))
    assert machine(*words.split()) == given
    assert machine() == Machine(workers=0), "what one command line was given is not in the next"


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (natural, "-1", "a whole number from 0 on"),
        (natural, "1.5", "a whole number from 0 on"),
        (percent, "nan", "an accuracy in percent"),
        (share, "0", "above 0, at most 1"),
    ],
)
def test_a_number_out_of_range_says_what_is_expected(read: object, text: str, expected: str) -> None:
    assert callable(read)
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text!r} is not .*{expected}"):
        read(text)
