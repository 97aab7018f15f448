"""What the programs of a plan's rank depend on beside the model."""

from typing import NamedTuple

from llama_core.attention import AttentionNeeds, DocumentAttention, Kernel, kernel_told
from llama_core.config.run import AttentionKernel
from llama_core.planning.program.operations import FP32_BYTES


class Setting(NamedTuple):
    """All that the programs depend on beside the model: the tokens of a rank, how it is divided, its kernels."""

    rows: int
    """Sequences of one forward."""
    seq_len: int
    """Tokens per sequence, over all context-parallel ranks."""
    itemsize: int
    """Bytes per element of activations."""
    is_fp16: bool = False
    """Whether activations are fp16, whose sums over many tokens are made in fp32, since they may overflow."""
    documents: DocumentAttention = "none"
    """What attention's kernels are told of what a query does not see before it."""
    on_cuda: bool = False
    """Whether CUDA's kernels run."""
    compiles: bool = False
    attention: AttentionKernel = "auto"
    tp: int = 1
    cp: int = 1
    ep: int = 1
    ep_nodes: int = 1
    folds_experts: bool = False
    """Whether tensor-parallel ranks have whole experts, and route the tokens of their part of the sequence."""
    sharded_sequence: bool = False
    """Whether tensor-parallel ranks divide the residual stream along the sequence."""
    uses_fully_shard: bool = False
    keeps_cast_weights: bool = False
    splits_backward: bool = False
    values_per_token: int = 0
    """Numbers that the objective reads of each token, beside its target."""

    def kernel(self, needs: AttentionNeeds) -> Kernel:
        """Return what computes attention of a layer."""
        return kernel_told(needs, self.documents, asked=self.attention, cp=self.cp)

    @property
    def is_mixed_precision(self) -> bool:
        """Whether activations have fewer bits than the weights."""
        return self.itemsize < FP32_BYTES

    @property
    def fuses_norms(self) -> bool:
        """Whether a norm is one kernel: CUDA's, or what a compiled block makes of it."""
        return self.on_cuda or self.compiles

    @property
    def widens_norms(self) -> bool:
        """Whether a norm writes its input and its result in more bits than activations have."""
        return self.is_mixed_precision and not self.fuses_norms

    @property
    def tp_of_experts(self) -> int:
        """Tensor-parallel ranks that divide every expert."""
        return 1 if self.folds_experts else self.tp

    @property
    def tokens(self) -> int:
        """Tokens of one forward on this rank."""
        return self.rows * self.seq_len // self.cp

    @property
    def stream_tokens(self) -> int:
        """Those of them whose residual stream this rank has."""
        return self.tokens // self.tp if self.sharded_sequence else self.tokens
