"""Object stores: checkpoints are mirrored there, and runs are taken from there. Needs no torch."""
