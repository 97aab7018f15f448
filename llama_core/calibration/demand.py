"""Measures what the time of one run asks for on this machine's processor, unless its profile knows it."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import starmap

from llama_core.calibration.lookup import FoundProfile, KnownDevice, gpu_for, named_profile
from llama_core.calibration.profile import (
    DeviceKind,
    MachineProfile,
    own_profile_path,
    read_profile,
    write_profile,
)
from llama_core.calibration.ranks import measure_on_ranks
from llama_core.config.hardware import DeviceSpec
from llama_core.config.measured_rates import MeasuredRates, Sizes
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.asked import asked_of_machine, shortened, undivided_passes
from llama_core.planning.time.kernels import Pass
from llama_core.planning.time.links import node_size
from llama_core.planning.work import Work


def known_profile(tell: Callable[[str], None] = lambda text: None, kind: DeviceKind = "cpu") -> MachineProfile:
    """Return the profile of this machine; a new one if there is none, or it is damaged or of something else.

    Args:
        kind: whether its processor's, or its GPUs'.
        tell: called with a line that says why a profile is not used.
    """
    fresh = MachineProfile.of_this_machine(kind)
    path = own_profile_path(kind)
    if not path.exists():
        return fresh
    try:
        profile = read_profile(path)
    except ConfigError as error:
        tell(str(error))
        return fresh
    if misfit := profile.misfit(fresh):
        tell(f"the profile {path} is not used: {misfit}; 'training-infra calibrate' measures it again")
        return fresh
    return profile


def device_for(config: RunConfig, plan: ParallelPlan | None = None, *, may_measure: bool = False) -> KnownDevice:
    """Return the device that a run is planned for, with the rates that are known best, and where they are from.

    The profile that ``launch.machine_profile`` names comes first, then one in the cache that fits, then the data sheet.

    Args:
        config: the resolved configuration.
        plan: its plan; a processor's times are known only for one.
        may_measure: see ``measured_cpu``.

    Raises:
        ConfigError: if the named profile is missing, damaged, or of something else; the message is one line.
        TrainingFailedError: if a measurement fails.
    """
    if config.launch.device != "cpu":
        return gpu_for(config.launch)
    notes: list[str] = []
    is_foreign = False
    spec = None
    if plan is not None and is_measurable(config, plan):
        found = named_profile(config.launch, "cpu", None, notes.append)
        is_foreign = found is not None and found.is_foreign
        spec = measured_cpu(config, plan, found, may_measure=may_measure, tell=notes.append)
    return KnownDevice(spec, is_foreign, "; ".join(dict.fromkeys(notes)))


def is_measurable(config: RunConfig, plan: ParallelPlan) -> bool:
    """Return whether calibration measures the operations that a plan runs on a processor."""
    return not plan.compile and plan.zero_backend != "deepspeed" and config.training.precision not in {"fp16", "fp8"}


def measured_cpu(
    config: RunConfig,
    plan: ParallelPlan,
    found: FoundProfile | None = None,
    *,
    may_measure: bool,
    tell: Callable[[str], None] = lambda text: None,
) -> DeviceSpec | None:
    """Return a processor with the times that a step of a run asks for, measured now or earlier.

    Args:
        config: the resolved configuration of a run.
        plan: its plan.
        found: the profile that the user names, which answers as it is; by default this machine's.
        may_measure: whether to measure what this machine's profile does not know, which takes seconds. Otherwise what
            ``calibrate`` measured answers; None if that was not done.
        tell: called with a line that says why a profile is not used.

    Raises:
        TrainingFailedError: if a measurement fails.
    """
    if found is None and not config.launch.is_here:  # this machine's profile tells nothing of its nodes
        return None
    profile = known_profile(tell) if found is None else found.profile
    told_by = profile.told_by if found is None else found.told_by
    may_measure = may_measure and found is None
    num_ranks = node_size(config, plan.world_size)
    if not may_measure and num_ranks not in profile.rates:
        if found is not None:
            tell(f"{found.path} has no times of {num_ranks} ranks that compute at once; 'calibrate --ranks' adds them")
        return None
    work = Work.of(config, plan)
    undivided = _undivided(work)
    name = _name_of_whole(undivided, num_ranks)
    device = profile.cpu(num_ranks)
    asked = dict.fromkeys((*asked_of_machine(work, device), *asked_of_machine(undivided, device, alone=True)))
    if may_measure:
        profile = _measured(profile, num_ranks, config, undivided, list(asked), name=name)
    rates = profile.rates[num_ranks]
    if any(rates.seconds(*question) is None for question in asked):
        if found is not None:
            tell(f"{found.path} does not have all operations of this plan; 'calibrate' adds them")
        return None
    if name in profile.whole:
        layers_share, ends_share = profile.whole[name]
        rates = replace(rates, layers_share=layers_share, ends_share=ends_share)
    return replace(replace(profile, rates={num_ranks: rates}).cpu(num_ranks), source=told_by)


def _measured(
    profile: MachineProfile,
    num_ranks: int,
    config: RunConfig,
    undivided: Work,
    asked: Sequence[tuple[str, Sizes]],
    *,
    name: str,
) -> MachineProfile:
    """Return a profile that knows all that is asked, at its own sizes, and keep it if something had to be measured.

    Args:
        profile: what is known.
        num_ranks: ranks that compute at once.
        config: the run.
        undivided: the part of its model that is timed as a whole.
        asked: kinds and sizes of operations.
        name: that part's name in the profile.
    """
    rates = profile.rates.get(num_ranks, MeasuredRates())
    missing = [(kind, sizes) for kind, sizes in asked if sizes not in _points(rates, kind)]
    is_known = name in profile.whole
    if is_known and not missing:
        return profile
    rows = undivided.plan.microbatch_size
    answer = measure_on_ranks(num_ranks, missing, whole=None if is_known else config, rows=rows)
    profile = profile.with_rates(num_ranks, rates.with_points(answer.seconds))
    if answer.layers is not None and answer.ends is not None:
        # undivided, it is one rank, but timed beside the others
        alike = replace(profile, rates={num_ranks: profile.rates[num_ranks]})
        layers, ends = undivided_passes(undivided, alike.cpu(num_ranks))
        shares = (_share(answer.layers, layers), _share(answer.ends, ends))
        profile = replace(profile, whole={**profile.whole, name: shares})
    write_profile(own_profile_path(), profile)
    return profile


def _points(rates: MeasuredRates, kind: str) -> set[tuple[int, ...]]:
    measured = rates.kinds.get(kind)
    return set() if measured is None else set(measured.points)


def _undivided(work: Work) -> Work:
    """Return the first layers and the ends of a model on one rank, with the rows of a rank's forward."""
    plan = ParallelPlan(microbatch_size=work.plan.rows_per_forward)
    return replace(work, spec=shortened(work.spec), plan=plan)


def _share(whole: Pass, parts: Pass) -> tuple[float, float]:
    forward, backward = starmap(lambda one, other: one / other if other else 1.0, zip(whole, parts, strict=True))
    return (forward, backward) if math.isfinite(forward + backward) else (1.0, 1.0)


def _name_of_whole(work: Work, num_ranks: int) -> str:
    """Return a name for what is timed as a whole: equal if and only if the layers, rows and kernels are."""
    identity = [asdict(work.spec), work.plan.as_dict(), work.seq_len, work.precision, work.documents, num_ranks]
    identity += [work.objective.name]
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]
