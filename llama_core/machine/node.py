"""The name of this process's node."""

import os
import socket

NODE_VARIABLE = "TRAINING_INFRA_NODE"
"""Environment variable with the name of a rank's node; unset if that is the name of the machine."""


def own_host() -> str:
    """Return the name of this process's node, as its scheduler knows it."""
    return os.environ.get(NODE_VARIABLE) or socket.gethostname()
