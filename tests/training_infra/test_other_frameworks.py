import json
import subprocess
import sys

import pytest

from training_infra import cli

TOML = "[model]\nflavor = '8B'\n[training]\nlocal_batch_size = 1\nseq_len = 8192\nsteps = 10\n"
SCRIPT = """
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 8192
--group-query-attention --num-query-groups 8 --swiglu --untie-embeddings-and-output-weights --vocab-size 128256
--micro-batch-size 1 --global-batch-size 128 --bf16 --use-distributed-optimizer --lr 1e-4
"""


@pytest.fixture
def ask(capsys, tmp_path, monkeypatch):
    """Return what estimate-memory prints, as standard output, standard error and the exit code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(TOML)
    (tmp_path / "mine.sh").write_text(SCRIPT)

    def run(*arguments):
        capsys.readouterr()
        try:
            code = cli.main(["estimate-memory", *arguments])
        except SystemExit as ended:
            code = ended.code
        return (*capsys.readouterr(), code)

    return run


def test_a_configuration_of_torchtitan_gives_memory_time_and_cost(ask):
    out, _, code = ask("--from-torchtitan", "mine.toml", "--gpus", "64", "--gpu-type", "h200", "--tokens", "1T")
    assert code == 0
    lines = {line.partition(":")[0]: line for line in out.splitlines() if ":" in line}
    assert lines["torchtitan"].endswith("8.03B parameters, sequence length 8192, batch of 64 sequences")
    assert "64 ranks (dp_shard 64), ZeRO 3" in lines["plan"]
    assert "usable on H200 141 GB: fits" in lines["memory"]
    assert "tokens/s" in lines["time"]
    assert "1.00T tokens (as asked for)" in lines["cost"]
    assert lines["ignored"] == "ignored: training.steps"


def test_arguments_of_megatron_give_a_record(ask):
    out, _, code = ask("--from-megatron", "mine.sh", "--gpus", "8", "--json")
    told = json.loads(out)
    assert (code, told["fits"], told["framework"], told["printed_statistic"]) == (3, False, "megatron", "allocated")
    assert told["plan"]["num_microbatches"] == 16
    assert told["ignored"] == ["lr"]
    assert told["step"]["host_seconds"] > 0


@pytest.mark.parametrize("framework", ["torchtitan", "megatron"])
def test_a_run_of_ours_is_estimated_as_another_frameworks(ask, framework):
    sizes = ("--model=llama3_8b", "--gpus=64", "--gpu-type=h200", "--zero-stage=1")
    out, _, code = ask("--as", framework, *sizes, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["framework"] == framework
    assert told["gpus"] == 64
    assert told["plan"]["zero_stage"] == {"torchtitan": 3, "megatron": 1}[framework]
    assert told["step"]["step_seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--as", "megatrom"], "invalid choice: 'megatrom'"),
        (["--from-torchtitan", "none.toml"], "cannot read none.toml: No such file"),
        (["--from-torchtitan", "mine.sh", "--gpus=8"], "mine.sh is no TOML"),
        (["--from-megatron", "mine.toml", "--gpus=8"], "mine.toml has no --arguments"),
        (["--from-torchtitan", "mine.toml"], "add --gpus"),
        (["--from-torchtitan", "mine.toml", "--from-megatron", "mine.sh"], "exclude each other"),
        (["--from-torchtitan", "mine.toml", "--as", "megatron"], "leave out --as megatron"),
        (["--from-megatron", "mine.sh", "--model=llama3_8b", "--set", "training.seed=1"], "leave out --model, --set"),
        (["--as", "torchtitan", "--model=llama3_8b", "--strategy=lora"], "--as torchtitan knows no strategy=lora"),
        (["--as", "torchtitan", "--model=llama3_8b", "--device=cpu"], "is about GPUs"),
    ],
)
def test_a_wrong_request_is_one_line_and_exits_with_2(ask, arguments, problem):
    out, err, code = ask(*arguments)
    assert (out, code) == ("", 2)
    assert problem in err
    assert err.count("\n") == 1


def test_the_estimate_of_another_framework_imports_no_torch(tmp_path):
    (tmp_path / "mine.toml").write_text(TOML)
    code = (
        "import sys; from training_infra import cli; "
        "code = cli.main(['estimate-memory', '--from-torchtitan', 'mine.toml', '--gpus=8']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False)
    assert ended.returncode == 0
