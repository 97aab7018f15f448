"""The model registry, the hardware table, the run configuration and ``config.json``. Imports no torch."""
