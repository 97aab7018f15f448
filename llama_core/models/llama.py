"""LLaMA 1, 2, 3 and Code LLaMA: one architecture, sized by a ``ModelSpec``."""

# Shape suffixes: B batch, S sequence, D model dim, V vocabulary, T tokens (B * S)

import hashlib
import math
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from llama_core.attention import AttentionNeeds
from llama_core.config.model_weights import adapter_weight, weight_of
from llama_core.config.models import ModelSpec
from llama_core.config.parametrization import factors_of
from llama_core.models import nf4, pissa
from llama_core.models.adapters import method_of
from llama_core.models.attention import document_mask
from llama_core.models.batch import Batch, Documents
from llama_core.models.block import Block
from llama_core.models.head import HeadInputs, logits, whole_head
from llama_core.models.layers import Linear, RMSNorm, TokenEmbedding, local_part
from llama_core.models.measures import Measures
from llama_core.models.moe import Routers, feed_forward
from llama_core.models.mtp import PredictionLosses, PredictionModule, trained_besides
from llama_core.models.next_token import NextToken
from llama_core.models.objective import Objective, PredictingObjective
from llama_core.models.rotation import positional

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
        layers: the layers of the part; default: all, with the prediction modules that follow them. The first brings the
            embedding. The last brings the final norm and the head, and a second copy of the embedding if that is the
            head or modules need it.
    """

    def __init__(
        self, spec: ModelSpec, *, compute_dtype: torch.dtype = torch.float32, layers: Collection[int] | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.compute_dtype = compute_dtype
        held = range(spec.num_blocks) if layers is None else sorted(layers)
        first = 0 in held
        last = spec.num_layers - 1 in held
        self.tok_embeddings = TokenEmbedding(spec, compute_dtype) if first or (last and spec.embeds_at_end) else None
        self.embedding_scale = _rounded(spec.hidden_size**0.5, compute_dtype) if spec.scaled_embedding else 1.0
        """Factor on the rows of the embedding, but not on those of a tied head."""
        # a dict, so that a part keeps the parameter names of the whole model
        self.layers = nn.ModuleDict({str(index): _block(spec, index) for index in held})
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps) if last else None
        self.output = Linear(spec.hidden_size, spec.vocab_size) if last and not spec.tied_embeddings else None
        self.sequence_shards = 1
        """Number of ranks that divide the sequence dimension of the residual stream between the blocks."""
        self.sequence_index: Callable[[int, torch.device], Tensor] = _all_places
        """Returns the places of the tokens held here in the whole sequence, int64 [S], given their number."""
        self.attention_mask: Callable[[Tensor | None, Tensor, torch.dtype, Documents | None, int], Any] = _document_mask
        """Makes the mask for every block's attention from positions [B, S], places [S], the queries' dtype, documents
        for a kernel that takes them instead, and the number of tokens that a query of the block sees (0 for all)."""
        self.continues_rows = False
        """Whether each forward continues the rows of the one before it, whose keys and values are kept."""
        self.head_inputs: Callable[[Tensor, Linear | TokenEmbedding], HeadInputs] = whole_head
        """Makes the factors of the logits, as this rank holds them, from hidden states [B, S, D] and head_table."""
        self.objective: Objective = NextToken()
        """Makes the loss of a batch from these factors."""
        self.by_row = False
        """Whether it returns the loss of each row instead of their sum: ``losses_by_row``."""
        self.prediction_losses = PredictionLosses(spec.mtp_layers)
        """What the prediction modules measure."""
        self.measure: Callable[[HeadInputs, Batch], Tensor] | None = None
        """What it returns of a batch in place of the loss: ``measuring``."""

    @property
    def measures(self) -> list[Measures]:
        """What measures something of a step beside the loss: the same on every rank, in the same order."""
        found: list[Measures] = []
        if isinstance(self.objective, Measures):
            found.append(self.objective)
        if self.spec.moe is not None:
            found.append(Routers(self.spec, self.spec.moe, self.layers.items()))
        if self.spec.mtp_layers:
            found.append(self.prediction_losses)
        return found

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
            layers: which layers; default: all of the model. The prediction modules among them run if the batch has what
                they read.

        Returns:
            Before the last layer, the residual stream, [B, S, D] in ``compute_dtype``. With the last layer, the
            objective's loss summed over the batch, an fp32 scalar (fp64 if that is the compute dtype), or by row, [B].
            Without a batch, the logits, [B, S, V] in ``compute_dtype``.
        """
        layers = range(self.spec.num_blocks) if layers is None else layers
        x_BSD, *predictions = self._run_blocks(inputs, batch, layers)
        if layers.stop < self.spec.num_layers or self.norm is None:
            return x_BSD
        return self.head(self.norm(x_BSD), batch, *predictions)

    def run_layers(self, inputs: Tensor, batch: Batch | None, layers: range) -> Tensor:
        """Return the residual stream after consecutive layers, [B, S, D]; the arguments are those of ``forward``."""
        return self._run_blocks(inputs, batch, layers)[0]

    def _run_blocks(self, inputs: Tensor, batch: Batch | None, layers: range) -> list[Tensor]:
        """Return the residual stream after the layers, and the normalised hidden states of the prediction modules."""
        num_layers = self.spec.num_layers
        later = () if batch is None else batch.later
        held = [index for index in layers if index < num_layers + len(later)]
        num_tokens = inputs.shape[1] * (1 if layers.start == 0 else self.sequence_shards)
        index_S = self.sequence_index(num_tokens, inputs.device)
        positions_BS = None if batch is None else batch.positions_BS
        documents = None if batch is None else batch.documents
        places_BS = index_S[None] if positions_BS is None else positions_BS
        if places_BS.shape[1] > num_tokens:  # the mask is that of whole rows
            places_BS = places_BS[:, index_S]
        wide = torch.promote_types(self.compute_dtype, torch.float32)
        kinds = [self.spec.positions(index) for index in held]
        positions = {kind: positional(kind, places_BS, wide) for kind in dict.fromkeys(kinds)}
        needs = [self.spec.attention(index) for index in held]
        masks = {one: self._mask(one, positions_BS, index_S, documents) for one in dict.fromkeys(needs)}
        x_BSD = inputs
        if layers.start == 0 and self.tok_embeddings is not None:
            x_BSD = self._embed(self.tok_embeddings, inputs)
        ahead_BSD = x_BSD
        predictions: list[Tensor] = []
        for index, kind, one in zip(held, kinds, needs, strict=True):
            block = self.layers[str(index)]
            if index < num_layers:
                x_BSD = ahead_BSD = block(x_BSD, positions[kind], masks[one])
                continue
            assert self.tok_embeddings is not None
            embedded_BSD = self._embed(self.tok_embeddings, later[index - num_layers].tokens_BS)
            ahead_BSD, hidden_BSD = block(ahead_BSD, positions[kind], masks[one], embedded_BSD)
            predictions.append(hidden_BSD)
        return [x_BSD, *predictions]

    def _embed(self, table: TokenEmbedding, tokens_BS: Tensor) -> Tensor:
        embedded_BSD: Tensor = table(tokens_BS)
        return embedded_BSD * self.embedding_scale if self.spec.scaled_embedding else embedded_BSD

    def _mask(
        self, needs: AttentionNeeds, positions_BS: Tensor | None, index_S: Tensor, documents: Documents | None
    ) -> Any:
        if needs.chunk:  # to a mask, a chunk is a shorter document
            positions_BS = index_S[None] if positions_BS is None else positions_BS
            documents = documents and documents.in_chunks(needs.chunk, positions_BS)
            positions_BS = positions_BS % needs.chunk
        return self.attention_mask(positions_BS, index_S, self.compute_dtype, documents, needs.window)

    def head(self, x_BSD: Tensor, batch: Batch | None, *predictions: Tensor) -> Tensor:
        """Return the loss of a batch from the normalised hidden states of its tokens; without a batch, the logits.

        Args:
            x_BSD: the hidden states.
            batch: the batch.
            predictions: those of the prediction modules that have run, whose losses are trained for besides.
        """
        inputs = self.head_inputs(x_BSD, self.head_table)
        if batch is None:
            logits_TV = logits(inputs)
            return logits_TV.view(len(x_BSD), -1, logits_TV.shape[-1])
        if self.measure is not None:
            return self.measure(inputs, batch)
        if not self.by_row:
            loss = self.objective.loss(inputs, batch)
            return self._with_predictions(loss, batch, predictions) if predictions else loss
        heads = inputs.rows(len(x_BSD))
        return torch.stack([self.objective.loss(head, row) for head, row in zip(heads, batch.split(1), strict=True)])

    def _with_predictions(self, loss: Tensor, batch: Batch, predictions: Sequence[Tensor]) -> Tensor:
        """Return the loss, whose backward also computes the gradients of the prediction modules' losses.

        These are divided by as many targets as the loss itself, as in the publication.
        """
        assert isinstance(self.objective, PredictingObjective)
        losses = []
        counts = []
        for hidden_BSD, later in zip(predictions, batch.later, strict=True):
            ahead = replace(batch, targets_BS=later.targets_BS)
            losses.append(self.objective.loss(self.head_inputs(hidden_BSD, self.head_table), ahead))
            counts.append(self.objective.count(ahead))
        self.prediction_losses.add(losses, counts)
        mean = torch.stack(losses).sum() * (self.objective.mtp_weight / len(losses))
        return trained_besides(loss, mean)


