"""Training: the engine, the optimizer, the loop, checkpoints, metrics, and weights read and written."""
