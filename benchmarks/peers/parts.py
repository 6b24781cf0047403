"""Where a contestant's rounds go: py-spy looks at its processes many times a second while it plays.

What it sees is the stack of Python calls of each process's main thread. The innermost call that `RULES` knows says
which part of a round that is. Parts are shares of a round, so that looking, which takes time, changes them little.
"""

from __future__ import annotations

import re
import signal
import statistics
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from driver import Failed, Turns

TRAINING, BATCHES, MODELS, CHECKS, RECORDS, REST, WAITING = PARTS = (
    "forward, backward, step",
    "examples and batches",
    "models: copied, sent, added up",
    "checks",
    "checkpoint and records",
    "rest",
    "waiting for others",
)
NOT_ITS_TURN = "not its turn"
FIRST, WORKER = "first", "worker"
"""Kinds of processes: those that a contestant's command names, and those that FedKeep starts."""

# The first two of these count wherever in a stack they are.
RULES = (
    (NOT_ITS_TURN, r"Turns\._wait|Turns\._say|WaitForTurn\._together"),
    (WAITING, r"_Inbox\.receive|wait_for_any|\(torch/distributed/|resource_tracker"),
    (CHECKS, r"\(fedkeep/trust/|_versions |check_reply|check_arguments|\(fedkeep/privacy/|ReplyStep\.receive"),
    (RECORDS, r"\(fedkeep/trials/checkpoint|Checkpoints\.|Records\.|JsonlWriter\."),
    (BATCHES, r"BatchStream|TrainJob\.steps|LocalParty\.(_stream|train_job|rng)|\(fedkeep/data/|\(pfl/data/"),
    (BATCHES, r"_prepare_batch|get_cohort|\(fedjax/core/client_datasets|Work\."),
    (MODELS, r"\(fedkeep/(models/weights|aggregation/|interface/(codec|pytree)|rounds/messages)"),
    (MODELS, r"(send|receive)_message|Connection\.|WorkerExecutor\._(encode|accept)|_mean|encode_aggregate"),
    (MODELS, r"get_model_difference|[gs]et_parameters|apply_model_update|\(pfl/(stats|aggregate/base)|fed_avg\.py"),
    (TRAINING, r"\(fedkeep/training/(local|vmap)_training|_sgd_train_step|do_multiple_epochs_of|run_client"),
)
ANYWHERE = 4
"""So many rules count wherever in a stack they are: what is inside a check is a check."""

LEAST, MOST = 3, 80

Parts = dict[str, dict[str, float]]
"""By kind of process, the share of a round that each part takes."""


def sampled(turns: Turns, spy: Path, folder: Path, seconds: float = 6.0) -> Parts:
    """Look at a contestant while it plays for some seconds, in at least `LEAST` and at most `MOST` rounds."""
    raw = folder / f"{turns.log.stem}.raw"
    command = [spy, "record", "--subprocesses", "--threads", "--idle", "--format", "raw", "--output", raw]
    with subprocess.Popen(
        [*command, "--pid", str(turns.process.pid)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as looking:
        assert looking.stdout is not None
        said = ""
        while "Sampling" not in said and (line := looking.stdout.readline()):
            said += line
        began, number = time.perf_counter(), 0
        while looking.poll() is None and number < MOST and (number < LEAST or time.perf_counter() - began < seconds):
            turns.round()
            number += 1
        looking.send_signal(signal.SIGINT)
        said += looking.stdout.read()
    if not raw.is_file():
        raise Failed(f"{turns.label}: py-spy saw nothing:\n{said}")
    return shares(raw.read_text())


def shares(raw: str) -> Parts:
    """Return parts from py-spy's stacks: calls from the outermost to the innermost, then how often each was seen."""
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        calls = stack.split(";")
        process = [call for call in calls if call.startswith("process ")][-1]
        if any("MainThread" in call for call in calls):
            seen[process][part_of(calls)] += int(count)
    first = max(seen.values(), key=lambda found: found[NOT_ITS_TURN])  # the process that is told when its turn is
    whole = sum(first.values()) - first[NOT_ITS_TURN]
    kinds: dict[str, list[Counter[str]]] = defaultdict(list)
    for process, found in seen.items():
        if any(found[part] for part in (TRAINING, MODELS)):  # others only look after processes
            kinds[WORKER if "spawn_main" in process else FIRST].append(found)
    return {kind: _mean(found, whole) for kind, found in kinds.items()}


def part_of(calls: list[str]) -> str:
    """Return the part to which a stack of calls belongs."""
    stack = ";".join(calls)
    for part, pattern in RULES[:ANYWHERE]:
        if re.search(pattern, stack):
            return part
    for call in reversed(calls):
        for part, pattern in RULES[ANYWHERE:]:
            if re.search(pattern, call):
                return part
    return REST


def _mean(found: list[Counter[str]], whole: int) -> dict[str, float]:
    """Return the mean over processes of one kind; a process that does nothing else waits."""
    parts = {part: sum(one[part] for one in found) / len(found) / whole for part in PARTS if part != WAITING}
    return {**parts, WAITING: max(0.0, 1.0 - sum(parts.values()))}


def table(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table in Markdown: milliseconds of a median round; empty if nobody was looked at."""
    rows = []
    for label, one in found.items():
        for kind, parts in sorted(one.get("parts", {}).items()) if one["seconds"] else ():
            middle = 1000 * statistics.median(one["seconds"])
            cells = (f"{middle * parts[part]:.0f}" for part in PARTS)
            rows.append(f"| {label}{', a worker' if kind == WORKER else ''} | {' | '.join(cells)} |")
    return [f"| ms a round | {' | '.join(PARTS)} |", f"|:--|{'--:|' * len(PARTS)}", *rows, ""] if rows else []
