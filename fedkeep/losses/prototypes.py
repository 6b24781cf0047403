"""What stands for old classes: prototypes with noise around them (PASS), and chosen exemplars (iCaRL).

PASS (Zhu et al., 2021) trains the classifier on noisy mean features of old classes. iCaRL (Rebuffi et al., 2017) keeps
some examples of each class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, normalize

from fedkeep.losses.base import Batch, Loss, ModelView
from fedkeep.losses.decoupled import upcast
from fedkeep.models.heads import BIAS, WEIGHT


@dataclass(frozen=True, eq=False)
class Prototypes:
    """What stands for classes without their examples.

    ``classes``: int64 [k].
    ``means``: [k, width], the mean features of each class.
    ``num_examples``: int64 [k], over how many examples each mean was taken.
    ``radius``: Of the noise around the means. Its square is the mean over classes of their features' variance, itself a
        mean over the width (trace of the covariance / width, divided by n - 1). Classes with one example do not count,
        and without any other it is 0.
    """

    classes: Tensor
    means: Tensor
    num_examples: Tensor
    radius: float

    def sample(self, count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw features of random classes, each its class's mean plus radius * N(0, I).

        Returns: Features [count, width] and their classes, int64 [count].
        """
        rows = torch.randint(len(self.classes), (count,), generator=rng).to(self.classes.device)
        noise = torch.randn(count, self.means.shape[1], generator=rng).to(self.means)
        return self.means[rows] + self.radius * noise, self.classes[rows]


@torch.no_grad()
def prototypes(features: Tensor, labels: Tensor) -> Prototypes:
    """Compute the prototypes of the classes that occur, in order.

    ``features``: [n, width].
    ``labels``: int64 [n], of at least one example.
    """
    counts = torch.bincount(labels)
    found = counts.nonzero().flatten()
    members = [features[labels == c] for c in found.tolist()]
    variances = [rows.var(dim=0).mean() for rows in members if len(rows) > 1]
    radius = float(torch.stack(variances).mean().sqrt()) if variances else 0.0
    return Prototypes(found, torch.stack([rows.mean(0) for rows in members]), counts[found], radius)


def extend_prototypes(old: Prototypes | None, new: Prototypes | None) -> Prototypes | None:
    """Return the prototypes of older classes together with those of other, newer ones.

    The first radius that is not 0 stays for all classes.

    ``old``, ``new``: None stands for no class at all.
    """
    if old is None or new is None:
        return old or new
    columns = {
        name: torch.cat((getattr(old, name), getattr(new, name))) for name in ("classes", "means", "num_examples")
    }
    return Prototypes(**columns, radius=old.radius or new.radius)


@dataclass(frozen=True, eq=False)
class PrototypeCrossEntropy(Loss):
    """Cross-entropy of the classifier on given features, its logits divided by ``tau``.

    ``features``: [n, width], one row for each example of the first data set, whose batches select what a step sees.
    ``labels``: int64 [n], rows of the classifier.
    ``tau``: The softmax temperature.
    """

    per_example_fields: ClassVar[tuple[str, ...]] = ("features", "labels")

    features: Tensor
    labels: Tensor
    tau: float = 0.1

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        rows = batches[0].index
        logits = linear(self.features[rows], model.weights[WEIGHT], model.weights.get(BIAS))
        return cross_entropy(upcast(logits) / self.tau, self.labels[rows])


@torch.no_grad()
def herd(features: Tensor, count: int) -> Tensor:
    """Choose exemplars of one class by herding (iCaRL, algorithm 4).

    Each next exemplar is that with which the mean of those chosen comes closest to the mean of all.

    ``features``: [n, width], of all examples of the class. Of equally good ones the first is taken.
    ``count``: How many to keep.
    Returns: int64 [min(count, n)], row numbers, the most representative first.
    """
    rows = normalize(features.double(), dim=1)
    mean, total, chosen = rows.mean(0), rows.new_zeros(rows.shape[1]), list[int]()
    left = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for number in range(1, min(count, len(rows)) + 1):
        distances = (mean - (rows + total) / number).norm(dim=1)
        best = int(distances.masked_fill(~left, torch.inf).argmin())
        chosen.append(best)
        left[best] = False
        total = total + rows[best]
    return torch.tensor(chosen, dtype=torch.int64, device=features.device)
