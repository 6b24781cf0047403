"""What frozen models say of a data set, asked once."""

from __future__ import annotations

from torch import Tensor

from fedkeep.interface import Data
from fedkeep.models import Weights
from fedkeep.training.context import ClientContext


class TeacherOutputs:
    """TeacherOutputs of frozen models about one data set: images normalised once for all, and a model asked once."""

    def __init__(self, place: ClientContext, data: Data) -> None:
        self.place = place
        self.data = data
        self.images: Tensor | None = None
        self.said: list[tuple[Weights, Tensor]] = []

    def __call__(self, model: Weights) -> Tensor:
        for asked, answer in self.said:
            if asked is model:
                return answer
        answer = self.context.runner.logits(model, self._normalised())
        self.said.append((model, answer))
        return answer

    def features(self, model: Weights) -> Tensor:
        return self.context.runner.features(model, self._normalised())

    def about(self, data: Data) -> TeacherOutputs:
        return TeacherOutputs(self.place, data)

    def _normalised(self) -> Tensor:
        if self.images is None:
            self.images = self.context.normalise(self.data["image"])
        return self.images
