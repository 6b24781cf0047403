"""Photos of different sizes, as a user has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

LIGHT = {"cat": 200, "dog": 60}
"""How light the photos of each class are, so that they can be told apart."""


def take_photos(folder: Path, number: int = 96) -> Path:
    """Write small colour photos of two classes, no two of one height, a quarter of them to test on."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for photo in range(number):
        split, name = ("test" if photo % 4 == 0 else "train"), list(LIGHT)[photo // 4 % 2]
        path = folder / split / name / f"{photo}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.normal(LIGHT[name], 20, (40 + photo, 60, 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(path)
    return folder
