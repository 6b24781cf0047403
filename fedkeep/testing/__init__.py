"""The conformance suite: what every method must keep, whatever it does, as functions for methods anywhere.

>>> from fedkeep.testing import check_algorithm
>>> check_algorithm(MyMethod)

It runs the method on a federation so small that a round takes milliseconds. Each check is a function
``check_<what>(algorithm)`` that raises AssertionError with what is expected of the method. Pytest is not needed; with
it, `checks_for` gives one test for each check.
"""

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

from fedkeep.errors import ConfigError, did_you_mean
from fedkeep.interface import Algorithm
from fedkeep.testing import checks

__all__ = ["CHECKS", "check_algorithm", "checks_for"]

CHECKS: tuple[Callable[[Algorithm[Any, Any]], None], ...] = tuple(
    check for name, check in vars(checks).items() if name.startswith("check_")
)
"""All checks. A name without ``check_`` is what `check_algorithm` skips, and what `checks_for` yields."""


def checks_for(algorithm: Algorithm[Any, Any] | type[Algorithm[Any, Any]]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each check that applies to a method, and a function without arguments that carries it out.

    ``algorithm``: The method, or its class for the method with its default options. Options that make its rounds small
        make the checks quick.
    """
    method = algorithm() if isinstance(algorithm, type) else algorithm
    for check in CHECKS:
        name = check.__name__.removeprefix("check_")
        if name.startswith("tasks") and "auxiliary" in method.needs:
            continue  # auxiliary examples are of all classes: recipes refuse them with tasks
        yield name, functools.partial(_carry_out, check, method)


def _carry_out(check: Callable[[Algorithm[Any, Any]], None], method: Algorithm[Any, Any]) -> None:
    """Carry out a check; what it raises also says of which method and in which check."""
    try:
        check(method)
    except Exception as error:
        name = check.__name__.removeprefix("check_")
        error.add_note(f"{type(method).__name__} has not passed the check {name!r} of fedkeep.testing.")
        raise


def check_algorithm(algorithm: Algorithm[Any, Any] | type[Algorithm[Any, Any]], *, skip: Collection[str] = ()) -> None:
    """Carry out all checks that apply to a method, and stop at the first that fails.

    ``algorithm``: The method, or its class for the method with its default options.
    ``skip``: Names of checks that are left out, such as ``"stacked_training"``.
    """
    known = [check.__name__.removeprefix("check_") for check in CHECKS]
    for name in skip:
        if name not in known:
            raise ConfigError(f"there is no check {name!r}.{did_you_mean(name, known)} See fedkeep.testing.CHECKS.")
    for name, check in checks_for(algorithm):
        if name not in skip:
            check()
