"""FLOPs, traffic and seconds of a step."""
