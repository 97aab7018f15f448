"""What training costs: FLOPs per token and the share of a device's peak that a run reaches.

FLOPs are those of matrix products, two per multiply-add; norms, rotary embedding, softmax and optimizer are left out.
The convention of everything printed is full attention: a causal mask is not credited with the half that it spares, as
in the figures of Megatron-LM and torchtitan.
"""

from llama_core.config.hardware import DeviceSpec
from llama_core.config.models import ModelSpec
from llama_core.config.run import RecomputeMode


def flops_per_token(spec: ModelSpec, seq_len: int, *, causal: bool = False) -> float:
    """Return the model FLOPs per token of a forward and a backward pass, nothing recomputed.

    Args:
        spec: the architecture.
        seq_len: tokens per sequence, all of which every token is scored against.
        causal: count only the scores below the diagonal, half of them.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B (6 N + 12 L H Q T), with N the parameters that are
    multiplied: the head counts, the embedding look-up does not.
    """
    attention = 12 * spec.num_layers * spec.q_size * seq_len
    return 6 * spec.num_matmul_parameters + (attention / 2 if causal else attention)


def hardware_flops_per_token(spec: ModelSpec, seq_len: int, recompute: RecomputeMode) -> float:
    """Return the FLOPs per token that are executed: with ``'full'`` every layer runs its forward a second time.

    That approaches 4/3 of ``flops_per_token`` as the layers outweigh the head, which is not recomputed. The scores
    that flash attention computes again in its backward are not counted.
    """
    forward = flops_per_token(spec, seq_len) / 3
    head_forward = 2 * spec.embedding_parameters
    return 3 * forward + (forward - head_forward if recompute == "full" else 0)


def model_flops_utilisation(
    tokens_per_second: float, spec: ModelSpec, seq_len: int, num_devices: int, device: DeviceSpec | None
) -> float | None:
    """Return model FLOP/s over the devices' peak bf16 rate, from 0 to 1; None where that peak is unknown.

    Attention is counted in full, recomputation is not counted.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    if device is None:
        return None
    return tokens_per_second * flops_per_token(spec, seq_len) / (num_devices * device.bf16_flops)
