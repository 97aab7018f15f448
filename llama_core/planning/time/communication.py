"""The traffic between the ranks of a plan in one optimizer step: how often and how much they send.

This counts the transfers of activations, weights and gradients that ``llama_core.parallel`` makes. It leaves out
transfers of a few numbers: the count of targets, the loss, the gradient norm, and the values per token that ranks with
a part of the vocabulary exchange, or those with different experts. The load of experts is assumed balanced.

Sources: Korthikanti et al. 2022, arXiv:2205.05198 (tensor and sequence); Rajbhandari et al. 2020, arXiv:1910.02054
(ZeRO); Liu et al. 2023, arXiv:2310.01889 (ring); Llama team 2024, arXiv:2407.21783 (gathered keys and values).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from llama_core.config.models import ATTENTION_NORM, FFN_NORM, LayerTraits, ModelSpec
from llama_core.config.run import Precision, RecomputeMode
from llama_core.config.strategy import ATTENTION_MATRICES, EMBEDDING, FEED_FORWARD_MATRICES, HEAD, MATRICES
from llama_core.planning.memory.tensors import FP32_BYTES, Adapter, adapter_size
from llama_core.planning.plan import DocumentAttention, ParallelPlan
from llama_core.planning.time.links import Axis, Collective, Traffic
from llama_core.schedules.actions import Action, Kind
from llama_core.units import MIB

BUCKET_BYTES = 25 * MIB
"""Gradients that copies of a model average at once: the default bucket of ``DistributedDataParallel``."""
POWERSGD_RANK = 4
"""Rank of the factors PowerSGD sends. Repeats ``parallel.zero``, which would import torch."""
_BACKWARDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT})


@dataclass(frozen=True)
class PassTraffic:
    """The transfers of one forward and its backward."""

    forward: tuple[Traffic, ...] = ()
    backward: tuple[Traffic, ...] = ()

    def __iter__(self) -> Iterator[Traffic]:
        yield from self.forward
        yield from self.backward


def communication(
    spec: ModelSpec,
    plan: ParallelPlan,
    *,
    seq_len: int,
    precision: Precision,
    documents: DocumentAttention = "none",
    pp_rank: int | None = None,
) -> tuple[Traffic, ...]:
    """Return the transfers of one rank in one optimizer step, one record per collective, axis and group size.

    Args:
        spec: the architecture.
        plan: how a batch is divided.
        seq_len: tokens per sequence.
        precision: the dtype of activations; ``auto`` counts as bf16.
        documents: how attention is kept inside packed documents.
        pp_rank: the rank's position in its pipeline; by default the one that sends most.
    """
    messages = Messages(spec, plan, seq_len=seq_len, precision=precision, documents=documents)
    ranks = range(plan.pp) if pp_rank is None else (pp_rank,)
    of_ranks = [_merged(_of_rank(messages, rank)) for rank in ranks]
    return max(of_ranks, key=lambda records: sum(record.sent_bytes for record in records))


def _of_rank(messages: "Messages", pp_rank: int) -> Iterator[Traffic]:
    schedule = messages.plan.build_schedule()
    passes = Counter(action.stage for action in schedule.actions[pp_rank] if action.kind is Kind.FORWARD)
    for stage in schedule.stages_of(pp_rank):
        yield from (traffic.times(passes[stage]) for traffic in messages.activations(stage))
        yield from (traffic.times(passes[stage]) for traffic in messages.weights_per_pass(stage))
        yield from messages.weights_per_step(stage)
        if messages.sums_partial_every_pass:
            yield messages.partial_gradients(stage).times(passes[stage])
    yield from messages.heads_gathered_again(schedule.actions[pp_rank])
    yield from messages.partial_gradients_per_step(pp_rank)
    yield from messages.shared_gradients(pp_rank)
    yield messages.hop.times(sum(map(schedule.is_sent, schedule.actions[pp_rank])))


def _merged(traffic: Iterable[Traffic]) -> tuple[Traffic, ...]:
    sums: dict[tuple[Collective, Axis, int], list[Traffic]] = defaultdict(list)
    for part in traffic:
        if part.num_ranks > 1 and part.count:
            sums[part.collective, part.axis, part.num_ranks].append(part)
    return tuple(
        Traffic(*key, sum(part.count for part in parts), sum(part.num_bytes for part in parts))
        for key, parts in sorted(sums.items())
    )


class Messages:
    """The transfers of one rank of a plan.

    Args:
        spec: the architecture.
        plan: how a batch is divided.
        seq_len: tokens per sequence.
        precision: the dtype of activations.
        documents: how attention is kept inside packed documents.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: ParallelPlan,
        *,
        seq_len: int,
        precision: Precision,
        documents: DocumentAttention,
    ) -> None:
        self.spec, self.plan = spec, plan
        self.gathers_keys = documents == "varlen"
        """Whether context-parallel ranks gather keys and values instead of passing them around a ring."""
        self.itemsize = FP32_BYTES if precision == "fp32" else 2
        schedule = plan.layout
        self.num_replicas, self.placement = schedule.num_replicas, schedule.placement
        self.layers, self.modes = plan.stage_layers(spec), plan.recompute_modes(spec)
        self.tokens = plan.rows_per_forward * seq_len // plan.cp
        self.gradient_itemsize = 2 if plan.gradient_compression == "bf16" else FP32_BYTES
        self.num_shards = plan.dp_shard * plan.cp if plan.zero_stage else 1
        self.num_copies = plan.dp_replicate if plan.zero_stage else plan.dp * plan.cp
        self.stream = self.tokens * spec.hidden_size * self.itemsize
        self.num_expert_shards = self.num_shards // plan.fewer_expert_shards
        self.num_expert_copies = self.num_copies * plan.fewer_expert_shards // plan.ep
        self.hop = Traffic("send", "pp", 2, 1, self.stream / plan.tp if plan.sharded_sequence else self.stream)

    def is_first(self, stage: int) -> bool:
        """Return whether a stage holds the embedding."""
        return stage == 0

    def is_last(self, stage: int) -> bool:
        """Return whether a stage holds the head."""
        return stage == len(self.layers) - 1

    def alike(self) -> list[int]:
        """Return, for every stage, the first stage with the same work and transfers."""
        hosting = {stage: hosted for hosted in self.placement for stage in hosted}
        firsts: dict[tuple[Any, ...], int] = {}
        return [
            firsts.setdefault(
                (
                    self.modes[stage],
                    tuple(map(id, self.traits(stage))),  # equal traits are one object
                    self.is_first(stage),
                    self.is_last(stage),
                    # the ends of a model with tied embeddings matter to all stages of their ranks
                    tuple(map(self._rest, hosting[stage])) if self.spec.tied_embeddings else (),
                ),
                stage,
            )
            for stage in range(len(self.layers))
        ]

    def traits(self, stage: int) -> tuple[LayerTraits, ...]:
        """Return the traits of a stage's layers."""
        layers = self.layers[stage]
        return self.spec.layers[layers.start : layers.stop]

    def sparse(self, stage: int) -> tuple[bool, ...]:
        """Return which layers of a stage have experts."""
        return tuple(traits.sparse for traits in self.traits(stage))

    def activations(self, stage: int) -> Iterator[Traffic]:
        """Yield the tp, cp and ep transfers of one microbatch's forward and backward through a stage."""
        for mode, sparse in zip(self.modes[stage], self.sparse(stage), strict=True):
            yield from self.tensor_parallel(mode)
            yield from self.gathered_keys(mode) if self.gathers_keys else self.ring(mode)
            yield from self.expert_parallel(mode) if sparse else ()
        yield from self.tensor_parallel_ends(stage)

    def tensor_parallel(self, mode: RecomputeMode) -> PassTraffic:
        """Return the tensor-parallel transfers of one layer.

        Attention and feed-forward each gather their input and sum their output; the backward does the reverse.
        Recomputation stops before the last sum.
        """
        again = mode != "none"
        if self.plan.sharded_sequence:
            forward = (self._tp("all_gather", 2), self._tp("reduce_scatter", 2))
            return PassTraffic(forward, (self._tp("all_gather", 2 + 2 * again), self._tp("reduce_scatter", 2 + again)))
        return PassTraffic((self._tp("all_reduce", 2),), (self._tp("all_reduce", 2 + again),))

    def tensor_parallel_ends(self, stage: int) -> PassTraffic:
        """Return the tensor-parallel transfers of the embedding and the head, whose vocabulary the ranks divide."""
        forward: list[Traffic] = []
        backward: list[Traffic] = []
        divided = self.plan.sharded_sequence
        if self.is_first(stage):
            forward.append(self._tp("reduce_scatter" if divided else "all_reduce", 1))
            if self.spec.trains_embedding:
                backward += [self._tp("all_gather", 1)] * divided
            else:  # inputs that no trained weight precedes need no gradient sums either
                first = self.spec.layers[0].adapted | self.spec.layers[0].trained
                without = 1 if first.intersection((*ATTENTION_MATRICES, FFN_NORM)) else 2
                without = 0 if ATTENTION_NORM in first else without
                backward.append(self._tp("reduce_scatter" if divided else "all_reduce", -without))
        if self.is_last(stage):
            forward += [self._tp("all_gather", 1)] * divided
            backward.append(self._tp("reduce_scatter" if divided else "all_reduce", 1))
        return PassTraffic(tuple(forward), tuple(backward))

    def _tp(self, collective: Collective, count: int) -> Traffic:
        return Traffic(collective, "tp", self.plan.tp, count, count * self.stream)

    def ring(self, mode: RecomputeMode) -> PassTraffic:
        """Return the hops of keys and values in one layer; in the backward their fp32 gradients follow."""
        hops = self.plan.cp - 1
        elements = 2 * self.tokens * self.spec.kv_size / self.plan.tp
        blocks = Traffic("send", "cp", 2, 1, elements * self.itemsize)
        gradients = Traffic("send", "cp", 2, 1, elements * FP32_BYTES)
        again = 2 if mode != "none" else 1
        return PassTraffic((blocks.times(hops),), (blocks.times(again * hops), gradients.times(hops)))

    def gathered_keys(self, mode: RecomputeMode) -> PassTraffic:
        """Return the gathers of keys and values in one layer, and the sums of their fp32 gradients.

        The backward gathers them again; selective recomputation keeps attention's result and gathers no more.
        """
        elements = 2 * self.plan.cp * self.tokens * self.spec.kv_size / self.plan.tp
        gather = Traffic("all_gather", "cp", self.plan.cp, 2, elements * self.itemsize)
        sums = Traffic("reduce_scatter", "cp", self.plan.cp, 2, elements * FP32_BYTES)
        return PassTraffic((gather,), (gather.times(2 if mode == "full" else 1), sums))

    def expert_parallel(self, mode: RecomputeMode) -> PassTraffic:
        """Return the trips of tokens to their experts and back in one layer, and those of their gradients."""
        copies = self.spec.moe.experts_per_token if self.spec.moe else 0
        trip = Traffic("all_to_all", "ep", self.plan.ep, 1, copies * self.stream)
        return PassTraffic((trip.times(2),), (trip.times(2 if mode == "none" else 4),))

    def trained_parameters(self, stage: int) -> float:
        """Return the parameters of a stage on one rank that get gradients, before data-parallel sharding."""
        return sum(self.trained_groups(stage)) + sum(self.expert_groups(stage))

    def updated_parameters(self, stage: int) -> float:
        """Return the parameters of a stage that one rank updates."""
        experts = sum(self.expert_groups(stage)) / self.num_expert_shards
        return sum(self.trained_groups(stage)) / self.num_shards + experts

    def expert_groups(self, stage: int) -> tuple[float, ...]:
        """Return the number of parameters in each group of experts, if fewer ranks share these than other weights."""
        return (self._experts_of_layer,) * sum(self.sparse(stage)) if self.plan.ep > 1 else ()

    @property
    def _experts_of_layer(self) -> float:
        """The parameters of a layer's experts on one rank."""
        num_experts = self.spec.moe.num_experts if self.spec.moe else 0
        return num_experts * self.spec.expert_parameters / (self.plan.ep * self.plan.tp)

    def groups(self, stage: int) -> tuple[float, ...]:
        """Return the number of parameters in each group of weights that is gathered at once."""
        return self._blocks(stage) + self._rest(stage)

    def trained_groups(self, stage: int) -> tuple[float, ...]:
        """Return the number of parameters with gradients in each group that has any."""
        spec = self.spec
        if spec.lora is None:
            return self.groups(stage)
        tables: list[float] = [sum(adapter) for adapter in self._table_adapters(stage)]
        if self.is_first(stage) and spec.trains_table and (self._is_tied_apart(stage) or not spec.tied_embeddings):
            tables.append(self._table)
        if self.is_last(stage):
            tables.append(self._table * spec.trains_head + spec.hidden_size * spec.trains_final_norm)
        layers = map(self._trained_of_layer, self.traits(stage))
        return tuple(group for group in (*layers, *tables) if group)

    def _trained_of_layer(self, traits: LayerTraits) -> float:
        """Return the parameters of a layer with gradients, without experts that have a group of their own."""
        spec, matrices = self.spec, traits.trained.intersection(MATRICES)
        trained: float = self._adapters_of_layer(traits) + spec.hidden_size * len(traits.trained - matrices)
        if traits.sparse:
            matrices = matrices.difference(FEED_FORWARD_MATRICES)
            trained += self._router + (self._experts_of_layer if self.plan.ep == 1 else 0)
        return trained + sum(math.prod(spec.matrix_shapes[matrix]) for matrix in matrices) / self.plan.tp

    def _adapters(self, layers: Iterable[LayerTraits]) -> list[Adapter]:
        """Return the sizes of the adapters of some layers."""
        return [adapter_size(self.spec, matrix, self.plan.tp) for traits in layers for matrix in traits.adapted]

    def _adapters_of_layer(self, traits: LayerTraits) -> int:
        return sum(map(sum, self._adapters([traits])))

    @property
    def _router(self) -> int:
        """The parameters of a router."""
        return self.spec.hidden_size * self.spec.moe.num_experts if self.spec.moe else 0

    def _table_adapters(self, stage: int) -> Iterator[Adapter]:
        """Yield the sizes of a stage's adapters outside the layers."""
        for table, is_there in ((EMBEDDING, self.is_first(stage)), (HEAD, self.is_last(stage))):
            if is_there and table in self.spec.adapted_tables:
                yield adapter_size(self.spec, table, self.plan.tp)

    def _blocks(self, stage: int) -> tuple[float, ...]:
        """Return the number of parameters in every layer, and in an untied embedding."""
        layer = self.spec.layer_matmul_parameters / self.plan.tp + 2 * self.spec.hidden_size
        mixture = layer - self.spec.expert_parameters / self.plan.tp + self._router
        mixture += self._experts_of_layer if self.plan.ep == 1 else 0
        embedding: tuple[float, ...] = ()
        if self.is_first(stage) and not self.spec.tied_embeddings:
            embedding = (self._table + self._beside(EMBEDDING),)
        traits = self.traits(stage)
        of_layer = {kind: (mixture if kind.sparse else layer) + self._adapters_of_layer(kind) for kind in set(traits)}
        return (*(of_layer[kind] for kind in traits), *embedding)

    def _beside(self, table: str) -> int:
        """Return the parameters of the adapter on a matrix outside the layers."""
        return sum(adapter_size(self.spec, table, self.plan.tp)) if table in self.spec.adapted_tables else 0

    def _rest(self, stage: int) -> tuple[float, ...]:
        """Return the rest: the last norm and the head, or an embedding tied to the head of another rank."""
        if self.is_last(stage):
            return (self._table + self._beside(HEAD) + self.spec.hidden_size,)
        return (self._table,) if self._is_tied_apart(stage) else ()

    @property
    def _table(self) -> float:
        return self.spec.embedding_parameters / self.plan.tp

    def _is_tied_apart(self, stage: int) -> bool:
        """Return whether a stage holds an embedding that is tied to the head of another rank."""
        if not (self.is_first(stage) and self.spec.tied_embeddings):
            return False
        last = len(self.layers) - 1
        return not any({stage, last} <= set(hosted) for hosted in self.placement)

    def weights_per_pass(self, stage: int) -> PassTraffic:
        """Return the data-parallel transfers of every microbatch."""
        forward, backward = [], []
        if self.plan.effective_zero_stage == 3:
            rest = self._rest(stage)
            if self.spec.tied_embeddings:  # gathered in whichever stage of the rank runs first, and kept to a backward
                hosted = next(hosted for hosted in self.placement if stage in hosted)
                rest = tuple(group for other in hosted for group in self._rest(other))
            experts = [self._gather(group, self.num_expert_shards) for group in self.expert_groups(stage)]
            forward = [self._gather(group) for group in (*self._blocks(stage), *rest)] + experts
            # the backward of an embedding needs it only for its adapter
            in_backward = None if EMBEDDING in self.spec.adapted_tables else len(self.layers[stage])
            backward = [self._gather(group) for group in self._blocks(stage)[:in_backward]] + experts
        if self.plan.effective_zero_stage >= 2:
            backward += self._scatters(stage)
        return PassTraffic(_merged(forward), _merged(backward))

    def heads_gathered_again(self, actions: Iterable[Action]) -> Iterator[Traffic]:
        """Yield the gathers of the head in a rank's ``actions`` that ``weights_per_pass`` does not count.

        The head stays gathered after its forward; the end of any backward of the rank drops it. So it is gathered once
        per pass, and again if the backward of another stage comes between its forward and its backward.
        """
        if self.plan.effective_zero_stage < 3 or self.spec.tied_embeddings:
            return
        last, again, is_gathered = len(self.layers) - 1, 0, False
        for action in actions:
            if action.stage == last:
                again += (not is_gathered) - (action.kind is Kind.FORWARD)
                is_gathered = True
            is_gathered &= action.kind not in _BACKWARDS
        yield from (self._gather(group).times(again) for group in self._rest(last))

    def weights_per_step(self, stage: int) -> PassTraffic:
        """Return the data-parallel transfers made once per step: in the first forward and in the last backward."""
        if not self.plan.uses_fully_shard:
            return PassTraffic((), _merged([self._copies(stage)]))
        forward = []
        if self.plan.effective_zero_stage in {1, 2}:
            forward = [self._gather(group) for group in self.groups(stage)]
            forward += [self._gather(group, self.num_expert_shards) for group in self.expert_groups(stage)]
        backward = self._scatters(stage) if self.plan.effective_zero_stage == 1 else []
        shards = [self._reduction(1, group / self.num_shards) for group in self.trained_groups(stage)]
        experts = [group / self.num_expert_shards for group in self.expert_groups(stage)]
        shards += [self._reduction(1, shard, self.num_expert_copies) for shard in experts]
        return PassTraffic(_merged(forward), _merged([*backward, *shards]))

    def _scatters(self, stage: int) -> list[Traffic]:
        rest = [self._scatter(group) for group in self.trained_groups(stage)]
        return rest + [self._scatter(group, self.num_expert_shards) for group in self.expert_groups(stage)]

    def _gather(self, parameters: float, num_ranks: int | None = None) -> Traffic:
        return Traffic("all_gather", "shard", num_ranks or self.num_shards, 1, parameters * self.itemsize)

    def _scatter(self, parameters: float, num_ranks: int | None = None) -> Traffic:
        return Traffic("reduce_scatter", "shard", num_ranks or self.num_shards, 1, parameters * self.gradient_itemsize)

    def _reduction(self, count: int, parameters: float, num_ranks: int | None = None) -> Traffic:
        num_bytes = parameters * self.gradient_itemsize
        return Traffic("all_reduce", "replicate", num_ranks or self.num_copies, count, num_bytes)

    def _copies(self, stage: int) -> Traffic:
        """Return the averaging of whole gradients in buckets, or of their factors with PowerSGD."""
        parameters, hidden = self.trained_parameters(stage), self.spec.hidden_size
        count = math.ceil(parameters * FP32_BYTES / BUCKET_BYTES)
        if self.plan.gradient_compression != "powersgd":
            return self._reduction(count, parameters)
        spec = self.spec
        if spec.lora:
            rank = spec.lora.lora_rank
            everywhere = [*self._adapters(spec.layers), *self._table_adapters(stage)]
            sides = sum(rank + size // rank for adapter in everywhere for size in adapter)
            whole = [matrix for traits in spec.layers for matrix in traits.trained.intersection(MATRICES)]
            sides += sum(sum(spec.matrix_shapes[matrix]) for matrix in whole)
            return self._reduction(2 * count, POWERSGD_RANK * sides)
        sides = 2 * (hidden + spec.q_size) + 2 * (hidden + spec.kv_size) + 3 * (hidden + spec.ffn_size)
        tables = (1 if spec.tied_embeddings else 2) * (spec.vocab_size + hidden)
        norms = (2 * spec.num_layers + 1) * hidden
        # the left factors of a bucket are sent, then the right ones
        return self._reduction(2 * count, POWERSGD_RANK * (spec.num_layers * sides + tables) + norms)

    @property
    def sums_partial_every_pass(self) -> bool:
        """Whether ``partial_gradients`` are summed after every backward, before they are reduced into shards."""
        return self.plan.effective_zero_stage >= 2

    def partial_gradients(self, stage: int) -> Traffic:
        """Return the sums of gradients that are partial on each tensor-parallel rank.

        These are the gradients of norms, where a rank sees its part of the sequence, of routers, where it sees its part
        of the experts, or of the whole side of adapters. ``fully_shard`` sums each of them.
        """
        layers, norms = self.traits(stage), 0
        if self.plan.sharded_sequence:
            norms = sum(len(traits.trained.difference(MATRICES)) for traits in layers)
            norms += self.is_last(stage) and self.spec.trains_final_norm
        routers, adapters = sum(self.sparse(stage)), [*self._adapters(layers), *self._table_adapters(stage)]
        count = norms + routers + len(adapters)
        elements = norms * self.spec.hidden_size + routers * self._router + sum(adapter.whole for adapter in adapters)
        is_reduced_as_made = self.sums_partial_every_pass or self.plan.num_microbatches == 1
        itemsize = self.itemsize if self.plan.uses_fully_shard and is_reduced_as_made else FP32_BYTES
        return Traffic("all_reduce", "tp", self.plan.tp, count, elements * itemsize)

    def partial_gradients_per_step(self, pp_rank: int) -> Iterator[Traffic]:
        """Yield the sums of ``partial_gradients`` made once per step: without ``fully_shard``, all in one."""
        if self.sums_partial_every_pass:
            return
        sums = list(map(self.partial_gradients, self.placement[pp_rank]))
        if self.plan.uses_fully_shard:
            yield from sums
        elif any(part.count for part in sums):
            yield Traffic("all_reduce", "tp", self.plan.tp, 1, sum(part.num_bytes for part in sums))

    def shared_gradients(self, pp_rank: int) -> Iterator[Traffic]:
        """Yield the sums, after the last backward, of gradients that are partial on several pipeline ranks."""
        hosted = self.placement[pp_rank]
        groups = [group for stage in hosted for group in self.trained_groups(stage)]
        if self.num_replicas > 1:
            experts = sum(sum(self.expert_groups(stage)) for stage in hosted)
            num_bytes = FP32_BYTES * (sum(groups) / self.num_shards + experts / self.num_expert_shards)
            yield Traffic("all_reduce", "pp", self.num_replicas, 1, num_bytes)
        ends = [stage for stage in hosted if self.is_first(stage) or self.is_last(stage)]
        if self.num_replicas == 1 and self._is_tied_apart(0) and ends and self.spec.trains_table:
            yield Traffic("all_reduce", "pp", 2, 1, self._table / self.num_shards * FP32_BYTES)
