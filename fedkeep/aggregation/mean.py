"""Means of models: plain, moving, normalised by steps (FedNova), and of masked layers (FedWeIT)."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fedkeep.interface import Fit
from fedkeep.interface.cohort import Aggregation as Aggregation
from fedkeep.interface.cohort import Replies
from fedkeep.models import Weights
from fedkeep.models.fedweit_layers import active_units, broadcast_units
from fedkeep.models.weights import RunningMean, add, mean, scale, subtract


def weighted_mean(replies: Mapping[str, Fit]) -> Weights:
    """Return sum_i n_i w_i / sum_i n_i, n_i the numbers of examples (McMahan et al., 2017, algorithm 1).

    The whole state dict is averaged; integer buffers are the first reply's. If nobody had an example, all count alike.

    ``replies``: By client, at least one.
    """
    return aggregate(replies, "num_examples")


def aggregate(replies: Mapping[str, Fit], how: Aggregation) -> Weights:
    """Return the mean of the replies' models.

    ``replies``: By client, at least one.
    ``how``: Whether clients are weighted by their numbers of examples, or all alike that have taken a step. If nobody
        has, as it seems with secure aggregation, all count alike.
    """
    if isinstance(replies, Replies):
        return replies.mean(how)
    if how == "num_examples":
        examples = [float(reply.num_examples) for reply in replies.values()]
        return mean([reply.model for reply in replies.values()], examples if any(examples) else None)
    trained = [reply.model for reply in replies.values() if reply.num_steps]
    return mean(trained or [reply.model for reply in replies.values()])


class PartialMean:
    """The mean of `aggregate`, of models or of groups' means, which come one after another; none of them is kept.

    ``weight``: The sum of the weights so far.
    ``count``: How many models were added.
    """

    def __init__(self, how: Aggregation) -> None:
        self.how = how
        self.weight = 0.0
        self.count = 0
        self._weighted, self._equal = RunningMean(), RunningMean()  # the second as long as nobody has a weight

    def weight_of(self, fit: Fit) -> float:
        """Return the weight of a client."""
        if self.how == "num_examples" and fit.num_examples < 0:
            raise ValueError(f"Weights of a mean must not be negative, unlike {fit.num_examples}.")
        return float(fit.num_examples if self.how == "num_examples" else fit.num_steps > 0)

    def add(self, fit: Fit) -> None:
        """Add a client's model."""
        self.add_group(fit.model, self.weight_of(fit), 1)

    def add_group(self, mean: Weights, weight: float, count: int) -> None:
        """Add the mean of a group; with a weight of 0 it is that of so many models that count alike."""
        if weight or self.how == "num_examples":
            self._weighted.add(mean, weight)
        if not weight and not self.weight:
            self._equal.add(mean, count)
        self.weight += weight
        self.count += count

    def value(self) -> dict[str, Tensor]:
        """Return the mean so far."""
        if not self.count:
            raise ValueError("There is no model to average: give at least one.")
        return (self._weighted if self.weight else self._equal).value()


def ema(average: Weights, new: Weights, decay: float) -> Weights:
    """Return the exponential moving average ``decay * average + (1 - decay) * new``.

    ``average``: The average so far; empty before there is one.
    Returns: ``new`` where there is no average yet.
    """
    return add(scale(average, decay), new, 1 - decay) if average else new


def effective_steps(steps: int, momentum: float) -> float:
    """Return how many plain SGD steps go as far along a constant gradient as these with momentum rho.

    a = (t - rho (1 - rho^t) / (1 - rho)) / (1 - rho), which is t without momentum (Wang et al., 2020, FedNova, sec. 4).
    """
    # Velocity and distance of t steps from those of its binary parts: every term is positive, so that no digits are
    # lost near rho = 1, as they are in the formula above, and a count of any size takes no time.
    velocity = distance = 0.0
    part_steps, part_velocity, part_distance = 1, 1.0, 1.0
    while steps:
        if steps & 1:
            distance += part_distance + velocity * momentum * part_velocity
            velocity = part_velocity + momentum**part_steps * velocity
        part_distance += part_distance + part_velocity * momentum * part_velocity
        part_velocity += momentum**part_steps * part_velocity
        part_steps *= 2
        steps >>= 1
    return distance


def normalised_mean(
    start: Weights, replies: Mapping[str, Fit], momentum: float, buffers: Collection[str] = ()
) -> Weights:
    """Return w - (sum_i p_i a_i) sum_i (p_i / a_i) (w - w_i), p_i by examples (Wang et al., 2020, FedNova, eq. 5).

    Clients that took no step take no part. With equal a_i this is FedAvg.

    ``start``: w, from which all clients trained.
    ``buffers``: Tensors that are averaged by examples in any case: nobody took steps along them, and a variance that is
        extrapolated beyond those of all clients may become negative.
    """
    trained = [reply for reply in replies.values() if reply.num_steps]
    if not trained:
        return start
    examples = [float(reply.num_examples) for reply in trained]
    steps = [effective_steps(reply.num_steps, momentum) for reply in trained]
    plain = mean([reply.model for reply in trained], examples)
    if len(set(steps)) == 1:
        return plain
    mean_steps = sum(p * a for p, a in zip(examples, steps, strict=True)) / sum(examples)
    per_step = [p / a for p, a in zip(examples, steps, strict=True)]
    direction = mean((subtract(reply.model, start) for reply in trained), per_step)
    model = add(start, direction, mean_steps * sum(per_step) / sum(examples))
    return model | {name: plain[name] for name in buffers}


def masked_mean(
    layers: Weights, sent: Sequence[Tensor], masks: Sequence[Weights], sparsity: float
) -> dict[str, Tensor]:
    """Return for each unit the mean over those clients who sent it (Yoon et al., 2021, FedWeIT).

    ``layers``: By name, [units, ...], before the mean. A unit that nobody sent keeps its value.
    ``sent``: By client, what `fedkeep.models.fedweit_layers.active_weights` gave.
    ``masks``: For each client, the masks that it used, by layer, [units].
    ``sparsity``: The share of units that a mask leaves out.
    Returns: By name, [units, ...].
    """
    total = {name: torch.zeros_like(layer) for name, layer in layers.items()}
    count = {name: layer.new_zeros(len(layer)) for name, layer in layers.items()}
    for numbers, mask in zip(sent, masks, strict=True):
        chosen = {name: active_units(mask[name], sparsity) for name in layers}
        sizes = [int(chosen[name].sum()) * layer[0].numel() for name, layer in layers.items()]
        for name, part in zip(layers, torch.split(numbers, sizes), strict=True):
            total[name][chosen[name]] += part.view(-1, *layers[name].shape[1:])
            count[name] += chosen[name]
    counts = {name: broadcast_units(count[name], layer) for name, layer in layers.items()}
    return {n: torch.where(counts[n] > 0, total[n] / counts[n].clamp(min=1), layer) for n, layer in layers.items()}
