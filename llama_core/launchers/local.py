"""Jobs of this machine."""

from llama_core.launchers.traits import LauncherType

LOCAL = LauncherType("local", module="llama_core.launch.jobs.local", title="this machine", is_here=True)
