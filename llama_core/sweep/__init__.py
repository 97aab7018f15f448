"""Sweeps: a grid over one configuration."""
