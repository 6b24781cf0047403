"""Rounds on one machine: whom a method can ask and who carries it out, state, checkpoints, trials and callbacks."""
