"""Laws that tie the three views of a plan together: search, estimate and rehearsal."""

from typing import get_args

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from llama_core.config import models
from llama_core.config.hardware import gpu_spec
from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.config.strategy import Gates
from llama_core.errors import PlanError
from llama_core.planning.memory.estimate import estimate_memory
from llama_core.planning.memory.verdict import FILL_LIMIT
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.auto import search
from llama_core.planning.search.least_memory import NothingFitsError
from llama_core.planning.work import Work
from llama_core.rehearsal.dry_run import rehearse
from llama_core.schedules.registry import schedule_names, schedule_type
from llama_core.units import MIB

pytestmark = pytest.mark.nightly

MODEL = ModelSpec("rehearsed", "llama3", 1024, 8, 16, 8, 64, 2816, 16384, 1e4, 1e-5, 4096, 512)
PARAMETER_BYTES = 16 * MODEL.num_parameters
ADAPTERS = st.fixed_dictionaries(
    {
        "lora_rank": st.sampled_from([8, 64]),
        "lora_dropout": st.sampled_from([0.0, 0.1]),
        "target_modules": st.sampled_from(
            [["q_proj", "v_proj"], ["gate_proj", "down_proj"], ["all-linear"], ["q_proj", "embed_tokens", "lm_head"]]
        ),
    }
)
TRAINABLE = st.sampled_from([[], ["*norm*"], ["lm_head", "norm"], ["*embed*"], ["layers.[67].*"]])
EXPERTS = st.fixed_dictionaries(
    {
        "num_experts": st.sampled_from([2, 4]),
        "experts_per_token": st.sampled_from([1, 2]),
        "moe_layers": st.sampled_from([None, 2]),
        "expert_size": st.sampled_from([0, 256]),
        "shared_size": st.sampled_from([0, 512]),
        "gates": st.sampled_from(get_args(Gates)),
        "gate_scale": st.sampled_from([1.0, 2.5]),
        "gate_inputs": st.booleans(),
        "biases": st.booleans(),
        "balance_bias": st.booleans(),
        "expert_groups": st.sampled_from([1, 2]),
    }
).map(lambda experts: experts | {"groups_per_token": experts["expert_groups"]})
SLOW = settings(
    max_examples=8,
    phases=[Phase.explicit, Phase.generate],  # to shrink a plan takes minutes, and makes it no clearer
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.fixture(autouse=True, scope="module")
def registered():
    models._REGISTRY[MODEL.name] = MODEL
    yield
    del models._REGISTRY[MODEL.name]


def request(**sections):
    return RunConfig.from_mapping({"model": MODEL.name} | sections)


@st.composite
def legal_plans(draw):
    """Any plan that can be trained, with a configuration that has its sizes."""
    strategy = draw(
        st.sampled_from(
            [
                {},
                {"strategy": "lora", "lora": draw(ADAPTERS)},
                {"strategy": "moe", "moe": draw(EXPERTS)},
                {
                    "strategy": "hybrid",
                    "lora": draw(ADAPTERS),
                    "moe": draw(EXPERTS) | {"moe_layers": 2},
                    "trainable": draw(TRAINABLE),
                },
            ]
        )
    )
    config = request(
        **strategy,
        training={
            "precision": draw(st.sampled_from(["bf16", "fp32"])),
            "seq_len": draw(st.sampled_from([512, 1024])),
        },
        data={"document_mask": draw(st.booleans())},
        architecture={"mtp_layers": 0 if "lora" in strategy else draw(st.sampled_from([0, 0, 1, 2]))},
        launch={"device": draw(st.sampled_from(["cpu", "cuda"]))},
    )
    zero_stage = draw(st.sampled_from([0, 1, 2, 3]))
    ranks = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([1, 2, 4]))
    schedule = draw(st.sampled_from(schedule_names())) if pp > 1 else "1f1b"
    try:
        plan = ParallelPlan(
            tp=draw(st.sampled_from([1, 2, 4])),
            pp=pp,
            cp=draw(st.sampled_from([1, 1, 2])),
            dp_shard=ranks if zero_stage else 1,
            dp_replicate=1 if zero_stage else ranks,
            ep=draw(st.sampled_from([1, 2])) if config.spec.moe else 1,
            expert_tp=draw(st.sampled_from([None, 1])),
            sequence_parallel=draw(st.booleans()),
            zero_stage=zero_stage,
            schedule=schedule,
            num_chunks=2 if schedule_type(schedule).takes_chunks else 1,
            microbatch_size=draw(st.sampled_from([1, 2, 4])),
            num_microbatches=draw(st.sampled_from([1, 2, 4, 8])),
            recompute=draw(st.sampled_from(["none", "selective", "full"])),
            compile=draw(st.booleans()),
            attention=draw(st.sampled_from(["auto", "auto", "ulysses"])),
        )
        plan.check(config.spec, seq_len=config.seq_len, precision=config.training.precision)
    except PlanError:
        assume(False)
    return config, plan


@SLOW
@given(legal_plans(), st.data())
def test_the_estimate_of_any_plan_is_within_three_percent_of_its_rehearsal(case, data):
    config, plan = case
    pp_rank = data.draw(st.integers(0, plan.pp - 1))
    rank = pp_rank * (plan.world_size // plan.pp)
    estimated = estimate_memory(Work.of(config, plan), pp_rank=pp_rank)
    assert estimated.peak_bytes == pytest.approx(rehearse(config, plan, rank).profile.peak_bytes, rel=0.03, abs=4 * MIB)


@SLOW
@given(
    gpus=st.sampled_from([1, 2, 4, 8, 16]),
    tokens=st.sampled_from([512, 1024, 2048, 4096]),
    batch_size=st.sampled_from([16, 32]),
    share=st.floats(0.2, 3.0),
    document_mask=st.booleans(),
)
def test_a_found_plan_fits_when_rehearsed(gpus, tokens, batch_size, share, document_mask):
    """Whatever the memory of a device, from less than the states of a rank to more than all of them."""
    config = request(
        parallel={"gpus": gpus},
        training={"precision": "bf16", "seq_len": tokens, "batch_size": batch_size},
        data={"document_mask": document_mask},
    )
    memory = int(share * PARAMETER_BYTES / gpus) + 512 * MIB
    try:
        plan = search(config, memory, gpu_spec("h100")).plan
    except NothingFitsError:
        assume(False)
    assert rehearse(config, plan).fullest.profile.peak_bytes <= 1.03 * FILL_LIMIT * memory
