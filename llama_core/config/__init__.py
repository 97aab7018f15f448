"""What a user asks for: the model registry, the hardware table and the run configuration. Imports no torch."""
