import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import memory_ledger
from benchmarks.published import ledger, predict, read_rows, write_predictions
from benchmarks.published.tables import section
from llama_core.config.models import model_names, model_spec
from llama_core.errors import ConfigError, DataError, PlanError
from llama_core.planning.frameworks.activations import Activations
from llama_core.planning.frameworks.architectures import from_spec, published_architecture
from llama_core.planning.frameworks.footprint import microbatches_in_flight, moments, peak_bytes
from llama_core.planning.frameworks.job import Job
from llama_core.planning.frameworks.registry import FRAMEWORKS, framework
from llama_core.planning.frameworks.shares import Shares, layers_per_rank

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "benchmarks/data/published_memory.csv"
ROWS = read_rows(PUBLISHED)
LEDGER = ledger(ROWS)
TITAN = {
    "framework": "torchtitan",
    "date": "2025-06",
    "model": "llama3_8b",
    "gpus": "64",
    "zero_stage": "3",
    "seq_len": "8192",
    "local_batch": "2",
    "method": "pretrain",
    "ac_mode": "selective op",
    "param_dtype": "fp32",
    "optimizer": "AdamW",
    "opt_state_dtype": "fp32",
    "compile": "no",
    "mem_stat": "peak reserved",
}
NAMES = sorted({entry.name for entry in FRAMEWORKS if " " not in entry.name})
frameworks = st.sampled_from(NAMES)
models = st.sampled_from(["llama2_7b", "llama3_70b", "qwen3_14b", "gemma2_9b", "mixtral_8x7b", "deepseek_v3_16b"])
recomputes = st.sampled_from(["none", "selective", "full"])


def gib(**cells):
    return predict(TITAN | cells).gib


def peak(job):
    return max(peak_bytes(list(moments(job, rank)), sum_of_pools=False) for rank in range(job.pp))


def job(model="llama3_8b", name="torchtitan", **fields):
    traits = framework(name, month="", remarks="")
    shape, _ = published_architecture(model, None, "")
    defaults = {"seq_len": 4096, "micro_batch": 2, "num_microbatches": 4, "dp_shard": 8}
    return Job(shape, traits, **defaults | fields)


def test_every_committed_row_is_mapped_or_refused_with_a_reason():
    assert len(LEDGER.entries) == 54
    assert [entry.name for entry in LEDGER.refused] == ["M065"]
    assert "gpus" in LEDGER.refused[0].reason


def test_the_committed_rows_are_predicted_within_8_percent_on_average():
    summary = LEDGER.summary()
    assert summary.mean_absolute < 0.08
    assert summary.share_off < 0.10
    assert abs(summary.bias) < 0.03


def test_slack_makes_the_mean_error_of_reserved_rows_zero():
    assert LEDGER.by_statistic()["reserved"].bias == pytest.approx(0, abs=0.01)


def test_the_page_shows_the_current_ledger():
    page = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    shown = page.split("<!-- published ledger -->\n")[1].split("\n<!-- end of published ledger -->")[0]
    assert shown == section(LEDGER)


@given(models, frameworks, recomputes, st.sampled_from([1, 2, 4]))
def test_more_tensor_parallel_ranks_never_need_more(model, name, recompute, tp):
    fields = {"model": model, "name": name, "recompute": recompute, "sequence_parallel": True}
    assert peak(job(tp=2 * tp, **fields)) <= peak(job(tp=tp, **fields))


@given(models, frameworks, st.sampled_from([1, 2, 4]), st.booleans())
def test_recomputing_more_keeps_less(model, name, tp, frozen):
    kept = [
        Activations(job(model=model, name=name, tp=tp, sequence_parallel=tp > 1, frozen=frozen, recompute=mode)).kept
        for mode in ("full", "selective", "none")
    ]
    assert kept == sorted(kept)


@given(models, frameworks, recomputes, st.integers(1, 8))
def test_a_larger_microbatch_never_needs_less(model, name, recompute, micro_batch):
    fields = {"model": model, "name": name, "recompute": recompute}
    assert peak(job(micro_batch=micro_batch, **fields)) <= peak(job(micro_batch=micro_batch + 1, **fields))


