"""The activations that the forward of one microbatch keeps on a rank, tensor by tensor.

Tensor-parallel ranks divide heads, feed-forward columns and the vocabulary. With sequence parallelism, they also divide
norms and the residual stream; the input of a matrix is gathered. A matrix keeps its input only if its weight, or an
adapter beside it, is trained.

Source: Korthikanti et al. 2022, arXiv:2205.05198, for counting activations by saved tensor.
"""

from functools import cached_property

from llama_core.planning.frameworks.job import Job, Recompute

_BF16 = 2
_FP32 = 4


class Activations:
    """The sizes, in bytes, of one layer's and the loss's tensors for one microbatch.

    Args:
        job: the job.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = job.architecture
        self.traits = job.framework
        self.tokens = job.micro_batch * job.seq_len / job.cp
        self.stream_tokens = self.tokens / (job.tp if job.sequence_parallel else 1)
        gathered = self.traits.keeps_gathered
        self.input_tokens = self.tokens if gathered else self.stream_tokens

    @cached_property
    def kept(self) -> float:
        """Bytes that a layer keeps, on average."""
        job = self.job
        if job.offloads_activations:
            return 0
        share = 1 / job.recompute_every
        return share * self.kept_under(job.recompute) + (1 - share) * self.kept_under("none")

    @cached_property
    def recomputed(self) -> float:
        """Bytes that the backward of one layer recomputes."""
        if self.job.recompute == "none":
            return 0
        return max(0, self.kept_under("none") - self.kept_under(self.job.recompute))

    def kept_under(self, recompute: Recompute) -> float:
        """Return the bytes that one layer keeps under a mode of recomputation."""
        stream = _BF16 * self.stream_tokens * self.model.hidden_size
        if recompute == "full":
            return stream
        everything = self.attention + self.feed_forward
        if recompute == "none" or self.traits.selective == "attention":
            return everything
        return min(everything, stream + self._products)

    @cached_property
    def _products(self) -> float:
        """Bytes that selective recompute keeps besides a layer's input: attention and matrix products."""
        model = self.model
        tokens = self.tokens
        tp = self.job.tp
        width = self._ffn_width
        partial = tokens * model.hidden_size  # output of a row-parallel matrix before the reduction
        reduced = 2 * self.stream_tokens * model.hidden_size if tp > 1 else 0
        attention = _BF16 * (tokens * model.output_size / tp + reduced) + self._log_sum_exp
        half = tokens * (model.query_size + model.value_size + width) / tp + partial
        if self.traits.selective == "alternate":
            return attention + _BF16 * half
        return attention + _BF16 * (half + tokens * (model.key_size + width) / tp + partial)

    @cached_property
    def _ffn_width(self) -> float:
        """Feed-forward width that a token passes through, averaged over layers."""
        model = self.model
        experts = self.model.experts
        if experts is None:
            return model.ffn_size
        per_token = experts.top_k * experts.ffn_size + experts.shared_ffn_size
        dense = experts.num_dense_layers * model.ffn_size
        return (dense + model.num_expert_layers * per_token) / model.num_layers

    @cached_property
    def _log_sum_exp(self) -> float:
        return _FP32 * self.tokens * self.model.num_heads / self.job.tp

    def _norm(self, elements: float) -> float:
        return elements * (self.traits.norm_frozen if self.job.frozen else self.traits.norm_saved)

    @cached_property
    def attention(self) -> float:
        """Bytes that the attention half of a layer keeps."""
        model = self.model
        job = self.job
        tokens = self.tokens
        inputs = self.input_tokens * model.hidden_size  # always kept: queries have a trained weight or adapter
        keys = model.key_size
        values = model.value_size
        if self.traits.repeats_kv:
            keys = model.query_size
            values = model.output_size
        heads = tokens * (model.query_size + keys + values + model.output_size) / job.tp
        total = self._norm(self.stream_tokens * model.hidden_size) + _BF16 * (inputs + heads) + self._log_sum_exp
        if model.norms_queries:
            total += self._norm(tokens * (model.query_size + model.key_size) / job.tp)
        if job.frozen and self.traits.adapters.drops_out:
            total += (_BF16 + 1) * inputs
        if job.float8 and job.compiles:
            total += inputs + tokens * model.output_size / job.tp  # in eight bits
        return total

    @cached_property
    def feed_forward(self) -> float:
        """Bytes that the feed-forward half of a layer keeps."""
        model = self.model
        job = self.job
        traits = self.traits
        trained = not job.frozen or traits.adapters.on_ffn
        num_tensors = traits.ffn_tensors if model.gated else min(2, traits.ffn_tensors)
        if not trained and not job.compiles:
            num_tensors -= 1  # the input of the last matrix
        wide = self.tokens * self._ffn_width / job.tp
        inputs = self.input_tokens * model.hidden_size
        norms = self._norm(self.stream_tokens * model.hidden_size) * (model.num_norms - 1)
        total = norms + _BF16 * num_tensors * wide + (_BF16 * inputs if trained and model.num_norms > 1 else 0)
        if job.float8 and job.compiles:
            total += (_BF16 + 1) * wide + inputs  # the last matrix's input, kept for its scale, and float8 copies
        if model.experts:  # tokens sorted by expert: as sent, as received, and as returned
            total += 3 * _BF16 * self.stream_tokens * model.experts.top_k * model.hidden_size
        return total

    @cached_property
    def backward(self) -> float:
        """Gradients at the last matrix of a feed-forward: of its input, its output and the residual stream."""
        wide = self.tokens * self._ffn_width / self.job.tp
        return _BF16 * (wide + 2 * self.tokens * self.model.hidden_size)

    @cached_property
    def final_norm(self) -> float:
        """Bytes that the last norm and the head keep."""
        hidden = self.model.hidden_size
        return self._norm(self.stream_tokens * hidden) + _BF16 * self.input_tokens * hidden

    @cached_property
    def loss(self) -> float:
        """Logits, softmax and gradients of one piece of the loss."""
        loss = self.traits.loss
        logits = self.tokens * self.model.vocab_size / self.job.tp / loss.num_pieces
        gradient = _BF16 * self.tokens * self.model.hidden_size if loss.num_pieces > 1 else 0
        if self.job.quantised and self.traits.quantises_head:
            gradient += _BF16 * self.model.table_parameters / self.job.tp  # the head, dequantised
        return logits * (loss.sharded if self.job.tp > 1 else loss.eager) + gradient
