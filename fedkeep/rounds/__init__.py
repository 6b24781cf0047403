"""Rounds: the state from which they begin, what is sent and comes back, reply steps, and the cohort."""
