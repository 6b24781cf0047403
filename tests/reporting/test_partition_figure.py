"""The heat map is one SVG that stands alone, whatever the number of clients."""

from __future__ import annotations

import base64
import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from fedkeep.reporting.figures import partition_figure


def pixels(svg: str) -> np.ndarray:
    """Return the picture inside, [classes, clients, 4] in 0..1."""
    image = pytest.importorskip("matplotlib.image")
    # The colour bar is an image too; only the trials ask not to be smoothed.
    (found,) = [tag for tag in re.findall(r"<image[^>]*>", svg) if "pixelated" in tag]
    data = re.search(r'data:image/png;base64,([^"]+)"', found)
    assert data
    return image.imread(io.BytesIO(base64.b64decode(data[1])))


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (10, 10), (1000, 10), (30, 100)])
def test_one_cell_a_pixel_and_white_for_none(clients: int, classes: int) -> None:
    counts = np.random.default_rng(0).integers(0, 3, (clients, classes)) * 40
    svg = partition_figure(counts, [f"name <{i}>" for i in range(classes)], "a & $b$")
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert "a &amp; $b$" in svg
    assert not re.findall(r'href="(?!#|data:)', svg)
    if clients >= 10:
        picture = pixels(svg)
        assert picture.shape[:2] == (classes, clients)
        white = (picture[..., :3] > 0.99).all(-1)
        empty = counts.T == 0
        assert np.array_equal(white, empty) or np.array_equal(white[::-1], empty)


def test_more_clients_than_columns_says_so() -> None:
    svg = partition_figure(np.ones((20_000, 2), np.int64), ["a", "b"], "many")
    assert pixels(svg).shape[1] == 1000
    assert "1,000 of 20,000 shown" in svg


def test_equal_input_equal_bytes() -> None:
    counts = np.arange(40).reshape(20, 2)
    assert partition_figure(counts, ["a", "b"], "t") == partition_figure(counts, ["a", "b"], "t")


def test_wrong_shapes_and_empty() -> None:
    with pytest.raises(ValueError, match="2 class names"):
        partition_figure(np.ones((3, 4)), ["a", "b"], "t")
    assert partition_figure(np.zeros((3, 2), np.int64), ["a", "b"], "t").startswith("<svg")
