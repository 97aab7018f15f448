"""Trains the same few steps under a plan and on one process, and compares the results."""

import logging
from dataclasses import replace
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch.distributed.tensor import DTensor, distribute_tensor

from llama_core.config.models import model_spec
from llama_core.config.run import TrainingConfig
from llama_core.config.strategy import TARGETS, LoRA, MoE
from llama_core.models.batch import IGNORE_INDEX, Batch
from llama_core.parallel.apply import ParallelModel
from llama_core.planning.plan import ParallelPlan
from llama_core.training.engine import NativeEngine, train_step
from llama_core.training.optimizer import build_optimizer

NUM_STEPS = 2
SEQ_LEN = 16
UNTIED = replace(
    model_spec("llama3_8b"),
    name="test",
    hidden_size=32,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    vocab_size=64,
)
TIED = replace(UNTIED, tied_embeddings=True)
SPARSE = replace(
    UNTIED,
    moe=MoE(num_experts=4, moe_layers=2, balance_loss_coefficient=0.5, z_loss_coefficient=0.05),
)
ADAPTED = replace(UNTIED, lora=LoRA(lora_rank=4, target_modules=TARGETS))
HYBRID = replace(
    SPARSE,
    lora=LoRA(lora_rank=4, target_modules=TARGETS),
    trainable=("*_norm.*", "norm", "layers.2.attention.wv.weight"),
)
"""Layers with experts and layers with adapters on every matrix, norms trained in full, and one matrix."""
TRAINING = TrainingConfig(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=1.0)


def largest_differences(plan, *, spec=UNTIED, dtype=torch.float64, documents=True, fault=None, objective=None):
    """Return the largest relative difference of losses, norms, first gradients, weights and held-out loss.

    Args:
        plan: what the ranks train under.
        spec: the model; it gets two layers for each pipeline stage, and four at least.
        dtype: of weights and activations.
        documents: whether rows are packed documents.
        fault: a function that changes something on every rank before it trains.
        objective: what is trained for; default: the next token.
    """
    spec = replace(spec, num_layers=max(4, 2 * plan.num_stages))
    expected = _alone(plan.batch_size, spec, dtype, documents, objective)
    ranks = run_ranks(plan.world_size, _differences, plan, spec, dtype, documents, expected, fault, objective)
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def weights_by_rank(plan, spec):
    """Return every rank's weights after training, as float32 arrays by name."""
    return run_ranks(plan.world_size, _own_weights, plan, spec)


def _own_weights(plan, spec):
    return train(plan, spec, torch.float32, documents=True)["weights"]


def make_batch(step, batch_size, *, documents):
    """Return a global batch: random tokens, some of them without a target, in documents of any length.

    Every token has a number under ``mask``: 0 for about half of them, else up to 1.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, UNTIED.vocab_size, (batch_size, SEQ_LEN + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.1] = IGNORE_INDEX
    starts = (torch.rand(targets.shape, generator=generator) < 0.2).long()
    index = torch.arange(SEQ_LEN)
    positions = index - (starts * index).cummax(1).values
    mask = torch.rand(targets.shape, generator=generator).sub(0.5).clamp(min=0).mul(2)
    return Batch(tokens[:, :-1].contiguous(), targets, positions if documents else None, per_token={"mask": mask})


def native_engine(
    plan, spec=UNTIED, compute_dtype=torch.float32, *, weight_dtype=torch.float32, seed=1, objective=None
):
    """Return this rank's part of a model with drawn weights, and AdamW for it."""
    parallel = ParallelModel(
        spec,
        plan,
        device=torch.device("cpu"),
        compute_dtype=compute_dtype,
        weight_dtype=weight_dtype,
        objective=objective,
    ).materialize()
    engine = NativeEngine(parallel, build_optimizer(parallel.model, TRAINING))
    engine.initialize_weights(seed)
    return engine


@torch.no_grad()
def undefined(model):
    """Set the weights of a model, or of a part of one, to NaN, from which no run can continue."""
    for parameter in model.parameters():
        parameter.fill_(torch.nan)


def train(plan, spec, dtype, *, documents, draw=True, objective=None):
    """Train, and return losses, norms, gradients, weights and evaluation as numpy arrays by name."""
    engine = native_engine(plan, spec, dtype, weight_dtype=dtype, objective=objective)
    if draw:
        draw_adapters(engine.model)
    engine.forward_backward(own_microbatches(0, plan, documents), loss_scale=1.0, on_phase=lambda phase: None)
    parameters = dict(engine.model.named_parameters())
    gradients = {name: _whole(parameter.grad) for name, parameter in parameters.items() if parameter.requires_grad}
    engine.optimizer.zero_grad()
    steps = [
        train_step(
            engine,
            own_microbatches(step, plan, documents),
            learning_rate=TRAINING.learning_rate,
            max_grad_norm=TRAINING.max_grad_norm,
        )
        for step in range(NUM_STEPS)
    ]
    return {
        "losses": {"": _array([step.loss for step in steps])},
        "norms": {"": _array([step.grad_norm for step in steps])},
        "gradients": gradients,
        "weights": {name: _whole(parameter.detach()) for name, parameter in engine.model.named_parameters()},
        "evaluation": {"": _array(engine.evaluate(own_microbatches(99, plan, documents)))},
    }


@torch.no_grad()
def draw_adapters(model):
    """Draw every B and the embedding's A, which begin at zero and would keep the other side's gradients at zero."""
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B.weight") or name == "tok_embeddings.lora_A.weight":
            generator = torch.Generator().manual_seed(sum(name.encode()))
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.to_local().copy_(distribute_tensor(drawn, mesh, placements, src_data_rank=None).to_local())
            else:
                parameter.copy_(drawn)


@cache
def _alone(batch_size, spec, dtype, documents, objective):
    return train(ParallelPlan(num_microbatches=batch_size), spec, dtype, documents=documents, objective=objective)


def _differences(plan, spec, dtype, documents, expected, fault, objective):
    logging.disable(logging.WARNING)  # torch warns about gathering sharded tensors for the comparison
    if fault is not None:
        fault()
    ours = train(plan, spec, dtype, documents=documents, objective=objective)
    return {
        kind: max(_relative(value, expected[kind][name]) for name, value in values.items())
        for kind, values in ours.items()
    }


def own_microbatches(step, plan, documents=True):
    """Return the microbatches of a global batch that this rank trains on."""
    batch = make_batch(step, plan.batch_size, documents=documents)
    rank = plan.dp_rank(dist.get_rank()) if dist.is_initialized() else 0
    return batch.split(len(batch.tokens_BS) // plan.dp)[rank].split(plan.rows_per_forward)


def _whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone().numpy()


def _array(values):
    return torch.tensor([float(value) for value in values], dtype=torch.float64).numpy()


def _relative(ours, theirs):
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    assert np.isfinite(ours).all()  # NaN is not larger than any bound
    return float(abs(ours - theirs).max() / abs(theirs).max())
