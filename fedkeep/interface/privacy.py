"""Differential privacy of what leaves a client: the options, and how what is spent is named."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fedkeep.interface.party import in_short
from fedkeep.options import Options, option

_PREFIX = "private "
COUNTS_TOLD = _PREFIX + "label counts"
"""The use of randomness that stands for one telling of noised label counts."""
CHANGE_TOLD = _PREFIX + "change"
"""The use of randomness that stands for one telling of a noised change, as of prototypes."""
MEANS_TOLD = _PREFIX + "means"
"""The use of randomness that stands for one telling of noised means over the server's examples, as of confidences."""
IN_MEAN = _PREFIX + "mean"
"""What stands for one noised mean of models in which a client's update is."""
SPENDING = ("noise_multiplier", "counts_epsilon", "prototypes_noise_multiplier")
"""Options under which clients spend of their privacy with what they send."""
MAX_CHANGES = 100
"""How many noised changes a client may tell in one step. The methods of the package tell one."""
MAX_SPENT = 2**53
"""Largest number that a site's ledger may hold: floating-point numbers count no further."""
_EVER = re.compile("ever ([0-9a-f]{16}) (.+)")
FROM_LABEL_COUNTS = "from label counts"
"""Marks, in `typing.Annotated`, a field of a reply that follows from `Client.label_counts` alone."""
EXACT_COUNTS = "exact label counts"
"""Marks, in `typing.Annotated`, a field of a reply with label counts that have no noise."""


@dataclass(frozen=True)
class Privacy(Options):
    """Noise for one example in what leaves a client, noise for a whole client on means, and secure aggregation."""

    noise_multiplier: float = option(
        0.0, "DP-SGD in local training: noise of a step (its standard deviation over max_grad_norm); 0: off", low=0.0
    )
    max_grad_norm: float = option(1.0, "DP-SGD: norm to which the gradient of each example is clipped", low=1e-12)
    delta: float = option(1e-5, "DP-SGD: delta for which epsilon is computed; below 1 / examples", low=1e-15, high=0.5)
    counts_epsilon: float = option(
        0.0, "epsilon of the label counts, and of what follows from them, that a client tells; 0: exact", low=0.0
    )
    prototypes_noise_multiplier: float = option(
        0.0, "noise on the prototypes that a client sends, over max_prototype_change; 0: exact", low=0.0
    )
    max_prototype_change: float = option(
        1.0, "norm to which a client's change of all prototypes together is clipped, if they are noised", low=1e-12
    )
    confidences_epsilon: float = option(
        0.0, "epsilon, in each round, of confidences on the server's examples that clients are sent; 0: exact", low=0.0
    )
    client_noise_multiplier: float = option(
        0.0, "central DP: noise on the mean update, over max_update_norm / clients of the mean; 0: off", low=0.0
    )
    secure_aggregation: bool = option(False, "the server sees sums of models only (SecAgg), for methods that average")
    clipping_range: float = option(
        1024.0, "secure aggregation: largest change of a weight; a client with a larger one is lost", low=1e-6, high=1e9
    )
    max_update_norm: float = option(1.0, "central DP: norm to which each client's update is clipped", low=1e-12)


def steps_name(sample_rate: float) -> str:
    """Return the name under which steps of DP-SGD are counted among a client's uses of randomness.

    ``sample_rate``: The probability with which an example is in a batch.
    """
    return f"{_PREFIX}steps at {sample_rate!r}"


def spent(uses: Mapping[str, int]) -> dict[str, int]:
    """Return the part of a client's uses of randomness that spends its privacy."""
    return {name: count for name, count in uses.items() if name.startswith(_PREFIX)}


def add_spent(totals: dict[str, int], uses: Mapping[str, int], task: int) -> None:
    """Add what was spent in a task to totals; label counts are told again with the same noise, and count once a task.

    ``totals``: What was spent so far, by name; updated.
    """
    for name, count in uses.items():
        if name == COUNTS_TOLD:
            totals[f"{COUNTS_TOLD} of task {task}"] = 1
        else:
            totals[name] = totals.get(name, 0) + count


def ever_name(ledger: str, name: str) -> str:
    """Return the name under which a site tells all that it ever spent in a run; ``ledger`` is 16 hexadecimal digits."""
    return f"ever {ledger} {name}"


def spent_ever(uses: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return what a site ever spent in a run, by the ledgers in which it counts."""
    ledgers: dict[str, dict[str, int]] = {}
    for name, count in uses.items():
        if told := _EVER.fullmatch(name):
            ledgers.setdefault(told[1], {})[told[2]] = count
    return ledgers


def sample_rate_of(name: str) -> float | None:
    """Return the sample rate in a name that `steps_name` made; None for another name.

    ``name``: The name, which may come from a client.
    """
    try:
        rate = float(name.removeprefix(f"{_PREFIX}steps at "))
    except ValueError:
        return None
    return rate if 0 < rate <= 1 and name == steps_name(rate) else None


def find_implausible_spending(
    before: Mapping[str, int], after: Mapping[str, int], privacy: Privacy, steps: int
) -> str | None:
    """Check what a client says that a step spent of its privacy, before it is recorded: epsilon is computed from it.

    ``before``, ``after``: The client's uses of randomness in the round, before the step and after it.
    ``steps``: The most steps of training that the client's examples need.
    Returns: What cannot be, after "answered with"; None if all can.
    """
    most = {COUNTS_TOLD: 1} if privacy.counts_epsilon else {}
    most |= {CHANGE_TOLD: MAX_CHANGES} if privacy.prototypes_noise_multiplier else {}
    for name, count in spent(after).items():
        is_training = bool(privacy.noise_multiplier) and sample_rate_of(name) is not None
        if not is_training and name not in most:
            return f"privacy spent on {name!r}, on which clients of this run spend none"
        allowed = steps if is_training else most[name]
        added = count - before.get(name, 0)
        if not 0 <= added <= allowed:
            return f"privacy spent on {name!r} {in_short(added)} times in a step, where 0 to {allowed} are possible"
        steps -= added if is_training else 0
    for name, count in ((name, count) for totals in spent_ever(after).values() for name, count in totals.items()):
        is_known = name.startswith(f"{COUNTS_TOLD} of task ") or name == CHANGE_TOLD or sample_rate_of(name) is not None
        if not is_known or not 0 <= count <= MAX_SPENT:
            return f"a ledger of {in_short(count)} times {name!r}, which no client has"
    return None
