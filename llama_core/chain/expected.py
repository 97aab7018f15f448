"""How long a step of a run should take, for someone who waits for the first."""

from llama_core.chain.runs import load_config, load_plan
from llama_core.config.hardware import DEFAULT_GPU_TYPE, gpu_spec
from llama_core.errors import TrainingInfraError
from llama_core.machine.detect import available_cores
from llama_core.planning.time.step_time import flops_per_token, step_time
from llama_core.records.directory import RunDirectory
from llama_core.units import format_duration

CORE_FLOPS = 3e10
"""FLOP/s that a core of a CPU commonly reaches in eager fp32 products; machines differ by a factor of three."""


def expected_step(run: RunDirectory) -> str:
    """Return in one clause how long a step should take: from the time model on a GPU, roughly on a CPU."""
    try:
        return f"expected: {_step(run)}"
    except TrainingInfraError as error:  # whoever waits for the job goes on waiting
        return f"the length of a step is not known ({error})"


def _step(run: RunDirectory) -> str:
    config, plan = load_config(run), load_plan(run)
    if config.launch.device == "cpu":
        flops = plan.batch_size * config.seq_len * flops_per_token(config.spec, config.seq_len)
        cores = available_cores() if config.launch.is_here else plan.world_size * config.launch.slurm.cpus_per_rank
        seconds = format_duration(flops / cores / CORE_FLOPS)
        return f"a step of {flops / 1e12:.3g} TFLOP takes very roughly {seconds} on {cores} cores"
    device = gpu_spec(config.launch.gpu_type or DEFAULT_GPU_TYPE)
    took = step_time(config.spec, plan, device, seq_len=config.seq_len, precision=config.training.precision)
    compiles = ", and the first compiles the blocks" if config.parallel.compile else ""
    return f"about {format_duration(took.total)} a step on {device.label}{compiles}"
