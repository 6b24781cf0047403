"""The command line."""

from fedkeep.cli.main import main

__all__ = ["main"]
