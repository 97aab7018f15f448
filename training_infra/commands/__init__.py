"""The commands of the command line, in files by subject; ``cli.py`` has the table of all."""
