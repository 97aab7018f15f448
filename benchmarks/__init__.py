"""Measurements of the engine beside its peers, and ledgers that compare predictions with published figures."""
