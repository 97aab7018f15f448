"""The fastest plan that fits, and why."""