def _block(spec: ModelSpec, index: int) -> Block:
    made = PredictionModule if index >= spec.num_layers else Block
    return made(spec, feed_forward(spec, index), index)


@contextmanager
def losses_by_row(model: Llama) -> Iterator[None]:
    """Inside the block, the model returns the loss of each row, [B], instead of their sum."""
    model.by_row = True
    try:
        yield
    finally:
        model.by_row = False


@contextmanager
def measuring(model: Llama, measure: Callable[[HeadInputs, Batch], Tensor]) -> Iterator[None]:
    """Inside the block, the model returns what ``measure`` makes of a batch instead of the loss."""
    model.measure = measure
    try:
        yield
    finally:
        model.measure = None


def _rounded(factor: float, dtype: torch.dtype) -> float:
    """Return a factor as a dtype holds it: transformers rounds it too, by 0.2 % in bf16 for a width of 640."""
    return torch.tensor(factor, dtype=dtype, device="cpu").item()


def _all_places(num_tokens: int, device: torch.device) -> Tensor:
    return torch.arange(num_tokens, device=device)


def _document_mask(
    positions_BS: Tensor | None, index_S: Tensor, dtype: torch.dtype, documents: Documents | None, window: int
) -> Tensor | Documents | None:
    if documents:
        return documents._replace(window=window)
    if positions_BS is None:
        return document_mask(index_S[None], dtype, window) if window else None
    return document_mask(positions_BS, dtype, window)


