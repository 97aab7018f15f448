"""Objectives as planning and reports know them: what they read and report. ``models`` computes them."""
