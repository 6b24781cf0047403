"""Puts this folder on the import path, so that all tests share `tiny`."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tiny", "conformance", "byhand", "local_line", "permuting", "toy")
