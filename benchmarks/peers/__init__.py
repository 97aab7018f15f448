"""Optimizer steps of this engine and of other frameworks on one CPU, taking turns; see ``__main__.py``."""
