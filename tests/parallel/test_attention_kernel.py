"""Attention with torch's math kernel, which holds all scores."""

from dataclasses import replace

import pytest
import torch
from operations import Operations

from llama_core.chain.preview import preview
from llama_core.config.models import model_spec
from llama_core.config.run import RunConfig
from llama_core.errors import PlanError
from llama_core.models.attention import use_kernels
from llama_core.models.batch import Batch
from llama_core.models.llama import build_llama
from llama_core.planning.plan import ParallelPlan

SPEC = replace(model_spec("tiny_llama3_50m"), hidden_size=64, num_layers=2, head_dim=16, ffn_size=96, vocab_size=128)
TOKENS = torch.randint(0, SPEC.vocab_size, (2, 256), generator=torch.Generator().manual_seed(1))
NUM_SCORES = 2 * SPEC.num_heads * 256 * 256


def losses_and_largest(positions):
    model = build_llama(SPEC, device="cpu", compute_dtype=torch.float32, seed=0)
    found = []
    for _ in range(2):
        with Operations() as operations:
            loss = model(TOKENS, Batch(TOKENS, TOKENS.roll(-1, 1), positions))
            loss.backward()
        found.append((float(loss.detach()), operations.largest))
        use_kernels(model, asked="math")
    return found


@pytest.mark.parametrize("positions", [None, torch.arange(256).expand(2, -1) % 100], ids=["causal", "documents"])
def test_it_gives_the_same_loss_and_holds_all_scores(positions):
    (loss, largest), (same, scores) = losses_and_largest(positions)
    assert same == pytest.approx(loss, rel=1e-5)  # sums in another order
    assert largest < NUM_SCORES == scores


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("device", "precision"), [("cpu", "fp32"), ("cuda", "bf16")])
@pytest.mark.parametrize(
    ("traits", "attention"),
    [({}, "math"), ({"attention_soft_cap": 20.0}, "auto"), ({"attention_sinks": True}, "math")],
    ids=str,
)
def test_the_estimate_of_its_scores_matches_the_rehearsal(traits, attention, device, precision, recompute):
    sizes = {"hidden_size": 256, "num_layers": 4, "ffn_size": 512, "head_dim": 32, "vocab_size": 512}
    config = RunConfig.from_mapping(
        {
            "model": "llama3_8b",
            "architecture": sizes | {"num_heads": 8, "num_kv_heads": 2} | traits,
            "training": {"batch_size": 1, "seq_len": 512, "precision": precision},
            "parallel": {"attention": attention, "recompute": recompute},
            "launch": {"device": device, "force": True},
        }
    )
    shown = preview(config, here=False, data=False)
    estimated, rehearsed = shown.planned.estimate.profile, shown.rehearsed.profile
    assert estimated.peak_bytes == pytest.approx(rehearsed.peak_bytes, rel=0.06)
    assert rehearsed.peak["activations"] + rehearsed.peak["temporaries"] > 8 * 512 * 512 * 4


def test_it_needs_whole_sequences():
    with pytest.raises(PlanError, match="attention=math needs whole sequences, but cp=2 divides them; use cp=1"):
        ParallelPlan(cp=2, dp_shard=1, attention="math")


def test_a_plan_names_the_math_kernel():
    plan = ParallelPlan(attention="math")
    assert "math attention" in plan.summary()
    assert plan.notes == (
        "attention=math holds all scores and is slow; the estimate counts its memory but not its time",
    )
