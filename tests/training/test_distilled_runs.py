"""A run learns from a teacher, whose view of the data is computed once and kept."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from corpora import write_jsonl
from test_references import column, damage, swap, weights
from torch._subclasses.fake_tensor import FakeTensorMode
from trained_tokenizers import byte_level

from llama_core.chain.expected import _reference_seconds
from llama_core.chain.planned import plan_for_gpu, planned_as
from llama_core.chain.prepare import refuse_unfit_teacher
from llama_core.config.config_json.writing import config_json
from llama_core.config.hardware import gpu_spec
from llama_core.config.models import model_spec
from llama_core.config.overrides import Override
from llama_core.config.run import RunConfig
from llama_core.data.check import DataCheck
from llama_core.data.datasets import BatchStream, load_datasets, validation_batches
from llama_core.errors import ConfigError, DataError, PlanError, StoppedError, WeightsError
from llama_core.hugging_face.pretrained import resolve_pretrained
from llama_core.machine.detect import detect_machine
from llama_core.models.batch import with_places
from llama_core.models.objective import build_objective
from llama_core.objectives.distill import LOGS, REST, TOKENS
from llama_core.planning.before import bytes_before_run
from llama_core.planning.kernels import attention_kernel
from llama_core.planning.memory.host import host_memory
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search import candidates
from llama_core.planning.search.auto import choose_plan
from llama_core.planning.time.step_time import forward_flops_per_token, forward_time
from llama_core.planning.work import Work
from llama_core.records.directory import RunDirectory
from llama_core.records.measurements import ExpectedStep
from llama_core.rehearsal.byte_counter import ByteCounter
from llama_core.rehearsal.kernels import kernels_of
from llama_core.rehearsal.trace import _fake_batch, alone_among
from llama_core.training.engine import build_model
from llama_core.training.inputs import StepInputs
from llama_core.training.reference import References
from llama_core.training.trainer import Trainer

STUDENT = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "ffn_size": 32,
    "vocab_size": 300,
}
TEACHER = STUDENT | {"hidden_size": 24, "num_layers": 3, "num_heads": 3, "num_kv_heads": 3}
PLAN = ParallelPlan(microbatch_size=2, num_microbatches=2)
SEQ_LEN = 64
TOP_K = 5


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    texts = [f"The {n}th number after {n - 1} is {n}, and twice that is {2 * n}. " * 3 for n in range(60)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "a.jsonl", texts)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, source):
    """The checkpoint of a run of another model."""
    trainer = trainer_of(tmp_path_factory.mktemp("teacher"), source, TEACHER, learning_rate=1e-2, steps=20)
    trainer.fit()
    return resolve_pretrained(str(trainer.run.path))


def config_of(folder, source, architecture, **training):
    data = {"source": str(source), "cache_dir": str(folder / "cache")}
    usual = {"seq_len": SEQ_LEN, "batch_size": 4, "steps": 4, "learning_rate": 1e-2, "precision": "fp32"}
    return RunConfig.from_mapping(
        {
            "architecture": architecture,
            "data": data,
            "training": usual | {"eval_every": 2} | training,
            "launch": {"device": "cpu"},
            "tracking": {"tensorboard": False},
        }
    )


def trainer_of(folder, source, architecture=STUDENT, name="run", **training):
    run = RunDirectory(folder / name)
    if not run.path.exists():
        run.create()
    config = config_of(folder, source, architecture, **training)
    run.config.write_text(config.to_yaml())
    datasets = load_datasets(config.data, config.spec, seq_len=SEQ_LEN, objective=config.objective)
    return Trainer(
        run,
        config,
        PLAN,
        batches=BatchStream(datasets.train, 4, seed=0),
        validation={name: partial(validation_batches, rows, 2, 8) for name, rows in datasets.validation.items()},
        total_steps=config.training.steps,
        references=References.of(run, "drawn", config.objective, datasets),
    )


def student_of(folder, source, teacher, name="run", **training):
    settings = {"objective": "distill", "teacher": teacher, "distill_top_k": TOP_K}
    return trainer_of(folder, source, name=name, **settings | training)


def test_every_row_has_what_the_whole_probabilities_of_the_teacher_say(tmp_path, source, teacher):
    student = student_of(tmp_path, source, teacher)
    rows = student.reference.references.rows["train/"]
    (batch,) = validation_batches(rows, len(rows), 1000)
    theirs = trainer_of(tmp_path, source, TEACHER, name="theirs", init_from=teacher)
    model = theirs.engine.model
    hidden = []
    with torch.no_grad():
        model.measure = lambda head, rows: hidden.append(head.hidden_TD @ head.weight_VD.T) or hidden[-1]
        model(batch.tokens_BS, batch)
    logs_TV = hidden[0].double().log_softmax(-1)
    logs_TK, _ = logs_TV.topk(TOP_K)
    flat = {name: batch.per_token[name].double().view(len(logs_TV), -1) for name in (TOKENS, LOGS, REST)}
    torch.testing.assert_close(flat[LOGS], logs_TK, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logs_TV.gather(-1, flat[TOKENS].long()), logs_TK, rtol=1e-4, atol=1e-4)
    everything = flat[LOGS].exp().sum(-1) + flat[REST].exp()[:, 0]
    torch.testing.assert_close(everything, torch.ones_like(everything), rtol=0, atol=1e-5)


def test_a_student_comes_nearer_to_its_teacher(tmp_path, source, teacher):
    student = student_of(tmp_path, source, teacher, steps=30, distill_weight=0.8)
    summary = student.fit()
    assert column(student, "teacher_kl")[-1] < 0.5 * column(student, "teacher_kl")[0]
    weighed = 0.8 * np.array(column(student, "teacher_kl")) + 0.2 * np.array(column(student, "cross_entropy"))
    np.testing.assert_allclose(column(student, "loss"), weighed, rtol=1e-5)
    assert summary.measured["eval_teacher_kl"] > 0


def test_a_stopped_run_goes_on_bit_for_bit_without_its_teacher(tmp_path, source, teacher):
    undisturbed = student_of(tmp_path, source, teacher, "whole")
    undisturbed.fit()
    first = student_of(tmp_path, source, teacher)
    first.stop.should_stop = lambda: first.step == 2
    with pytest.raises(StoppedError, match="stopped after step 2 of 4"):
        first.fit()
    second = student_of(tmp_path, source, str(tmp_path / "gone"))
    second.fit()
    for name in ("loss", "teacher_kl", "cross_entropy", "eval_loss"):
        assert column(second, name) == column(undisturbed, name)
    torch.testing.assert_close(weights(second), weights(undisturbed), rtol=0, atol=0)


@pytest.mark.parametrize("spoil", [damage, swap])
def test_a_run_that_goes_on_refuses_what_its_teacher_has_not_said_of_its_data(tmp_path, source, teacher, spoil):
    first = student_of(tmp_path, source, teacher)
    first.stop.should_stop = lambda: first.step == 2
    with pytest.raises(StoppedError):
        first.fit()
    spoil(first.run)
    with pytest.raises(DataError, match=r"reference\.(json|bin).*the teacher makes of the data is computed once"):
        student_of(tmp_path, source, teacher).fit()


def test_the_file_has_as_many_bytes_as_tokens_need(tmp_path, source, teacher):
    student = student_of(tmp_path, source, teacher)
    num_rows = sum(map(len, student.reference.references.rows.values()))
    assert student.run.reference_values.stat().st_size == 4 * (2 * TOP_K + 1) * SEQ_LEN * num_rows


def test_a_teacher_of_another_vocabulary_is_refused_in_one_line(tmp_path, source):
    other = trainer_of(tmp_path, source, STUDENT | {"vocab_size": 310}, name="other", steps=1)
    other.fit()
    teacher = resolve_pretrained(str(other.run.path))
    config = config_of(tmp_path, source, STUDENT, objective="distill", teacher=teacher)
    with pytest.raises(ConfigError, match=r"^training\.teacher=.*has a vocabulary of 310 tokens and .* one of 300.*$"):
        refuse_unfit_teacher(config)


def test_a_folder_without_a_model_is_refused_as_a_teacher(tmp_path, source):
    config = config_of(tmp_path, source, STUDENT, objective="distill", teacher=str(tmp_path))
    with pytest.raises(WeightsError, match=r"^training\.teacher=.* holds no model"):
        refuse_unfit_teacher(config)


def test_a_teacher_whose_tokens_are_all_among_the_k_is_refused(tmp_path, source, teacher):
    with pytest.raises(ConfigError, match=r"training\.distill_top_k=300 leaves no other token of the 300"):
        config_of(tmp_path, source, STUDENT, objective="distill", teacher=teacher, distill_top_k=300)


def test_a_teacher_with_another_tokenizer_is_refused_in_one_line(tmp_path, source, teacher):
    config = config_of(tmp_path, source, STUDENT, objective="distill", teacher=teacher)
    other = config.with_overrides(Override("data.tokenizer", str(byte_level(tmp_path, ["<s>", "</s>"], {}))))
    with pytest.raises(
        ConfigError, match=r"^training\.teacher=.* has learnt with another tokenizer than data\.tokenizer"
    ):
        refuse_unfit_teacher(other)


BEFORE = {
    "alone": ParallelPlan(microbatch_size=4),
    "zero3": ParallelPlan(dp_shard=4, zero_stage=3, num_microbatches=2),
    "tp2 pp2": ParallelPlan(tp=2, pp=2, num_microbatches=4),
    "cp2": ParallelPlan(cp=2, num_microbatches=2),
}


@pytest.mark.parametrize("plan", BEFORE.values(), ids=BEFORE)
def test_the_forward_of_a_teacher_takes_what_is_estimated_or_somewhat_less(tmp_path, plan):
    """The teacher is counted as the ranks hold it, with as many rows as a step has."""
    spec = folder_of_teacher(tmp_path)
    training = {"objective": "distill", "teacher": str(tmp_path), "precision": "bf16", "seq_len": 512}
    training["batch_size"] = plan.batch_size
    config = RunConfig.from_mapping({"model": "tiny_llama3_50m", "training": training, "launch": {"device": "cpu"}})
    fullest = max(
        counted_teacher(config, plan, spec, rank) for rank in range(0, plan.world_size, plan.world_size // plan.pp)
    )
    estimated = bytes_before_run(config, plan)
    assert fullest <= estimated <= 1.15 * fullest
    refused = planned_as(config, replace(detect_machine(), memory_bytes=estimated // 2), plan=ParallelPlan())
    assert "before the first step, the teacher takes" in refused.estimate.refusal


@pytest.mark.parametrize(
    ("traits", "parallel", "problem"),
    [
        ({"num_heads": 6, "num_kv_heads": 3}, {"gpus": 2, "tp": 2}, "tp=2 does not divide the 3 key/value heads"),
        ({"num_layers": 2}, {"gpus": 4, "pp": 4}, "4 pipeline stages .* are more than the 2 layers"),
        (
            {"attention_soft_cap": 20.0},
            {"gpus": 2, "cp": 2},
            "soft cap has no kernel .*use parallel.cp=1",
        ),
    ],
)
def test_a_plan_that_cannot_divide_the_teacher_is_refused_before_a_job(
    tmp_path, monkeypatch, traits, parallel, problem
):
    teacher = replace(folder_of_teacher(tmp_path), **traits)
    monkeypatch.setattr(candidates, "spec_before_run", lambda config: teacher)
    training = {"objective": "distill", "teacher": str(tmp_path), "seq_len": 512, "batch_size": 8}
    request = {"model": "tiny_llama3_50m", "training": training, "parallel": parallel, "launch": {"device": "cpu"}}
    with pytest.raises(PlanError, match=rf"^training\.teacher: .*{problem}"):
        choose_plan(RunConfig.from_mapping(request), None)


def test_a_teacher_is_told_of_rows_what_its_own_kernel_takes(tmp_path):
    """A capped one beside a student without a cap needs a mask, where the student's kernel takes documents."""
    capped = replace(folder_of_teacher(tmp_path), attention_soft_cap=20.0)
    training = {"objective": "distill", "teacher": str(tmp_path), "precision": "bf16", "seq_len": 512}
    launch = {"device": "cuda", "gpu_type": "h100"}
    config = RunConfig.from_mapping({"model": "tiny_llama3_50m", "training": training, "launch": launch})
    assert [attention_kernel(config, PLAN, spec).told for spec in (None, capped)] == ["varlen", "mask"]
    of_teacher = StepInputs(config, PLAN, build_objective(config.training), torch.device("cpu"), spec=capped)
    (rows, *_) = of_teacher.examples()
    assert rows.documents is None
    assert rows.positions_BS is not None
    build_model(config, PLAN, torch.device("cpu"), spec=capped)


