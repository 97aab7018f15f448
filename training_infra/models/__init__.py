"""Models as objects: Llama, and its parameters as a mixture of experts."""
