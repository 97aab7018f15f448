"""The model card of an export: what the records of its run say, and nothing else."""

import os
from dataclasses import asdict, replace

import pytest
import yaml
from synthetic_run import DATA, SUMMARY, write_run

from llama_core.config.run import RunConfig
from llama_core.data.statistics import SourceStatistics
from llama_core.records.activity import Activity, append_activities
from llama_core.records.checkpoints import STATE
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluations import Score, write_scores
from llama_core.records.files import write_json
from llama_core.records.held_out import HeldOutRows
from llama_core.records.hub import HubRecord, HubSource
from llama_core.runs.export_source import ExportSource
from llama_core.runs.model_card import model_card

BEGIN = 1_795_000_000.0
STEPS = 40


@pytest.fixture
def export(tmp_path):
    """The last checkpoint of a run on four GPUs that began with weights of the Hub."""
    run = write_run(tmp_path / "mine")
    checkpoint = run.checkpoints / "step-00000040"
    checkpoint.mkdir()
    write_json(checkpoint / STATE, {"tokens": 655_360})
    plan = {"dp_shard": 4, "zero_stage": 3, "microbatch_size": 1, "num_microbatches": 2, "world_size": 4}
    write_json(run.plan, plan)
    queued, began = Activity("queued", BEGIN - 7200, "queue"), Activity("starting", BEGIN)
    append_activities(run, queued, began, Activity("stopped", BEGIN + 3 * 3600, "stopped"))
    sources = (
        HubSource("training.init_from", "meta/base@v2", "0" * 40, 4),
        HubSource("data.sources.wiki.path", "org/wiki/data/train-*", "1" * 40, 9),
    )
    write_json(run.hub, HubRecord(sources))
    mixed = (
        SourceStatistics("wiki", 0.75, 100, 900, 30, 5, 50, 1.5),
        SourceStatistics("own", 0.25, 50, 300, 10, 0, 0, None),
    )
    write_json(run.data, DATA | {"sources": [asdict(one) for one in mixed], "stages": []})
    rows = HeldOutRows((160.0, 150.0), (64, 64))
    write_json(run.training, replace(SUMMARY, eval_rows=rows))
    write_scores(run, [score("arc_easy", STEPS, 0.5)])
    write_scores(run, [score("piqa", 20, 0.25)])
    settings = {"launch": {"device": "cuda", "gpu_type": "h100"}, "model": "tiny_llama3_50m"}
    training = {"init_from": str(tmp_path / "base"), "steps": STEPS, "learning_rate": 2e-4, "z_loss": 1e-4}
    config = RunConfig.from_mapping(settings | {"training": training})
    return ExportSource(run, [checkpoint], config, "bf16", merged=False)


def score(task, step, value):
    return Score(step, 1, task, "acc", value, 0.01, True, 200, "1", "5-shot", "2026-11-21T10:00:00+00:00")


def parts(card):
    """Return the metadata of a card, and its rows by their first cell."""
    _, metadata, text = card.split("---\n", 2)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return yaml.safe_load(metadata), {row[0]: row[1:] for row in rows}


def test_a_card_has_what_the_records_say(export):
    metadata, rows = parts(model_card(export, "llama3.2"))
    assert metadata == {
        "license": "llama3.2",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "meta/base",
        "base_model_relation": "finetune",
        "datasets": ["org/wiki"],
    }
    assert rows["Weights"] == ["step 40, in bf16"]
    assert rows["Began with"] == ["meta/base"]
    assert rows["wiki (org/wiki)"] == ["75 %", "1.5"]
    assert rows["own"] == ["25 %", "unknown"]
    assert rows["tokens"] == ["655,360 until step 40"]
    assert rows["learning_rate"] == ["0.0002"]
    assert rows["z_loss"] == ["0.0001"]  # not the default
    assert rows["held-out"] == ["2.4219 ± 0.1562 nats/token, over 128 tokens"]
    assert rows["arc_easy (5-shot)"] == ["acc", "0.5000 ± 0.0200", "200"]
    assert "piqa (5-shot)" not in rows  # of another step


def test_energy_is_at_most_that_of_the_devices_while_the_run_held_them(export):
    _, rows = parts(model_card(export, None))
    assert rows["Devices"] == ["4 x H100 SXM 80 GB"]
    assert rows["Time with devices"] == ["3 h 00 min of 5 h 00 min"]
    assert rows["Device hours"] == ["12"]
    assert rows["Energy, estimated"][0].startswith("8.4 kWh at most: 700 W")  # 12 h x 700 W


def test_nothing_is_made_up(export, tmp_path):
    run = export.run
    for record in (run.hub, run.data, run.training, run.environment, run.plan):
        record.unlink()
    metadata, rows = parts(model_card(export, None))
    assert "license" not in metadata
    assert "base_model" not in metadata
    assert "datasets" not in metadata
    assert rows["Began with"] == ["other weights, which no record of the run names"]
    assert "Energy, estimated" not in rows


def test_no_path_of_the_machine_is_on_a_card(export, tmp_path):
    assert str(tmp_path) not in model_card(export, None)


def test_a_chat_template_is_told_by_its_name_and_not_by_its_path(export):
    template = "/home/somebody/turns.jinja"
    summary = f"9 conversations to train on, template: {template}"
    write_json(export.run.data, DATA | {"chat_template": template, "summary": summary})
    card = model_card(export, None)
    assert "template: turns.jinja" in card
    assert "somebody" not in card


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("sample", "The source code of Python's standard library."),
        ("/data/own.jsonl", "One source, which no record of the run names."),
    ],
)
def test_a_source_is_told_if_it_is_everybodys(export, source, said):
    export.run.data.unlink()
    export.run.hub.unlink()
    config = export.config.model_copy(update={"data": export.config.data.model_copy(update={"source": source})})
    assert said in model_card(replace(export, config=config), None).splitlines()


def test_markup_in_a_record_is_text(export):
    write_json(export.run.data, DATA | {"summary": "a text begins with <s> and ends with </s>"})
    assert r"begins with \<s\> and ends with \</s\>." in model_card(export, None)


@pytest.mark.parametrize(
    ("name", "title"), [(b"bad\xff", r"# bad\\udcff"), (b"two\nlines", "# two lines"), (b"[x](y)*", r"# \[x\](y)\*")]
)
def test_any_name_of_a_run_is_a_title_of_one_line(export, tmp_path, name, title):
    renamed = replace(export, run=RunDirectory(tmp_path / os.fsdecode(name)))
    assert title in model_card(renamed, None).encode().decode().splitlines()


def test_a_mean_of_checkpoints_has_no_scores(export):
    both = replace(export, checkpoints=[export.run.checkpoints / "step-00000020", *export.checkpoints])
    card = model_card(both, None)
    assert "the mean of the checkpoints of steps 20, 40" in card
    assert "arc_easy" not in card
