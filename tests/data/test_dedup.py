"""Images known by their content."""

from __future__ import annotations

import tiny
import torch

from fedkeep.data.holdout import image_hashes, without_images


def test_equal_pixels_and_no_others_have_equal_fingerprints() -> None:
    images = tiny.dataset(30).train["input"]
    found = image_hashes(torch.cat((images, images)))
    assert torch.equal(found[:30], found[30:])
    assert len(found.unique()) == 30
    one_pixel = images.clone()
    one_pixel[:, 0, 3, 3] ^= 1
    assert not torch.isin(image_hashes(one_pixel), found).any()


def test_what_is_left_is_all_but_the_images_that_were_seen() -> None:
    data = tiny.dataset(30)
    seen = data.train["input"][[3, 8, 20]]
    left = without_images(data, image_hashes(seen))
    assert left.train["label"].tolist() == [
        c for row, c in enumerate(data.train["label"].tolist()) if row not in {3, 8, 20}
    ]
    assert not torch.isin(image_hashes(left.train["input"]), image_hashes(seen)).any()
    assert left.test is data.test
    assert (left.mean, left.std) == (data.mean, data.std)


def test_held_out_images_that_were_seen_go_too() -> None:
    data = tiny.dataset(30)
    seen = torch.cat((data.train["input"][:3], data.test["input"][:2]))
    left = without_images(data, image_hashes(seen), from_test=True)
    assert left.train["label"].tolist() == data.train["label"][3:].tolist()
    assert left.test["label"].tolist() == data.test["label"][2:].tolist()
