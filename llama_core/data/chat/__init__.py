"""Conversations: their messages are checked, rendered by a template in a sandbox, and the trained tokens marked."""
