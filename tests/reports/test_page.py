"""The report shows every piece of a run, names the missing ones, escapes users' text, and loads nothing."""

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from statistics import median
from urllib.parse import unquote

import pytest
import yaml
from synthetic_run import (
    ATTEMPT,
    BENCHMARK,
    DATA,
    DRY_RUN,
    ESTIMATE,
    FAILED,
    FINISHED,
    SUMMARY,
    step_records,
    write_run,
)
from tiers import nightly
from toy_objective import MASKED

from llama_core.config.run import RunConfig
from llama_core.errors import RunDirectoryError
from llama_core.launch.attempts import log_path
from llama_core.objectives.registry import OBJECTIVES
from llama_core.planning.plan import ParallelPlan
from llama_core.records.activity import Activity, append_activities
from llama_core.records.data_changes import DataChange, record_data_change
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json, write_json
from llama_core.records.held_out import HeldOutRows
from llama_core.records.measurements import ExpectedStep
from llama_core.records.preflight import NamedRank, PreflightRecord, append_preflight
from llama_core.records.timelines import LaneRecord, write_lane
from llama_core.units import GIB, MIB, format_bytes
from training_reports import page as page_of_run
from training_reports.by_step import panels_of_learning
from training_reports.contents import RunContents
from training_reports.page import write_report
from training_reports.peak_memory import memory_comparison_panel

HOSTILE = "<script>alert('$title')<img src=x onerror=\"alert(1)\">&amp;"


