"""Calibration: what this machine takes for the engine's operations, measured, kept in a profile, and asked for."""
