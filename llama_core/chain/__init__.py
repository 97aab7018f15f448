"""The chain of a run: find it, plan it, prepare it, take its steps."""
