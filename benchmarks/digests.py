"""What digests cost: processor seconds of SHA-256, beside those of writing the file that it is of.

Every file that a run reads again has a SHA-256, which is computed as the file is written, and again as it is read
(docs/reliability.md). Here files of the sizes of models are written as checkpoints are, and read.

    python benchmarks/digests.py [--note "what else ran on the machine"]

writes its result beside itself, with date, versions and hardware.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from telling import arguments, beginning

from fedkeep._utils.digests import check_file, digest_of
from fedkeep._utils.files import atomic_write

MEGABYTES = (0.03, 0.25, 10.0, 45.0)
TIMES = 7


def main() -> None:
    """Measure, print and write the result."""
    options = arguments(__doc__).parse_args()
    lines = [
        *beginning("Digests", "digests.py", options.note),
        "| MB of the file | ms to write it | ms of SHA-256 | ms to read and check it |",
        "|--:|--:|--:|--:|",
        *map(row, MEGABYTES),
        "",
        f"Processor time, the median of {TIMES}. A run saves a checkpoint about once a minute.",
        "",
    ]
    text = "\n".join(lines)
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


def row(megabytes: float) -> str:
    """Return the row of a size."""
    content = os.urandom(int(megabytes * 1e6))
    with tempfile.TemporaryDirectory() as folder:
        path, digest = Path(folder) / "model.safetensors", digest_of(content)
        measured = (
            median(lambda: atomic_write(path, content, sync=False)),
            median(lambda: digest_of(content)),
            median(lambda: check_file(path, digest)),
        )
    return f"| {megabytes:g} | " + " | ".join(f"{1e3 * seconds:.2f}" for seconds in measured) + " |"


def median(function: Callable[[], object]) -> float:
    """Return the median of the processor seconds of a few calls."""
    taken = []
    for _ in range(TIMES):
        began = time.process_time()
        function()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
