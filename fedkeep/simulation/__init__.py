"""Rounds on one machine: cohorts, executors, states, checkpoints, trials and callbacks."""
