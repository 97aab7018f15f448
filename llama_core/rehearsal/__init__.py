"""The step on fake tensors: every byte, FLOP and transfer counted."""
