"""LLaMA 1, 2, 3 and Code LLaMA: one architecture, sized by a ``ModelSpec``."""

# Shape suffixes: B batch, S sequence, D model dim, V vocabulary, T tokens (B * S)

import hashlib
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from llama_core.config.models import ModelSpec, weight_of
from llama_core.models.batch import Batch, Documents
from llama_core.models.head import HeadInputs, logits, whole_head
from llama_core.models.layers import Block, Linear, RMSNorm, TokenEmbedding, document_mask, local_part, rotation
from llama_core.models.moe import feed_forward
from llama_core.models.next_token import NextToken
from llama_core.models.objective import Objective

INIT_STD = 0.02
INIT_CUTOFF = 3.0
"""Initial weights lie within this many standard deviations of zero."""


class Llama(nn.Module):
    """A LLaMA model, or the part of one that a pipeline rank holds: embedding, blocks, final norm and head.

    A part keeps the parameter names of the whole model. The parameters are made in torch's default dtype and on its
    default device; activations are in ``compute_dtype``.

    Args:
        spec: the architecture.
        compute_dtype: the dtype of the residual stream and of every matrix product.
        layers: the layers of the part; default: all. The first brings the embedding; the last brings the final norm
            and the head, which is a second copy of the embedding if the two are tied.
    """

    def __init__(
        self, spec: ModelSpec, *, compute_dtype: torch.dtype = torch.float32, layers: Collection[int] | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.compute_dtype = compute_dtype
        held = range(spec.num_layers) if layers is None else sorted(layers)
        first = 0 in held
        last = spec.num_layers - 1 in held
        self.tok_embeddings = TokenEmbedding(spec, compute_dtype) if first or (last and spec.tied_embeddings) else None
        # a dict, so that a part keeps the parameter names of the whole model
        self.layers = nn.ModuleDict({str(index): Block(spec, feed_forward(spec, index)) for index in held})
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps) if last else None
        self.output = Linear(spec.hidden_size, spec.vocab_size) if last and not spec.tied_embeddings else None
        self.sequence_shards = 1
        """Number of ranks that divide the sequence dimension of the residual stream between the blocks."""
        self.sequence_index: Callable[[int, torch.device], Tensor] = _all_places
        """Returns the places of the tokens held here in the whole sequence, int64 [S], given their number."""
        self.attention_mask: Callable[[Tensor | None, Tensor, torch.dtype, Documents | None], Any] = _document_mask
        """Makes the mask for every block's attention from positions [B, S], places [S], the queries' dtype and, for a
        kernel that takes them instead, documents."""
        self.head_inputs: Callable[[Tensor, Linear | TokenEmbedding], HeadInputs] = whole_head
        """Makes the factors of the logits, as this rank holds them, from hidden states [B, S, D] and head_table."""
        self.objective: Objective = NextToken()
        """Makes the loss of a batch from these factors."""

    @property
    def head_table(self) -> Linear | TokenEmbedding:
        """The module with the matrix from hidden states to logits, [V, D]: the token embedding if the two are tied.

        Raises:
            ValueError: if this part of the model has no head.
        """
        head = self.tok_embeddings if self.spec.tied_embeddings else self.output
        if head is None:
            raise ValueError("this part of the model does not hold the head")
        return head

    def forward(
        self,
        inputs: Tensor,
        batch: Batch | None = None,
        *,
        layers: range | None = None,
    ) -> Tensor:
        """Run consecutive layers; the first layer of the model includes the embedding, the last the norm and the head.

        If only the loss is asked for, the logits of all tokens are never held at once.

        Args:
            inputs: token ids [B, S] for the first layer of the model; else the previous layer's output, [B, S, D].
            batch: the batch of these tokens. Attention stays within the documents that its positions tell apart; its
                documents, of whole rows even if this rank holds a part of each, are for the kernel that takes them
                instead of a mask, on CUDA and in 16 bits. The objective reads the rest. None: every row is one
                document, and there is no loss.
            layers: which layers; default: all of the model.

        Returns:
            Before the last layer, the residual stream, [B, S, D] in ``compute_dtype``. With the last layer, the
            objective's loss summed over the batch, an fp32 scalar (fp64 if that is the compute dtype). Without a batch,
            the logits, [B, S, V] in ``compute_dtype``.
        """
        layers = range(self.spec.num_layers) if layers is None else layers
        num_tokens = inputs.shape[1] * (1 if layers.start == 0 else self.sequence_shards)
        index_S = self.sequence_index(num_tokens, inputs.device)
        positions_BS = None if batch is None else batch.positions_BS
        documents = None if batch is None else batch.documents
        places_BS = index_S[None] if positions_BS is None else positions_BS
        rotary = rotation(self.spec, places_BS, torch.promote_types(self.compute_dtype, torch.float32))
        mask = self.attention_mask(positions_BS, index_S, self.compute_dtype, documents)
        x_BSD = inputs
        if layers.start == 0 and self.tok_embeddings is not None:
            x_BSD = self.tok_embeddings(inputs)
        for index in layers:
            x_BSD = self.layers[str(index)](x_BSD, rotary, mask)
        if layers.stop < self.spec.num_layers or self.norm is None:
            return x_BSD
        return self.head(self.norm(x_BSD), batch)

    def head(self, x_BSD: Tensor, batch: Batch | None) -> Tensor:
        """Return the loss of a batch from the normalised hidden states of its tokens; without a batch, the logits."""
        inputs = self.head_inputs(x_BSD, self.head_table)
        if batch is None:
            logits_TV = logits(inputs)
            return logits_TV.view(len(x_BSD), -1, logits_TV.shape[-1])
        return self.objective.loss(inputs, batch)


