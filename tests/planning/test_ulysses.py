"""Exchanged heads are planned where every rank gets as many of the key/value heads."""

from dataclasses import replace

import pytest

from llama_core.config.hardware import gpu_spec
from llama_core.config.models import model_spec
from llama_core.config.run import RunConfig
from llama_core.errors import PlanError
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.candidates import Candidates


def test_exchanged_heads_need_as_many_key_heads_on_each_rank():
    plan = ParallelPlan(tp=2, cp=4, attention="ulysses")
    plan.check(model_spec("llama3_8b"), seq_len=4096, precision="bf16")
    with pytest.raises(
        PlanError,
        match=r"\Aattention=ulysses: cp=8 does not divide the 4 key/value heads of llama3_8b that each of tp=2 ranks "
        r"has; use attention=auto, or cp one of 1, 2, 4\Z",
    ):
        replace(plan, cp=8).check(model_spec("llama3_8b"), seq_len=4096, precision="bf16")
    with pytest.raises(
        PlanError, match=r"\Aattention with soft cap has no kernel among those of cp=4 and attention=ulysses"
    ):
        plan.check(replace(model_spec("llama3_8b"), attention_soft_cap=30.0), seq_len=4096, precision="bf16")


def test_a_plan_says_that_whole_sequences_need_no_exchange_of_heads():
    assert ParallelPlan(attention="ulysses").notes == ("attention=ulysses has no effect with cp=1",)


def test_the_search_tries_only_what_divides_the_heads():
    found = {}
    for attention in ("auto", "ulysses"):
        parallel = {"gpus": 16, "tp": 4, "pp": 1, "attention": attention}
        config = RunConfig.from_mapping(
            {
                "model": "llama3_1_8b",
                "parallel": parallel,
                "training": {"batch_size": 4, "seq_len": 32768},
                "launch": {"device": "cuda", "gpu_type": "h200", "launcher": "slurm", "nodes": 2},
            }
        )
        found[attention] = {shape.cp for shape in Candidates(config, gpu_spec("h200")).shapes()}
    assert found == {"auto": {1, 2, 4}, "ulysses": {1, 2}}
