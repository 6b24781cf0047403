"""What a client's differential privacy has cost: epsilon, by Opacus' accountant."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from fedkeep.errors import MissingExtra

ORDERS = [1.25, 1.5, 1.75, *range(2, 65), 96, 128, 256, 512]
"""Orders of the Rényi divergence over which epsilon is minimised. Opacus takes longer for fractions."""

MOST_STEPS = 2**53
"""As many steps no training takes, and Opacus counts in floating-point numbers."""


def require_accountant() -> None:
    """Raise `MissingExtra` if Opacus is not installed."""
    if find_spec("opacus") is None:
        raise MissingExtra("Differential privacy", "privacy")


def dp_sgd_epsilon(steps: Mapping[float, int], noise_multiplier: float, delta: float) -> float:
    """Return epsilon after steps of DP-SGD, by Rényi differential privacy of the subsampled Gaussian mechanism.

    Opacus computes it (Mironov et al., 2019, "Rényi differential privacy of the sampled Gaussian mechanism").

    ``steps``: Number of steps by the probability with which an example was in a batch.
    ``noise_multiplier``: Standard deviation of the noise, in units of the norm to which gradients were clipped.
    ``delta``: Probability with which the guarantee may fail.
    Returns: Epsilon; 0 without steps, infinite without noise and for numbers that no training has, as in the record of
        a site that lied.
    """
    if not any(steps.values()):
        return 0.0
    if not noise_multiplier or not all(0 < rate <= 1 and 0 <= count < MOST_STEPS for rate, count in steps.items()):
        return float("inf")
    require_accountant()
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, rate, count) for rate, count in steps.items() if count]
    return float(accountant.get_epsilon(delta, alphas=ORDERS))