def named_weights(model: Llama) -> Iterator[tuple[str, Tensor]]:
    """Yield all that files hold of a model, or of a part of one, by name: its parameters, and its balance biases."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name in model.spec.buffer_shapes:
            yield name, buffer


@torch.no_grad()
def initialize_weights(model: Llama, seed: int) -> None:
    """Draw the initial weights of ``model`` in place.

    Matrices and the embedding are normal with standard deviation 0.02, truncated at three standard deviations. The two
    matrices that write to the residual stream (``wo`` and ``w2``) are scaled by ``1 / sqrt(2 * num_layers)``, so that
    the stream's variance does not grow with depth. Norms are one. Adapters begin as their rows say, so that they change
    nothing at first. A model with ``spec.base`` has factors on these values, see ``config.parametrization``.

    Every parameter has its own generator, seeded by ``seed`` and the parameter's name. Its values depend neither on
    the order in which a model is built nor on the other parts that a rank holds. A CPU and a GPU draw different values
    from one seed.

    Source: Radford et al. 2019 (GPT-2), section 2.3, for the scale by depth.
    """
    for name, parameter in named_weights(model):
        if name not in model.spec.packed and not takes_principal_part(name, model.spec):
            initialize_parameter(name, parameter, model.spec, seed)
    begin_with_principal_parts(model, partial(_draw_again_, model.spec, seed))
    pack_matrices(model, partial(_draw_packed, model.spec, seed))


@torch.no_grad()
def initialize_parameter(
    name: str, parameter: Tensor, spec: ModelSpec, seed: int, *, read: Callable[[str, Tensor], None] | None = None
) -> None:
    """Draw the initial values of one parameter in place; see ``initialize_weights``.

    Args:
        name: its name.
        parameter: the parameter, or this rank's part of it.
        spec: the model.
        seed: the seed.
        read: sets a tensor to the matrix called by a name, from which an adapter may begin; default: as drawn.
    """
    local = local_part(parameter)
    # draw it whole and in fp32 or wider, one parameter at a time, whatever this rank's shard and dtype are
    whole = local
    wide = torch.promote_types(parameter.dtype, torch.float32)
    if isinstance(parameter, DTensor) or wide != parameter.dtype:
        whole = torch.empty(parameter.shape, dtype=wide, device=local.device)
    if weight_of(name).begins == "adapted":
        whole.copy_(_begin(name, whole, spec, read or partial(_draw_again_, spec, seed)))
    else:
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        _draw_(whole, name, spec, torch.Generator(local.device).manual_seed(int.from_bytes(digest)))
    if whole is not local:
        _set(parameter, whole)


def _set(parameter: Tensor, whole: Tensor) -> None:
    """Set a parameter to the values of a whole one, or to this rank's part of them."""
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
    local_part(parameter).copy_(whole)


