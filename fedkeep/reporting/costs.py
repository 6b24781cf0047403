"""What a record says of cost: seconds of each part, and bytes both ways."""

from __future__ import annotations

from dataclasses import dataclass

from fedkeep.reporting.record import Record


@dataclass(frozen=True)
class CostMetrics(Record):
    """Measures of time and traffic."""

    @property
    def train_seconds(self) -> float:
        """Return the seconds spent in local training, teachers included, over all rounds and clients."""
        return self.seconds("train") + self.seconds("teachers")

    def seconds(self, part: str) -> float:
        """Return the seconds of one part of the timings (``"train"``, ``"evaluate"``, ...) over all rounds."""
        return float(sum(row.get(part) or 0.0 for row in self.timings)) if self.timings else float("nan")

    def task_seconds(self, part: str) -> list[float]:
        """Return the seconds of one part of the timings in each task that was begun; without tasks there is one."""
        tasks = {int(row["round"]): int(row.get("task", 1)) for row in self.rounds}
        sums = dict.fromkeys(sorted(set(tasks.values())), 0.0)
        for row in self.timings:
            sums[tasks[int(row["round"])]] += row.get(part) or 0.0
        return list(sums.values())

    @property
    def steps(self) -> list[str]:
        """Return what was asked of clients, by the names that the method gives it, in order."""
        named = (key for row in self.timings for key in row if key.startswith("step "))
        return [key.removeprefix("step ") for key in dict.fromkeys(named)]

    @property
    def down(self) -> float:
        """Return the mean bytes that a client receives in a round it is asked in.

        What a task begins and ends with is shared out over these visits.
        """
        return self._per_visit("down")

    @property
    def up(self) -> float:
        """Return the mean bytes that a client sends in such a round; lost clients count as asked."""
        return self._per_visit("up")

    @property
    def traffic(self) -> int:
        """Return all bytes, both ways, of all rounds."""
        return int(sum((row.get("down") or 0) + (row.get("up") or 0) for row in self.rounds))

    def _per_visit(self, way: str) -> float:
        visits = sum(len(row.get("cohort", ())) for row in self.rounds)
        return sum(row.get(way) or 0 for row in self.rounds) / visits if visits else float("nan")
