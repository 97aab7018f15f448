"""Checks of the machines before a run's first step: which rank is slower than its peers, or has a fault."""