@given(models, st.sampled_from(["megatron", "nanotron", "deepspeed"]), st.sampled_from([2, 8, 64]))
def test_every_zero_stage_keeps_no_more_than_the_one_before(model, name, dp_shard):
    shares = [Shares(job(model=model, name=name, dp_shard=dp_shard, zero_stage=stage), 0) for stage in range(4)]
    states = [share.weights + share.moments + share.gradients for share in shares]
    assert states == sorted(states, reverse=True)


@given(models, frameworks, recomputes, st.sampled_from([1, 2, 4]))
def test_separate_pools_never_reserve_less_than_they_hold(model, name, recompute, pp):
    described = job(model=model, name=name, recompute=recompute, pp=pp)
    held = [list(moments(described, rank)) for rank in range(pp)]
    assert all(peak_bytes(m, sum_of_pools=True) >= peak_bytes(m, sum_of_pools=False) * (1 - 1e-12) for m in held)


def test_reserved_is_at_least_active():
    assert gib(mem_stat="peak reserved") >= gib(mem_stat="peak active") == gib(mem_stat="peak allocated")


def test_the_16_bytes_of_state_per_parameter_are_divided_over_all_ranks():
    shares = Shares(job(weight_bytes=4), 0)
    total = shares.weights + shares.moments + shares.gradients
    assert total == pytest.approx(16 * model_spec("llama3_8b").num_parameters / 8, rel=1e-4)


def test_a_layer_keeps_the_tensors_counted_by_hand():
    eager = replace(job(name="fsdp2"), micro_batch=1, seq_len=1)  # bytes of one token
    h, ffn, heads = 4096, 14336, 32
    norms, inputs, attention, feed_forward = 2 * 6 * h, 2 * 2 * h, 4 * 2 * h + 4 * heads, 4 * 2 * ffn
    assert Activations(eager).kept == norms + inputs + attention + feed_forward


@pytest.mark.parametrize("name", model_names())
def test_registered_variants_have_the_registrys_parameter_count(name):
    spec = model_spec(name)
    uncounted = sum(
        math.prod(shape) for weight, shape in spec.parameter_shapes.items() if weight.endswith((".bias", ".sinks"))
    )
    assert from_spec(spec).num_parameters == spec.num_parameters - uncounted


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3_32b", 32.76),
        ("gemma2-9b", 9.24),
        ("mixtral_8x7b", 46.70),
        ("deepseek_v3_16b", 15.71),
        ("deepseek_v3_671b", 671.03),
        ("llama-3.2-1b", 1.236),
        ("mistral-7b-v0.2", 7.242),
        ("phi-2", 2.78),
        ("gpt3_15b", 15.6),
    ],
)
def test_other_shapes_have_the_published_number_of_parameters(name, billions):
    shape, assumed = published_architecture(name, None, "")
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert assumed == ""


def test_an_unknown_model_becomes_a_llama_of_its_size():
    shape, assumed = published_architecture("orca_21b", 21e9, "")
    assert shape.num_parameters == pytest.approx(21e9, rel=0.02)
    assert "orca_21b" in assumed


def test_a_remark_may_spell_out_the_shape():
    shape, _ = published_architecture("nameless", None, "L16 h2048 H32 ffn8192 tied; vocab 131072")
    assert (shape.num_layers, shape.hidden_size, shape.tied, shape.head_dim) == (16, 2048, True, 64)


def test_stages_split_by_cost_give_the_last_one_fewer_layers():
    dealt = layers_per_rank(job(name="nanotron", pp=4))
    assert sum(dealt) == 32
    assert dealt[-1] < dealt[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"schedule": "gpipe"}, [16, 16, 16, 16]),
        ({"schedule": "1f1b"}, [4, 3, 2, 1]),
        ({"num_chunks": 2}, [5.5, 4.5, 3.5, 2.5]),
        ({"schedule": "v", "num_chunks": 2}, [4, 4, 4, 4]),
    ],
)
def test_microbatches_in_flight_follow_the_schedule(fields, expected):
    described = job(pp=4, num_microbatches=16, **fields)
    assert [microbatches_in_flight(described, rank) for rank in range(4)] == expected


