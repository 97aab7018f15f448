"""Train LLaMA models from Python: the public API over ``llama_core``.

Names are imported on first use, so ``import training_infra`` is cheap and needs no torch.
"""

import os
import sys

# For `python -m training_infra.cli`, Python puts the current folder first, where somebody may have put a yaml.py.
if sys.argv[:1] == ["-m"] and sys.path[0] == os.getcwd() != os.path.dirname(__path__[0]):  # noqa: PTH109, PTH120
    del sys.path[0]

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training_infra.config import TrainingConfig as TrainingConfig
    from training_infra.config import TrainingStrategy as TrainingStrategy
    from training_infra.orchestrator import LlamaTrainingOrchestrator as LlamaTrainingOrchestrator
    from training_infra.orchestrator import create_llama3_8b_orchestrator as create_llama3_8b_orchestrator
    from training_infra.orchestrator import create_llama3_70b_orchestrator as create_llama3_70b_orchestrator
    from training_infra.orchestrator import create_llama3_405b_orchestrator as create_llama3_405b_orchestrator
    from training_infra.orchestrator import create_tiny_llama3_orchestrator as create_tiny_llama3_orchestrator
    from training_infra.orchestrator import estimate_requirements as estimate_requirements
    from training_infra.orchestrator import evaluate as evaluate
    from training_infra.orchestrator import quick_start as quick_start
    from training_infra.orchestrator import tokenize as tokenize
    from training_infra.orchestrator import validate_environment as validate_environment

_HOMES = {
    "LlamaTrainingOrchestrator": "orchestrator",
    "TrainingConfig": "config",
    "TrainingStrategy": "config",
    "create_llama3_405b_orchestrator": "orchestrator",
    "create_llama3_70b_orchestrator": "orchestrator",
    "create_llama3_8b_orchestrator": "orchestrator",
    "create_tiny_llama3_orchestrator": "orchestrator",
    "estimate_requirements": "orchestrator",
    "evaluate": "orchestrator",
    "quick_start": "orchestrator",
    "tokenize": "orchestrator",
    "validate_environment": "orchestrator",
}
__all__ = [
    "LlamaTrainingOrchestrator",
    "TrainingConfig",
    "TrainingStrategy",
    "create_llama3_8b_orchestrator",
    "create_llama3_70b_orchestrator",
    "create_llama3_405b_orchestrator",
    "create_tiny_llama3_orchestrator",
    "estimate_requirements",
    "evaluate",
    "quick_start",
    "tokenize",
    "validate_environment",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
