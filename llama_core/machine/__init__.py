"""The machine: what it has, the defaults that follow from it, and whether a run can start here."""
