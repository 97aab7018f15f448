"""The traffic between the ranks of a plan in one optimizer step: how often and how much they send.

This counts the transfers of activations, weights and gradients that ``llama_core.parallel`` makes. It leaves out
transfers of a few numbers: the count of targets, the loss, the gradient norm, and the values per token that ranks with
a part of the vocabulary exchange, or those with different experts. The load of experts is assumed balanced.

Sources: Korthikanti et al. 2022, arXiv:2205.05198 (tensor and sequence); Rajbhandari et al. 2020, arXiv:1910.02054
(ZeRO); Liu et al. 2023, arXiv:2310.01889 (ring); Llama team 2024, arXiv:2407.21783 (gathered keys and values).
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from llama_core.planning.program.operations import FP32_BYTES
from llama_core.planning.program.passes import Passes
from llama_core.planning.transfers import PassTraffic, Traffic, merged
from llama_core.planning.work import Work
from llama_core.schedules.actions import Action, Kind
from llama_core.units import MIB

BUCKET_BYTES = 25 * MIB
"""Gradients that copies of a model average at once: the default bucket of ``DistributedDataParallel``."""
POWERSGD_RANK = 4
"""Rank of the factors PowerSGD sends. Repeats ``parallel.zero``, which would import torch."""
_BACKWARDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT})


def communication(work: Work, *, pp_rank: int | None = None) -> tuple[Traffic, ...]:
    """Return the transfers of one rank in one optimizer step, one record per collective, axis and group size.

    Args:
        work: the model, the plan and the sequences.
        pp_rank: the rank's position in its pipeline; by default the one that sends most.
    """
    messages = Messages(work)
    ranks = range(work.plan.pp) if pp_rank is None else (pp_rank,)
    of_ranks = [merged(_of_rank(messages, rank)) for rank in ranks]
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
    yield from messages.update(pp_rank)
    yield messages.hop.times(sum(map(schedule.is_sent, schedule.actions[pp_rank])))


class Messages:
    """The transfers of one rank of a plan.

    Args:
        work: the model, the plan and the sequences.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        spec = self.spec = work.spec
        plan = self.plan = work.plan
        self.itemsize = work.itemsize
        schedule = plan.layout
        self.num_replicas = schedule.num_replicas
        self.placement = schedule.placement
        self.layers = [work.layers[layers.start : layers.stop] for layers in plan.stage_layers(spec)]
        """The forward and the backward of every layer of each stage."""
        self.modes = plan.recompute_modes(spec)
        self.gradient_itemsize = 2 if plan.gradient_compression == "bf16" else FP32_BYTES
        self.num_shards = plan.dp_shard * plan.cp if plan.zero_stage else 1
        self.num_copies = plan.dp_replicate if plan.zero_stage else plan.dp * plan.cp
        self.num_expert_shards = self.num_shards // plan.fewer_expert_shards
        self.num_expert_copies = self.num_copies * plan.fewer_expert_shards // plan.ep
        self.hop = Traffic("send", "pp", 2, 1, work.stream_bytes)

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
                    self.layers[stage],
                    self.is_first(stage),
                    self.is_last(stage),
                    # the ends of a model with tied embeddings matter to all stages of their ranks
                    tuple(map(self._rest, hosting[stage])) if self.spec.tied_embeddings else (),
                ),
                stage,
            )
            for stage in range(len(self.layers))
        ]

    def ends(self, stage: int) -> list[Passes]:
        """Return the embedding, or the final norm and the head, if a stage holds them."""
        ends = [self.work.embedding] if self.is_first(stage) else []
        return [*ends, self.work.final_norm, self.work.head] if self.is_last(stage) else ends

    def activations(self, stage: int) -> Iterator[Traffic]:
        """Yield the tp, cp and ep transfers of one microbatch's forward and backward through a stage."""
        for layer, mode in zip(self.layers[stage], self.modes[stage], strict=True):
            yield from layer.transfers(mode)
        yield from self.transfers_of_ends(stage)

    def transfers_of_ends(self, stage: int) -> PassTraffic:
        """Return the transfers of the embedding and the head, whose vocabulary tensor-parallel ranks divide."""
        ends = [end.transfers() for end in self.ends(stage)]
        forward = merged(traffic for end in ends for traffic in end.forward)
        return PassTraffic(forward, merged(traffic for end in ends for traffic in end.backward))

    def trained_parameters(self, stage: int) -> float:
        """Return the parameters of a stage on one rank that get gradients, before data-parallel sharding."""
        return sum(self.trained_groups(stage)) + sum(self.expert_groups(stage))

    def updated_parameters(self, stage: int) -> float:
        """Return the parameters of a stage that one rank updates."""
        experts = sum(self.expert_groups(stage)) / self.num_expert_shards
        return sum(self.trained_groups(stage)) / self.num_shards + experts

    def expert_groups(self, stage: int) -> tuple[int, ...]:
        """Return the number of parameters in each group of experts, if fewer ranks share these than other weights."""
        if self.plan.ep == 1:
            return ()
        counts = (layer.program.num_of_experts for layer in self.layers[stage])
        return tuple(count for count in counts if count)

    def groups(self, stage: int) -> tuple[int, ...]:
        """Return the number of parameters in each group of weights that is gathered at once."""
        return self._blocks(stage) + self._rest(stage)

    def trained_groups(self, stage: int) -> tuple[int, ...]:
        """Return the number of parameters with gradients in each group that has any."""
        groups = [self._beside_experts(layer, layer.program.num_trained) for layer in self.layers[stage]]
        if self.is_first(stage) and (self._is_tied_apart(stage) or not self.spec.tied_embeddings):
            groups.append(self.work.embedding.program.num_trained)
        if self.is_last(stage):
            groups.append(self.work.final_norm.program.num_trained + self.work.head.program.num_trained)
        return tuple(group for group in groups if group)

    def _beside_experts(self, layer: Passes, num_parameters: int) -> int:
        """Return some of a layer's parameters without its experts, if these have a group of their own."""
        return num_parameters - (layer.program.num_of_experts if self.plan.ep > 1 else 0)

    def _blocks(self, stage: int) -> tuple[int, ...]:
        """Return the number of parameters in every layer, and in an untied embedding."""
        blocks = [self._beside_experts(layer, layer.program.num_parameters) for layer in self.layers[stage]]
        if self.is_first(stage) and not self.spec.tied_embeddings:
            blocks.append(self.work.embedding.program.num_parameters)
        return tuple(blocks)

    def _rest(self, stage: int) -> tuple[int, ...]:
        """Return the rest: the last norm and the head, or an embedding tied to the head of another rank."""
        if self.is_last(stage):
            return (self.work.final_norm.program.num_parameters + self.work.head.program.num_parameters,)
        return (self.work.embedding.program.num_parameters,) if self._is_tied_apart(stage) else ()

    def _is_tied_apart(self, stage: int) -> bool:
        """Return whether a stage holds an embedding that is tied to the head of another rank."""
        if not (self.is_first(stage) and self.spec.tied_embeddings):
            return False
        last = len(self.layers) - 1
        return not any({stage, last} <= set(hosted) for hosted in self.placement)

    def weights_per_pass(self, stage: int) -> PassTraffic:
        """Return the data-parallel transfers of every microbatch."""
        forward = []
        backward = []
        if self.plan.effective_zero_stage == 3:
            rest = self._rest(stage)
            if self.spec.tied_embeddings:  # gathered in whichever stage of the rank runs first, and kept to a backward
                hosted = next(hosted for hosted in self.placement if stage in hosted)
                rest = tuple(group for other in hosted for group in self._rest(other))
            experts = [self._gather(group, self.num_expert_shards) for group in self.expert_groups(stage)]
            forward = [self._gather(group) for group in (*self._blocks(stage), *rest)] + experts
            # the backward of an embedding needs it only for its adapter
            embedding = self.work.embedding.program
            is_adapted = 0 < embedding.num_trained < embedding.num_parameters
            in_backward = None if is_adapted else len(self.layers[stage])
            backward = [self._gather(group) for group in self._blocks(stage)[:in_backward]] + experts
        if self.plan.effective_zero_stage >= 2:
            backward += self._scatters(stage)
        return PassTraffic(merged(forward), merged(backward))

    def heads_gathered_again(self, actions: Iterable[Action]) -> Iterator[Traffic]:
        """Yield the gathers of the head in a rank's ``actions`` that ``weights_per_pass`` does not count.

        The head stays gathered after its forward; the end of any backward of the rank drops it. So it is gathered once
        per pass, and again if the backward of another stage comes between its forward and its backward.
        """
        if self.plan.effective_zero_stage < 3 or self.spec.tied_embeddings:
            return
        last = len(self.layers) - 1
        again = 0
        is_gathered = False
        for action in actions:
            if action.stage == last:
                again += (not is_gathered) - (action.kind is Kind.FORWARD)
                is_gathered = True
            is_gathered &= action.kind not in _BACKWARDS
        yield from (self._gather(group).times(again) for group in self._rest(last))

    def weights_per_step(self, stage: int) -> PassTraffic:
        """Return the data-parallel transfers made once per step: in the first forward and in the last backward."""
        if not self.plan.uses_fully_shard:
            return PassTraffic((), merged([self._copies(stage)]))
        forward = []
        if self.plan.effective_zero_stage in {1, 2}:
            forward = [self._gather(group) for group in self.groups(stage)]
            forward += [self._gather(group, self.num_expert_shards) for group in self.expert_groups(stage)]
        backward = self._scatters(stage) if self.plan.effective_zero_stage == 1 else []
        shards = [self._reduction(1, group / self.num_shards) for group in self.trained_groups(stage)]
        experts = [group / self.num_expert_shards for group in self.expert_groups(stage)]
        shards += [self._reduction(1, shard, self.num_expert_copies) for shard in experts]
        return PassTraffic(merged(forward), merged([*backward, *shards]))

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
        count = math.ceil(self.trained_parameters(stage) * FP32_BYTES / BUCKET_BYTES)
        if self.plan.gradient_compression != "powersgd":
            return self._reduction(count, self.trained_parameters(stage))
        # the left factors of a bucket are sent, then the right ones
        return self._reduction(2 * count, sum(map(_factored, self._trained_shapes())))

    def _trained_shapes(self) -> Iterator[tuple[int, ...]]:
        """Yield the shapes of the model's parameters that get gradients."""
        spec = self.spec
        yield from (shape for name, shape in spec.parameter_shapes.items() if name in spec.trained_in_full)
        if spec.lora is None:
            return
        for matrix in (*spec.adapted_tables, *(matrix for traits in spec.layers for matrix in traits.adapted)):
            columns, rows = spec.target_shapes[matrix]
            yield (spec.lora.lora_rank, columns)
            yield (rows, spec.lora.lora_rank)

    @property
    def sums_partial_every_pass(self) -> bool:
        """Whether ``partial_gradients`` are summed after every backward, before they are reduced into shards."""
        return self.plan.effective_zero_stage >= 2

    def partial_gradients(self, stage: int) -> Traffic:
        """Return the sums of gradients that are partial on each tensor-parallel rank.

        These are the gradients of norms, where a rank sees its part of the sequence, of routers, where it sees its part
        of the experts, or of the whole side of adapters. ``fully_shard`` sums each of them.
        """
        parts = [*self.layers[stage], *self.ends(stage)]
        partial = [elements for part in parts for elements in part.program.partial.values()]
        is_reduced_as_made = self.sums_partial_every_pass or self.plan.num_microbatches == 1
        itemsize = self.itemsize if self.plan.uses_fully_shard and is_reduced_as_made else FP32_BYTES
        return Traffic("all_reduce", "tp", self.plan.tp, len(partial), sum(partial) * itemsize)

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
            yield Traffic(
                "all_reduce", "pp", 2, 1, self.work.embedding.program.num_trained / self.num_shards * FP32_BYTES
            )

    def update(self, pp_rank: int) -> Iterator[Traffic]:
        """Yield what the optimizer gathers from the ranks that shard a weight, one transfer per group of weights."""
        if not self.work.optimizer.gathered_bytes:
            return
        for stage in self.placement[pp_rank]:
            yield self._gathered_in_update(self.trained_groups(stage), self.num_shards)
            yield self._gathered_in_update(self.expert_groups(stage), self.num_expert_shards)

    def _gathered_in_update(self, groups: tuple[int, ...], num_ranks: int) -> Traffic:
        num_bytes = self.work.optimizer.gathered_bytes * sum(groups)
        return Traffic("all_gather", "shard", num_ranks, len(groups), num_bytes)


def _factored(shape: tuple[int, ...]) -> int:
    """Return the elements that PowerSGD sends of a gradient: of a matrix its factors, of a vector all of it."""
    if len(shape) == 1:
        return shape[0]
    return POWERSGD_RANK * (shape[0] + math.prod(shape[1:]))
