"""Prefect flows: the chain as a table of contents."""