def test_a_row_gets_the_framework_of_its_month():
    assert gib(date="2025-02", compile="yes") - gib(date="2025-04", compile="yes") > 10  # 8 bytes for 2e9 logits
    assert framework("torchtitan", month="2024-07", remarks="").since == "2024-06"
    assert framework("torchtitan", month="2026-07", remarks="graph_trainer").selective == "products"


def test_an_unspecified_recipe_is_assumed_to_fit_its_gpu():
    tune = {"framework": "torchtune", "date": "2025", "gpus": "1", "method": "LoRA", "param_dtype": "bf16"}
    row = TITAN | tune | {"ac_mode": "per recipe config", "seq_len": "2048", "compile": "yes", "opt_state_dtype": ""}
    large, small = predict(row | {"gpu_mem_gib": "48"}), predict(row | {"gpu_mem_gib": "24"})
    assert small.gib < 24 < large.gib < 48
    assert predict(row | {"gpu_mem_gib": "48", "method": "QLoRA"}).gib < small.gib - 5
    assert any("recipe" in assumption for assumption in small.assumptions)


def test_adapters_need_less_than_all_weights_and_quantised_weights_less_still():
    alone = {"framework": "litgpt", "date": "2024", "gpus": "1", "seq_len": "512", "opt_state_dtype": ""}
    alone |= {"param_dtype": "bf16", "ac_mode": "none", "mem_stat": "peak allocated"}
    assert gib(**alone, method="qlora") < gib(**alone, method="lora") < gib(**alone, method="full")


def test_a_row_without_a_measurement_is_predicted_and_not_compared(tmp_path):
    result = ledger([TITAN | {"id": "x"}, TITAN | {"id": "y", "framework": "picotron"}])
    write_predictions(result, tmp_path / "out.csv")
    header, first, second = (tmp_path / "out.csv").read_text().splitlines()
    assert header == "id,predicted_gib,reason"
    assert first == f"x,{gib():.2f},"
    assert second.startswith('y,,"nothing is known about framework')
    assert result.summary() is None


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"framework": "picotron"}, "nothing is known about framework 'picotron'"),
        ({"model": "orca"}, "'orca' is not in the table"),
        ({"gpus": ""}, "neither gpus nor dp_shard"),
        ({"local_batch": ""}, "neither micro_batch nor local_batch"),
        ({"seq_len": ""}, "seq_len is not given"),
        ({"seq_len": "long"}, "seq_len is 'long'"),
        ({"dp_shard": "3"}, "gpus is 64"),
        ({"tp": "3"}, "64 GPUs are no multiple"),
    ],
)
def test_a_row_that_says_too_little_is_refused_in_one_line(cells, message):
    with pytest.raises((ConfigError, PlanError), match=message) as refusal:
        predict(TITAN | cells)
    assert "\n" not in str(refusal.value)


def test_a_remark_after_a_number_is_ignored():
    assert gib(local_batch="2 (presumed)") == gib(local_batch="2")


def test_a_file_without_the_columns_is_refused(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("id,model,colour\n1,llama3_8b,red\n")
    with pytest.raises(DataError, match="has no column framework, seq_len"):
        read_rows(path)
    with pytest.raises(DataError, match="cannot read"):
        read_rows(tmp_path / "absent.csv")


def test_the_command_predicts_every_row_or_says_why_not(tmp_path, capsys):
    assert memory_ledger.main(["--csv", str(PUBLISHED), "--out", str(tmp_path / "predicted.csv")]) == 0
    assert "mean absolute error" in capsys.readouterr().out
    with PUBLISHED.open() as measured, (tmp_path / "predicted.csv").open() as predicted:
        ids, rows = [row["id"] for row in csv.DictReader(measured)], list(csv.DictReader(predicted))
    assert [row["id"] for row in rows] == ids
    assert all(bool(row["predicted_gib"]) != bool(row["reason"]) for row in rows)


def test_a_missing_file_is_one_line(tmp_path, capsys):
    assert memory_ledger.main(["--csv", "no.csv", "--out", str(tmp_path / "predicted.csv")]) == 2
    assert capsys.readouterr().err.startswith("error: cannot read no.csv: ")
    assert list(tmp_path.iterdir()) == []
