"""One forward pass for all data sets of a step: what batch statistics see, and what stays as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from table_model import EXACT, TableOutputs, TableView, data, draw, model, value_and_gradients
from torch import Tensor

from fedkeep.losses import Batch, ClassSubset, CrossEntropy, Distillation, FullKL, Loss, ModelView, Scaled, SupCon
from fedkeep.losses.wrappers import ConcatForward

STUDENT, TEACHER, OLD = model(10, 4, 5, seed=1), model(10, 4, 3, seed=2), 3
NEW, PAST = data([3, 4, 4, 3, 3, 4, 3, 4, 4, 3]), data([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
TAUGHT = ClassSubset(Distillation((TEACHER,), FullKL(2.0), dataset_index=1), 0, OLD, any_label=True)
TERM = (
    ClassSubset(CrossEntropy(), OLD)
    + Scaled(0.5, ClassSubset(CrossEntropy(dataset_index=1), 0, OLD))
    + TAUGHT
    + SupCon()
)


class Centring(TableView):
    """A student that answers how far an image is from its batch's mean, as batch norm would."""

    def __init__(self) -> None:
        super().__init__({})

    def logits(self, batch: Batch) -> Tensor:
        return batch.data["input"] - batch.data["input"].mean()


@dataclass(frozen=True, eq=False)
class Said(Loss):
    """Notes what a student says of each batch, and of one that it makes itself."""

    noted: list[list[float]]

    def __call__(self, student: ModelView, batches: Sequence[Batch]) -> Tensor:
        own = Batch({"input": torch.tensor([5.0, 7.0])}, torch.arange(2))
        self.noted.extend(student.logits(batch).tolist() for batch in (*batches, own))
        return torch.zeros(())


def test_batch_statistics_are_of_all_data_sets() -> None:
    batches = [Batch({"input": torch.tensor(images)}, torch.arange(len(images))) for images in ([1.0, 3.0], [8.0])]
    apart, at_once = Said([]), Said([])
    apart(Centring(), batches)
    ConcatForward(at_once)(Centring(), batches)
    assert apart.noted == [[-1.0, 1.0], [0.0], [-1.0, 1.0]]
    assert at_once.noted == [[-3.0, -1.0], [4.0], [-1.0, 1.0]], "the mean of 1, 3 and 8 is 4"


@pytest.mark.parametrize("known", [False, True])
def test_where_images_are_answered_one_by_one_nothing_changes(known: bool) -> None:
    terms: list[Loss] = [TERM, ConcatForward(TERM)]
    if known:
        terms = [term.cache_teachers(TableOutputs(PAST), PAST, 1) for term in terms]  # type: ignore[arg-type]
    batches = draw(NEW, (7, 2, 5, 0)), draw(PAST, (1, 3, 8))
    (loss, gradients), (other, others) = (value_and_gradients(term, STUDENT, *batches) for term in terms)
    torch.testing.assert_close(loss, other, **EXACT)
    for name, slope in gradients.items():
        torch.testing.assert_close(slope, others[name], **EXACT)
