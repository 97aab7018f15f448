"""The training engine: every algorithm and every type. See docs/development.md for the layers."""
