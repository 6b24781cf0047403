"""Trials: a simulation round after round, its reply steps, callbacks and checkpoints."""
