"""The chain of a run: find it, plan it, prepare it, run its steps."""
