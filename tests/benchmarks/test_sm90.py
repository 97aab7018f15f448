"""What compiled blocks cost on an H100, counted without one."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.sm90 import __main__ as sm90
from benchmarks.sm90 import environment
from benchmarks.sm90.kinds import KINDS, TOKENS

BYTES = {"2.13.0": {"forward": 1_157_775_360, "backward": 1_396_957_184}}
"""That the Triton kernels of a block of 1B read and write, by the version of torch."""


def kernel(name, *, launches=1, num_bytes=0, **configuration):
    usual = {"registers": 32, "stack_bytes": 0, "loads": 2, "wide_loads": 2}
    other = usual | {"registers": 40, "wide_loads": 0}
    return {
        "name": name,
        "launches": launches,
        "num_bytes": num_bytes,
        "configurations": [other | configuration, usual | configuration],
    }


def block(*kernels):
    passes = {"forward": {"kernels": list(kernels)}, "backward": {"kernels": []}}
    return {"layer": 1, "graphs": 1, "kept_bytes": 3 << 20, **passes}


def found(*blocks):
    return {"name": "1B", "torch": "2.13.0+cu130", "triton": "3.7.1", "blocks": list(blocks)}


def last_row(text):
    return [cell.strip() for cell in text.strip().splitlines()[-1].strip("|").split("|")]


def test_a_row_counts_every_launch_and_the_best_configuration_of_a_kernel():
    casts = kernel("triton_poi_fused__to_copy_1", launches=3, num_bytes=10**9)
    spilling = kernel("triton_red_fused_add_view_0", num_bytes=5 * 10**8, stack_bytes=8, registers=255, wide_loads=0)
    row = last_row(sm90.table([found(block(casts, spilling))]))
    assert row == ["1B", "1", "4, 3.50", "0, 0.00", "3.00", "3", "255", "1", "1 of 2"]


def test_a_kind_that_fails_keeps_its_row_and_says_why():
    text = sm90.table(
        [{"name": "broken", "error": "RuntimeError: a | b"}, found(block(kernel("triton_poi_fused_a_0")))]
    )
    assert "| broken | RuntimeError: a / b |" in text
    with pytest.raises(SystemExit, match="no block could be compiled: why"):
        sm90.table([{"name": "broken", "error": "why"}])


def test_every_kind_is_compiled_on_one_rank_for_the_same_row():
    for kind in KINDS.values():
        plan = kind.parallel_plan()
        assert (kind.config().seq_len, plan.compile, plan.world_size) == (TOKENS, True, 1), kind.name


@pytest.fixture(scope="module")
def python():
    """Return the Python of an environment with a CUDA build of torch."""
    python = Path(os.environ.get("SM90_VENV", sys.prefix), "bin/python")
    if not environment.has_cuda_build(python):
        pytest.skip(f"{python} has no CUDA build of torch; name an environment that has it in SM90_VENV")
    return python


@pytest.fixture(scope="module")
def dense(python):
    """Return what a block of 1B launches, compiled anew."""
    (dense,) = sm90.compiled(["1B"], python)
    assert "error" not in dense, dense
    return dense


@pytest.mark.nightly
def test_a_block_reads_and_writes_as_many_bytes_as_before(dense):
    version = dense["torch"].partition("+")[0]
    (one,) = dense["blocks"]
    counted = {name: sm90.num_bytes(one[name]["kernels"]) for name in ("forward", "backward")}
    assert counted == BYTES.get(version, pytest.approx(BYTES["2.13.0"], rel=0.05))  # another torch may fuse otherwise


@pytest.mark.nightly
def test_a_forward_casts_each_matrix_once_and_a_backward_none(dense):
    (one,) = dense["blocks"]
    hidden, heads, ffn = 2048, (32 + 8 + 8 + 32) * 64, 8192
    matrices = hidden * heads + 3 * hidden * ffn
    casts = {name: [k for k in one[name]["kernels"] if sm90.is_cast(k)] for name in ("forward", "backward")}
    assert sm90.num_bytes(casts["forward"]) == (4 + 2) * matrices
    assert not casts["backward"]


@pytest.mark.nightly
def test_large_kernels_of_a_dense_block_read_16_bytes_at_a_time_and_none_has_a_stack(dense):
    (one,) = dense["blocks"]
    for kernel in one["forward"]["kernels"] + one["backward"]["kernels"]:
        reads_wide = max(way["wide_loads"] for way in kernel["configurations"]) > 0
        assert reads_wide or kernel["num_bytes"] < 10**6, kernel["name"]
        assert sm90.least(kernel, "stack_bytes") == 0, kernel["name"]


@pytest.mark.nightly
def test_a_block_over_nf4_keeps_no_more_than_one_over_plain_matrices(python):
    """A compiler keeps a matrix that a forward and a backward both unpack, if it can tell that they are one."""
    plain, packed = (found["blocks"][0] for found in sm90.compiled(["8B, LoRA", "8B, QLoRA"], python))
    assert packed["graphs"] == plain["graphs"] == 1
    assert packed["kept_bytes"] == plain["kept_bytes"]
    assert packed["backward"]["operators"]["unpack_nf4"] == 7
