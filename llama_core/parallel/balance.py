"""Balance without a loss: a step moves the bias of each expert by whether it got more or fewer tokens than the mean.

Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2.
"""

# Shape suffixes: L layers, E experts

import torch
import torch.distributed as dist
from torch import Tensor

from llama_core.models.layers import local_part
from llama_core.models.llama import Llama
from llama_core.models.moe import mixtures


@torch.no_grad()
def move_balance_biases(model: Llama, updated: Tensor) -> None:
    """Move the balance biases of a model, or of a part of one, by the tokens of a step on all ranks.

    All ranks must call it together, before the routers' statistics are taken. It does not wait for the device. Every
    rank that holds a layer moves its biases by the same sums, so that they stay equal.

    Args:
        model: this rank's part of the model.
        updated: whether the step has updated the weights, a boolean scalar; a step that is skipped moves no bias.
    """
    moe = model.spec.moe
    if moe is None or not moe.balance_bias or moe.balance_bias_rate == 0:
        return
    # in fp64, since the sums of all ranks may be too large for fp32 to count by ones
    tokens_LE = torch.zeros((model.spec.num_blocks, moe.num_experts), dtype=torch.float64, device=updated.device)
    held = {int(name): mixture for name, block in model.layers.items() for mixture in mixtures(block)}
    for layer, mixture in held.items():
        if mixture.statistics is not None:
            tokens_LE[layer] = mixture.statistics[: moe.num_experts]
    if dist.is_initialized():
        dist.all_reduce(tokens_LE)  # tensor-parallel ranks count the same tokens, which changes no sign
    missing_LE = tokens_LE.sum(1, keepdim=True) - moe.num_experts * tokens_LE
    moves_LE = moe.balance_bias_rate * missing_LE.sign() * updated
    for layer, mixture in held.items():
        if mixture.balance_bias is not None:
            local_part(mixture.balance_bias).add_(moves_LE[layer])
