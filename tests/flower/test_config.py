"""Run configurations and node-configs: their names, their defaults, and what is said of mistakes."""

from __future__ import annotations

from typing import Any

import pytest

from fedkeep.errors import ConfigError
from fedkeep.flower.config import read_node_config, read_run_config


def test_what_a_node_does_not_say_the_run_may_say() -> None:
    node_config = read_node_config(
        {"partition-id": 3, "num-partitions": 8}, {"state-dir": "there", "data-dir": "", "wait": 3.0}
    )
    assert (node_config.site, node_config.partition_id, node_config.state_dir) == ("3", 3, "there")
    assert read_node_config({"site": 1, "data": "x", "state-dir": "here"}, {"state-dir": "there"}).state_dir == "here"


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({}, "no name"),
        ({"site": "a"}, "no data"),
        ({"site": "a", "dat": "x"}, "Did you mean 'data'"),
        ({"site": "a", "data": "x", "threads": 0}, "at least 1"),
    ],
)
def test_a_node_that_is_configured_badly_is_told_how(node: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_node_config(node, {})


def test_a_run_that_is_configured_badly_is_told_how() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'settings'"):
        read_run_config({"setting": "run.rounds=3"})


def test_a_folder_of_states_may_be_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/erika")
    node = {"site": "a", "data": "x", "state-dir": "~/states"}
    assert read_node_config(node, {}).state_dir == "/home/erika/states"
    assert read_node_config({"partition-id": 0}, {"state-dir": "~/states"}).state_dir == "/home/erika/states"


def test_a_run_says_nothing_to_a_real_site() -> None:
    """Whoever starts a run chooses neither what code runs at a site nor where it writes."""
    run = {"allow-code": True, "use": "/tmp/any.py", "state-dir": "/elsewhere", "data-dir": "/other"}
    assert read_node_config({"site": "a", "data": "/data/a"}, run) == read_node_config(
        {"site": "a", "data": "/data/a"}, {}
    )
    trial = read_node_config({"partition-id": 1}, run)
    assert (trial.state_dir, trial.allow_code, trial.use) == ("/elsewhere", False, "")
