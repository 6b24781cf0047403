"""Local training on one device: the training loop, vmapped cohorts, teachers' cached outputs, Fisher information."""
