"""This machine: its hardware, the defaults that follow from it, and whether a run can start here."""
