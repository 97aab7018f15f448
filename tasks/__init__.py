"""Prefect tasks: each a name, a retry policy, one engine call and one artifact."""
