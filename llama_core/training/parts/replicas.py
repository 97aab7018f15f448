"""Replicas that no longer agree, because a device has flipped a bit or computed wrongly, are found and named."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from llama_core.models.layers import local_part
from llama_core.parallel.ranks import from_first_rank, is_first_rank, num_ranks, of_every_rank, on_first_rank
from llama_core.parallel.replicas import ReplicaSets, bit_hash
from llama_core.planning.plan import ParallelPlan
from llama_core.records.rollbacks import Suspect, named
from llama_core.training.engine import Engine
from llama_core.training.parts.part import FinishedStep, LoopPart, RunProgress
from llama_core.training.parts.spikes import BadStep
from llama_core.training.parts.stragglers import own_place
from llama_core.training.reports import Reports

logger = logging.getLogger(__name__)


class ReplicaCheck(LoopPart):
    """Compares what replicas hold after some steps, and makes a step bad after which they differ.

    Each rank hashes its weights and optimizer states on its device, and the hashes travel with the results of the step.
    No checkpoint is saved and no evaluation made of a step before it has been checked, so that the run can go back to
    its newest checkpoint.

    Args:
        every: steps from one look to the next; 0 to never look.
        plan: how the model is divided.
        progress: how far the run is.
        engine: holds weights and states.
        reports: takes this rank's hashes.
        device: this rank's device.
        is_due: says whether to look after a step in any case.
    """

    def __init__(
        self,
        every: int,
        plan: ParallelPlan,
        progress: RunProgress,
        *,
        engine: Engine,
        reports: Reports,
        device: torch.device,
        is_due: Callable[[int], bool],
    ) -> None:
        self._every = every
        self._progress = progress
        self._engine = engine
        self._device = device
        self._is_due = is_due
        self._sets = ReplicaSets((), {})
        if every and num_ranks() > 1:
            self._sets = ReplicaSets.find(((name, parameter) for name, parameter, _ in engine.replicated()), plan)
        self._report = {
            name: reports.declare_of_ranks(name)
            for name in (f"replica hash {slot}" for slot in range(self._sets.num_slots))
        }

    def begin(self) -> None:
        """Say so if a run of several ranks has nothing to compare."""
        if self._every and num_ranks() > 1 and not self._sets.ranks and is_first_rank():
            logger.info("replicas: each weight is held by one rank only, so none are compared")

    def step_begun(self) -> None:
        """Hash what this rank holds, if it is time for it."""
        step = self._progress.step
        if self._sets.ranks and (step % self._every == 0 or self._is_due(step)):
            for report, value in zip(self._report.values(), self._own_hashes(), strict=True):
                report(value)

    def after_step(self, step: FinishedStep) -> None:
        """Name the ranks that differ from their replicas."""
        if not self._sets.ranks:
            return
        hashes = [step.values.of_ranks[name] for name in self._report if name in step.values.of_ranks]
        is_saved = step.is_newest and (step.asked_to_stop or self._is_due(step.step))
        is_stale = step.taken_again and hashes  # they are those of the weights before it was taken again
        if is_stale or (not hashes and (is_saved or step.bad or step.spike or not step.is_sound)):
            hashes = [of_every_rank(int(value)) for value in self._own_hashes()]
        if not hashes:
            return
        suspects = self._sets.differing(hashes)
        if suspects:
            step.bad = self._name(step.step, suspects)

    def _own_hashes(self) -> list[Tensor]:
        """Return the hash of what this rank has in common with each of its sets, and 0 where others are in more."""
        tensors: list[list[Tensor]] = [[] for _ in self._sets.ranks]
        for number, _, tensor in self._tensors():
            tensors[number].append(tensor)
        hashes = [bit_hash(of_set, self._device) for of_set in tensors if of_set]
        nothing = torch.zeros((), dtype=torch.float64, device=self._device)
        return hashes + [nothing] * (self._sets.num_slots - len(hashes))

    def _tensors(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield what this rank has in common with others: the set, a name and its part of the tensor."""
        for name, parameter, states in self._engine.replicated():
            number = self._sets.own.get(name)
            if number is not None:
                # a state that differs makes its weight differ in the next step, but a weight no state
                for kind, state in states.items():
                    yield number, f"{kind} of {name}", local_part(state)
                yield number, name, local_part(parameter)

    def _name(self, step: int, suspects: Mapping[int, Sequence[int]]) -> BadStep:
        """Return the bad step, with the ranks that may be wrong and the first tensor that differs.

        Args:
            step: its number.
            suspects: the sets that do not agree, with the ranks of each that may be wrong.
        """
        own = [(number, name, tensor) for number, name, tensor in self._tensors() if number in suspects]
        values = [int(bit_hash([tensor], self._device)) for _, _, tensor in own]
        hashes = {(number, name): value for (number, name, _), value in zip(own, values, strict=True)}
        of_ranks = on_first_rank((own_place(self._device), hashes))  # nothing on the other ranks
        bad = None
        if of_ranks:
            places = [place for place, _ in of_ranks]
            differing = dict.fromkeys(
                name
                for number in suspects
                for name in _differing_names(number, [of_ranks[rank][1] for rank in self._sets.ranks[number]])
            )
            ranks = sorted({rank for of_set in suspects.values() for rank in of_set})
            found = tuple(Suspect(rank, *places[rank]) for rank in ranks)
            has_majority = all(len(suspects[number]) < len(self._sets.ranks[number]) for number in suspects)
            bad = BadStep(
                step,
                _in_words(found, list(differing), has_majority=has_majority),
                is_finite=True,
                data=None,
                suspects=found,
            )
        shared = from_first_rank(bad)
        assert shared is not None
        return shared


def _differing_names(number: int, hashes: Sequence[Mapping[tuple[int, str], int]]) -> list[str]:
    """Return the names of the tensors of a set that differ, given the hashes of each of its ranks."""
    return [
        name
        for of_set, name in hashes[0]
        if of_set == number and any(of_rank[of_set, name] != hashes[0][of_set, name] for of_rank in hashes)
    ]


def _in_words(suspects: Sequence[Suspect], names: Sequence[str], *, has_majority: bool) -> str:
    """Return which ranks differ from their replicas, and in what."""
    who = named(suspects)
    where = names[0] if names else "bits that are equal again by now"
    if len(names) > 1:
        where += f" and {len(names) - 1} more"
    if has_majority:
        return f"{who} differ{'s' if len(suspects) == 1 else ''} from the other replicas in {where}"
    return f"{who} are replicas, but differ in {where}"
