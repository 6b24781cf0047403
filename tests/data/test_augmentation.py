"""Augmentations, each against a slow and obvious version of itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkeep.data.augmentation import Augmentation, rotation_source
from fedkeep.errors import ConfigError, ValueRefused


def raw(images: Tensor) -> Tensor:
    return images.float()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(batch: int = 64, channels: int = 3, height: int = 12, width: int = 10) -> Tensor:
    return torch.randint(1, 256, (batch, channels, height, width), dtype=torch.uint8, generator=seeded(99))


def test_off_by_default_draws_nothing() -> None:
    generator = seeded()
    before = generator.get_state()
    images = noise()
    augmentation = Augmentation()
    assert not augmentation
    assert torch.equal(augmentation(images, raw, generator), images.float())
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(
    "options", [{"crop_padding": 1}, {"horizontal_flip": True}, {"rotation": 5.0}, {"brightness": 0.1}, {"cutout": 2}]
)
def test_on(options: dict[str, Any]) -> None:
    assert Augmentation(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"crop_padding": 3},
        {"crop_padding": 3, "padding_mode": "reflect"},
        {"horizontal_flip": True},
        {"rotation": 30.0},
        {"brightness": 0.3},
        {"cutout": 4},
    ],
)
def test_same_generator_same_batch_and_input_unchanged(options: dict[str, Any]) -> None:
    images = noise()
    kept = images.clone()
    augmentation = Augmentation(**options)
    first, again, other = (augmentation(images, raw, seeded(s)) for s in (1, 1, 2))
    assert first.dtype == torch.float32
    assert first.shape == images.shape
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(images, kept)


@pytest.mark.parametrize(("mode", "padding"), [("zero", "constant"), ("reflect", "reflect")])
def test_crop_is_a_window_of_the_padded_image(mode: Any, padding: str) -> None:
    images, pad = noise(200), 3
    result = Augmentation(crop_padding=pad, padding_mode=mode)(images, raw, seeded())
    padded = torch.nn.functional.pad(images.float(), (pad,) * 4, mode=padding)
    seen = set()
    for image, around in zip(result, padded, strict=True):
        windows = {(y, x): around[:, y : y + 12, x : x + 10] for y in range(7) for x in range(7)}
        found = [location for location, window in windows.items() if torch.equal(window, image)]
        assert found
        seen.add(found[0])
    assert len(seen) > 40  # of 49 places
    assert {y for y, _ in seen} == set(range(7))
    assert {x for _, x in seen} == set(range(7))


def test_flip_mirrors_about_half() -> None:
    images = noise(400)
    result = Augmentation(horizontal_flip=True)(images, raw, seeded())
    same = (result == images.float()).flatten(1).all(1)
    mirrored = (result == images.float().flip(3)).flatten(1).all(1)
    assert bool((same ^ mirrored).all())
    assert 150 < int(mirrored.sum()) < 250


def test_crop_then_flip_is_one_window_mirrored() -> None:
    images = noise(20, 1, 6, 6)
    result = Augmentation(crop_padding=2, horizontal_flip=True)(images, raw, seeded())
    padded = torch.nn.functional.pad(images.float(), (2,) * 4)
    for image, around in zip(result, padded, strict=True):
        windows = [around[:, y : y + 6, x : x + 6] for y in range(5) for x in range(5)]
        assert any(torch.equal(image, w) or torch.equal(image, w.flip(2)) for w in windows)


@pytest.mark.parametrize("degrees", [-90.0, -33.0, 15.0, 90.0, 180.0])
@pytest.mark.parametrize("size", [(12, 10), (9, 9), (16, 16)])
def test_rotation_agrees_with_pillow(degrees: float, size: tuple[int, int]) -> None:
    pillow = pytest.importorskip("PIL.Image")
    height, width = size
    image = noise(1, 1, height, width)[0, 0].numpy()
    expected = np.asarray(pillow.fromarray(image).rotate(degrees))
    grid = torch.arange(height).view(1, -1, 1), torch.arange(width).view(1, 1, -1)
    y, x = (p[0].numpy() for p in rotation_source(*grid, torch.full((1, 1, 1), degrees), height, width))
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    result = np.where(inside, image[y.clip(0, height - 1), x.clip(0, width - 1)], 0)
    # Ties between two pixels may round differently; nothing else may differ.
    assert (result == expected).mean() > 0.97


def test_rotation_varies_within_its_range_and_fills_with_black() -> None:
    images = torch.full((300, 1, 21, 21), 200, dtype=torch.uint8)
    images[:, :, 10, 20] = 100  # right of the centre; moves up when the image turns counter-clockwise
    result = Augmentation(rotation=20.0)(images, raw, seeded())
    assert set(result.flatten().tolist()) == {0.0, 100.0, 200.0}
    marks = (result[:, 0, :, 17:] == 100).nonzero()
    heights = marks[:, 1]
    assert int(heights.min()) < 8
    assert int(heights.max()) > 12
    assert int(heights.min()) >= 6  # sin(20 degrees) * 10 is 3.4
    assert int(heights.max()) <= 14


def test_brightness_multiplies_each_image_by_a_number_of_its_own() -> None:
    images = torch.full((4000, 3, 2, 2), 200, dtype=torch.uint8)
    result = Augmentation(brightness=63 / 255)(images, raw, seeded())
    assert bool((result == result[:, :1, :1, :1]).all()), "one number for an image"
    values = result[:, 0, 0, 0]
    assert 150 <= float(values.min()) <= 151, "200 * (1 - 63 / 255) is 150.6"
    assert float(values.max()) <= 249
    assert float(values.mean()) == pytest.approx(199.5, abs=1.5), "as often brighter as darker, and cut to integers"
    white = Augmentation(brightness=1.0)(images, raw, seeded())
    assert float(white.max()) == 255
    assert float(white.min()) < 10


def test_made_images_keep_their_brightness_and_change_no_draw() -> None:
    images, created = noise(6), torch.tensor([True, False, False, True, False, True])
    changed, some = (Augmentation(brightness=0.5)(images, raw, seeded(), which) for which in (None, created))
    assert torch.equal(some[created], images[created].float())
    assert torch.equal(some[~created], changed[~created])
    assert not torch.equal(changed[created], some[created])


@pytest.mark.parametrize("factor", [0.76, 0.9, 1.0, 1.1, 1.24])
def test_brightness_agrees_with_pillow(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL.Image")
    from PIL import Image, ImageEnhance

    image = noise(1)
    share = (factor - 1) / 0.25 / 2 + 0.5
    monkeypatch.setattr(torch, "rand", lambda *shape, **where: torch.full((1, 1, 1, 1), share, dtype=torch.float64))
    result = Augmentation(brightness=0.25)(image, raw, seeded())
    expected = np.asarray(ImageEnhance.Brightness(Image.fromarray(image[0].permute(1, 2, 0).numpy())).enhance(factor))
    apart = np.abs(result[0].permute(1, 2, 0).numpy() - expected)
    assert apart.max() <= 1, "where a product is a whole number but for rounding"
    assert (apart == 0).mean() > 0.98


def test_cutout_clears_one_square_after_normalisation() -> None:
    images = noise(500, 2, 12, 10)
    result = Augmentation(cutout=4)(images, lambda batch: batch.float() + 1000, seeded())
    holes = result == 0
    assert torch.equal(holes[:, 0], holes[:, 1])
    assert torch.equal(result[~holes], (images.float() + 1000)[~holes])
    sizes = set()
    for hole in holes[:, 0]:
        locations = hole.nonzero()
        low, high = locations.min(0).values, locations.max(0).values
        extent = high - low + 1
        assert int(extent.prod()) == len(locations)  # a full rectangle
        sizes.add(tuple(extent.tolist()))
    assert (4, 4) in sizes
    assert min(sizes) == (2, 2)  # clipped at a corner: two of the four rows lie before the centre's


def test_normalise_sees_uint8() -> None:
    def check(images: Tensor) -> Tensor:
        assert images.dtype == torch.uint8
        return images.float()

    Augmentation(crop_padding=2, horizontal_flip=True, rotation=10.0, cutout=3)(noise(), check, seeded())


def test_refusals() -> None:
    with pytest.raises(ValueRefused, match="uint8"):
        Augmentation(horizontal_flip=True)(noise().float(), raw, seeded())
    with pytest.raises(ConfigError, match="Lower crop"):
        Augmentation(crop_padding=10, padding_mode="reflect")(noise(), raw, seeded())
    with pytest.raises(ConfigError, match=r"Augmentation.crop_padding must be at least 0"):
        Augmentation(crop_padding=-1)
    with pytest.raises(ConfigError, match="reflect"):
        Augmentation(padding_mode="reflected")  # type: ignore[arg-type]


def test_pixels_of_any_type_are_moved_alike_and_pass_gradients_on() -> None:
    augmentation = Augmentation(crop_padding=2, horizontal_flip=True)
    stored = torch.arange(2 * 3 * 6 * 6).view(2, 3, 6, 6).to(torch.uint8)
    pixels = stored.float().requires_grad_()
    moved = augmentation.move_pixels(pixels, torch.Generator().manual_seed(0))
    expected = augmentation.move_pixels(stored, torch.Generator().manual_seed(0))
    assert torch.equal(moved.detach(), expected.float())
    moved.sum().backward()
    assert pixels.grad is not None
    assert int(pixels.grad.sum()) < pixels.numel(), "what was cropped away counts for nothing"


@pytest.mark.parametrize("options", [{"horizontal_flip": True}, {"crop_padding": 1}, {"rotation": 1.0}, {"cutout": 1}])
def test_an_empty_batch_stays_empty(options: dict[str, Any]) -> None:
    """DP-SGD draws batches at random, and some are empty."""
    assert Augmentation(**options)(noise(batch=0), raw, seeded()).shape == (0, 3, 12, 10)
