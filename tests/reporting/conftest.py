"""A run like the demo's, made once; the tests only read it."""

from __future__ import annotations

import pytest
from synthetic_run import read_run, write_demo

from fedkeep.reporting.run_folder import Run


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(write_demo(tmp_path_factory.mktemp("runs") / "demo"))
