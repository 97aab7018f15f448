"""From the paths of a source to its records: files are found, opened and read by kind, and records recognised."""
