"""The parameters of a mixture of experts: ``TrainingStrategy("moe", parameters)`` takes the fields of ``MoE``."""

from llama_core.config.strategy import MoE

__all__ = ["MoE"]
