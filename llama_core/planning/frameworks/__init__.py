"""Other training frameworks: what their runs hold, how fast they are, and how they spell a configuration."""
