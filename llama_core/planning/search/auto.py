"""Choose a ``ParallelPlan`` for a run's request and a device's memory."""

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
from llama_core.planning.search.least_memory import NothingFitsError, nothing_fits
from llama_core.planning.search.rules import plan_by_rules
from llama_core.planning.search.search import Search

_KEYS = {name: f"parallel.{name}" for name in ParallelConfig.model_fields}
_KEYS |= {"num_ranks": "parallel.pp", "seq_len": "training.seq_len"}
"""The configuration key of each name that a plan's errors use."""


def choose_plan(
    config: RunConfig,
    memory_budget_bytes: int | None,
    device: DeviceSpec | None = None,
) -> ParallelPlan:
    """Return the plan of ``config``, with every open choice made for the memory of a device.

    For a device of known speed, that is the fastest plan that fits (``search``). Without one, as on the CPU, the plan
    follows from rules (``rules.plan_by_rules``); if nothing fits, it is the one that misses by least, and its estimate
    says by how much.

    Args:
        config: what to run.
        memory_budget_bytes: bytes each device has for the run; None for no limit.
        device: the devices, all of one kind.

    Raises:
        NothingFitsError: if ``device`` is given and nothing fits it.
        PlanError: if the request makes no valid plan; the message uses the keys of ``config``.
    """
    if device is not None:
        return search(config, memory_budget_bytes, device).plan
    with _spelled_as_asked():
        return plan_by_rules(Candidates(config, None), Fitting(config, memory_budget_bytes))


def search(config: RunConfig, memory_budget_bytes: int | None, device: DeviceSpec) -> Choice:
    """Return the fastest plan that fits ``FILL_LIMIT`` of the budget on every rank, with its reasons.

    Args:
        config: what to run; the values it sets are kept.
        memory_budget_bytes: bytes each device has for the run; None for no limit.
        device: the devices, all of one kind.

    Raises:
        NothingFitsError: if nothing fits; says by how much and what would fit, and has the plan of least memory.
        PlanError: if the request makes no valid plan; the message uses the keys of ``config``.
    """
    candidates = Candidates(config, device)
    fitting = Fitting(config, memory_budget_bytes)
    with _spelled_as_asked():
        for offload in candidates.offloads():
            searching = Search(candidates, fitting, device, offload)
            best = searching.fastest()
            if best:
                return explain(searching, best)
        raise nothing_fits(candidates, fitting, device)


@contextmanager
def _spelled_as_asked() -> Iterator[None]:
    """Replace a plan's field names in an error by the configuration keys."""
    try:
        yield
    except NothingFitsError:
        raise
    except PlanError as error:
        names = "|".join(_KEYS)
        # a name before "=" that is not already the end of a key
        assigned = rf"(?<![.\w])({names})(?==)"
        spelled = re.sub(assigned, lambda name: _KEYS[name[0]], str(error))
        raise PlanError(spelled) from None
