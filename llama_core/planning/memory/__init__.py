"""Bytes per rank, by category and phase."""
