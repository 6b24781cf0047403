"""Let contestants take turns: all are alive, one works at a time, the order changes from cycle to cycle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import Any

from memory import Watch, tree

# One thread a process unless a runner says otherwise, as everybody advises for small models; and nobody calls home.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # as where they are installed: nobody compiles its modules at each start
}
MEMORY_ROUNDS = 3


class Failed(Exception):
    """A contestant died, fell silent or said something else; the message holds the end of its log."""


@dataclass
class Turns:
    """A running contestant. `about` is what it said of itself, `began` how many seconds it took to get ready."""

    label: str
    command: Sequence[str]
    log: Path
    cwd: Path
    patience: float = 300.0
    about: dict[str, Any] = field(default_factory=dict)
    began: float = 0.0

    def __post_init__(self) -> None:
        start = time.perf_counter()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.cwd,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )
        self._heard = b""
        self.about = self._answer("ready")
        self.began = time.perf_counter() - start

    def round(self) -> float:
        """Let it play a round and return the seconds."""
        start = time.perf_counter()
        self._say("round")
        self._answer("done")
        return time.perf_counter() - start

    def memory(self, rounds: int) -> int:
        """Let it play some rounds that are not timed, and return the largest sum of memory seen, in bytes."""
        with Watch(self.process.pid) as watch:
            for _ in range(rounds):
                self.round()
        return watch.peak

    def show(self, weights: Path) -> int:
        """Ask for its weights in a file (.npz), and return after how many rounds they are."""
        self._say(f"show {weights}")
        rounds: int = self._answer("shown")["rounds"]
        return rounds

    def end(self) -> None:
        """Make sure that it and all that it started are gone."""
        with suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        left = tree(self.process.pid)[1:]
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        for process in [self.process.pid] * (self.process.poll() is None) + left:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()
        except OSError:
            raise self._failure("is gone") from None

    def _answer(self, word: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        deadline = time.monotonic() + self.patience
        while b"\n" not in self._heard:
            ready, _, _ = select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failure(f"said nothing for {self.patience:.0f} s")
            said = os.read(self.process.stdout.fileno(), 65536)
            if not said:
                raise self._failure("ended")
            self._heard += said
        line, _, self._heard = self._heard.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if not answer.pop(word, False):
            raise self._failure(f"answered {line!r} where {word!r} was expected")
        return answer

    def _failure(self, what: str) -> Failed:
        self.end()
        last = self.log.read_text(errors="replace").splitlines()[-8:]
        return Failed(f"{self.label} {what}. The end of {self.log}:\n  " + "\n  ".join(last))


@dataclass
class Measured:
    """What was found of one contestant.

    Attributes
    ----------
    about : versions, as it said. start : seconds until it was ready. seconds : of each round that counts.
    memory : bytes, the largest sum over its processes. rounds : that it had played when it showed its weights.
    gap : see `report`; None if there is nothing to compare with. parts : see `parts`; empty if nobody looked.
    failed : why it was left out; empty if it was not.
    """

    label: str
    about: dict[str, Any] = field(default_factory=dict)
    start: float = 0.0
    seconds: list[float] = field(default_factory=list)
    memory: int = 0
    rounds: int = 0
    gap: float | None = None
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: str = ""


@dataclass(frozen=True)
class Schedule:
    """How often everybody plays.

    Attributes
    ----------
    cycles : most rounds that count, of each. budget : seconds that they may take; whoever is slow plays in fewer of the
        cycles, but in three. One whose second round takes longer is left out.
    warm_up : rounds before that do not count. settle : pause after the first of these, in which helpers may start.
    """

    cycles: int = 20
    budget: float = 20.0
    warm_up: int = 3
    settle: float = 10.0

    def plays(self, cycle: int, seconds: float) -> bool:
        """Tell whether one whose round takes so many seconds plays in this cycle, counted from 0."""
        rounds = max(min(3, self.cycles), min(self.cycles, int(self.budget / seconds)))
        return (cycle + 1) * rounds // self.cycles > cycle * rounds // self.cycles


def alternate(
    starters: Mapping[str, Callable[[], Turns]],
    schedule: Schedule,
    folder: Path,
    tell: Callable[[str], None] = lambda line: None,
    look: Callable[[Turns], dict[str, dict[str, float]]] = lambda turns: {},
) -> dict[str, Measured]:
    """Start contestants, let them take turns, measure them, and end them; after the warm-up they show their weights.

    Parameters
    ----------
    starters : by label, what starts a contestant. folder : where the weights go, as ``LABEL.npz``.
    look : lets a contestant play on, not timed, and returns its `Measured.parts`.

    One that fails is left out from then on; its `Measured` says why.
    """
    found: dict[str, Measured] = {}
    alive: dict[str, Turns] = {}
    pace: dict[str, float] = {}  # seconds of the last warm-up round

    def guarded(label: str, work: Callable[[Turns], None]) -> None:
        try:
            work(alive[label])
        except Failed as error:
            tell(f"{label} is out: {error}")
            found[label].failed = str(error)
            del alive[label]

    def warm(turns: Turns) -> None:
        first = turns.label not in pace  # which sets up, in some
        pace[turns.label] = turns.round()
        if not first and pace[turns.label] > schedule.budget:
            turns.end()
            raise Failed(f"a round takes {pace[turns.label]:.0f} s, more than the {schedule.budget:.0f} s it may take")

    def play(turns: Turns) -> None:
        found[turns.label].seconds.append(turns.round())

    def show(turns: Turns) -> None:
        found[turns.label].rounds = turns.show(folder / f"{turns.log.stem}.npz")

    def remember_memory(turns: Turns) -> None:
        found[turns.label].memory = turns.memory(MEMORY_ROUNDS if pace[turns.label] < schedule.budget / 4 else 1)

    def look_at(turns: Turns) -> None:
        found[turns.label].parts = look(turns)

    try:
        for label, start in starters.items():
            found[label] = Measured(label)
            try:
                alive[label] = start()
            except Failed as error:
                tell(f"{label} is out: {error}")
                found[label].failed = str(error)
                continue
            found[label].about, found[label].start = alive[label].about, alive[label].began
            tell(f"{label} is ready after {alive[label].began:.1f} s")
        for number in range(schedule.warm_up):
            for label in list(alive):
                if number < 2 or pace[label] < schedule.budget / 4:
                    guarded(label, warm)
            if number == 0:
                time.sleep(schedule.settle)
        for label in list(alive):  # early, since rounding grows from round to round
            guarded(label, show)
        labels = list(starters)
        for cycle in range(schedule.cycles):
            turn = cycle % len(labels)
            for label in labels[turn:] + labels[:turn]:
                if label in alive and schedule.plays(cycle, pace[label]):
                    guarded(label, play)
        for label in list(alive):
            guarded(label, remember_memory)
        for label in list(alive):
            guarded(label, look_at)
    finally:
        for turns in alive.values():
            turns.end()
    return found
