"""A CPU with other vector instructions trains to the same losses, up to rounding."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import UNTIED, native_engine, own_microbatches

from llama_core.planning.plan import ParallelPlan
from llama_core.training.engine import train_step

pytestmark = pytest.mark.nightly

SPEC = replace(UNTIED, hidden_size=128, num_layers=4, head_dim=32, ffn_size=256)
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def losses_and_norms():
    """Return the losses and gradient norms of some steps, by the precision of the products."""
    plan, trained = ParallelPlan(num_microbatches=2), {}
    for dtype in LIMITS:
        engine = native_engine(plan, SPEC, dtype, weight_dtype=torch.float32)
        steps = [
            train_step(engine, own_microbatches(step, plan, documents=True), learning_rate=1e-3, max_grad_norm=1.0)
            for step in range(3)
        ]
        trained[dtype] = np.array([float(value) for step in steps for value in (step.loss, step.grad_norm)])
    return trained


def test_losses_are_the_same_without_avx512():
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this CPU has no AVX-512 to leave out")
    here = Path(__file__)
    script = (
        f"import sys; sys.path[:0] = {[str(here.parent), str(here.parents[1])]}\n"
        "import torch; assert torch.backends.cpu.get_cpu_capability() == 'AVX2'\n"
        "from test_instruction_sets import losses_and_norms\n"
        "for values in losses_and_norms().values(): print(*map(float, values))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | AVX2, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    for (dtype, ours), line in zip(losses_and_norms().items(), ended.stdout.splitlines(), strict=True):
        without = np.array([float(word) for word in line.split()])
        np.testing.assert_allclose(ours, without, rtol=LIMITS[dtype], err_msg=str(dtype))
