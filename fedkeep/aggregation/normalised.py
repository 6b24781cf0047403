"""The normalised mean of FedNova."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fedkeep.interface import Fit
from fedkeep.models import Weights
from fedkeep.models.weights import add, mean, subtract


def effective_steps(steps: int, momentum: float) -> float:
    """Return how many plain SGD steps go as far along a constant gradient as these with momentum rho.

    a = (t - rho (1 - rho^t) / (1 - rho)) / (1 - rho), which is t without momentum (Wang et al., 2020, FedNova, sec. 4).
    """
    # Summed up, not in closed form: that loses its digits near rho = 1, and divides by zero there.
    velocity = moved = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        moved += velocity
    return moved


def normalised_mean(
    start: Weights, replies: Mapping[str, Fit], momentum: float, buffers: Collection[str] = ()
) -> Weights:
    """Return w - (sum_i p_i a_i) sum_i (p_i / a_i) (w - w_i), p_i by examples (Wang et al., 2020, FedNova, eq. 5).

    Clients that took no step have nothing to say. With equal a_i this is FedAvg. The tensors named in ``buffers`` are
    averaged by examples in any case: nobody took steps along them, and a variance carried beyond those of all clients
    may become negative.
    """
    trained = [reply for reply in replies.values() if reply.steps]
    if not trained:
        return start
    examples = [float(reply.examples) for reply in trained]
    steps = [effective_steps(reply.steps, momentum) for reply in trained]
    plain = mean([reply.model for reply in trained], examples)
    if len(set(steps)) == 1:
        return plain
    reach = sum(p * a for p, a in zip(examples, steps, strict=True)) / sum(examples)
    per_step = [p / a for p, a in zip(examples, steps, strict=True)]
    towards = mean([subtract(reply.model, start) for reply in trained], per_step)
    moved = add(start, towards, reach * sum(per_step) / sum(examples))
    return moved | {name: plain[name] for name in buffers}
