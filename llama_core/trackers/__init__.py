"""Trackers: what shows the values of a run elsewhere than in its own metrics. A row and a file each."""
