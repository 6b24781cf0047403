"""Where the time went."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from rich.console import Console

import fedkeep
from fedkeep.reporting.profile import profile_table, shares


def test_parts_add_up_to_the_whole(tmp_path: Path) -> None:
    recipe = fedkeep.load_recipe(tiny.write_recipe(tmp_path), settings=['run.served=["last", "moving"]'])
    run = fedkeep.run(recipe, out=tmp_path / "run")
    for cell in run.cells:
        parts = shares(cell)
        whole = parts.pop("whole")
        assert sum(parts.values()) == pytest.approx(whole)
        assert 0 < parts["training"] < whole
        assert parts["evaluation"] > 0
    console = Console(width=140, record=True, file=(tmp_path / "out").open("w"))
    console.print(profile_table(run))
    told = console.export_text()
    assert told.count("SFedKD") == 1, "an average that was served took no time of its own"
    assert all(part in told for part in ("training", "teachers", "server", "evaluation", "saving", "the rest", "whole"))
