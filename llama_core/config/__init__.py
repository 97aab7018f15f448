"""The model registry, the hardware table and the run configuration. Imports no torch."""
