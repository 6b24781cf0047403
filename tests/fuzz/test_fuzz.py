"""A few hundred odd inputs of each kind, always the same ones; `make fuzz` tries others for an hour."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

sys.path.append(str(Path(__file__).parents[1] / "reporting"))

pytest.importorskip("pyarrow")

from targets import TARGETS, VALID

EXAMPLES = {"recipes": 30, "command lines": 15, "data files": 40, "messages": 50, "run folders": 40}


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_odd_input_is_accepted_or_refused_with_a_clear_error(name: str) -> None:
    sampled, check = TARGETS[name]
    assert "accepted" in check(VALID[name]), "inputs are so odd that nothing behind the first check is reached"

    @settings(
        max_examples=EXAMPLES[name],
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(sampled)
    def try_one(given_input: Any) -> None:
        check(given_input)

    try_one()
