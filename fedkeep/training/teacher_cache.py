"""Outputs of frozen teachers on a data set, computed once per client and round."""

from __future__ import annotations

from torch import Tensor

from fedkeep.interface import Data
from fedkeep.models import Weights
from fedkeep.training.context import ClientContext


class TeacherCache:
    """Outputs of frozen models on one data set; images are normalised once, and each model runs once."""

    def __init__(self, context: ClientContext, data: Data) -> None:
        self.context = context
        self.data = data
        self._images: Tensor | None = None
        self._logits: list[tuple[Weights, Tensor]] = []

    def __call__(self, model: Weights) -> Tensor:
        """Return a model's logits, computed on the first call.

        Returns: Logits, float32 [n, rows].
        """
        for known, logits in self._logits:
            if known is model:
                return logits
        logits = self.context.runner.logits(model, self._normalised())
        self._logits.append((model, logits))
        return logits

    def features(self, model: Weights) -> Tensor:
        """Compute the input of a model's classifier.

        Returns: Features, float32 [n, width].
        """
        return self.context.runner.features(model, self._normalised())

    def for_data(self, data: Data) -> TeacherCache:
        """Return a cache for another data set.

        Returns: An empty cache.
        """
        return TeacherCache(self.context, data)

    def _normalised(self) -> Tensor:
        if self._images is None:
            self._images = self.context.normalise(self.data["input"])
        return self._images
