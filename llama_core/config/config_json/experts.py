"""The loss that balances experts, in a ``config.json``."""

from typing import Annotated

from pydantic import Field

from llama_core.config.models import ModelSpec
from llama_core.config.strategy import MoE

LossWeight = Annotated[float, Field(ge=0)]
"""``router_aux_loss_coef``."""


def balanced(moe: MoE, router_aux_loss_coef: float, num_layers: int) -> MoE:
    """Return some experts with the weight of our balance loss that stands for a file's ``router_aux_loss_coef``.

    transformers has one loss over the tokens of all layers together, which is K for even experts.
    Ours is a sum over layers, each 1 for even experts.

    Args:
        moe: the experts.
        router_aux_loss_coef: the file's.
        num_layers: layers of the model, with experts or not.
    """
    num_sparse_layers = sum(map(moe.is_sparse, range(num_layers)))
    coefficient = router_aux_loss_coef * moe.experts_per_token / num_sparse_layers
    return moe.model_copy(update={"balance_loss_coefficient": coefficient})


def router_aux_loss_coef(spec: ModelSpec) -> float:
    """Return the inverse: transformers' weight for that of ``spec``."""
    assert spec.moe is not None
    return spec.moe.balance_loss_coefficient * spec.num_sparse_layers / spec.moe.experts_per_token
