"""Methods for clients of different networks, which exchange logits instead of weights."""
