"""Executors that carry client steps out in worker processes."""
