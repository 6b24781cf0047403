"""One test for many files: a test costs a hundredth of a second to report, and most of these take less to run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def for_each(values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of all values from a test whose first argument is one of them: it fails with the faults of all."""

    every = list(values)

    def of_all(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def whole(**fixtures: Any) -> None:
            faults = []
            for value in every:
                try:
                    test(value, **fixtures)
                except Exception as error:
                    error.add_note(f"with {value}")
                    faults.append(error)
            if faults:
                raise ExceptionGroup(f"{len(faults)} of them", faults)

        signature = inspect.signature(test)
        whole.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        return whole

    return of_all
