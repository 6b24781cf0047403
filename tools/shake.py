"""Play the tests with other seeds of the global generators, in random order, some of them on a busy machine.

    python tools/shake.py --seeds 10 --busy 3

A test that fails in one of these and passes in `make test` depends on a generator, on the order, on time or on the
machine. Ends with code 1 if any failed, and prints the command that repeats each failing run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUSY = "while True: sum(range(10**6))"


def main() -> int:
    """Play the suite once for each seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds (default: 10)")
    parser.add_argument("--first", type=int, default=1, help="the first of them (default: 1)")
    parser.add_argument("--busy", type=int, default=3, help="how many of the runs have four busy processes beside them")
    parser.add_argument("tests", nargs="*", help="arguments for pytest (default: the whole suite)")
    options = parser.parse_args()
    failed = []
    for seed in range(options.first, options.first + options.seeds):
        load = 4 if seed - options.first < options.busy else 0
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile"]
        command += ["--random-order", f"--random-order-seed={seed}", *options.tests]
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(load)]
        try:
            code = subprocess.run(command, cwd=ROOT, env=os.environ | {"FEDKEEP_TEST_SEED": str(seed)}).returncode
        finally:
            for process in busy:
                process.kill()
        print(f"seed {seed}, {load} busy processes: {'passed' if code == 0 else 'FAILED'}", flush=True)
        if code:
            failed.append(f"FEDKEEP_TEST_SEED={seed} {' '.join(command)}")
    print("\n".join(["to repeat:", *failed]) if failed else f"{options.seeds} seeds passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
