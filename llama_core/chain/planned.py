"""A planned run, before it has a directory: its configuration with every default, its plan and memory estimate."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from llama_core.calibration.demand import device_for
from llama_core.calibration.lookup import KnownDevice, gpu_type_named
from llama_core.config.hardware import DEFAULT_GPU_TYPE, DeviceSpec, gpu_spec
from llama_core.config.overrides import Override
from llama_core.config.run import RunConfig
from llama_core.data.check import DataCheck
from llama_core.errors import ConfigError, EnvironmentMismatchError, PlanError
from llama_core.launch.jobs.launcher import launcher_of
from llama_core.machine.defaults import resolve_machine_defaults
from llama_core.machine.detect import Machine, detect_machine
from llama_core.planning.before import bytes_before_run, forwards_before_run
from llama_core.planning.memory.estimate import estimate_ranks
from llama_core.planning.memory.host import host_memory
from llama_core.planning.memory.verdict import MemoryEstimate
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.auto import choose_plan, search
from llama_core.planning.search.choice import Choice
from llama_core.planning.search.least_memory import NothingFitsError
from llama_core.planning.time.cost import BILLION, Cost
from llama_core.planning.time.step_time import StepTime, forward_time_of, step_time_of
from llama_core.planning.work import Work
from llama_core.units import GIB, format_bytes


@dataclass(frozen=True)
class PlannedRun:
    """A configuration with every default filled in, and the plan made for it."""

    config: RunConfig
    plan: ParallelPlan
    estimate: MemoryEstimate
    choices: tuple[str, ...]
    """One line for each default that was taken from the machine."""
    choice: Choice | None = None
    """The result of the plan search, with its reasons; None if the plan follows from rules or was given."""
    on_fewest_nodes: "PlannedRun | None" = None
    """The same run on ``launch.min_nodes`` nodes; None if it always gets all of its nodes."""

    @cached_property
    def step(self) -> StepTime | None:
        """The time of one optimizer step; None for a CPU that was not measured, and for a plan that does not fit."""
        if self.choice is not None:
            return self.choice.step
        device = self.device.spec
        if device is None or not self.estimate.fits:
            return None
        return step_time_of(self.config, self.plan, device)

    @cached_property
    def device(self) -> KnownDevice:
        """The device that the run is planned for, with the rates that times follow from."""
        return device_for(self.config, self.plan)

    @property
    def is_on_gpu(self) -> bool:
        """Whether it has a price, and a peak rate to compare with."""
        return self.config.launch.device != "cpu"

    @property
    def _gpu(self) -> DeviceSpec:
        assert self.device.spec is not None  # a GPU has a data sheet
        return self.device.spec

    def step_record(self) -> dict[str, Any] | None:
        """Return the time of a step as a record; None if it is unknown. A CPU has no peak that a share could be of."""
        if self.step is None:
            return None
        record = self.step.as_dict()
        return record if self.is_on_gpu else record | {"mfu": None}

    def cost(self, tokens: float | None = None, data: DataCheck | None = None) -> Cost | None:
        """Return the time and the price of the run; None if its length or the time of a step is unknown.

        Args:
            tokens: the tokens to train on; by default those of ``training.steps``, or else of the data and its epochs.
            data: the check of the data.
        """
        num_tokens, told_by = self.length(tokens, data)
        if num_tokens is None or self.step is None or not self.is_on_gpu:
            return None
        return self._cost_of(self.step, num_tokens, told_by, self.reference_tokens(data))

    @property
    def cost_for_scale(self) -> Cost | None:
        """The time and the price of a billion tokens; None if the time of a step is unknown."""
        if self.step is None or not self.is_on_gpu:
            return None
        return self._cost_of(self.step, BILLION, "for scale", self.reference_tokens(None))

    def _cost_of(self, step: StepTime, tokens: float, told_by: str, reference_tokens: float | None) -> Cost:
        reference_seconds = reference_tokens
        if reference_tokens:  # neither unknown nor none at all
            reference_seconds = forward_time_of(self.config, self.plan, self._gpu, reference_tokens)
        price = self.config.launch.dollars_per_gpu_hour
        spares = self.config.launch.spare_nodes * (step.num_devices // self.config.num_nodes)
        return Cost.of(step, tokens, told_by, price, reference_seconds, spare_devices=spares)

    def reference_tokens(self, data: DataCheck | None) -> float | None:
        """Return the tokens over which the reference is computed, held-out ones too: 0 without one, None if unknown.

        They count once for each forward over them.

        Args:
            data: the check of the data.
        """
        num_forwards = forwards_before_run(self.config.objective)
        if not num_forwards:
            return 0
        if data is None or data.num_tokens is None or data.num_held_out_tokens is None:
            return None
        return num_forwards * (data.num_tokens + data.num_held_out_tokens)

    def length(self, tokens: float | None = None, data: DataCheck | None = None) -> tuple[float | None, str]:
        """Return the tokens of the run (None if unknown) and where their number comes from; see ``cost``."""
        training = self.config.training
        if tokens is not None:
            return tokens, "as asked for"
        if training.steps is not None:
            return self.config.num_tokens, f"{training.steps:,} steps"
        if data is not None and data.num_tokens is not None:
            return training.epochs * data.num_tokens, f"{training.epochs:g} epochs of the data"
        return None, ""


def plan_run(config: RunConfig, machine: Machine | None = None) -> PlannedRun:
    """Fill in the machine's defaults, choose a plan and estimate its memory. Writes nothing.

    Raises:
        ConfigError, PlanError, EnvironmentMismatchError: if the request cannot be met here.
    """
    machine = machine or detect_machine()
    resolved = resolve_machine_defaults(config, machine)
    planned = planned_as(resolved.config, machine, resolved.choices)
    fewest_nodes = resolved.config.fewest_nodes
    if fewest_nodes == resolved.config.num_nodes:
        return planned
    try:
        fewest = planned_as(on_nodes(resolved.config, fewest_nodes), machine)
    except (ConfigError, PlanError) as error:
        raise PlanError(f"launch.min_nodes={fewest_nodes}: {error}") from None
    return with_fewest(planned, fewest)


def with_fewest(planned: PlannedRun, fewest: PlannedRun | None) -> PlannedRun:
    """Return ``planned`` with its plan for the fewest nodes, and with the host memory that the latter needs."""
    host_bytes = 0 if fewest is None else fewest.estimate.host_bytes_of_node
    return replace(
        planned, estimate=replace(planned.estimate, host_bytes_on_fewest_nodes=host_bytes), on_fewest_nodes=fewest
    )


def on_nodes(config: RunConfig, num_nodes: int) -> RunConfig:
    """Return ``config`` with as many ranks on each node and the same steps, but on ``num_nodes`` nodes.

    Raises:
        ConfigError: if the degrees that it asks for do not divide that many ranks.
    """
    ranks = config.parallel.gpus // config.num_nodes
    return with_keys(
        config,
        training={"batch_size": config.first_batch_size, "seq_len": config.first_seq_len},
        parallel={"gpus": ranks * num_nodes},
        launch={"nodes": num_nodes, "min_nodes": None, "spare_nodes": 0},
    )


def plan_for_gpu(config: RunConfig) -> PlannedRun:
    """Plan like ``plan_run``, but for GPUs that this machine need not have, or for the CPU if ``config`` names it."""
    machine = detect_machine()
    if config.launch.device == "cpu":
        return plan_run(config, machine)
    # Every GPU in the hardware table computes bf16 natively.
    precision = "bf16" if config.training.precision == "auto" else config.training.precision
    here = machine.gpu_type
    gpu_type = config.launch.gpu_type
    choices: tuple[str, ...] = ()
    if gpu_type is None:
        named = gpu_type_named(config.launch)
        gpu_type = named or (here.name if here else DEFAULT_GPU_TYPE)
        why = "the device here" if here else "no device here"
        choices = (f"launch.gpu_type={gpu_type} ({'that of the profile' if named else why})",)
    return planned_as(
        with_keys(config, launch={"device": "cuda", "gpu_type": gpu_type}, training={"precision": precision}),
        machine,
        choices,
    )


def plan_anywhere(config: RunConfig) -> PlannedRun:
    """Plan for this machine if it has the devices, as training would; otherwise like ``plan_for_gpu``."""
    try:
        return plan_run(config)
    except EnvironmentMismatchError:
        return plan_for_gpu(config)


def planned_as(
    config: RunConfig, machine: Machine, choices: tuple[str, ...] = (), plan: ParallelPlan | None = None
) -> PlannedRun:
    """Return a resolved configuration with its plan and memory estimate.

    Args:
        config: the configuration, with every default filled in.
        machine: this machine; a plan for the CPU must fit its memory.
        choices: the defaults that were filled in.
        plan: the plan; by default one is chosen.

    Raises:
        PlanError: if the request makes no valid plan.
    """
    gpu = None
    node = _node_memory(config, machine)
    if config.launch.device == "cpu":
        label, whole = node or ("this machine's memory", machine.memory_bytes)
        usable = whole * config.num_nodes // config.parallel.gpus
    else:
        gpu = device_for(config).spec
        assert gpu is not None  # a GPU has a data sheet
        label = gpu.label
        usable = gpu.usable_bytes
    choice = None
    refusal = ""
    if plan is None and gpu is not None:
        try:
            choice = search(config, usable, gpu)
            plan = choice.plan
        except NothingFitsError as error:
            plan = error.plan
            refusal = str(error)
    elif plan is None:  # no speed model for this device
        plan = choose_plan(config, usable)
    host = host_memory(config, plan)
    if node is not None:
        host = replace(host, available_where=node[0], available_bytes=node[1])
    ranks = estimate_ranks(Work.of(config, plan))
    fullest = max(ranks, key=lambda profile: profile.peak_bytes)
    estimate = MemoryEstimate(fullest, label, usable, ranks, refusal or _no_room_before(config, plan, usable), host)
    return PlannedRun(config, plan, estimate, (*choices, *_chosen_nodes(config)), choice)


def _no_room_before(config: RunConfig, plan: ParallelPlan, usable: int) -> str:
    """Return why the model whose forward there is before the run does not fit; empty if it does, or there is none."""
    num_bytes = bytes_before_run(config, plan)
    if num_bytes <= usable:
        return ""
    assert config.objective.reference is not None
    return (
        f"before the first step, the {config.objective.reference.name} takes {format_bytes(num_bytes)} per device, "
        f"more than the {format_bytes(usable)} usable; divide it over more devices, or choose a smaller one"
    )


def _chosen_nodes(config: RunConfig) -> tuple[str, ...]:
    """Return the line about nodes that nobody asked for; none for a single one."""
    num_nodes = config.num_nodes
    if config.launch.nodes is not None or num_nodes == 1:
        return ()
    label = gpu_spec(config.launch.gpu_type or DEFAULT_GPU_TYPE).label
    return (f"launch.nodes={num_nodes} ({config.parallel.gpus // num_nodes} x {label} on each)",)


def _node_memory(config: RunConfig, machine: Machine) -> tuple[str, int] | None:
    """Return a name for the memory of a node of the job, and its bytes; None if it is unknown."""
    launch = config.launch
    if (asked := launch.request.node_memory_gb) is not None:
        return f"{asked} GB of each node", asked * GIB  # as schedulers count
    if not launch.is_here:
        return launcher_of(launch.launcher).node_memory(config)
    # a plan for GPUs that are not here is one for another machine
    is_for_here = launch.device == "cpu" or config.parallel.gpus <= len(machine.gpus)
    return ("this machine's memory", machine.memory_bytes) if is_for_here and config.num_nodes == 1 else None


def with_keys(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """Return ``config`` with some keys changed, given by section, and validated again."""
    changed = {f"{section}.{key}": value for section, changes in sections.items() for key, value in changes.items()}
    return config.with_overrides(*(Override(key, value) for key, value in changed.items()))
