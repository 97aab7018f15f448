"""The traffic between the ranks of a plan in one optimizer step: how often and how much they send.

This counts the transfers of activations, weights and gradients that ``llama_core.parallel`` makes. It leaves out
transfers of a few numbers: the count of targets, the loss, the gradient norm, and the values per token that ranks with
a part of the vocabulary exchange, or those with different experts. The load of experts is assumed balanced.

Sources: Korthikanti et al. 2022, arXiv:2205.05198 (tensor and sequence); Rajbhandari et al. 2020, arXiv:1910.02054
(ZeRO); Liu et al. 2023, arXiv:2310.01889 (ring); Llama team 2024, arXiv:2407.21783 (gathered keys and values).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from llama_core.config.trained_ends import trains_table
from llama_core.optimizers.traits import Trained
from llama_core.planning.before import forwards_before_step
from llama_core.planning.fully_shard import Resharding, Unit
from llama_core.planning.program.operations import FP32_BYTES, Program
from llama_core.planning.program.passes import Passes
from llama_core.planning.transfers import PassTraffic, Traffic, merged
from llama_core.planning.work import Stage, Work
from llama_core.schedules.actions import Kind
from llama_core.schedules.walk import Turn, walk
from llama_core.units import MIB

BUCKET_BYTES = 25 * MIB
"""Gradients that copies of a model average at once: the default bucket of ``DistributedDataParallel``."""
POWERSGD_RANK = 4
"""Rank of the factors PowerSGD sends. Repeats ``parallel.zero``, which would import torch."""


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
    """Yield the transfers of a rank's step."""
    turns = list(walk(messages.plan.build_schedule(), pp_rank))
    forwards = [turn for turn in turns if turn.action.kind is Kind.FORWARD]
    for stage, num_passes in _hosted(messages, pp_rank, forwards):
        yield from _repeated(messages.activations(stage), num_passes)
        yield from _repeated(messages.weights_per_pass(stage), num_passes)
        yield from messages.weights_per_step(stage)
        if messages.sums_partial_every_pass:
            yield messages.partial_gradients(stage).times(num_passes)
    yield from messages.heads_gathered_again(turns)
    yield from messages.partial_gradients_per_step(pp_rank)
    yield from messages.shared_gradients(pp_rank)
    yield from messages.update(pp_rank)
    yield messages.hop.times(sum(turn.is_sent for turn in turns))
    for _ in range(forwards_before_step(messages.work.objective)):
        yield from _of_forwards(messages, pp_rank, forwards)


def _of_forwards(messages: "Messages", pp_rank: int, forwards: Sequence[Turn]) -> Iterator[Traffic]:
    """Yield the transfers of a forward over other rows before the step, of as many microbatches."""
    for stage, num_passes in _hosted(messages, pp_rank, forwards):
        yield from _repeated(messages.activations_forward(stage), num_passes)
        yield from _repeated(messages.weights_per_pass(stage).forward, num_passes)
        yield from messages.weights_per_step(stage).forward
    yield messages.hop.times(sum(turn.is_sent for turn in forwards))


def _hosted(
    messages: "Messages",
    pp_rank: int,
    forwards: Sequence[Turn],
) -> Iterator[tuple[Stage, int]]:
    """Yield the stages of a rank, each with the number of its forwards."""
    num_passes = Counter(turn.action.stage for turn in forwards)
    numbers = messages.plan.layout.stages_of(pp_rank)
    for number, stage in zip(numbers, messages.work.hosted(pp_rank), strict=True):
        yield stage, num_passes[number]


def _repeated(traffic: Iterable[Traffic], count: int) -> Iterator[Traffic]:
    for part in traffic:
        yield part.times(count)


class Group(NamedTuple):
    """Weights that ranks gather, or whose gradients they reduce, in one transfer."""

    parameters: int
    num_shards: int
    """Ranks that each have a part of them."""
    num_copies: int
    """Ranks that have the same part."""

    @property
    def sharded(self) -> float:
        """Parameters of a rank's part."""
        return self.parameters / self.num_shards


