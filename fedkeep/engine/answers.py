"""What frozen models say of a data set, asked once."""

from __future__ import annotations

from torch import Tensor

from fedkeep.engine.workplace import Workplace
from fedkeep.interface import Data
from fedkeep.models import Weights


class Answers:
    """Answers of frozen models about one data set: images normalised once for all, and a model asked once."""

    def __init__(self, place: Workplace, data: Data) -> None:
        self.place = place
        self.data = data
        self.images: Tensor | None = None
        self.said: list[tuple[Weights, Tensor]] = []

    def __call__(self, model: Weights) -> Tensor:
        for asked, answer in self.said:
            if asked is model:
                return answer
        answer = self.place.networks.logits(model, self._normalised())
        self.said.append((model, answer))
        return answer

    def features(self, model: Weights) -> Tensor:
        return self.place.networks.features(model, self._normalised())

    def for_data(self, data: Data) -> Answers:
        return Answers(self.place, data)

    def _normalised(self) -> Tensor:
        if self.images is None:
            self.images = self.place.normalise(self.data["image"])
        return self.images
