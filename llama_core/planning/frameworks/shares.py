"""One rank's share of a model's weights, gradients and optimizer states, and its buffers for gathered weights."""

from functools import cached_property

from llama_core.planning.frameworks.job import Job

_COMPUTE_BYTES = 2  # computation uses 16-bit weights and gradients


class Shares:
    """The states and buffers of one pipeline rank, in bytes unless noted otherwise.

    Args:
        job: the job.
        pp_rank: the rank's place in the pipeline.
    """

    def __init__(self, job: Job, pp_rank: int) -> None:
        self.job = job
        self.traits = job.framework
        self.model = job.architecture
        self.num_layers = layers_per_rank(job)[pp_rank]
        self.is_first = pp_rank == 0
        self.is_last = pp_rank == job.pp - 1
        self.num_shards = job.dp_shard * job.cp
        self.num_expert_shards = max(1, self.num_shards * job.tp // job.expert_parts)
        keeps_others = self.num_shards > 1 or job.weight_bytes > _COMPUTE_BYTES or job.offloads_states
        self.gathers = job.zero_stage >= 3 and keeps_others
        """Whether computation uses copies of the stored weights: gathered from shards, or at least cast."""

    @cached_property
    def layer(self) -> float:
        """Parameters of one layer without its experts."""
        model = self.model
        ffn = model.ffn_parameters(model.ffn_size) * (model.num_layers - model.num_expert_layers)
        if model.experts:
            ffn += model.ffn_parameters(model.experts.shared_ffn_size) * model.num_expert_layers
        return (model.attention_parameters + ffn / model.num_layers) / self.job.tp + 2 * model.hidden_size

    @cached_property
    def experts(self) -> float:
        """Parameters of one layer's experts."""
        model = self.model
        if model.experts is None:
            return 0
        each = model.ffn_parameters(model.experts.ffn_size) * model.num_expert_layers / model.num_layers
        return model.experts.count * each / self.job.expert_parts

    @cached_property
    def table(self) -> float:
        """Parameters of the embedding, or of the head."""
        return self.model.table_parameters / self.job.tp

    @cached_property
    def num_tables(self) -> int:
        """Number of tables, embedding and head, on this rank."""
        shared = self.model.tied and not self.traits.unties_head and self.is_first and self.is_last
        return 1 if shared else int(self.is_first) + int(self.is_last)

    def state(self, bytes_per_parameter: float, *, is_sharded: bool) -> float:
        """Return the bytes of a state that every trained parameter has."""
        if self.job.frozen:
            return self.job.adapter_parameters * bytes_per_parameter / (self.num_shards if is_sharded else 1)
        dense = self.num_layers * self.layer + self.num_tables * self.table
        experts = self.num_layers * self.experts
        if is_sharded:
            dense = dense / self.num_shards
            experts = experts / self.num_expert_shards
        return bytes_per_parameter * (dense + experts)

    @cached_property
    def weights(self) -> float:
        """Weights between steps."""
        job = self.job
        if job.offloads_states:
            return 0
        matrix_bytes = self.traits.quantised_bytes if job.quantised else job.weight_bytes
        head_bytes = matrix_bytes if self.traits.quantises_head else job.weight_bytes
        tables = self.table * (job.weight_bytes * (self.num_tables - 1) + head_bytes) if self.num_tables else 0
        dense = self.num_layers * self.layer * matrix_bytes + tables + job.adapter_parameters * job.weight_bytes
        experts = self.num_layers * self.experts * matrix_bytes
        if job.zero_stage < 3:
            return dense + experts
        return dense / self.num_shards + experts / self.num_expert_shards

    @cached_property
    def dequantised(self) -> float:
        """The widest matrix of a layer, dequantised for its product."""
        widest = self.model.hidden_size * self.model.ffn_size / self.job.tp
        return _COMPUTE_BYTES * widest if self.job.quantised else 0

    @cached_property
    def moments(self) -> float:
        """Moments of the optimizer, and its own copy of the weights."""
        if self.job.offloads_states:
            return 0
        each = self.job.moment_bytes + self.traits.master_bytes
        return self.state(each, is_sharded=self.job.zero_stage >= 1)

    @cached_property
    def gradients(self) -> float:
        """All gradients after the last backward."""
        job = self.job
        traits = self.traits
        if job.steps_in_backward or job.offloads_states:
            return 0
        complete = self.state(traits.gradient_bytes, is_sharded=job.zero_stage >= 2)
        if job.dp_replicate * self.num_shards > 1:
            complete += self.state(traits.bucket_bytes, is_sharded=False)
        sums_first = self.gathers and job.pp > 1 and job.num_microbatches > 1 and self.num_shards > 1
        return complete + (self.state(traits.reduce_bytes, is_sharded=False) if sums_first else 0)

    @cached_property
    def gradients_between_microbatches(self) -> float:
        """Gradients that exist during a forward."""
        return self.gradients if self.traits.persistent_gradients or self.job.num_microbatches > 1 else 0

    @cached_property
    def head_gradient(self) -> float:
        """The gradient of the head, the first of the backward."""
        if self.job.frozen or not self.is_last or self.traits.persistent_gradients:
            return 0
        is_reduced = self.gathers and self.traits.tables_in_root == 1
        return self.table * self.traits.gradient_bytes / (self.num_shards if is_reduced else 1)

    @cached_property
    def gathered_layer(self) -> float:
        """The gathered weights of the current layer; quantised weights are gathered quantised."""
        each = self.traits.quantised_bytes if self.job.quantised else _COMPUTE_BYTES
        return each * (self.layer + self.experts) if self.gathers and self.job.reshards else 0

    @cached_property
    def gather_buffers(self) -> float:
        """The buffers that gather this layer and the next."""
        return 2 * self.gathered_layer if self.num_shards > 1 else 0

    @cached_property
    def layer_gradients(self) -> float:
        """The gradients of one layer before they are reduced or accumulated."""
        if self.job.frozen:
            return 0
        layer = self.layer + self.experts
        if self.gathers:
            return layer * (_COMPUTE_BYTES + (self.traits.reduce_bytes if self.num_shards > 1 else 0))
        return layer * _COMPUTE_BYTES if self.traits.persistent_gradients or self.job.steps_in_backward else 0

    @cached_property
    def gathered_root(self) -> float:
        """The gathered tables and, if weights stay gathered, all layers."""
        if not self.gathers:
            return 0
        if not self.job.reshards:
            return _COMPUTE_BYTES * (self.num_layers * (self.layer + self.experts) + self.num_tables * self.table)
        return _COMPUTE_BYTES * self._root

    @cached_property
    def root_buffer(self) -> float:
        """The buffer that gathers the tables."""
        return _COMPUTE_BYTES * self._root if self.gathers and self.num_shards > 1 else 0

    @cached_property
    def _root(self) -> float:
        """Parameters of the tables that are gathered with the root module."""
        return self.table * min(self.num_tables, self.traits.tables_in_root)

    @cached_property
    def root_reduction(self) -> float:
        """The embedding's gradient, and all that is reduced with it."""
        if self.job.frozen or not self.is_first:
            return 0
        if not self.gathers:
            copies = 2 if self.is_last and self.num_tables == 1 else 1  # a tied table has one as embedding, one as head
            return _COMPUTE_BYTES * self.table * copies
        embedding = _COMPUTE_BYTES * self.table if self.traits.tables_in_root == 1 else 0
        return self._root * (_COMPUTE_BYTES + self.traits.reduce_bytes) + embedding


def layers_per_rank(job: Job) -> list[int]:
    """Return the number of layers on each rank of a pipeline."""
    model = job.architecture
    pp = job.pp
    if not job.framework.balances_cost:
        return [model.num_layers // pp + (rank < model.num_layers % pp) for rank in range(pp)]
    layer = (model.num_parameters - (1 if model.tied else 2) * model.table_parameters) / model.num_layers
    share = (model.num_layers * layer + model.table_parameters) / pp
    counts = [0] * pp
    rank = 0
    dealt = 0.0
    for _ in range(model.num_layers):  # a stage ends with the layer that exceeds its share
        counts[rank] += 1
        dealt += layer
        rank += dealt > share * (rank + 1)
    return counts