class Page(HTMLParser):
    """The elements of a page and its visible text, which excludes scripts and styles."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.texts, self.open = [], [], []
        self.feed(path.read_text())
        self.text = " ".join(" ".join(self.texts).split())
        self.tags = Counter(tag for tag, _ in self.elements)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        # Void elements such as <meta> are opened and never closed.
        while self.open.pop() != tag:
            pass

    def handle_data(self, data):
        self.texts += [] if self.open and self.open[-1] in ("script", "style") else [data]


def test_the_page_shows_no_secret_of_the_environment_wherever_it_stands(tmp_path, monkeypatch):
    secret = "hf_abcDEF<123456"
    monkeypatch.setenv("HF_TOKEN", secret)
    run = write_run(tmp_path / secret)
    config = yaml.safe_load(run.config.read_text())
    run.config.write_text(yaml.safe_dump(config | {"data": {"source": f"/data/{secret}/a.jsonl"}}))
    page = write_report(run)
    assert "/data/***/a.jsonl" in page.read_text()
    assert not [text for text in (secret, "abcDEF&lt;123456", "abcDEF%3C123456") if text in page.read_text()]


def report(run):
    return Page(write_report(run))


def test_a_model_with_another_architecture_is_not_called_by_its_name_alone(run):
    run.config.write_text(RunConfig().with_overrides("architecture.num_layers=3").to_yaml())
    assert "Model tiny_llama3_50m with num_layers=3 " in report(run).text
    run.config.write_text("{model: of another version, strategy: unknown}")
    assert "Model of another version " in report(run).text


def test_communication_is_shown_as_predicted_where_no_profile_measured_it(run):
    assert "Step by part" not in report(run).text
    parts = {"matrix products": 2.25, "all-gather": 0.25, "all-reduce": 0.5}
    write_json(run.expected, ExpectedStep(3.0, 1e12, "from a data sheet", parts, "data sheet"))
    page = report(run)
    assert any("predicted computing 2.25 s, communication 0.75 s" in label for label in labels(page))
    assert re.search(r"computing and communication\s+3 s\s", page.text)


def labels(page):
    """Return what screen readers say of the figures."""
    return [attributes["aria-label"] for _, attributes in page.elements if "aria-label" in attributes]


def facts(page):
    """Return the facts below the name of a run."""
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page.read_text()))


def test_a_run_at_work_has_its_newest_step_as_its_status_and_its_ranks_as_its_device(run, tmp_path):
    queued = RunDirectory(tmp_path / "queued")
    queued.create()
    waiting = write_report(queued, job="queued, for Resources")
    assert "queued, for Resources, no step yet" in waiting.read_text()
    assert facts(waiting)["Measured on"] == "nothing yet"
    for ended in (run.outcome, run.benchmark, run.training):
        ended.unlink()
    ranks = [{"device": name} for name in ("NVIDIA H200", "NVIDIA H200", "NVIDIA H100 80GB HBM3")]
    write_json(run.environment, {"facts": {}, "ranks": ranks})
    at_work = write_report(run, job="running")
    assert "running, step 40 of 40" in at_work.read_text()
    assert facts(at_work)["Measured on"] == "NVIDIA H100 80GB HBM3, NVIDIA H200"
    assert "no outcome yet" in write_report(run).read_text()


def test_the_report_is_the_only_file_that_is_written(run):
    before = set(run.path.rglob("*"))
    assert write_report(run) == run.report
    assert set(run.path.rglob("*")) - before == {run.report}


def test_the_page_loads_nothing_from_anywhere(run):
    page = report(run)
    assert not any("src" in attributes for _, attributes in page.elements)
    assert {tag for tag, attributes in page.elements if "href" in attributes} == {"a"}
    assert page.tags["link"] == page.tags["iframe"] == 0
    policies = [attributes["content"] for tag, attributes in page.elements if "http-equiv" in attributes]
    assert policies[0].startswith("default-src 'none'")


def test_plotly_is_embedded_once_however_many_figures_there_are(run):
    html = write_report(run).read_text()
    assert html.count('id="plotly"') == 1
    assert Page(run.report).tags["figure"] > 1


def test_the_page_is_titled_after_the_run_and_every_figure_is_described(run):
    page = report(run)
    assert f"{run.name} · training report" in page.text
    labels = [attributes["aria-label"] for _, attributes in page.elements if attributes.get("role") == "img"]
    assert len(labels) == page.tags["figure"]
    assert all(label.partition(". ")[2] for label in labels)
    first, *_, last = step_records()
    assert labels[0] == f"Loss. Steps 1 to 40: training loss from {first.loss:.4f} to {last.loss:.4f} nats per token."


def test_a_loss_has_the_unit_of_the_objective(run, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, MASKED.name, MASKED)
    config = RunConfig.load(run.config, ["training.objective=masked"])
    run.config.write_text(config.to_yaml())
    text = report(run).text
    assert "2.4518 nats per kept token" in text
    assert "nats per token" not in text


def test_headline_numbers_match_the_records(run):
    text = report(run).text
    assert "2.4518 nats per token" in text
    assert "0.7009 below the byte-unigram entropy of 3.1527." in text
    assert "0.0644 above the byte-bigram entropy of 2.3874." in text
    assert "1,354 ± 17 tokens/s" in text
    assert "No MFU: the peak FLOP/s of this device is unknown." in text
    assert "1.84 GiB measured" in text


def test_on_a_shared_machine_the_training_steps_make_the_headline(run):
    assert "waited for a core" not in report(run).text
    timed = replace(BENCHMARK, num_threads=2, waiting_threads=2.24, mfu=2.27)
    write_json(run.benchmark, timed)
    text = report(run).text
    rates = [record.tokens_per_second for record in step_records()]
    assert f"{median(rates):,.0f} tokens/s" in text
    assert f"Median of the {len(rates)} training steps." in text
    assert "in the timed steps, while threads waited for a core 112% of the time: the machine was shared." in text
    assert "227.0%" not in text  # the utilisation is that of training too


def test_predictions_of_memory_carry_their_signed_error(run):
    write_json(run.training, replace(SUMMARY, memory_baseline_bytes=0, memory_peak_bytes=ESTIMATE["peak_bytes"] // 2))
    write_json(run.dry_run, DRY_RUN | {"phases": {"backward": {"weights": 3}}, "peak_bytes": 3})
    text = report(run).text
    assert "Estimated 1.70 GiB (+100.0 %)." in text
    assert "Rehearsed 3 B (-100.0 %)." in text


def test_a_run_that_ended_early_says_why(run):
    write_json(run.training, replace(SUMMARY, ended_early="no lower held-out loss in 3 evaluations"))
    assert "Ended early: no lower held-out loss in 3 evaluations." in report(run).text


def test_a_run_with_experts_shows_their_routing(run, tmp_path):
    assert "Routing to experts" not in report(run).text
    records = [replace(record, measured={"expert_load": 1.25, "router_entropy": 0.5}) for record in step_records()]
    page = report(write_run(tmp_path / "experts", records=records))
    assert "Routing to experts" in page.text
    captions = " ".join(str(attributes) for _, attributes in page.elements)
    assert "the busiest expert got 1.25 times the tokens of an average one; the routers' entropy was 0.5" in captions
    assert "Experts of each layer" not in page.text


def test_a_run_with_experts_shows_what_each_of_them_got_where_it_was_recorded(tmp_path):
    shares = {"0": (0.25, 0.75, 0.0, 0.0), "2": (0.25, 0.25, 0.3, 0.2)}
    first, *others = [
        replace(record, measured={"expert_load": 3.0, "router_entropy": 0.5}) for record in step_records()
    ]
    page = report(write_run(tmp_path / "experts", records=[replace(first, expert_shares=shares), *others]))
    captions = " ".join(str(attributes) for _, attributes in page.elements)
    assert "At step 1, 2 experts got no token; the busiest is in layer 0, with 75.0% of the tokens there." in captions
    assert "balance bias" not in captions
    assert "Other metrics" not in page.text


def test_a_run_with_balance_biases_says_how_large_they_are(tmp_path):
    biases = {"balance_bias/layer_0": 0.125, "balance_bias/layer_2": 0.25}
    measured = {"expert_load": 3.0, "router_entropy": 0.5} | biases
    shares = {"0": (0.25, 0.75), "2": (0.5, 0.5)}
    records = [replace(record, measured=measured, expert_shares=shares) for record in step_records()]
    page = report(write_run(tmp_path / "experts", records=records))
    captions = " ".join(str(attributes) for _, attributes in page.elements)
    assert "The largest balance bias is 0.25, in layer 2." in captions
    assert "Other metrics" not in page.text


def test_a_metric_without_a_figure_of_its_own_is_drawn_and_the_ones_too_many_are_named(run, tmp_path):
    assert "Other metrics" not in report(run).text
    values = {f"metric_{number}": 0.5 * number for number in range(8)}
    page = report(write_run(tmp_path / "more", records=[replace(one, measured=values) for one in step_records()]))
    assert "Other metrics" in page.text
    assert "Not drawn, but in the metrics: metric_6, metric_7." in page.text
    captions = " ".join(str(attributes) for _, attributes in page.elements)
    assert "metric_4 2, metric_5 2.5." in captions


def test_a_run_on_pairs_of_answers_shows_their_rewards(run, tmp_path):
    assert "Rewards of the answers" not in report(run).text
    values = {"reward_chosen": 0.5, "reward_rejected": -1.0, "reward_margin": 1.5, "reward_accuracy": 0.75}
    page = report(
        write_run(tmp_path / "pairs", records=[replace(record, measured=values) for record in step_records()])
    )
    assert "Rewards of the answers" in page.text
    captions = " ".join(str(attributes) for _, attributes in page.elements)
    assert "exceeded that of the rejected ones by 1.5, and it was higher in 75.0% of the pairs" in captions
    assert "KL" not in captions


@pytest.mark.parametrize(
    ("objective", "unit", "told"),
    [
        ("dpo", "nats/pair", "Mean over 12 held-out pairs. In 75.0% of them the chosen answer has the higher reward."),
        ("kto", "utility/answer", "Mean over 12 held-out answers. In 75.0% of them the reward is right."),
        ("orpo", "nats/pair", "Mean over 12 held-out pairs. In 75.0% of them the chosen answer has the higher reward."),
    ],
)
def test_a_run_on_answers_is_told_in_answers_first_of_all(tmp_path, objective, unit, told):
    values = {"reward_margin": 1.5, "reward_accuracy": 0.9, "eval_reward_margin": 0.5, "eval_reward_accuracy": 0.75}
    run = write_run(tmp_path / "run", records=[replace(record, measured=values) for record in step_records()])
    run.config.write_text(run.config.read_text().replace("objective: next_token", f"objective: {objective}"))
    summary = replace(SUMMARY, unigram_entropy=None, bigram_entropy=None, loss_unit=unit, eval_tokens=12)
    write_json(run.training, replace(summary, measured={"eval_reward_margin": 0.5, "eval_reward_accuracy": 0.75}))
    words = {"pair": "pairs", "answer": "labelled answers"}[unit.partition("/")[2]]
    write_json(run.data, read_json(run.data) | {"unit": words, "num_sequences": 48})
    page = report(run)
    assert told in page.text
    assert "entropies" not in page.text
    assert f"Data sample, 120 {words}, 65.00K tokens" in page.text
    assert f"Global batch 8 sequences, about 20 {words}" in page.text
    assert f"{words.capitalize()} 120 to train on, 7 held out" in page.text
    assert f"Batch 8 sequences, about 20 {words} a step, 16,384 tokens; 120 {words} fill 48 sequences" in page.text
    captions = " ".join(str(attributes) for _, attributes in page.elements)
    assert "at step 40, the margin was 0.5 and the accuracy 75.0%" in captions
    titles = [panel.title for panel in page_of_run._panels(RunContents.read(run))]
    assert titles[:2] == ["Loss", "Rewards of the answers"]


def test_a_run_with_a_reference_shows_how_far_the_model_is_from_it(run, tmp_path):
    values = {"reward_margin": 1.5, "reward_accuracy": 0.75, "kl": -2.5}
    page = report(
        write_run(tmp_path / "pairs", records=[replace(record, measured=values) for record in step_records()])
    )
    captions = " ".join(str(attributes) for _, attributes in page.elements)
    assert "The KL divergence from the reference was about -2.5 nats" in captions


def test_a_run_on_labelled_answers_shows_the_last_step_that_had_both_labels(run, tmp_path):
    both = {"reward_chosen": 0.5, "reward_rejected": -1.0, "reward_margin": 1.5, "reward_accuracy": 0.75, "kl": 0.25}
    good = {"reward_chosen": 0.5, "reward_accuracy": 1.0, "kl": 2.0}
    *before, last = step_records()
    of_run = write_run(
        tmp_path / "kto", records=[*(replace(one, measured=both) for one in before), replace(last, measured=good)]
    )
    of_run.config.write_text(of_run.config.read_text().replace("objective: next_token", "objective: kto"))
    page = report(of_run)
    captions = " ".join(str(attributes) for _, attributes in page.elements)
    assert "exceeded that of the bad ones by 1.5, and 75.0% of the answers were on their side" in captions
    assert "the prompts of other answers, at least 0" in page.text


def test_a_known_peak_rate_gives_the_mfu(run):
    write_json(run.benchmark, replace(BENCHMARK, mfu=0.4123))
    assert "41.2% MFU" in report(run).text


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cpu", "The measurement is the peak of the memory in use, as the C library counts it, less"),
        ("cuda", "The measurement is the peak of the memory allocated by PyTorch on the GPU, less"),
        ("auto", "allocated by PyTorch on the GPU, or on the CPU the memory in use, as the C library counts it, less"),
    ],
)
def test_the_caption_names_the_memory_measurement(run, device, said):
    run.config.write_text(run.config.read_text().replace("device: cpu", f"device: {device}"))
    assert said in report(run).text


def test_on_a_cpu_predictions_count_the_checkpoint_copy_and_bars_go_on_with_the_whole_process(run):
    parts = {"process": 500 * MIB, "tensors": ESTIMATE["peak_bytes"], "freed memory": 70 * MIB, "checkpoint copy": GIB}
    host = {"on_cuda": False, "num_ranks": 2, "parts": parts, "node_bytes": 8 * GIB}
    write_json(run.estimate, ESTIMATE | {"host": host})
    taken = {"memory_reserved_bytes": 4 * GIB, "memory_process_bytes": GIB}
    write_json(run.training, replace(SUMMARY, memory_baseline_bytes=0, memory_peak_bytes=2 * GIB, **taken))
    text = report(run).text
    alive = ESTIMATE["peak_bytes"] + GIB
    assert f"Estimated {format_bytes(alive)} (+{100 * (alive / (2 * GIB) - 1):.1f} %)." in text
    assert "The whole process took 4.00 GiB" in text
    assert "Host memory of a node: about 8.00 GiB; each of 2 ranks takes process 500.00 MiB" in text
    contents = RunContents.read(run)
    assert contents.measured_outside == {"process": GIB, "freed memory": GIB}
    panel = memory_comparison_panel(contents)
    ends = {label: sum(x for bar in panel.figure.data for x, y in zip(bar.x, bar.y, strict=True) if y.startswith(label))
            for label in ("estimated", "measured")}  # fmt: skip
    assert ends["measured"] == pytest.approx(4)
    assert ends["estimated"] * GIB == pytest.approx(alive + 570 * MIB)


def test_a_finished_run_asks_for_nothing(run):
    text = report(run).text
    assert "Next:" not in text
    assert "--resume" not in text
    assert "Attempts" not in text


def test_a_failed_run_shows_its_reason_the_next_action_and_its_attempts(tmp_path):
    text = report(write_run(tmp_path / "failed", outcome=FAILED, records=step_records(23))).text
    assert "Ended as oom after step 23" in text
    assert FAILED.reason in text
    assert f"Next: {FAILED.next_action}" in text
    assert f"4711 — {FAILED.ended_at} preempted 1 to 11" in text
    assert f"4712 — {FAILED.ended_at} oom 12 to 23" in text


def test_an_unfinished_run_shows_its_last_sign_of_life_and_how_to_continue(tmp_path):
    run = write_run(tmp_path / "my run")
    run.outcome.unlink()
    text = report(run).text
    assert "Job 1234 (local) was submitted from login1" in text
    assert "Last sign of life: step 40" in text
    assert f"training-infra train --run-dir '{run.path}' --resume" in text


def test_settings_that_differ_from_their_defaults_stand_out(run):
    run.config.write_text(RunConfig().with_overrides("training.seed=12345").to_yaml())
    page = report(run)
    assert [attributes.get("class") for tag, attributes in page.elements if tag == "tr"].count("emphasised") == 1
    assert "Settings 1 of " in page.text
    assert "training.seed 12345" in page.text


def test_a_page_names_ranks_that_fell_behind_before_a_start_and_escapes_them(run):
    slow = NamedRank(3, HOSTILE, "a device", ("a copy in its memory took 2 ms",), slows_training=True)
    unread = "rank 0 on n0 could not measure a write"
    append_preflight(run, PreflightRecord("2026-11-29T20:00:00+00:00", 0.1, (), (slow,), (unread,)))
    text = report(run).text
    assert f"before the start at 2026-11-29T20:00:00+00:00 : {slow}" in text
    assert unread in text


def test_a_page_warns_that_the_base_weights_are_random(run):
    assert "are random" not in report(run).text
    run.config.write_text(RunConfig.from_mapping({"strategy": "lora"}).to_yaml())
    assert "Base weights are random, so the trained model will be useless" in report(run).text


def test_the_page_begins_with_data_batch_and_commit(run):
    header = report(run).text.partition("Held-out loss")[0]
    for fact in (
        "Parameters 50.14M",
        "Tokenizer bytes",
        "Data sample, 120 documents, 65.00K tokens",
        "Sequence length 2,048 tokens",
        "Global batch 8 sequences",
        "Microbatch 4 sequences",
        "Gradient accumulation 2 microbatches",
        "Commit 0123456789ab-dirty",
    ):
        assert fact in header


def test_lines_left_out_of_the_data_are_counted_and_quoted(run):
    text = report(run).text
    assert "Lines left out 3: 2 not JSON, 1 no text" in text
    assert "texts.jsonl:17: not JSON (Expecting value)" in text


def test_links_lead_to_logs_checkpoints_and_records_from_the_run_directory(tmp_path):
    run = write_run(tmp_path / "a run#1")
    page = report(run)
    links = [unquote(attributes["href"]) for tag, attributes in page.elements if tag == "a"]
    assert {"logs/rank-00000.log", "logs/", "checkpoints/step-00000020/", "config.yaml"} <= set(links)
    assert all((run.path / link).exists() for link in links)
    assert "step 20 (incomplete)" in page.text


def test_a_failed_run_shows_the_end_of_the_log_and_the_command_that_goes_on(tmp_path):
    run = write_run(tmp_path / "failed", outcome=replace(FAILED, reason="rank 1: it asked for 2.1 GiB"))
    page = report(run)
    assert f"Continue with: training-infra train --run-dir {run.path} --resume" in page.text
    assert page.text.count("a line of rank 1") == 20
    assert "an earlier attempt" not in page.text
    assert "The end of logs/rank-00001.log" in page.text


@pytest.mark.parametrize(
    ("status", "next_action"),
    [("non-finite", "start a new run"), ("preempted", "nothing to do: Slurm has queued the job again")],
)
def test_a_run_that_should_not_be_continued_by_hand_shows_no_command(tmp_path, status, next_action):
    outcome = replace(FAILED, status=status, next_action=next_action)
    assert "Continue with" not in report(write_run(tmp_path / "ended", outcome=outcome)).text


def test_the_page_describes_the_data_with_its_notes(run):
    assert "Data 120 documents; loss on 40 of 90 tokens. 3 of them lose their end." in report(run).text


def test_a_run_on_the_callers_dataloader_reports_no_missing_data_statistics(run):
    run.data.unlink()
    run.config.write_text(RunConfig().with_overrides("data.source=dataloader").to_yaml())
    assert "statistics of the data" not in report(run).text


MISSING = {
    "config": "No configuration yet: config.yaml has not been written.",
    "plan": "No plan yet: plan.json has not been written.",
    "environment": "No check of the environment yet: environment.json has not been written.",
    "estimate": "No memory estimate yet: estimate.json has not been written.",
    "dry_run": "No dry run yet: dry_run.json has not been written.",
    "data": "No statistics of the data yet: data.json has not been written.",
    "training": "No training summary yet: training.json has not been written.",
    "benchmark": "No benchmark yet: benchmark.json has not been written.",
    "outcome": "No outcome yet: outcome.json has not been written.",
}


@pytest.mark.parametrize("field", MISSING)
def test_a_missing_piece_is_named_in_its_place(run, field):
    getattr(run, field).unlink()
    assert MISSING[field] in report(run).text


@pytest.mark.parametrize("field", MISSING)
@pytest.mark.parametrize(
    "damage", ["[1, 2]", *map(nightly, ("", "\x00 [", '{"schema_version": 1}', '{"schema_version": 99}', "\xff"))]
)
def test_a_damaged_piece_never_prevents_the_report(run, field, damage):
    getattr(run, field).write_text(damage, encoding="latin-1")
    assert run.name in report(run).text


def test_a_damaged_piece_is_named(run):
    run.estimate.write_text('{"schema_version": 1, "phases": {}}')
    run.outcome.write_text("{")
    text = report(run).text
    assert "No memory estimate to show: estimate.json is damaged" in text
    assert "No outcome to show: outcome.json is damaged" in text


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "sizes", [{"pp": 10_000_000}, {"pp": 2, "num_chunks": 1_000_000, "schedule": "interleaved"}, {"schedule": "none"}]
)
def test_a_plan_that_no_run_can_have_is_named_and_not_drawn(run, sizes):
    write_json(run.plan, ParallelPlan().as_dict() | {"num_microbatches": 4} | sizes)
    assert f"No plan to show: plan.json is damaged ({run.plan} is damaged (" in report(run).text


@pytest.mark.timeout(60)
def test_the_largest_schedule_is_not_built_where_no_step_of_it_is_recorded(run):
    write_json(run.plan, ParallelPlan(pp=256, num_microbatches=8192).as_dict())
    for position in range(256):
        write_lane(run, position, LaneRecord(("0F0",), (0.0,), (1.0,)))
    assert "No timeline: a run records the actions of one step" in report(run).text


def test_a_profile_that_does_not_add_up_is_not_drawn(run):
    write_json(run.estimate, ESTIMATE | {"peak_bytes": ESTIMATE["peak_bytes"] + 1})
    assert "the categories of its peak phase do not add up to its peak" in report(run).text


def test_damaged_metrics_leave_the_rest_of_the_report(run):
    next(run.metrics.glob("part-*.parquet")).write_bytes(b"PAR1 cut short")
    text = report(run).text
    assert "No metrics to show: metrics is damaged" in text
    assert "1.84 GiB measured" in text


def test_a_new_run_has_a_report(tmp_path):
    run = RunDirectory(tmp_path / "new")
    run.create()
    page = report(run)
    assert "No metrics yet" in page.text
    assert all(sentence in page.text for sentence in MISSING.values())
    assert page.tags["script"] == 2


def test_users_text_is_never_markup(tmp_path):
    plain, hostile = (
        report(written_by(tmp_path / name, text))
        for name, text in (("plain", "plain"), (HOSTILE.replace("/", ""), HOSTILE))
    )
    assert hostile.tags == plain.tags
    assert hostile.text.count(HOSTILE) >= 9


def written_by(path, text):
    """Write a failed run with ``text`` in place of all words of a user or a machine."""
    attempt = ATTEMPT | {text: text, "status": text, "reason": text, "job_id": text}
    run = write_run(path, outcome=replace(FAILED, reason=text, next_action=text, attempts=(attempt, attempt)))
    run.config.write_text(yaml.safe_dump({"model": text, "data": {"source": text}}))
    write_json(run.plan, {text: text})
    write_json(run.environment, {"errors": [text], "warnings": [text], "facts": {text: text}})
    write_json(run.estimate, ESTIMATE | {"device": text, "notes": [text]})
    write_json(run.benchmark, replace(BENCHMARK, device=text))
    write_json(run.data, DATA | {"summary": text, "notes": [text], "bad_lines": {text: 1}, "bad_line_examples": [text]})
    log_path(run, 0).write_text(f"=== job 1\n{text}\n")
    return run


def test_a_run_whose_model_cannot_be_had_has_a_page(run):
    config = yaml.safe_load(run.config.read_text()) | {"model": "gopher://example/model"}
    run.config.write_text(yaml.safe_dump(config))
    assert "gopher://example/model" in report(run).text


def test_a_missing_directory_is_refused_and_not_created(tmp_path):
    with pytest.raises(RunDirectoryError, match="is not a directory; give the directory of a run"):
        write_report(RunDirectory(tmp_path / "absent"))
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_is_an_error_that_names_it(run):
    run.report.mkdir()
    with pytest.raises(RunDirectoryError, match=r"cannot write .*report\.html"):
        write_report(run)
    assert list(run.path.glob(".report*")) == []


@pytest.mark.root
def test_a_page_on_a_full_disk_says_how_much_room_it_needs(disk_of):
    run = RunDirectory(disk_of("1m") / "run")
    run.create()
    with pytest.raises(
        RunDirectoryError, match=r"the disk of .*/run is full: over \d.* needed, \d.* free; free some space"
    ):
        write_report(run)


def test_the_time_of_every_attempt_is_in_the_table_of_goodput(run):
    assert "Goodput" not in report(run).text
    end = step_records()[-1].time
    for begin in (end - 1000.0, end + 8.0):
        marks = Activity("", begin, "queue"), Activity("", begin + 4.0), Activity("", begin + 5.0, "steps")
        append_activities(run, *marks)
    assert "Attempt Wall time Progress" in report(run).text
    assert "1 16 min 40 s" in report(run).text
    assert "2 13.0 s" in report(run).text
    assert "Part Before attempt 2 What shortens it All 13.0 s" in report(run).text
    assert "Until it was submitted again 8.0 s" in report(run).text


def test_an_older_report_is_replaced(run):
    write_report(run)
    write_json(run.outcome, replace(FINISHED, status="cancelled"))
    assert "cancelled" in report(run).text


def test_stages_and_other_data_are_lines_in_the_figures_of_losses_and_sentences_below_them(tmp_path):
    names = ("code", "wiki")
    records = [replace(one, eval_losses=dict.fromkeys(names, 2.0)) if one.eval_loss else one for one in step_records()]
    run = write_run(tmp_path / "run", records=records)
    stages = [{"from_tokens": 16_384 * step, "weights": {"code": 3}} for step in (10, 90)]
    sources = {name: {"path": name, "weight": 1} for name in names}
    config = {
        "data": {"sources": sources, "stages": stages},
        "training": {"steps": 40, "batch_size": 8, "seq_len": 2048},
    }
    run.config.write_text(RunConfig.from_mapping(config).to_yaml())
    record_data_change(run, DataChange(176, {"code": 44}, new=("wiki",), changed=(), left=(), step=22))
    named_rows = {"code": HeldOutRows.of([6.0] * 3, [3] * 3), "wiki": HeldOutRows.of([1.0], [3])}
    write_json(run.training, replace(SUMMARY, named_eval_rows=named_rows))
    loss, named = panels_of_learning(RunContents.read(run))
    weighs = "Names weigh in the held-out loss as they have held-out tokens, whatever their shares in training: "
    assert named.notes == [f"{weighs}code 75.0%, wiki 25.0%."]
    assert f"{weighs}code 75.0%, wiki 25.0%." in report(run).text.partition("Throughput")[0], "on the card too"
    for panel in (loss, named):
        lines = {one.text: line.x0 for one, line in zip(panel.figure.layout.annotations, vertical(panel), strict=True)}
        assert lines == {"stage 2": 10, "other data": 22}
    assert "Stage 2 begins after step 10 (163.84K tokens): code 75 %, wiki 25 %." in loss.notes
    assert "The data changed after step 22: code goes on after 44 sequences; wiki is new." in loss.notes


def vertical(panel):
    return [shape for shape in panel.figure.layout.shapes if shape.x0 == shape.x1]
