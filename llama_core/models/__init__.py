"""The LLaMA model: its layers, its adapters, and the losses of all objectives."""
