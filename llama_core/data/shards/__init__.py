"""Tokenised sources on disk: shards are built once, by all cores or in jobs, and found again by what they hold."""
