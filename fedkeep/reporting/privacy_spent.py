"""The privacy that a trial spent in all, from its records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from fedkeep import metrics
from fedkeep.interface.privacy import CHANGE_TOLD, COUNTS_TOLD, IN_MEAN, MEANS_TOLD, add_spent, sample_rate_of


class PrivacySpent:
    """What `TrialResult` tells of privacy: epsilon, by what it covers; NaN where nothing of the kind had noise.

    ``rounds``: One entry a round, as in rounds.jsonl.
    ``ledger``: One entry for each round in which something left with noise, as in privacy.jsonl.
    """

    rounds: list[dict[str, Any]]
    ledger: Sequence[Mapping[str, Any]]

    @cached_property
    def _releases(self) -> list[Mapping[str, Any]]:
        """Return the distinct rounds in which something left with noise.

        A round that was repeated counts once more, unless the very same left again.
        """
        distinct = {json.dumps(row, sort_keys=True): row for row in self.ledger}
        known = {row["round"] for row in self.ledger}
        return [*distinct.values(), *(row for row in self.rounds if "privacy" in row and row["round"] not in known)]

    @cached_property
    def _spent(self) -> tuple[dict[str, dict[str, int]], Mapping[str, float]]:
        """Return each client's uses by kind, and the options.

        What a site counted itself (`ever`) stands in place of what arrived from it, if it is more.
        """
        spent: dict[str, dict[str, int]] = {}
        ever: dict[str, dict[str, dict[str, int]]] = {}
        options: Mapping[str, float] = {}
        for row in self._releases:
            options = row["privacy"]
            for client, uses in row["privacy"].get("clients", {}).items():
                add_spent(spent.setdefault(client, {}), uses, row.get("task", 1))
            for client, ledgers in row.get("ever", {}).items():
                for ledger, totals in ledgers.items():
                    known = ever.setdefault(client, {}).setdefault(ledger, {})
                    known |= {name: max(count, known.get(name, 0)) for name, count in totals.items()}
        for client, ledgers in ever.items():
            mine = spent.setdefault(client, {})
            for name in {name for totals in ledgers.values() for name in totals}:
                mine[name] = max(mine.get(name, 0), sum(totals.get(name, 0) for totals in ledgers.values()))
        return spent, options

    @staticmethod
    def _steps(uses: Mapping[str, int]) -> dict[float, int]:
        """Return steps of DP-SGD by sample rate. What a site of an earlier version made up is of an infinite rate."""
        steps: dict[float, int] = {}
        for name, count in uses.items():
            if name not in (CHANGE_TOLD, IN_MEAN) and not name.startswith(COUNTS_TOLD):
                rate = sample_rate_of(name) or math.inf
                steps[rate] = steps.get(rate, 0) + count
        return steps

    @cached_property
    def epsilon(self) -> float:
        """Return the largest epsilon of a client's example, of all that left it; NaN if its models had no noise.

        This one and the others are for neighbours of which one has an example, or a client, less ("add-or-remove"):
        its place counts as nothing, and how many there are is public.
        """
        spent, options = self._spent
        if not options.get("noise_multiplier"):
            return math.nan
        noise, delta = options["noise_multiplier"], options["delta"]
        steps = {client: tuple(sorted(self._steps(uses).items())) for client, uses in spent.items()}
        of_steps = {taken: metrics.dp_sgd_epsilon(dict(taken), noise, delta) for taken in set(steps.values())}
        by_client = (
            of_steps[steps[client]] + options["counts_epsilon"] * _told_counts(uses) for client, uses in spent.items()
        )
        return max(by_client, default=0.0)  # of rounds in which no client's reply came

    @cached_property
    def client_epsilon(self) -> float:
        """Return the largest epsilon of a whole client in the noised means of all rounds; NaN without such noise.

        Who is in which cohort follows from the run's seed, which everybody knows. So no sampling is claimed: it is the
        epsilon of as many noised means as the client's updates were in.
        """
        return self._gaussian_epsilon(IN_MEAN, "client_noise_multiplier")

    @property
    def counts_epsilon(self) -> float:
        """Return the largest epsilon of an example in label counts, over all that were told; NaN without noise."""
        spent, options = self._spent
        most = max(map(_told_counts, spent.values()), default=0)
        return options["counts_epsilon"] * most if most else math.nan

    @cached_property
    def prototypes_epsilon(self) -> float:
        """Return the largest epsilon of a whole client in its noised prototypes; NaN if they had no noise."""
        return self._gaussian_epsilon(CHANGE_TOLD, "prototypes_noise_multiplier")

    def _gaussian_epsilon(self, name: str, option: str) -> float:
        """Return the epsilon of all that the client told that told most; NaN if none told anything."""
        spent, options = self._spent
        most = max((uses.get(name, 0) for uses in spent.values()), default=0)
        return metrics.dp_sgd_epsilon({1.0: most}, options[option], options["delta"]) if most else math.nan

    @property
    def confidences_epsilon(self) -> float:
        """Return the epsilon of a server's example, in all confidences that clients were sent; NaN without noise."""
        rows = [row["privacy"] for row in self._releases if row["privacy"].get("server")]
        told = [options["confidences_epsilon"] * options["server"].get(MEANS_TOLD, 0) for options in rows]
        return sum(told) if told else math.nan


def _told_counts(uses: Mapping[str, int]) -> int:
    """Return in how many tasks label counts were told."""
    return sum(count for name, count in uses.items() if name.startswith(COUNTS_TOLD))
