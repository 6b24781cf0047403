"""Classes learned as four by rotation: what is turned how, and that terms see it so, asked before or in each batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from table_model import EXACT, noise
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.functional import cross_entropy

from fedkeep.errors import ConfigError
from fedkeep.losses import (
    Batch,
    ClassSubset,
    CrossEntropy,
    Distillation,
    FeatureDistance,
    FullKL,
    Loss,
    Rotated,
    Scaled,
)
from fedkeep.losses.wrappers import rotate

EXAMPLES, WIDTH, OLD, CLASSES = 6, 4, 2, 3
IMAGES, LABELS = noise(EXAMPLES, 1, 3, 3), torch.tensor([0, 1, 2, 2, 1, 0])
DATA = {"input": IMAGES, "label": LABELS}
ROWS = torch.tensor([4, 1, 2])


def network(classes: int, seed: int) -> dict[str, Tensor]:
    return {
        "body": noise(9, WIDTH, seed=seed),
        "classifier.weight": noise(4 * classes, WIDTH, seed=seed + 1),
        "classifier.bias": noise(4 * classes, seed=seed + 2),
    }


def features(model: Mapping[str, Tensor], images: Tensor) -> Tensor:
    return images.flatten(1) @ model["body"]


def logits(model: Mapping[str, Tensor], images: Tensor) -> Tensor:
    return features(model, images) @ model["classifier.weight"].T + model["classifier.bias"]


STUDENT, TEACHER = network(CLASSES, 1), network(OLD, 10)


class Seeing:
    """A student that sees images; counts how often teachers are asked."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.asked = 0

    def logits(self, batch: Batch) -> Tensor:
        return logits(self.weights, batch.data["input"])

    def features(self, batch: Batch) -> Tensor:
        return features(self.weights, batch.data["input"])

    def teacher_logits(self, model: Mapping[str, Tensor], batch: Batch) -> Tensor:
        self.asked += 1
        return logits(model, batch.data["input"])

    def teacher_features(self, model: Mapping[str, Tensor], batch: Batch) -> Tensor:
        self.asked += 1
        return features(model, batch.data["input"])


class TableOutputs:
    """Frozen models, asked about all of a data set."""

    def __init__(self, data: Mapping[str, Tensor]) -> None:
        self.data = data

    def __call__(self, model: Mapping[str, Tensor]) -> Tensor:
        return logits(model, self.data["input"])

    def features(self, model: Mapping[str, Tensor]) -> Tensor:
        return features(model, self.data["input"])

    def for_data(self, data: Mapping[str, Tensor]) -> TableOutputs:
        return TableOutputs(data)


def settled(objective: Loss) -> Loss:
    answer: Any = TableOutputs(DATA)
    return objective.cache_teachers(answer, DATA, 0)


def test_rotations_are_classes_of_their_own() -> None:
    image = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    images, labels = rotate(torch.stack((image, 10 * image))[:, None], torch.tensor([2, 5]))
    assert labels.tolist() == [8, 9, 10, 11, 20, 21, 22, 23]
    assert images.shape == (8, 1, 2, 2)
    assert images[0, 0].tolist() == [[1, 2], [3, 4]]
    assert images[1, 0].tolist() == [[2, 4], [1, 3]], "counter-clockwise"
    assert images[2, 0].tolist() == [[4, 3], [2, 1]]
    assert images[3, 0].tolist() == [[3, 1], [4, 2]]
    assert torch.equal(images[4:], 10 * images[:4])


def test_only_square_images_can_be_turned() -> None:
    with pytest.raises(ConfigError, match="28 pixels high and 24 wide"):
        rotate(torch.zeros(1, 1, 28, 24), torch.tensor([0]))


def distilled() -> Loss:
    term = Distillation((TEACHER,), FullKL(3.0), 2.0, "none", teacher_entropy=False)
    return ClassSubset(term, 0, 4 * OLD, any_label=True)


@pytest.mark.parametrize("is_settled", [False, True])
def test_terms_see_every_rotation(is_settled: bool) -> None:
    """Cross-entropy, the distance of features and distillation, each over 12 images of a batch of 3."""
    objective: Loss = Rotated(CrossEntropy(tau=0.1) + Scaled(10.0, FeatureDistance(TEACHER)) + distilled())
    if is_settled:
        objective = settled(objective)
    student = Seeing(STUDENT)
    value = objective(student, [Batch({"input": IMAGES[ROWS], "label": LABELS[ROWS]}, ROWS)])
    assert student.asked == (0 if is_settled else 2)
    turned = torch.stack([IMAGES[row].rot90(k, (1, 2)) for row in ROWS for k in range(4)])
    labels = torch.tensor([4 * int(LABELS[row]) + k for row in ROWS for k in range(4)])
    own, output = logits(STUDENT, turned), logits(TEACHER, turned)
    expected = cross_entropy(own / 0.1, labels)
    expected = expected + 10 * (features(STUDENT, turned) - features(TEACHER, turned)).norm()
    probabilities = (output / 2).softmax(-1)
    expected = expected - 3 * (probabilities * (own[:, : 4 * OLD] / 2).log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(value, expected, **EXACT)


def test_clients_side_by_side_see_the_same() -> None:
    term = settled(Rotated(CrossEntropy(tau=0.1) + FeatureDistance(TEACHER) + distilled()))

    def loss(weights: dict[str, Tensor], rows: Tensor, image: Tensor, label: Tensor) -> Tensor:
        return term(Seeing(weights), [Batch({"input": image, "label": label}, rows)])

    stacked = {name: torch.stack((tensor, tensor + 0.1)) for name, tensor in STUDENT.items()}
    rows = torch.tensor([[1, 2, 3], [4, 5, 0]])
    gradients, losses = vmap(grad_and_value(loss))(stacked, rows, IMAGES[rows], LABELS[rows])
    for client in range(2):
        own = {name: tensor[client] for name, tensor in stacked.items()}
        slope, value = grad_and_value(loss)(own, rows[client], IMAGES[rows[client]], LABELS[rows[client]])
        torch.testing.assert_close(losses[client], value, **EXACT)
        torch.testing.assert_close(gradients["body"][client], slope["body"], **EXACT)


def test_only_the_first_data_set_is_turned() -> None:
    objective = Rotated(CrossEntropy(dataset_index=1))
    answer: Any = None
    assert objective.cache_teachers(answer, DATA, 1) is objective
    other = Batch({"input": IMAGES, "label": LABELS}, torch.arange(EXAMPLES))
    value = objective(Seeing(STUDENT), [Batch({"input": IMAGES[ROWS], "label": LABELS[ROWS]}, ROWS), other])
    torch.testing.assert_close(value, cross_entropy(logits(STUDENT, IMAGES), LABELS), **EXACT)