class Messages:
    """The transfers of one rank of a plan.

    Args:
        work: the model, the plan and the sequences.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.spec = work.spec
        self.plan = work.plan
        self.resharding = Resharding.of(work.plan)
        self.itemsize = work.itemsize
        self.stages = work.stages
        self.gradient_itemsize = 2 if self.plan.gradient_compression == "bf16" else FP32_BYTES
        self.hop = Traffic("send", "pp", 2, 1, work.stream_bytes)
        self._groups: dict[Stage, list[Group]] = {}
        self._trained: dict[Stage, list[Group]] = {}

    def activations(self, stage: Stage) -> Iterator[Traffic]:
        """Yield the tp, cp and ep transfers of one microbatch's forward and backward through a stage."""
        for layer, mode in zip(stage.layers, stage.modes, strict=True):
            yield from layer.transfers(mode)
        yield from self.transfers_of_ends(stage)

    def activations_forward(self, stage: Stage) -> Iterator[Traffic]:
        """Yield those of the forward alone."""
        for layer, mode in zip(stage.layers, stage.modes, strict=True):
            yield from layer.transfers(mode).forward
        yield from self.transfers_of_ends(stage).forward

    def transfers_of_ends(self, stage: Stage) -> PassTraffic:
        """Return the transfers of the embedding and the head, whose vocabulary tensor-parallel ranks divide."""
        forward: list[Traffic] = []
        backward: list[Traffic] = []
        for end in stage.ends:
            transfers = end.transfers()
            forward += transfers.forward
            backward += transfers.backward
        return PassTraffic(merged(forward), merged(backward))

    def groups(self, stage: Stage) -> list[Group]:
        """Return the weights that a stage gathers at once: a group for each unit, without its experts."""
        if stage not in self._groups:
            units = stage.units
            self._groups[stage] = [self._outside_experts(unit, _num_held) for unit in units]
        return self._groups[stage]

    def trained(self, stage: Stage) -> list[Group]:
        """Return the gradients that a stage reduces at once."""
        if stage not in self._trained:
            groups = [self._outside_experts(unit, _num_trained) for unit in stage.units]
            trained = [group for group in groups if group.parameters]
            self._trained[stage] = trained + self._experts(stage)
        return self._trained[stage]

    def _experts(self, stage: Stage) -> list[Group]:
        """Return the experts of a stage's layers, if fewer ranks share these than other weights."""
        plan = self.plan
        experts: list[Group] = []
        if plan.ep == 1:
            return experts
        for layer in stage.layers:
            count = layer.program.num_of_experts
            if count:
                experts.append(Group(count, plan.num_expert_shards, plan.num_expert_copies))
        return experts

    def _outside_experts(self, unit: Unit[Passes], count: Callable[[Program], int]) -> Group:
        """Return some of a unit's parameters, without experts if these have a group of their own."""
        divides_experts = self.plan.ep > 1
        num_parameters = 0
        for part in unit.parts:
            num_parameters += count(part.program)
            if divides_experts:
                num_parameters -= part.program.num_of_experts
        return self._group(num_parameters)

    def _group(self, num_parameters: int) -> Group:
        return Group(num_parameters, self.plan.num_shards, self.plan.num_copies)

    def _trained_on(self, pp_rank: int) -> Iterator[Group]:
        """Yield the gradients that a rank reduces at once."""
        for stage in self.work.hosted(pp_rank):
            yield from self.trained(stage)

    def updated_parameters(self, pp_rank: int) -> float:
        """Return the parameters that a rank updates."""
        return sum(group.sharded for group in self._trained_on(pp_rank))

    def updated(self, pp_rank: int) -> Trained:
        """Return the same, as optimizers tell them apart."""
        matrices = sum(stage.num_trained_in_matrices for stage in self.work.hosted(pp_rank))
        whole = sum(group.parameters for group in self._trained_on(pp_rank))
        share = matrices / max(1, whole)
        total = self.updated_parameters(pp_rank)
        return Trained(total * share, total * (1 - share))

    def weights_per_pass(self, stage: Stage) -> PassTraffic:
        """Return the data-parallel transfers of every microbatch."""
        forward: list[Group] = []
        backward: list[Group] = []
        reduced: list[Group] = []
        if self.resharding.drops_weights:
            experts = self._experts(stage)
            forward = [*self.groups(stage), *experts]
            if stage.root and not any(unit.role == "root" for unit in stage.units):
                # torch's root gathers its own weights before any stage of the rank runs, also one
                # that lacks them (_root_pre_forward)
                forward.append(self._group(stage.root))
            for unit, group in zip(stage.units, self.groups(stage), strict=True):
                # what is not dropped after the forward is still there: see heads_gathered_again
                if self.resharding.drops_after_forward(unit) and unit.gathers_in_backward:
                    backward.append(group)
            backward += experts
        if self.resharding.shards_gradients:
            reduced = self.trained(stage)
        to_backward = [*map(self._gather, backward), *map(self._scatter, reduced)]
        return PassTraffic(merged(map(self._gather, forward)), merged(to_backward))

    def heads_gathered_again(self, turns: Iterable[Turn]) -> Iterator[Traffic]:
        """Yield the gathers of the head in a rank's step that ``weights_per_pass`` does not count.

        The head stays gathered after its forward; the end of any backward of the rank drops it. So it is gathered once
        per pass, and again if the backward of another stage comes between its forward and its backward.
        """
        if not self.resharding.drops_weights or self.spec.tied_embeddings:
            return
        of_head = [turn for turn in turns if self.stages[turn.action.stage].is_last]
        num_gathers = sum(not turn.state.head_gathered for turn in of_head)
        num_forwards = sum(turn.action.kind is Kind.FORWARD for turn in of_head)
        last = self.stages[-1]
        for unit, group in zip(last.units, self.groups(last), strict=True):
            if unit.role == "head":
                yield self._gather(group).times(num_gathers - num_forwards)

    def weights_per_step(self, stage: Stage) -> PassTraffic:
        """Return the data-parallel transfers made once per step: in the first forward and in the last backward."""
        trained = self.trained(stage)
        if not self.plan.uses_fully_shard:
            num_parameters = sum(group.parameters for group in trained)
            return PassTraffic((), merged([self._copies(num_parameters)]))
        gathered: list[Group] = []
        reduced: list[Group] = []
        if not self.resharding.drops_weights:
            gathered = [*self.groups(stage), *self._experts(stage)]
        if not self.resharding.shards_gradients:
            reduced = trained
        in_backward = [*map(self._scatter, reduced), *map(self._average, trained)]
        return PassTraffic(merged(map(self._gather, gathered)), merged(in_backward))

    def _gather(self, group: Group) -> Traffic:
        num_bytes = group.parameters * self.itemsize
        return Traffic("all_gather", "shard", group.num_shards, 1, num_bytes)

    def _scatter(self, group: Group) -> Traffic:
        num_bytes = group.parameters * self.gradient_itemsize
        return Traffic("reduce_scatter", "shard", group.num_shards, 1, num_bytes)

    def _average(self, group: Group) -> Traffic:
        num_bytes = group.sharded * self.gradient_itemsize
        return Traffic("all_reduce", "replicate", group.num_copies, 1, num_bytes)

    def _copies(self, num_parameters: int) -> Traffic:
        """Return the averaging of whole gradients in buckets, or of their factors with PowerSGD."""
        count = math.ceil(num_parameters * FP32_BYTES / BUCKET_BYTES)
        if self.plan.gradient_compression == "powersgd":
            # the left factors of a bucket are sent, then the right ones
            count *= 2
            num_parameters = sum(map(_factored, self._trained_shapes()))
        num_bytes = num_parameters * self.gradient_itemsize
        return Traffic("all_reduce", "replicate", self.plan.num_copies, count, num_bytes)

    def _trained_shapes(self) -> Iterator[tuple[int, ...]]:
        """Yield the shapes of the model's parameters that get gradients."""
        spec = self.spec
        for name, shape in spec.parameter_shapes.items():
            if name in spec.trained_in_full:
                yield shape
        yield from spec.adapter_shapes.values()

    @property
    def sums_partial_every_pass(self) -> bool:
        """Whether ``partial_gradients`` are summed after every backward, before they are reduced into shards."""
        return self.resharding.shards_gradients

    def partial_gradients(self, stage: Stage) -> Traffic:
        """Return the sums of gradients that are partial on each tensor-parallel rank.

        These are the gradients of norms, where a rank sees its part of the sequence, of routers, where it sees its part
        of the experts, or of the whole side of adapters. ``fully_shard`` sums each of them.
        """
        count = 0
        num_elements = 0
        for part in (*stage.layers, *stage.ends):
            partial = part.program.partial
            count += len(partial)
            num_elements += sum(partial.values())
        # later, they have been added to those of other microbatches, in fp32
        is_reduced_as_made = self.sums_partial_every_pass or self.plan.num_microbatches == 1
        in_compute_dtype = self.plan.uses_fully_shard and is_reduced_as_made
        itemsize = self.itemsize if in_compute_dtype else FP32_BYTES
        return Traffic("all_reduce", "tp", self.plan.tp, count, num_elements * itemsize)

    def partial_gradients_per_step(self, pp_rank: int) -> Iterator[Traffic]:
        """Yield the sums of ``partial_gradients`` made once per step: without ``fully_shard``, all in one."""
        if self.sums_partial_every_pass:
            return
        sums = list(map(self.partial_gradients, self.work.hosted(pp_rank)))
        if self.plan.uses_fully_shard:
            yield from sums
        elif any(part.count for part in sums):
            yield Traffic("all_reduce", "tp", self.plan.tp, 1, sum(part.num_bytes for part in sums))

    def shared_gradients(self, pp_rank: int) -> Iterator[Traffic]:
        """Yield the sums, after the last backward, of gradients that are partial on several pipeline ranks."""
        num_replicas = self.plan.layout.num_replicas
        hosted = self.work.hosted(pp_rank)
        if num_replicas > 1:
            num_bytes = FP32_BYTES * self.updated_parameters(pp_rank)
            yield Traffic("all_reduce", "pp", num_replicas, 1, num_bytes)
            return
        trains_tied_table = self.stages[0].is_tied_apart and trains_table(self.spec)
        if trains_tied_table and any(stage.ends for stage in hosted):
            table = self._group(self.work.embedding.program.num_trained)
            yield Traffic("all_reduce", "pp", 2, 1, FP32_BYTES * table.sharded)

    def update(self, pp_rank: int) -> Iterator[Traffic]:
        """Yield what the optimizer gathers from the ranks that shard a weight, one transfer per group of weights.

        Matrices that are computed whole travel to their owners and back.
        """
        num_bytes = self.work.optimizer.gathered_bytes
        if num_bytes:
            for group in self._trained_on(pp_rank):
                gathered = num_bytes * group.parameters
                yield Traffic("all_gather", "shard", group.num_shards, 1, gathered)
        if self.work.optimizer.flops is not None:
            yield from self._to_owners_and_back(pp_rank)

    def _to_owners_and_back(self, pp_rank: int) -> Iterator[Traffic]:
        """Yield the ways of matrices along each axis: their parts to the owners, and what these have made of them.

        Every rank has about as much as any other, and each transfer is taken for one round.
        """
        plan = self.plan
        part = self.itemsize * self.updated(pp_rank).matrices
        # every copy has the parts, and gets every result
        yield Traffic("all_to_all", "replicate", plan.num_copies, 1, part)
        to_owners = Traffic("all_to_all", "shard", plan.num_shards, 1, part / plan.num_copies)
        yield to_owners.times(2)
        yield replace(to_owners, axis="tp", num_ranks=plan.tp).times(2)


def _factored(shape: tuple[int, ...]) -> int:
    """Return the elements that PowerSGD sends of a gradient: of a matrix its factors, of a vector all of it."""
    if len(shape) == 1:
        return shape[0]
    return POWERSGD_RANK * (shape[0] + math.prod(shape[1:]))


def _num_held(program: Program) -> int:
    return program.num_held


def _num_trained(program: Program) -> int:
    return program.num_trained