def _all_places(num_tokens: int, device: torch.device) -> Tensor:
    return torch.arange(num_tokens, device=device)


def _document_mask(
    positions_BS: Tensor | None, index_S: Tensor, dtype: torch.dtype, documents: Documents | None
) -> Tensor | Documents | None:
    return documents or (None if positions_BS is None else document_mask(positions_BS, dtype))


@torch.no_grad()
def initialize_weights(model: Llama, seed: int) -> None:
    """Draw the initial weights of ``model`` in place.

    Matrices and the embedding are normal with standard deviation 0.02, truncated at three standard deviations. The two
    matrices that write to the residual stream (``wo`` and ``w2``) are scaled by ``1 / sqrt(2 * num_layers)``, so that
    the stream's variance does not grow with depth. Norms are one. In an adapter, A is uniform within
    ``1 / sqrt(columns)`` and B is zero. In the embedding's adapter, A is zero and B is normal with standard deviation
    one, truncated as above. In either case the adapter adds nothing at first.

    Every parameter has its own generator, seeded by ``seed`` and the parameter's name. Its values depend neither on
    the order in which a model is built nor on the other parts that a rank holds. A CPU and a GPU draw different values
    from one seed.

    Source: Radford et al. 2019 (GPT-2), section 2.3, for the scale by depth; Hu et al. 2021, section 4.1, and PEFT for
    adapters.
    """
    for name, parameter in model.named_parameters():
        initialize_parameter(name, parameter, model.spec, seed)


@torch.no_grad()
def initialize_parameter(name: str, parameter: Tensor, spec: ModelSpec, seed: int) -> None:
    """Draw the initial values of one parameter in place; see ``initialize_weights``."""
    local = local_part(parameter)
    # draw it whole and in fp32 or wider, one parameter at a time, whatever this rank's shard and dtype are
    whole = local
    wide = torch.promote_types(parameter.dtype, torch.float32)
    if isinstance(parameter, DTensor) or wide != parameter.dtype:
        whole = torch.empty(parameter.shape, dtype=wide, device=local.device)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    _draw_(whole, name, spec, torch.Generator(local.device).manual_seed(int.from_bytes(digest)))
    if isinstance(parameter, DTensor):
        part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        local.copy_(part.to_local())
    elif whole is not local:
        local.copy_(whole)


def _draw_(parameter: Tensor, name: str, spec: ModelSpec, generator: torch.Generator) -> None:
    if name == "tok_embeddings.lora_B.weight":
        _draw_truncated_normal_(parameter, 1.0, generator)
    elif name.endswith("lora_B.weight") or name == "tok_embeddings.lora_A.weight":
        nn.init.zeros_(parameter)
    elif name.endswith("lora_A.weight"):
        bound = parameter.shape[1] ** -0.5
        parameter.uniform_(-bound, bound, generator=generator)
    else:
        match weight_of(name).begins:
            case "ones":
                nn.init.ones_(parameter)
            case "normal":
                _draw_truncated_normal_(parameter, INIT_STD, generator)
            case "residual":
                _draw_truncated_normal_(parameter, INIT_STD / math.sqrt(2 * spec.num_layers), generator)


def _draw_truncated_normal_(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    # By inverse transform sampling: nn.init.trunc_normal_ redraws until all values are inside, which fake tensors
    # cannot decide, and its draws change between versions of torch.
    limit = math.erf(INIT_CUTOFF / math.sqrt(2))
    parameter.uniform_(-limit, limit, generator=generator).erfinv_().mul_(math.sqrt(2) * std)
    parameter.clamp_(-INIT_CUTOFF * std, INIT_CUTOFF * std)


def build_llama(
    spec: ModelSpec,
    *,
    device: torch.device | str,
    compute_dtype: torch.dtype = torch.float32,
    seed: int,
) -> Llama:
    """Return a model on ``device`` with initial weights drawn from ``seed``; allocates its memory only once."""
    with torch.device("meta"):
        model = Llama(spec, compute_dtype=compute_dtype)
    model.to_empty(device=device)
    initialize_weights(model, seed)
    return model
