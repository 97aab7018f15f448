"""``training-infra generate`` as a user meets it."""

import json
import os
import pty
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


@pytest.mark.nightly
def test_a_seed_repeats_a_text(shell):
    drawn = ["generate", "mine", "--prompt=a", "--temperature=1", "--top-k=200", "--top-p=0.95", "--device=cpu"]
    first, again, other = (shell(*drawn, f"--seed={seed}").stdout for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["mine", "--prompt="], "error: the prompt is empty; give some text"),
        (
            ["mine", "--prompt=a", "--top-p=2", "--temperature=1"],
            "error: top_p=2: use a probability above 0 and up to 1",
        ),
        (["nowhere", "--prompt=a"], "error: nowhere is no folder here; name a run's directory, or a folder of Hugging"),
        (["mine"], "error: nothing to continue; give a text with --prompt, or converse with --chat"),
        (["mine", "--prompt=a", "--system=b"], "error: --system has no effect without --chat"),
        (["mine", "--chat"], "error: mine/checkpoints/step-00000002 has no chat template"),
    ],
)
def test_a_wrong_request_is_one_line(shell, arguments, line):
    ended = shell("generate", *arguments, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(line)
    assert ended.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def chatting(shell, tmp_path_factory):
    """A run on conversations, whose model has learnt next to nothing and hardly ends an answer."""
    folder = tmp_path_factory.mktemp("chat")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 9}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (folder / "template").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    settings = (f"data.source={folder / 'chats.jsonl'}", f"data.chat_template={folder / 'template'}")
    sizes = ("architecture.max_context=4096", "data.validation_fraction=0")
    flags = [f"--set={setting}" for setting in (*settings, *sizes)]
    trained = shell("train", *SMALL, *flags, "--steps=2", f"--run-dir={folder / 'run'}")
    assert trained.returncode == 0, trained.stderr
    return folder / "run"


@pytest.mark.nightly
def test_lines_of_standard_input_are_turns_with_a_system_prompt_before_them(shell, chatting):
    asked = ["generate", str(chatting), "--chat", "--max-new-tokens=1", "--device=cpu"]
    answered = shell(*asked, "--system=Be brief.", input=b"one\ntwo\n")
    assert answered.returncode == 0, answered.stderr
    assert answered.stderr.count(b"\n") == 1
    assert len(answered.stdout.splitlines()) >= 2


@pytest.mark.nightly
def test_ctrl_c_ends_an_answer_and_ctrl_d_the_conversation(chatting):
    command = [sys.executable, "-m", "training_infra.cli", "generate", str(chatting), "--chat", "--device=cpu"]
    process, terminal = pty.fork()
    if process == 0:
        os.execv(command[0], [*command, "--max-new-tokens=4000"])
    shown = read_up_to(terminal, b"> ")
    os.write(terminal, b"q\n")
    shown += read_up_to(terminal, b"q\r\n") + os.read(terminal, 1)
    os.write(terminal, b"\x03")
    shown += read_up_to(terminal, b"\n> ")
    os.write(terminal, b"\x04")
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"Traceback" not in shown


def read_up_to(terminal, mark):
    shown = b""
    while mark not in shown:
        shown += os.read(terminal, 1)
    return shown
