"""The files that a run leaves on disk, and how they are written."""
