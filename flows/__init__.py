"""Prefect flows: each runs a chain with its steps as tasks."""
