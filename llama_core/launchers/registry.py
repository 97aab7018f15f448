"""All launchers by name. To add one, add its ``LauncherType`` here, or bring it in a package of your own."""

from llama_core.launchers.local import LOCAL
from llama_core.launchers.slurm import SLURM
from llama_core.launchers.traits import LauncherType
from llama_core.registry import Registry

LAUNCHERS = Registry("launchers", LauncherType, "launch.launcher", LOCAL, SLURM)

DEFAULT_LAUNCHER = LOCAL.name


def with_nodes() -> str:
    """Return the flags that choose a launcher whose jobs have nodes of their own, for an error that proposes them."""
    return " or ".join(f"--launcher {launcher.name}" for launcher in LAUNCHERS.built_in() if not launcher.is_here)
