"""Frozen teachers' outputs on a data set, computed once per client and round."""

from __future__ import annotations

from torch import Tensor

from fedkeep.interface import Data
from fedkeep.models import Weights
from fedkeep.training.context import ClientContext


class TeacherCache:
    """Outputs of frozen models on one data set: images are normalised once for all, and each model runs once.

    Parameters
    ----------
    context : ClientContext
        Normalises images and runs models.
    data : Data
        The examples.
    """

    def __init__(self, context: ClientContext, data: Data) -> None:
        self.context = context
        self.data = data
        self._images: Tensor | None = None
        self._logits: list[tuple[Weights, Tensor]] = []

    def __call__(self, model: Weights) -> Tensor:
        """Return a model's logits [n, rows], from the cache if it ran before."""
        for known, logits in self._logits:
            if known is model:
                return logits
        logits = self.context.runner.logits(model, self._normalised())
        self._logits.append((model, logits))
        return logits

    def features(self, model: Weights) -> Tensor:
        """Return the input of a model's classifier, [n, width]."""
        return self.context.runner.features(model, self._normalised())

    def for_data(self, data: Data) -> TeacherCache:
        """Return the outputs on another data set."""
        return TeacherCache(self.context, data)

    def _normalised(self) -> Tensor:
        if self._images is None:
            self._images = self.context.normalise(self.data["image"])
        return self._images
