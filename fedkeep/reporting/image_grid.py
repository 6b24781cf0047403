"""Real and generated images side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedkeep.reporting.figures import INK, PAPER, theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GAP = 2  # pixels between images
_ZOOM = 1.5  # points a pixel


FONT_SIZE = 10.0


def image_grid(real: Sequence[Tensor], generated: Sequence[Tensor], label_names: Sequence[str], title: str) -> Figure:
    """Draw a row a class: real images left, generated ones right.

    ``real``, ``generated``: For each class, uint8 [count, channels, height, width]; counts may differ, even be 0.
    """
    sides = [_canvas(images) for images in (real, generated)]
    height = sides[0].shape[0]
    aisle = np.full((height, 6 * _GAP, 3), 255, dtype=np.uint8)
    canvas = np.concatenate((sides[0], aisle, sides[1]), axis=1)
    row = height / len(label_names)
    margin_left, margin_top = 0.65 * FONT_SIZE * max(map(len, label_names)) + 12, 4 * FONT_SIZE
    wide, high = canvas.shape[1] * _ZOOM, height * _ZOOM
    width_points, height_points = wide + margin_left + 8, high + margin_top + 8
    with theme():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width_points / 72, height_points / 72), facecolor=PAPER)
        axes = figure.add_axes(
            (margin_left / width_points, 8 / height_points, wide / width_points, high / height_points)
        )
        axes.imshow(canvas, interpolation="nearest", aspect="auto", extent=(0, canvas.shape[1], height, 0))
        axes.set_yticks([row * (number + 0.5) for number in range(len(label_names))])
        axes.set_yticklabels([name.replace("$", r"\$") for name in label_names], color=INK)
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        for text, place in (("real", 0), ("generated", sides[0].shape[1] + aisle.shape[1])):
            axes.text(place, -_GAP, text, va="bottom", color=INK)
        figure.text(0.01, 1 - 0.4 * FONT_SIZE / height_points, title, va="top", color=INK)
    return figure


def _canvas(classes: Sequence[Tensor]) -> NDArray[np.uint8]:
    """Return rows of images as one picture [height, width, 3], white where there is none."""
    _, channels, height, width = classes[0].shape
    columns = max(1, *(len(images) for images in classes))
    canvas = np.full((len(classes) * (height + _GAP), columns * (width + _GAP), 3), 255, dtype=np.uint8)
    for row, images in enumerate(classes):
        for column, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
            top, left = row * (height + _GAP), column * (width + _GAP)
            canvas[top : top + height, left : left + width] = image if channels == 3 else image.repeat(3, axis=2)
    return canvas
