"""Helpers that know nothing of federated learning, except how its randomness is named."""
