"""``training-infra generate`` as a user meets it."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.wide, pytest.mark.xdist_group("generate")]

SIZES = ("hidden_size=64", "num_layers=2", "ffn_size=128", "head_dim=16", "vocab_size=512")
SMALL = [
    *(f"--set=architecture.{size}" for size in SIZES),
    "--device=cpu",
    "--seq-len=32",
    "--batch-size=2",
]


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Run the command line in a directory that holds a run, ``mine``."""
    path = tmp_path_factory.mktemp("generate")

    def run(*arguments, **options):
        command = [sys.executable, "-m", "training_infra.cli", *arguments]
        return subprocess.run(command, cwd=path, capture_output=True, check=False, **options)

    trained = run("train", *SMALL, "--steps=2", "--run-dir=mine")
    assert trained.returncode == 0, trained.stderr
    return run


def test_the_text_is_all_of_standard_output_and_the_prompt_may_come_from_standard_input(shell):
    given = shell("generate", "mine", "--prompt", "def é", "--max-new-tokens=20", "--device=cpu")
    assert given.returncode == 0, given.stderr
    assert given.stderr.decode() == "mine/checkpoints/step-00000002 in fp32 on cpu, tokenizer bytes\n"
    assert given.stdout.endswith(b"\n")
    read = shell("generate", "mine", "--prompt=-", "--max-new-tokens=20", "--device=cpu", input="def é\n".encode())
    assert read.stdout == given.stdout


def test_a_seed_repeats_a_text(shell):
    drawn = ["generate", "mine", "--prompt=a", "--temperature=1", "--top-k=200", "--top-p=0.95", "--device=cpu"]
    first, again, other = (shell(*drawn, f"--seed={seed}").stdout for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["mine", "--prompt="], "error: the prompt is empty; give some text to continue"),
        (
            ["mine", "--prompt=a", "--top-p=2", "--temperature=1"],
            "error: top_p=2: use a probability above 0 and up to 1",
        ),
        (["nowhere", "--prompt=a"], "error: nowhere is no folder here; name a run's directory, or a folder of Hugging"),
        (["mine"], "error: the following arguments are required: --prompt"),
    ],
)
def test_a_wrong_request_is_one_line(shell, arguments, line):
    ended = shell("generate", *arguments, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(line)
    assert ended.stderr.count("\n") == 1
