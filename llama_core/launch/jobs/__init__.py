"""Who starts a job, follows it and stops it: this machine or Slurm."""
