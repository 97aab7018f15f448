"""Command lines: any words end with an exit code of our own and one line for each error."""

import pytest
from malformed import NUMBERS, WORDS, cases, keep_the_law, naming
from synthetic_run import write_run

from training_infra.cli import main
from training_infra.flags import FLAGS

COMMANDS = (
    "models", "estimate-memory", "train", "dry-run", "benchmark", "profile", "sweep", "report", "compare", "logs",
    "cancel", "export-hf", "generate", "evaluate", "validate-environment", "tokenize", "", "nonsense",
)  # fmt: skip
OTHERS = (
    "--json", "--debug", "--config", "--set", "--resume", "--run-dir", "--out", "--step", "--rank", "--lines",
    "--tokens", "--dtype", "--prompt", "--temperature", "--top-k", "--help", "--help-all", "--markdown",
    "--sweep-dir", "--objective", "--history", "--predict", "--", "-", "-x",
)  # fmt: skip


SAFE = [word for word in WORDS if not word.startswith(("/", "~", ".."))]
"""Values that name no file of this machine, which a flag may ask to write."""


def words_of(rng, run):
    """Return a command with flags and values that name nothing real: the command never gets to work."""
    flags = [name for flag in FLAGS for name in (flag.name, *flag.also)]
    words = [rng.choice(COMMANDS)]
    words += [rng.choice(rng.choice((flags, OTHERS, SAFE, NUMBERS))) for _ in range(rng.randrange(1, 6))]
    if words[0] in {
        "train",
        "benchmark",
        "dry-run",
        "profile",
        "sweep",
        "generate",
        "validate-environment",
        "tokenize",
    }:
        words += ["--device", "nonsense", "--config", "/nonexistent.yaml"]  # they would start real work
    if words[0] in {"report", "logs", "cancel", "compare"} and rng.random() < 0.5:
        words.append(str(run.path))
    return [str(word).replace("\0", "").replace("\ud800", "\udcff") for word in words]  # as the system gives them


def test_any_words_end_with_an_exit_code_and_lines(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)

    def call(words):
        capsys.readouterr()
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code
        errors = capsys.readouterr().err
        assert code in {0, 1, 2, 3, 4}, code
        assert "Traceback" not in errors
        assert all(line.startswith("error: ") for line in errors.splitlines() if code not in {0, None}), errors

    for number, rng in cases("command line"):
        words = [word for word in words_of(rng, run) if word != "--debug"]
        with naming(number):
            keep_the_law([lambda words=words: call(words)], tmp_path, processes=True)


@pytest.mark.parametrize("word", ["a\nb", "\x1b[31mred", "\ud800"])
def test_control_characters_of_a_word_do_not_reach_the_terminal(word, capsys):
    assert main(["report", word]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and errors.rstrip("\n").isprintable()
