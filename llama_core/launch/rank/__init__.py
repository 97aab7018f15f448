"""The processes of every rank: a worker, and the supervisor that watches it."""
