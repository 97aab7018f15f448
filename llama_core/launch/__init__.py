"""Starting a run: what the machine offers, the jobs that carry the ranks, and why they ended."""
