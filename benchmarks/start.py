"""How long a user waits: for ``fedkeep --help``, and from ``fedkeep run`` to the end of the demo's first round.

Told are seconds of the clock, and seconds of the CPU: those of the command with all its processes until then. On an
idle core the clock shows about the CPU's seconds; on a busy one it shows whatever the others leave.

    python benchmarks/start.py [--repeat 5]

writes its result beside itself. Linux only.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from telling import arguments, beginning

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a process and its descendants so far, ended children included."""
    fields, children = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            values = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        number = int(stat.parent.name)
        fields[number] = sum(map(int, values[11:15])) / TICKS
        children.setdefault(int(values[1]), []).append(number)
    total, waiting = 0.0, [process]
    while waiting:
        one = waiting.pop()
        total += fields.get(one, 0.0)
        waiting += children.get(one, [])
    return total


def measure(arguments: list[str], is_over: Callable[[], bool] | None = None) -> tuple[float, float]:
    """Run a command until it is over, and return the seconds of the clock and of the CPU."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "fedkeep", *arguments], stdout=subprocess.DEVNULL, start_new_session=True
    )
    if is_over is None:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
        return time.perf_counter() - began, usage.ru_utime + usage.ru_stime
    while not is_over():
        assert process.poll() is None, "the command has failed"
        time.sleep(0.02)
    clock, cpu = time.perf_counter() - began, cpu_seconds(process.pid)
    os.killpg(process.pid, signal.SIGKILL)  # its own session: only what it has started
    process.wait()
    return clock, cpu


def first_round(*extra: str) -> tuple[float, float]:
    """Run the demo until its first round is recorded."""
    folder = Path(tempfile.mkdtemp(prefix="fedkeep-start-"))
    try:
        return measure(
            ["run", "demo", "--quiet", "--out", str(folder / "run"), *extra],
            lambda: any(path.stat().st_size for path in folder.glob("run/trials/*/rounds.jsonl")),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


CASES: dict[str, Callable[[], tuple[float, float]]] = {
    "`fedkeep --help`": lambda: measure(["--help"]),
    "`fedkeep run demo --workers 1`, first round": lambda: first_round("--workers", "1"),
}


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for case, function in CASES.items():
        function()  # files are read from the disk once
        seconds = [function() for _ in range(options.repeat)]
        clock, cpu = ([one[which] for one in seconds] for which in (0, 1))
        rows.append(
            f"| {case} | {min(cpu):.2f} | {statistics.median(cpu):.2f} | {min(clock):.2f} | "
            f"{statistics.median(clock):.2f} |"
        )
        print(rows[-1], flush=True)
    text = "\n".join(
        [
            *beginning("How long a user waits at the start", f"start.py --repeat {options.repeat}", options.note),
            "| command | least CPU, s | median CPU, s | least clock, s | median clock, s |",
            "|:--|--:|--:|--:|--:|",
            *rows,
            "",
        ]
    )
    Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
