"""Rehearse a step on fake tensors, and count every byte, FLOP and transfer."""
