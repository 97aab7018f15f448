from dataclasses import replace

import pytest

from llama_core.config.hardware import gpu_spec
from llama_core.config.models import model_spec
from llama_core.errors import PlanError
from llama_core.planning.frameworks.architectures import from_spec, published_architecture
from llama_core.planning.frameworks.estimate import FrameworkEstimate
from llama_core.planning.frameworks.given import ReadJob
from llama_core.planning.frameworks.job import Job
from llama_core.planning.frameworks.peak import peak_of
from llama_core.planning.frameworks.registry import framework
from llama_core.planning.frameworks.step import time_of, work_of
from llama_core.planning.frameworks.traits import Efficiencies
from llama_core.planning.time.step_time import step_time

H100 = gpu_spec("h100")
NAMES = ("torchtitan", "megatron")


def job(name="torchtitan", model="llama3_8b", **fields):
    traits = framework(name, month="", remarks="")
    defaults = {"seq_len": 4096, "micro_batch": 1, "num_microbatches": 4, "dp_shard": 8}
    defaults |= {} if traits.sharding == "fully_shard" else {"zero_stage": 1, "weight_bytes": 2}
    return Job(from_spec(model_spec(model)), traits, **defaults | fields)


@pytest.mark.parametrize("name", NAMES)
def test_the_engines_own_efficiencies_give_the_engines_own_time(name):
    asked = job(name)
    timed = time_of(asked, H100)
    assert timed.total(Efficiencies()) == step_time(work_of(asked), H100).total
    assert timed.under(Efficiencies()).total == pytest.approx(timed.own.total)


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_a_step_add_up_to_its_total_under_any_efficiencies(name):
    timed = time_of(job(name, tp=2, pp=2, sequence_parallel=True, dp_shard=2), H100)
    efficiencies = Efficiencies(products=1.3, tensor_parallel=0.4, step_seconds=0.2)
    assert timed.under(efficiencies).total == pytest.approx(timed.total(efficiencies))
    assert timed.under(efficiencies).parts["host"] == 0.2


def test_products_that_take_twice_the_time_are_those_of_a_device_of_half_the_rate():
    asked = job("megatron")
    slower = replace(H100, matmul_share=H100.matmul_share / 2)
    doubled = time_of(asked, H100).total(Efficiencies(products=2))
    assert doubled == pytest.approx(time_of(asked, slower).own.total, rel=0.01)


def test_a_job_whose_states_are_in_host_memory_holds_no_state_and_has_no_time():
    on_device = peak_of(job(), "allocated").breakdown
    offloaded = job(offloads_states=True)
    peak = peak_of(offloaded, "allocated").breakdown
    assert on_device["weights"] > 0
    assert (peak.get("weights"), peak.get("moments")) == (0, 0)
    estimate = FrameworkEstimate(ReadJob(offloaded, (), (), ()), H100)
    assert estimate.step is None
    assert "time: unknown, because transfers of states to host memory are not modelled" in estimate.lines()


def test_a_mixture_of_experts_has_memory_but_no_time():
    mixtral, _ = published_architecture("mixtral_8x7b", None, "")
    asked = replace(job("megatron", dp_shard=64), architecture=mixtral)
    assert peak_of(asked, "reserved").num_bytes > 0
    with pytest.raises(PlanError, match="a mixture of experts is not modelled"):
        time_of(asked, H100)


@pytest.mark.parametrize("name", NAMES)
def test_a_job_fits_a_device_that_has_what_it_reserves(name):
    estimate = FrameworkEstimate(ReadJob(job(name), (), (), ()), gpu_spec("h200"))
    assert estimate.fits
    assert not FrameworkEstimate(estimate.asked, replace(H100, memory_bytes=2**34)).fits
    assert estimate.as_dict()["fits"] is True


def test_a_line_says_what_the_rates_were_fitted_to():
    lines = FrameworkEstimate(ReadJob(job(), ("a",), ("b",), ("c",)), H100).lines()
    assert any(line.startswith("rates: fitted to 22 published rows of torchtitan") for line in lines)
    assert lines[-3:] == ["read: a", "ignored: b", "note: c"]
