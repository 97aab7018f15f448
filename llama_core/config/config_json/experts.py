"""The loss that balances experts, in a ``config.json``."""

from typing import Annotated

from pydantic import Field

from llama_core.config.models import ModelSpec

LossWeight = Annotated[float, Field(ge=0)]
"""``router_aux_loss_coef``."""


def balance_loss_coefficient(router_aux_loss_coef: float, *, experts_per_token: int, num_layers: int) -> float:
    """Return the weight of our balance loss that stands for a file's ``router_aux_loss_coef``.

    transformers has one loss over the tokens of all layers together, which is K for even experts.
    Ours is a sum over layers, each 1 for even experts.
    """
    return router_aux_loss_coef * experts_per_token / num_layers


def router_aux_loss_coef(spec: ModelSpec) -> float:
    """Return the inverse: transformers' weight for that of ``spec``."""
    assert spec.moe is not None
    return spec.moe.balance_loss_coefficient * spec.num_sparse_layers / spec.moe.experts_per_token
