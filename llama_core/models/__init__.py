"""The LLaMA model: its layers, its loss, and the way to and from Hugging Face checkpoints."""
