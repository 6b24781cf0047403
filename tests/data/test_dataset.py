"""What a DataSet accepts, refuses and computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedkeep.data.dataset import DataSet, channel_statistics
from fedkeep.data.holdout import hold_out, image_hashes, validated
from fedkeep.data.loading import load
from fedkeep.errors import DataError


def small(**changes: Any) -> DataSet:
    train = {"input": torch.zeros(6, 3, 4, 4, dtype=torch.uint8), "label": torch.tensor([0, 1, 2, 0, 1, 2])}
    test = {"input": torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "label": torch.tensor([0, 2])}
    fields: dict[str, Any] = {
        "name": "small", "train": train, "test": test, "label_names": ("a", "b", "c"),
        "mean": (0.5, 0.4, 0.3), "std": (0.1, 0.2, 0.4),
    }  # fmt: skip
    return DataSet(**{**fields, **changes})


def test_properties() -> None:
    dataset = small()
    assert dataset.num_classes == 3
    assert dataset.shape == (3, 4, 4)
    assert dataset.note == ""


def test_normalise_per_channel_in_float32_and_leaves_its_input() -> None:
    images = torch.full((2, 3, 4, 4), 51, dtype=torch.uint8)  # 0.2
    result = small().normalise(images)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result[1, :, 0, 0], torch.tensor([-3.0, -1.0, -0.25]))
    assert int(images.min()) == 51


def test_made_pixels_are_normalised_as_stored_ones_and_pass_gradients_on() -> None:
    stored = torch.randint(0, 256, (2, 3, 4, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    created = (stored / 255).requires_grad_()
    result = small().image_format.normalise(created)
    torch.testing.assert_close(result, small().normalise(stored))
    result.sum().backward()
    assert created.grad is not None
    torch.testing.assert_close(created.grad[0, :, 0, 0], torch.tensor([10.0, 5.0, 2.5]))
    assert small().image_format.shape == (3, 4, 4)


def test_normalise_returns_floats_as_they_are() -> None:
    images = torch.rand(2, 3, 4, 4)
    assert small().normalise(images) is images


def test_channel_statistics_agree_with_torch_over_several_chunks() -> None:
    images = torch.randint(256, (5000, 2, 3, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    images[:, 1] //= 3
    mean, std = channel_statistics(images)
    scaled = images.double() / 255
    assert mean == pytest.approx(scaled.mean(dim=(0, 2, 3)).tolist())
    assert std == pytest.approx(scaled.std(dim=(0, 2, 3), correction=0).tolist())


def test_constant_channel_can_be_divided_by() -> None:
    mean, std = channel_statistics(torch.full((3, 1, 2, 2), 255, dtype=torch.uint8))
    assert mean == (1.0,)
    assert std == (1.0,)


def columns(**changes: Any) -> dict[str, Any]:
    return {**small().train, **changes}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"label_names": ("a", "b", "a")}, "same name: 'a'"),
        ({"label_names": ("a", "b")}, "0..2, but 2 classes"),
        ({"label_names": ()}, "there are no classes"),
        ({"mean": (0.5,)}, "3 channel"),
        ({"mean": (float("nan"), 0.1, 0.1)}, "finite"),
        ({"std": (0.1, 0.0, 0.1)}, "above 0"),
        ({"train": {"inputs": torch.zeros(1)}}, "'input' is missing. Did you mean 'inputs'"),
        ({"train": columns(input=torch.zeros(6, 4, 4, dtype=torch.uint8))}, "[6, 4, 4]"),
        ({"train": columns(input=torch.full((6, 3, 4, 4), torch.nan))}, "NaN"),
        ({"train": columns(label=torch.zeros(5, dtype=torch.int64))}, "has 5 rows but there are 6"),
        ({"train": columns(label=torch.zeros(6))}, "one integer a row"),
        ({"train": columns(label=torch.zeros(6, dtype=torch.int32))}, "int64"),
        ({"train": columns(label=torch.full((6,), -1))}, "-1..-1"),
        ({"train": columns(writer=torch.zeros(6, dtype=torch.int64))}, "both need the same"),
        ({"train": columns(input=torch.zeros(6, 3, 5, 4, dtype=torch.uint8))}, "one size"),
        (
            {"test": {"input": torch.zeros(0, 3, 4, 4, dtype=torch.uint8), "label": torch.zeros(0, dtype=torch.int64)}},
            "no inputs",
        ),
    ],
)
def test_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as caught:
        small(**changes)
    assert says in str(caught.value)


def test_to_the_same_device_is_itself() -> None:
    dataset = small()
    assert dataset.to("cpu") is dataset
    assert replace(dataset, name="other").to(torch.device("cpu")).name == "other"


def test_digits_are_stratified_and_always_the_same() -> None:
    first, second = load("digits"), load("digits")
    assert first.shape == (1, 8, 8)
    assert (len(first.train["label"]), len(first.test["label"])) == (1438, 359)
    share = first.test["label"].bincount() / torch.cat([first.test["label"], first.train["label"]]).bincount()
    assert float((share - 0.2).abs().max()) < 0.005
    assert int(first.train["input"].max()) == 255
    assert set(first.train["input"].flatten().tolist()) <= {round(v * 255 / 16) for v in range(17)}
    assert torch.equal(first.test["input"], second.test["input"])


def test_hold_out_takes_the_share_of_each_group_and_leaves_one() -> None:
    groups = torch.tensor([0] * 10 + [7] * 25 + [3])
    chosen = hold_out(groups, 0.2)
    assert [int(chosen[groups == group].sum()) for group in (0, 7, 3)] == [2, 5, 0]
    # A group's choice is drawn, not its first rows.
    assert chosen[groups == 7].nonzero().flatten().tolist() != [0, 1, 2, 3, 4]


def test_a_part_of_the_training_images_stands_for_the_test_images() -> None:
    whole = load("digits")
    part = validated(whole, 0.1)
    together = torch.cat((part.train["label"], part.test["label"]))
    assert torch.equal(together.bincount(), whole.train["label"].bincount())
    share = part.test["label"].bincount() / together.bincount()
    assert float((share - 0.1).abs().max()) < 0.005
    ours, theirs = image_hashes(part.test["input"]), image_hashes(part.train["input"])
    assert torch.isin(ours, image_hashes(whole.train["input"])).all()
    assert int(torch.isin(ours, theirs).sum()) == 0, "clients do not have them"
    assert not torch.isin(image_hashes(whole.test["input"]), torch.cat((ours, theirs))).any()
    assert torch.equal(part.test["input"], validated(whole, 0.1).test["input"])
    assert "10% of each class's training images, held out; the test images are not used" in part.note
    assert (part.mean, part.label_names) == (whole.mean, whole.label_names)


def test_a_part_of_no_image_is_refused() -> None:
    with pytest.raises(DataError, match="holds none out"):
        validated(small(), 1e-6)
