"""What runs on every rank: a worker, and the supervisor that watches it."""
