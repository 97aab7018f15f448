"""Choosing a plan: from what a run asks for and what a device holds to a ``ParallelPlan``."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from llama_core.config.hardware import DeviceSpec
from llama_core.config.run import ParallelConfig, RunConfig
from llama_core.errors import PlanError
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.candidates import Candidates
from llama_core.planning.search.choice import Choice, explain
from llama_core.planning.search.fitting import Fitting
from llama_core.planning.search.leanest import NothingFitsError, nothing_fits
from llama_core.planning.search.rules import plan_by_rules
from llama_core.planning.search.search import Search

_KEYS = {name: f"parallel.{name}" for name in ParallelConfig.model_fields}
_KEYS |= {"num_ranks": "parallel.pp", "seq_len": "training.seq_len"}
"""How a request spells what a plan calls by these names."""


def choose_plan(config: RunConfig, memory_budget_bytes: int | None, device: DeviceSpec | None = None) -> ParallelPlan:
    """Return the plan of ``config``, with everything that it leaves open chosen for the memory of a device.

    Without a device whose speed is known, as on the CPU, the plan follows from rules (``rules.plan_by_rules``); where
    nothing fits it is the leanest of those, and its estimate tells by how much it does not fit. With one, it is the
    fastest plan that fits (``search``).

    Args:
        config: what to run.
        memory_budget_bytes: bytes each device has for it; None where memory is no object.
        device: the devices, all of one kind.

    Raises:
        NothingFitsError: if there is a device, and nothing fits it.
        PlanError: if the request makes no valid plan, in the spelling of ``config``.
    """
    if device is not None:
        return search(config, memory_budget_bytes, device).plan
    with _spelled_as_asked():
        return plan_by_rules(Candidates(config, None), Fitting(config, memory_budget_bytes))


def search(config: RunConfig, memory_budget_bytes: int | None, device: DeviceSpec) -> Choice:
    """Return the fastest plan that fits ``FILL_LIMIT`` of the budget on every rank, with its reasons.

    Args:
        config: what to run; what it asks for is taken as it is.
        memory_budget_bytes: bytes each device has for it; None where memory is no object.
        device: the devices, all of one kind.

    Raises:
        NothingFitsError: if nothing fits: by how much, what would, and the leanest plan.
        PlanError: if the request makes no valid plan, in the spelling of ``config``.
    """
    candidates, fitting = Candidates(config, device), Fitting(config, memory_budget_bytes)
    with _spelled_as_asked():
        for offload in candidates.offloads():
            searching = Search(candidates, fitting, device, offload)
            best = searching.fastest()
            if best:
                return explain(searching, best)
        raise nothing_fits(candidates, fitting, device)


@contextmanager
def _spelled_as_asked() -> Iterator[None]:
    """Put the keys of a request where an error has the names of a plan's fields."""
    try:
        yield
    except NothingFitsError:
        raise
    except PlanError as error:
        spelled = re.sub(rf"(?<![.\w])({'|'.join(_KEYS)})(?==)", lambda name: _KEYS[name[0]], str(error))
        raise PlanError(spelled) from None
