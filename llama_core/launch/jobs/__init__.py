"""Start, follow and stop jobs, on this machine or through a launcher of a cluster."""
