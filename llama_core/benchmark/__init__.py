"""Sweeps: many configurations timed alike, to be compared. Imports no torch."""
