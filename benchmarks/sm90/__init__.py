"""What a compiled block costs on an H100, counted on a machine without a GPU."""
