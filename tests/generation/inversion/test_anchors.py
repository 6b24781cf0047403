"""Anchors from files: two forms, and what is said where one does not serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedkeep.errors import ConfigError
from fedkeep.generation.inversion import read_anchors

VECTORS = {"cat": [1.0, 2.0, 3.0], "sea, the": [0.5, -1.0, 0.25], "unused": [9.0, 9.0, 9.0]}


def write(folder: Path, form: str) -> str:
    path = folder / f"anchors.{form}"
    if form == "csv":
        path.write_text('cat,1,2,3\n"sea, the",0.5,-1,0.25\nunused,9,9,9\n')
    else:
        save_file({name: torch.tensor(vector) for name, vector in VECTORS.items()}, path)
    return str(path)


@pytest.mark.parametrize("form", ["csv", "safetensors"])
def test_both_forms_hold_the_same(form: str, tmp_path: Path) -> None:
    found = read_anchors(write(tmp_path, form), ["sea, the", "cat"])
    assert found.dtype == torch.float32
    assert found.tolist() == [VECTORS["sea, the"], VECTORS["cat"]]


def test_what_does_not_serve_is_said(tmp_path: Path) -> None:
    path = write(tmp_path, "csv")
    for wrong, message in ((str(tmp_path / "no.csv"), "No such file"), (str(tmp_path / "a.pickle"), "expected a .csv")):
        with pytest.raises(ConfigError, match=message):
            read_anchors(wrong, ["cat"])
    with pytest.raises(ConfigError, match=r"no anchor for class 'cats', and 1 more\. Did you mean 'cat'"):
        read_anchors(path, ["cats", "dogs"])
    for text, message in (("a,1,2\nb,1\n", "of one length"), ("a,1\nb,nan\n", "not finite"), ("a,one\nb,2\n", "'one'")):
        Path(path).write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_anchors(path, ["a", "b"])
