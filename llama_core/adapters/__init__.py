"""Adapters as planning and folders know them: their weights and their spelling. ``models`` computes them."""
