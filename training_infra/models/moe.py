"""What makes a mixture of experts of a Llama: ``TrainingStrategy("moe", parameters)`` takes the fields of ``MoE``.

The memory of mixtures is estimated; training them is refused.
"""

from llama_core.config.strategy import MoE

__all__ = ["MoE"]
