"""Try odd inputs of every kind for a while, and count what became of them: python tools/fuzz.py --minutes 60.

Inputs that failed are kept in the folder .fuzz and are tried first the next time. The exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("fuzz", "reporting"))]
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when `datasets` is imported

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from targets import TARGETS, Hang

AT_A_TIME = 200
SHARES = {"recipes": 0.45, "command lines": 0.1, "data files": 0.15, "messages": 0.2, "run folders": 0.1}
"""The part of the time that each kind of input gets."""


def fuzz(name: str, seconds: float, first_seed: int, corpus: Path) -> tuple[Counter[str], list[str]]:
    """Return how many inputs were accepted and refused, and how each failure is made again."""
    drawn, check = TARGETS[name]
    counts: Counter[str] = Counter()
    failures: list[str] = []
    ends, number = time.monotonic() + seconds, first_seed

    while time.monotonic() < ends and len(failures) < 20:

        @seed(number)
        @settings(
            max_examples=AT_A_TIME,
            deadline=None,
            database=DirectoryBasedExampleDatabase(corpus / name.replace(" ", "-")),
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            report_multiple_bugs=False,
        )
        @given(drawn)
        def try_some(given_input: Any) -> None:
            counts.update(check(given_input))

        try:
            try_some()
        except (Exception, Hang) as error:
            failures.append(f"seed {number}: {type(error).__name__}: {str(error)[:500]}\n{_notes(error)}")
        number += 1
    return counts, failures


def _notes(error: BaseException) -> str:
    return "\n".join(str(note)[:2000] for note in getattr(error, "__notes__", ()))


def main() -> int:
    """Fuzz every target and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="for all kinds together (default: 60)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first inputs (default: the time)")
    parser.add_argument("--only", choices=sorted(TARGETS), help="one kind of input")
    parser.add_argument("--corpus", type=Path, default=ROOT / ".fuzz", help="where failed inputs are kept")
    options = parser.parse_args()
    failed = False
    print(f"{'input':<15}{'tried':>9}{'accepted':>10}{'refused':>9}{'failed':>8}", flush=True)
    for name, share in SHARES.items():
        if options.only not in (None, name):
            continue
        seconds = 60 * options.minutes * (1.0 if options.only else share)
        counts, failures = fuzz(name, seconds, options.seed, options.corpus)
        tried, failed = sum(counts.values()) + len(failures), failed or bool(failures)
        print(f"{name:<15}{tried:>9}{counts['accepted']:>10}{counts['refused']:>9}{len(failures):>8}", flush=True)
        for failure in failures:
            print(f"  {failure}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
