"""Training itself: the data, the optimizer, the loop, its checkpoints and its metrics."""
