"""Measurements side by side with peers, and ledgers of predictions against figures."""
