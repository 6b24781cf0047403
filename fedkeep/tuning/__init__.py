"""Choosing options on held-out training examples, with seeds that are not reported."""
