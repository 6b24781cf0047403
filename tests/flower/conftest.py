"""Puts the folder of the host scripts on the import path, so that tests start Flower as they do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "hosts"))
