"""Start, follow and stop jobs, on this machine or through Slurm."""
