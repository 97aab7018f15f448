"""The memory of one GPU under another framework: one model of sharded training, parametrised by its traits.

The peak is the maximum over a few moments, each of which is the peak of some configuration: the load of a checkpoint,
the first gather of a forward, the loss, the backward of the last and of the first layer, the last reduction, and the
optimizer step. All sizes are those of tensors.

Sources: Rajbhandari et al. 2020, arXiv:1910.02054, for states; Korthikanti et al. 2022, arXiv:2205.05198, for
activations; Narayanan et al. 2021, arXiv:2104.04473, and Qi et al. 2023, arXiv:2401.10241, for microbatches in flight.
"""

from collections.abc import Iterator

from llama_core.planning.frameworks.activations import Activations
from llama_core.planning.frameworks.job import Job
from llama_core.planning.frameworks.shares import Shares

Moment = dict[str, float]
"""Bytes by category."""

_POOLS = {"gradients": "reduce", "gather buffers": "gather"}
"""Categories that ``fully_shard`` allocates on its own streams."""


def moments(job: Job, pp_rank: int) -> Iterator[Moment]:
    """Yield the moments of a step at which a rank's memory may peak."""
    shares = Shares(job, pp_rank)
    acts = Activations(job)
    states: Moment = {"weights": shares.weights, "moments": shares.moments}
    waiting = shares.gradients_between_microbatches
    complete = shares.gradients
    own = shares.num_layers * acts.kept / job.num_chunks
    others = (microbatches_in_flight(job, pp_rank) * job.num_chunks - 1) * own
    root = shares.gathered_root
    layer = shares.gathered_layer
    buffers = shares.gather_buffers

    if job.framework.loads_whole and shares.num_shards > 1:
        yield {"weights": shares.weights, "gathered": shares.weights * shares.num_shards}
    yield states | {
        "activations": others,
        "gradients": waiting,
        "gathered": root,
        "gather buffers": shares.root_buffer,
    }
    if shares.is_last:
        yield states | {
            "activations": others + own + acts.final_norm,
            "loss": acts.loss,
            "gradients": waiting,
            "gathered": root + layer,
            "gather buffers": buffers / 2,  # only the last layer's
        }
    work = {
        "recomputed": acts.recomputed,
        "temporaries": acts.backward + shares.layer_gradients + shares.dequantised,
        "gathered": root + layer,
        "gather buffers": buffers,
    }
    last_layer = {"activations": others + own, "gradients": waiting + shares.head_gradient}
    first_layer = {"activations": others + acts.kept, "gradients": complete}
    yield states | work | last_layer
    yield states | work | first_layer
    yield states | {
        "activations": others,
        "temporaries": shares.root_reduction,
        "gradients": complete,
        "gathered": root,
    }
    step = 0.0 if job.offloads_states else shares.state(job.framework.foreach_bytes, is_sharded=True)
    yield states | {"gradients": complete, "temporaries": step}


def peak_bytes(moments: list[Moment], *, sum_of_pools: bool) -> float:
    """Return the peak over all moments or, if streams have their own pools, the sum of the pools' peaks."""
    if not sum_of_pools:
        return max(sum(moment.values()) for moment in moments)
    peaks: dict[str, float] = {}
    for moment in moments:
        pools: dict[str, float] = {}
        for category, num_bytes in moment.items():
            pool = _POOLS.get(category, "compute")
            pools[pool] = pools.get(pool, 0) + num_bytes
        peaks = {pool: max(peaks.get(pool, 0), pools.get(pool, 0)) for pool in peaks | pools}
    return sum(peaks.values())


def microbatches_in_flight(job: Job, pp_rank: int) -> float:
    """Return the peak number of microbatches whose activations a rank holds, in units of all its layers.

    ``N`` under GPipe, ``min(N, D - r)`` under 1F1B, ``min(vN, (v - 1)D + 2(D - 1 - r) + 1) / v`` under interleaved
    1F1B, and ``min(N, D)`` under schedules that place stages in a V.
    """
    depth = job.pp
    num = job.num_microbatches
    chunks = job.num_chunks
    if job.schedule == "gpipe" or depth == 1:
        return num if job.schedule == "gpipe" and depth > 1 else 1
    if job.schedule == "v":
        return min(num, depth)
    if chunks > 1:
        return min(chunks * num, (chunks - 1) * depth + 2 * (depth - 1 - pp_rank) + 1) / chunks
    return min(num, depth - pp_rank)