def takes_principal_part(name: str, spec: ModelSpec) -> bool:
    """Return whether a parameter begins as PiSSA's part of a matrix: of its adapter, or the rest that stays frozen."""
    takes_part = spec.lora is not None and spec.lora.take_principal_part
    return takes_part and (name in spec.adapted or name in spec.adapter_shapes)


@torch.no_grad()
def begin_with_principal_parts(model: Llama, read: Callable[[str, Tensor], None], *, keep: Container[str] = ()) -> None:
    """Take the principal part off each matrix with an adapter of PiSSA, which begins as that part.

    Args:
        model: the model, or any part of it.
        read: sets a tensor to the whole matrix called by a name.
        keep: the names of weights of adapters that have their values already.
    """
    lora = model.spec.lora
    if lora is None or not lora.take_principal_part:
        return
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if name not in model.spec.adapted:
            continue
        held = local_part(parameter)
        wide = torch.promote_types(held.dtype, torch.float32)
        matrix_OI = torch.empty(model.spec.parameter_shapes[name], dtype=wide, device=held.device)
        read(name, matrix_OI)
        part = pissa.principal(matrix_OI, lora)
        _set(parameter, pissa.rest(matrix_OI, part, lora).to(held.dtype))
        for weight, begins in part.by_name.items():
            of_adapter = name.removesuffix("weight") + weight
            if of_adapter not in keep:
                adapter = parameters[of_adapter]
                _set(adapter, begins.to(adapter.dtype))


