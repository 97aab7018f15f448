"""What each launcher is like: the facts that planning, configuration and messages ask it for."""
