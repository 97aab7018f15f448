"""Launch runs: jobs, the processes on each rank, and why a job ended."""