def _begin(name: str, like: Tensor, spec: ModelSpec, read: Callable[[str, Tensor], None]) -> Tensor:
    """Return the initial values of an adapter's weight that begins from the matrix, which ``read`` reads."""
    of_adapter = adapter_weight(name)
    assert of_adapter is not None
    assert spec.lora is not None
    matrix, weight = of_adapter
    matrix_OI = like.new_empty(spec.parameter_shapes[matrix])
    read(matrix, matrix_OI)
    return method_of(spec.lora.kind).begin(weight, matrix_OI)


def _draw_again_(spec: ModelSpec, seed: int, name: str, parameter: Tensor) -> None:
    initialize_parameter(name, parameter, replace(spec, lora=None), seed)


def _draw_packed(spec: ModelSpec, seed: int, name: str, device: torch.device) -> nf4.Packed:
    matrix_OI = torch.empty(spec.parameter_shapes[name], device=device)
    _draw_again_(spec, seed, name, matrix_OI)
    return nf4.pack(matrix_OI)


def _draw_(parameter: Tensor, name: str, spec: ModelSpec, generator: torch.Generator) -> None:
    factor = factors_of(name, spec).initial
    match weight_of(name).begins:
        case "ones":
            nn.init.constant_(parameter, factor)
        case "zeros":
            nn.init.zeros_(parameter)
        case "normal":
            _draw_truncated_normal_(parameter, factor * INIT_STD, generator)
        case "residual":
            _draw_truncated_normal_(parameter, factor * INIT_STD / math.sqrt(2 * spec.num_layers), generator)
        case "uniform":
            bound = parameter.shape[1] ** -0.5
            parameter.uniform_(-bound, bound, generator=generator)
        case "standard":
            _draw_truncated_normal_(parameter, 1.0, generator)


def _draw_truncated_normal_(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    # By inverse transform sampling: nn.init.trunc_normal_ redraws until all values are inside, which fake tensors
    # cannot decide, and its draws change between versions of torch.
    limit = math.erf(INIT_CUTOFF / math.sqrt(2))
    parameter.uniform_(-limit, limit, generator=generator).erfinv_().mul_(math.sqrt(2) * std)
    parameter.clamp_(-INIT_CUTOFF * std, INIT_CUTOFF * std)


def with_adapters(model: Llama) -> Llama:
    """Return ``model``, frozen and with the adapters of its spec; unchanged if the spec has none.

    Parameters that the spec trains in full stay as they are. Frozen ones are cast to the model's compute dtype, and
    adapters have the dtype that they had.
    """
    spec = model.spec
    lora = spec.lora
    if lora is None:
        return model
    dtype = next(model.parameters()).dtype
    for name, parameter in model.named_parameters():
        if name not in spec.trained_in_full:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(model.compute_dtype)
    adapt = method_of(lora.kind).adapt
    for path, module in list(model.named_modules()):
        if f"{path}.weight" in spec.adapted and isinstance(module, Linear | TokenEmbedding):
            parent, _, name = path.rpartition(".")
            adapted = adapt(module, spec, lora, dtype)
            if isinstance(module, Linear):
                adapted.bias = module.bias
            setattr(model.get_submodule(parent), name, adapted)
    for _, module in packed_modules(model):
        nf4.keep_packed(module)
    return model


def packed_modules(model: Llama) -> Iterator[tuple[str, Linear]]:
    """Yield the names of the matrices of a model, or of a part of one, that are held in NF4, with their modules."""
    for path, module in model.named_modules():
        if f"{path}.weight" in model.spec.packed and isinstance(module, Linear):
            yield f"{path}.weight", module


@torch.no_grad()
def pack_matrices(model: Llama, packed: Callable[[str, torch.device], nf4.Packed]) -> None:
    """Set the matrices that are held in NF4.

    Args:
        model: the model, or any part of it.
        packed: returns the whole matrix called by a name; one that it rounds, it may round on this device.
    """
    for name, module in packed_modules(model):
        bytes_OK, scales_G = packed(name, local_part(module.weight).device)
        _set(module.weight, bytes_OK)
        local_part(module.get_buffer("scales")).copy_(scales_G)


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
