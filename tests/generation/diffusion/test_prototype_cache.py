"""What was looked for once is not looked for again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from fedkeep.generation import prototypes as image_cache
from fedkeep.generation.prototypes import (
    PrototypeSearch,
    cached_search,
    search_prototypes,
)

SETTINGS = PrototypeSearch(steps=3, batch_size=4)
DATA = tiny.dataset().train


def look(folder: Path, settings: PrototypeSearch = SETTINGS, seed: int = 0, rows: int = 30) -> Tensor:
    begin = torch.full((tiny.CLASSES, *tiny.SHAPE), 0.1)
    rng = torch.Generator().manual_seed(seed)
    images, labels = DATA["input"][:rows], DATA["label"][:rows]
    with pytest.MonkeyPatch.context() as context:
        context.setenv("FEDKEEP_CACHE", str(folder))
        return cached_search(tiny.ToyGenerator(), begin, images, labels, settings, rng)


def test_it_is_what_a_search_finds_and_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, rng = torch.full((tiny.CLASSES, *tiny.SHAPE), 0.1), torch.Generator().manual_seed(0)
    expected, _ = search_prototypes(tiny.ToyGenerator(), begin, DATA["input"][:30], DATA["label"][:30], SETTINGS, rng)
    first = look(tmp_path)
    monkeypatch.setattr(image_cache, "search_prototypes", None)
    for found in (first, look(tmp_path)):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "changes",
    [{"seed": 1}, {"rows": 29}, {"settings": replace(SETTINGS, steps=4)}],
)
def test_what_is_another_search_is_searched(changes: dict[str, Any], tmp_path: Path) -> None:
    one, other = look(tmp_path), look(tmp_path, **changes)
    assert not torch.equal(one, other)
    assert len(list((tmp_path / "prototypes").iterdir())) == 2


def test_without_examples_the_rows_are_kept_as_they_were(tmp_path: Path) -> None:
    for _ in range(2):
        found = look(tmp_path, rows=0)
        assert torch.equal(found, torch.full((tiny.CLASSES, *tiny.SHAPE), 0.1))


def test_a_damaged_entry_is_found_again_and_a_full_disk_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = look(tmp_path)
    (path,) = (tmp_path / "prototypes").iterdir()
    whole = path.read_bytes()
    turned = bytes([*whole[:-40], whole[-40] ^ 1, *whole[-39:]])  # a bit of a number
    for damaged in (whole[:40], turned):
        path.write_bytes(damaged)
        assert torch.equal(look(tmp_path), first)
        assert "made again" in caplog.text
        caplog.clear()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image_cache, "write_sealed", full)
    assert torch.equal(look(tmp_path / "other"), first)


def test_old_entries_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_cache, "MAX_BYTES", 10)
    for seed in range(4):
        look(tmp_path, seed=seed)
    assert len(list((tmp_path / "prototypes").iterdir())) <= 1

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)  # somebody else's entry in a folder of all
    image_cache._evict(tmp_path / "prototypes", 0)
