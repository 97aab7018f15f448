"""Optimizers as planning knows them: what they hold, read, write and send. ``training`` builds them."""
