"""The loss of weights on named data: that of training's own evaluation, and that of transformers."""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from distributed import run_ranks
from saved_runs import CHATML_TURNS, SMALL, make_lively, save_run
from transformers import LlamaForCausalLM

from llama_core.chain.prepare import prepare_run
from llama_core.config.overrides import Override
from llama_core.config.run import RunConfig
from llama_core.data.packing import pack
from llama_core.data.selection import everything
from llama_core.data.tokenising import tokenised
from llama_core.data.tokenizer import load_tokenizer
from llama_core.errors import ConfigError, DataError, RunDirectoryError, WeightsError
from llama_core.evaluation import evaluator
from llama_core.evaluation import ranks as evaluation_ranks
from llama_core.evaluation.generate import find_model
from llama_core.evaluation.held_out import HELD_OUT, LossOnData, evaluate
from llama_core.evaluation.questions import AskedQuestion, Devices
from llama_core.launch.rank import worker
from llama_core.launch.rank.supervisor import worker_environment
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import checkpoint_name, checkpoint_step, data_digests, list_checkpoints
from llama_core.records.data_changes import allow_data_change
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluation_jobs import read_ending
from llama_core.records.evaluations import read_scores
from llama_core.runs.export import export_run
from llama_core.runs.loading import load_config
from training_infra import cli

