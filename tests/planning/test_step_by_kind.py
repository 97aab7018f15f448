"""The predicted time of a step by kind of work."""

from dataclasses import replace

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from llama_core.config.hardware import gpu_spec
from llama_core.config.measured_rates import MeasuredRates
from llama_core.config.models import model_spec
from llama_core.errors import PlanError
from llama_core.objectives.registry import OBJECTIVES
from llama_core.optimizers.registry import OPTIMIZERS
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.parts import StepParts
from llama_core.planning.work import Work
from llama_core.records.step_parts import (
    ATTENTION,
    BUBBLE,
    COLLECTIVES,
    COMPUTING,
    HEAD,
    HOST,
    OPTIMIZER,
    OTHER_TRANSFERS,
)

KINDS = {*COMPUTING, OPTIMIZER, BUBBLE, HOST, *COLLECTIVES.values()}


class OneRate(MeasuredRates):
    """A machine on which all operations take as long, and whole layers half as long again."""

    def seconds(self, kind, sizes):
        return 1e-4


CPU = replace(gpu_spec("h100"), is_gpu=False, measured={1: OneRate(layers_share=(1.5, 1.5))})
MEASURED_GPU = replace(gpu_spec("h100"), measured={1: OneRate()})
plans = st.builds(
    dict,
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    dp_shard=st.sampled_from([1, 2]),
    dp_replicate=st.sampled_from([1, 2]),
    zero_stage=st.sampled_from([0, 1, 2, 3]),
    num_microbatches=st.sampled_from([4, 8]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved", "chimera"]),
)


def both(plan, device, **options):
    """Return the seconds of a step by part and by kind."""
    parts = StepParts(Work(model_spec("tiny_llama3_50m"), plan, 256, **options), device)
    seconds = parts.seconds()
    return seconds, parts.by_kind(seconds)


@settings(max_examples=60, deadline=None)
@given(
    plans,
    st.sampled_from([gpu_spec("h100"), gpu_spec("rtx4090"), CPU, MEASURED_GPU]),
    st.sampled_from(["adamw", "muon"]),
    st.sampled_from(["next_token", "kto"]),
)
def test_the_kinds_of_work_add_up_to_the_step(asked, device, optimizer, objective):
    try:
        plan = ParallelPlan(**asked)
        plan.check(model_spec("tiny_llama3_50m"), seq_len=256, precision="bf16")
    except PlanError:
        reject()
    chosen = {"optimizer": OPTIMIZERS[optimizer], "objective": OBJECTIVES[objective]}
    seconds, kinds = both(plan, device, **chosen)
    assert sum(kinds.values()) == pytest.approx(sum(seconds.values()))
    assert kinds.keys() <= KINDS | {OTHER_TRANSFERS}
    assert kinds.get(BUBBLE, 0.0) == pytest.approx(seconds["bubble"])


def test_each_transfer_has_its_own_kind():
    sharded = both(ParallelPlan(dp_shard=4, zero_stage=3), gpu_spec("h100"))[1]
    assert sharded["all-gather"] > sharded["reduce-scatter"] > 0
    assert "all-reduce" not in sharded
    copied = both(ParallelPlan(dp_replicate=4), gpu_spec("h100"))[1]
    assert copied["all-reduce"] > 0
    assert "all-gather" not in copied


def test_more_of_a_kind_of_work_takes_longer_in_that_kind():
    once = both(ParallelPlan(), CPU)[1]
    again = both(ParallelPlan(recompute="full"), CPU)[1]
    assert again["attention"] > once["attention"]
    assert again[HEAD] == pytest.approx(once[HEAD])
    assert again[OPTIMIZER] == pytest.approx(once[OPTIMIZER])


def test_small_kernels_leave_time_to_the_host():
    assert both(ParallelPlan(), gpu_spec("h100"))[1][HOST] > 0
    assert HOST not in both(ParallelPlan(), CPU)[1]


def test_a_rank_that_has_half_of_a_row_attends_half_as_long_as_was_measured_for_the_row():
    (_, whole), (_, half) = (both(ParallelPlan(cp=cp), CPU) for cp in (1, 2))
    assert half[ATTENTION] == pytest.approx(whole[ATTENTION] / 2)
