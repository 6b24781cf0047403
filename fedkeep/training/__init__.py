"""Local training on one device: the training loop, stacked clients, cached teachers, Fisher information, evaluation."""
