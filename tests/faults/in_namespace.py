"""A worker that lives on a host of its own, a network namespace: ``in_namespace.py NAME RUN_DIR [...]``."""

import os
import sys

from llama_core.machine.node import NODE_VARIABLE

name, *arguments = sys.argv[1:]
host = f"{name}-{os.environ['RANK']}"
os.environ |= {"MASTER_ADDR": "10.77.0.10", "GLOO_SOCKET_IFNAME": "eth0", NODE_VARIABLE: host}
worker = [sys.executable, "-m", "llama_core.launch.rank.worker", *arguments]
os.execvp("ip", ["ip", "netns", "exec", host, *worker])