SEQ_LEN = 32
CPU = Devices("cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files of texts, by name."""
    folder = tmp_path_factory.mktemp("texts")
    texts = {"tales": "Once upon a time there was a king. ", "sums": "1 + 1 = 2; 2 + 2 = 4. "}
    for name, text in texts.items():
        lines = [json.dumps({"text": f"{number}: " + text * (1 + number % 7)}) for number in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return {name: str(folder / f"{name}.jsonl") for name in texts}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, files):
    """A run of four steps on both files, which holds out a part of each, with checkpoints of steps 2 and 4."""
    sources = {name: {"path": path, "weight": 1} for name, path in files.items()}
    data = {"sources": sources, "validation_fraction": 0.3, "cache_dir": str(tmp_path_factory.mktemp("cache"))}
    training = {
        "seq_len": SEQ_LEN,
        "batch_size": 2,
        "steps": 4,
        "checkpoint_every": 2,
        "eval_sequences": 20,
        "precision": "fp32",
    }
    config = RunConfig.from_mapping(
        SMALL | {"data": data, "training": training | {"learning_rate": 0.01}, "launch": {"device": "cpu"}}
    )
    run = prepare_run(config, tmp_path_factory.mktemp("run") / "run")
    assert worker.main([str(run.path)]) == 0
    return run


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A run with weights that were not trained, and their export."""
    path = tmp_path_factory.mktemp("drawn")
    run = save_run(path / "run", {}, lambda engine, step: make_lively(engine.model, step))
    return run, export_run(run, path / "exported")


def test_the_newest_checkpoint_has_the_held_out_losses_that_training_tells(trained):
    told = json.loads(trained.training.read_text())
    found = {one.data: one for one in evaluate(trained.path, devices=CPU)}
    assert found.keys() == {"tales", "sums"}
    for name, one in found.items():
        rows = told["named_eval_rows"][name]
        assert one.rows.losses == pytest.approx(rows["losses"], rel=1e-5)
        assert one.rows.counts == tuple(rows["counts"])
        assert (one.step, one.seq_len) == (4, SEQ_LEN)
        assert one.perplexity == pytest.approx(math.exp(one.rows.mean))


def test_every_checkpoint_is_evaluated_in_order(trained):
    found = list(evaluate(trained.path, steps="all", devices=CPU))
    assert [(one.step, one.data) for one in found] == [(2, "sums"), (2, "tales"), (4, "sums"), (4, "tales")]
    assert found[0].rows.mean > found[2].rows.mean
    assert [one.rows.losses for one in evaluate(trained.path, steps=2, devices=CPU)] == [
        one.rows.losses for one in found[:2]
    ]


@pytest.fixture
def tales(files):
    """One of the files, which a test may edit."""
    file = Path(files["tales"])
    before = file.read_bytes()
    yield file
    file.write_bytes(before)


@pytest.mark.parametrize("seq_len", [None, 16])
def test_data_that_were_edited_behind_a_run_are_not_what_it_has_held_out(trained, tales, tmp_path, seq_len):
    run = RunDirectory(shutil.copytree(trained.path, tmp_path / "run"))
    kept = {"seq_len": seq_len, "devices": CPU}
    before = {one.data: one.rows for one in evaluate(run.path, **kept)}
    tales.write_text(tales.read_text().replace("king", "frog"))
    with pytest.raises(DataError, match=r"was made on other data \(.*; restore them or name data with --data$"):
        list(evaluate(run.path, **kept))
    named = next(evaluate(run.path, {"tales": str(tales)}, **kept))
    assert named.rows.losses
    allow_data_change(run, data_digests(run))
    on_purpose = {one.data: one.rows for one in evaluate(run.path, **kept)}
    assert on_purpose["sums"] == before["sums"]
    assert on_purpose["tales"] != before["tales"]


def test_a_template_that_was_replaced_behind_a_run_renders_no_conversations_of_it(files, tmp_path):
    chats = tmp_path / "chats.jsonl"
    asked = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "!"}] for n in range(20)]
    chats.write_text("\n".join(json.dumps({"messages": messages}) for messages in asked))
    template = tmp_path / "template.jinja"
    template.write_text(CHATML_TURNS)
    data = {"source": str(chats), "chat_template": str(template), "validation_fraction": 0.3}
    training = {"seq_len": SEQ_LEN, "batch_size": 2, "steps": 1, "precision": "fp32"}
    given = {"data": data | {"cache_dir": str(tmp_path / "cache")}, "training": training}
    run = prepare_run(RunConfig.from_mapping(SMALL | given | {"launch": {"device": "cpu"}}), tmp_path / "run")
    assert worker.main([str(run.path), "--only", "train"]) == 0
    for named in (None, {"chats": str(chats)}):
        assert list(evaluate(run.path, named, devices=CPU))
    template.write_text(CHATML_TURNS.replace("im_start", "start"))
    for named in (None, {"chats": str(chats)}):
        with pytest.raises(DataError, match=rf"template '{template}' is not the one that {run.path} has trained with"):
            list(evaluate(run.path, named, devices=CPU))
    assert list(evaluate(run.path, {"tales": files["tales"]}, devices=CPU)), "texts need no template"


def losses_of(source, data, plan):
    question = LossOnData(data, seq_len=SEQ_LEN, num_sequences=19, tokenizer=None)
    found = AskedQuestion(question, "cpu", "fp32", plan).follow([find_model(source, 2, print)], print, print)
    return {one.data: one.rows for one in found}


PLANS = [
    pytest.param(ParallelPlan(pp=2, dp_replicate=2), id="pp 2, dp 2"),
    pytest.param(ParallelPlan(tp=2, dp_replicate=2), id="tp 2, dp 2", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_that_divide_the_rows_and_the_model_tell_the_losses_of_one(trained, files, plan):
    expected = {one.data: one.rows for one in evaluate(trained.path, files, steps=2, num_sequences=19, devices=CPU)}
    for found in run_ranks(plan.world_size, losses_of, trained.path, files, plan):
        assert found.keys() == expected.keys()
        for name, rows in found.items():
            assert rows.losses == pytest.approx(expected[name].losses, rel=1e-6)
            assert rows.counts == expected[name].counts


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_a_run_and_its_export_have_the_loss_of_transformers(drawn, tmp_path, dtype, tolerance):
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"text": "All the way from here to there. " * 8}))
    run, folder = drawn
    kept = {"seq_len": SEQ_LEN, "num_sequences": 0, "tokenizer": "bytes", "devices": Devices("cpu", dtype)}
    one, other = (next(evaluate(source, {"long": str(file)}, **kept)) for source in (run.path, folder))
    assert one.rows == other.rows
    config = RunConfig.from_mapping(SMALL)
    cache = tokenised(str(file), config.data, load_tokenizer("bytes"), config.spec, None).cache
    packed = pack(everything(cache), SEQ_LEN)
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for row, loss in enumerate(one.rows.losses):
        tokens, targets, _ = (torch.from_numpy(column) for column in packed.row(row))
        with torch.no_grad():
            logits = theirs(tokens[None]).logits[0]
        expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
        assert loss == pytest.approx(float(expected), rel=tolerance)


def test_a_run_without_named_data_has_one_held_out_loss(drawn, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run, _ = drawn
    (one,) = evaluate(run.path, seq_len=SEQ_LEN, num_sequences=3, devices=CPU)
    assert one.data == HELD_OUT
    assert len(one.rows.losses) == 3


@pytest.mark.root
def test_a_run_of_somebody_else_names_neither_the_cache_nor_an_address(drawn, tales, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = {"cache": {"cache_dir": str(tmp_path / "theirs")}, "address": {"source": "http://x/a.jsonl"}}
    for name, data in settings.items():
        run = save_run(tmp_path / name, {"data": data}, lambda engine, step: None)
        os.chown(run.path, 65534, -1)
    (one,) = evaluate(tmp_path / "cache", data={"tales": str(tales)}, seq_len=SEQ_LEN, num_sequences=1, devices=CPU)
    assert all(map(math.isfinite, one.rows.losses))
    assert not (tmp_path / "theirs").exists()
    with pytest.raises(ConfigError, match=r"belongs to nobody, and its data are at http://x/a\.jsonl; name data with"):
        list(evaluate(tmp_path / "address", seq_len=SEQ_LEN, devices=CPU))


def test_a_run_on_pairs_of_answers_has_held_out_no_text(tmp_path):
    run = save_run(tmp_path / "run", {"training": {"objective": "dpo"}}, lambda engine, step: None)
    with pytest.raises(
        ConfigError, match="this run was trained for dpo on pairs, which have no loss of the next token"
    ):
        list(evaluate(run.path, devices=CPU))


@pytest.mark.parametrize(
    ("choices", "error", "message"),
    [
        ({"steps": 3}, RunDirectoryError, "has no checkpoint of step 3; there are 1"),
        ({"seq_len": 1}, ConfigError, "seq_len=1: a row needs at least 2 tokens"),
        ({"num_sequences": -1}, ConfigError, "sequences=-1: give a number of rows, or 0 for all"),
        ({"data": {"none": "nowhere.jsonl"}}, DataError, "'nowhere.jsonl' does not exist"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(drawn, choices, error, message):
    with pytest.raises(error) as refused:
        list(evaluate(drawn[0].path, devices=CPU, **choices))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_may_be_called_as_a_checkpoint_begins(drawn, files, tmp_path):
    named = tmp_path / "step-by-step"
    named.symlink_to(drawn[1])
    (one,) = evaluate(named, {"tales": files["tales"]}, tokenizer="bytes", seq_len=SEQ_LEN, devices=CPU)
    assert one.step is None


def test_of_a_folder_with_splits_the_held_out_files_are_evaluated_and_a_line_says_so(drawn, files, tmp_path):
    _, exported = drawn
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "train.jsonl").write_text(Path(files["tales"]).read_text())
    (folder / "test.jsonl").write_text(Path(files["sums"]).read_text())
    told = []
    settings = {"seq_len": SEQ_LEN, "num_sequences": 4, "devices": CPU}
    [of_folder] = evaluate(exported, data={"it": str(folder)}, **settings, tell=told.append)
    [of_file] = evaluate(exported, data={"it": files["sums"]}, **settings)
    assert of_folder.rows.mean == of_file.rows.mean
    assert f"{folder}: left out 1 file for training (train.jsonl)" in told


def test_a_folder_needs_data_and_a_place_without_a_model_is_refused(drawn, tmp_path):
    with pytest.raises(ConfigError, match="is no run, so nothing is held out; name data with --data"):
        list(evaluate(drawn[1], tokenizer="bytes", devices=CPU))
    with pytest.raises(WeightsError, match="holds no model"):
        list(evaluate(tmp_path, devices=CPU))
    with pytest.raises(RunDirectoryError, match="has no checkpoint; name a run's directory, or drop --step all"):
        list(evaluate(tmp_path, steps="all", devices=CPU))


def test_the_command_prints_a_line_for_each_or_json(trained, files, capsys):
    assert cli.main(["evaluate", str(trained.path), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["step", "4", "sums"], ["step", "4", "tales"]]
    named = ["--data", f"mine={files['sums']}", files["tales"], "--sequences", "2"]
    assert cli.main(["evaluate", str(trained.path), *named, "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["evaluations"]
    assert [one["data"] for one in found] == ["mine", "tales.jsonl"]


@pytest.mark.wide
def test_the_command_shares_held_out_rows_among_processes(trained, capsys):
    assert cli.main(["evaluate", str(trained.path), "--device", "cpu"]) == 0
    expected = capsys.readouterr().out
    assert cli.main(["evaluate", str(trained.path), "--device", "cpu", "--gpus", "2"]) == 0
    told = capsys.readouterr()
    assert told.out == expected
    assert "in fp32 on 2 cpu processes (dp=2)" in told.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "3", "--tensor-parallel", "3"], "tp=3 does not divide the 2 key/value heads"),
        (["--device", "cpu", "--gpus", "2", "--nodes", "2"], "this is no job of Slurm; run it inside salloc --nodes=2"),
        (["--data", "a/docs", "b/docs"], "--data has two sets called docs; name them: --data first=a/docs second="),
        (["--data", "wiki="], "--data wiki=: no path after the name; give wiki=PATH"),
        (["--step", "newest"], "--step newest: give the step of a checkpoint, best or all"),
    ],
)
def test_the_command_refuses_in_one_line(trained, capsys, arguments, message):
    assert cli.main(["evaluate", str(trained.path), *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def with_evaluation(run, **evaluation):
    config = load_config(run).with_overrides(Override("evaluation", evaluation))
    run.config.write_text(config.to_yaml())


def test_the_scores_are_those_of_evaluate(trained, files, capsys):
    with_evaluation(trained, data=files, sequences=4)
    assert evaluator.main([str(trained.path), "--step", "2", "--device", "cpu"]) == 0
    assert read_ending(trained, trained.checkpoints / checkpoint_name(2)).problem == ""
    found = {one.data: one.rows for one in evaluate(trained.path, files, steps=2, num_sequences=4, devices=CPU)}
    own = [score for score in read_scores(trained) if score.settings == "4 sequences"]  # other tests have some too
    scores = {score.task: score for score in own}
    assert scores.keys() == files.keys()
    for name, score in scores.items():
        assert (score.value, score.standard_error) == (found[name].mean, found[name].standard_error)
        assert (score.step, score.tokens, score.metric, score.examples) == (2, 2 * 2 * SEQ_LEN, "loss", 4)


def test_an_evaluation_of_which_a_rank_dies_has_not_ended(files, tmp_path, monkeypatch, capsys):
    run = save_run(tmp_path / "run", {}, lambda engine, step: None)
    with_evaluation(run, data=files, tp=2)
    monkeypatch.setattr(evaluation_ranks, "_COMMAND", (sys.executable, "-c", "raise SystemExit('out of luck')"))
    (checkpoint,) = list_checkpoints(run)
    step = checkpoint_step(checkpoint)
    assert evaluator.main([str(run.path), "--step", str(step), "--device", "cpu"]) == 1
    assert "of the evaluation ended with exit code 1: out of luck" in capsys.readouterr().out
    assert read_ending(run, checkpoint) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_ranks_of_an_evaluation_have_the_environment_of_those_of_training(device, monkeypatch):
    program = "import json, os; print(json.dumps({'answer': dict(os.environ)}), flush=True)"
    monkeypatch.setattr(evaluation_ranks, "_COMMAND", (sys.executable, "-c", program))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "3")
    (said,) = evaluation_ranks.answers_of_ranks({"device": device}, 2)
    expected = worker_environment(os.environ, device, 2, None)
    assert expected.items() <= said["answer"].items()
    assert expected["TORCHINDUCTOR_COMPILE_THREADS"] == "3"
    assert not any(name.startswith("TORCH_FR_") for name in expected)  # there is no folder for these of a run


def test_an_evaluation_that_is_refused_ends_with_the_reason(trained, files, capsys):
    with_evaluation(trained, data=files | {"gone": "/nowhere/gone.jsonl"}, sequences=4)
    assert evaluator.main([str(trained.path), "--step", "4", "--device", "cpu"]) == 0
    problem = read_ending(trained, trained.checkpoints / checkpoint_name(4)).problem
    assert "/nowhere/gone.jsonl" in problem
    assert problem in capsys.readouterr().out