def folder_of_teacher(folder):
    """Describe a larger model in a folder, and return it."""
    spec = replace(model_spec("tiny_llama3_50m"), num_layers=8)
    (folder / "config.json").write_text(json.dumps(config_json(spec)))
    return spec


def counted_teacher(config, plan, spec, rank):
    with alone_among(plan.world_size, rank), kernels_of(config, plan):
        model = build_model(config, plan, torch.device("cpu"), spec=spec, weight_dtype=torch.bfloat16)
        model.model.requires_grad_(False)
        with FakeTensorMode(allow_non_fake_inputs=True), ByteCounter() as counter:
            model.materialize()
            counter.forget_segments()
            objective = model.model.objective
            rows = [with_places(_fake_batch(config, plan)) for _ in range(plan.num_microbatches)]
            model.measure_rows(objective.of_reference, objective.num_referred(config.seq_len), rows)
            counter.begin_segment()
    return max(peak.num_bytes for peak in counter.peaks.values())


def test_the_time_and_the_price_of_a_run_have_the_forward_of_its_teacher(tmp_path):
    spec = folder_of_teacher(tmp_path)
    settings = {"model": "tiny_llama3_50m", "parallel": {"gpus": 1}, "launch": {"device": "cuda", "gpu_type": "h100"}}
    training = {"precision": "bf16", "seq_len": 512, "steps": 10}
    config = RunConfig.from_mapping(
        settings | {"training": training | {"objective": "distill", "teacher": str(tmp_path)}}
    )
    planned = plan_for_gpu(config)
    checked = DataCheck("", num_tokens=10**9, num_held_out_tokens=0)
    theirs = forward_time(replace(Work.of(planned.config, planned.plan), spec=spec), gpu_spec("h100"), 10**9)
    assert planned.cost(data=checked).reference_seconds == pytest.approx(theirs)
    seconds = forward_flops_per_token(spec, 512) * 10**6 / 10**12
    step = ExpectedStep(seconds=2.0, flops=2e12, told_by="a rate of 10^12 FLOP/s")
    assert _reference_seconds(planned.config, 10**6, step) == pytest.approx(seconds)


def test_what_the_host_holds_of_a_batch_has_the_values_of_the_teacher():
    def batches(top_k):
        training = {"objective": "distill", "teacher": "/there", "distill_top_k": top_k}
        training |= {"seq_len": 512, "batch_size": 4}
        config = RunConfig.from_mapping({"training": training, "launch": {"device": "cpu"}, "data": {"num_workers": 0}})
        return host_memory(config, ParallelPlan(num_microbatches=4)).batches_bytes

    assert batches(33) - batches(32) == 4 * 512 * 2 * 4  # of each token, a number and its log-probability
