"""Trains the same few steps under a plan and on one process, and compares the results."""

import logging
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
import torch.distributed as dist
from architectures import with_every_trait
from distributed import run_ranks
from torch.distributed.tensor import DTensor, distribute_tensor

from llama_core.config.model_types import GPT_OSS
from llama_core.config.model_weights import weight_of
from llama_core.config.models import model_spec
from llama_core.config.rope import YarnScaling
from llama_core.config.run import TrainingConfig
from llama_core.config.strategy import MATRICES, TARGETS, LoRA, MoE
from llama_core.models.batch import IGNORE_INDEX, Batch
from llama_core.models.llama import named_weights
from llama_core.models.objective import PreparingObjective
from llama_core.models.preferences import answer_log_probabilities, answers_of_row
from llama_core.parallel.apply import ParallelModel
from llama_core.parallel.measured import measured_totals
from llama_core.planning.plan import ParallelPlan
from llama_core.training.engine import NativeEngine, train_step
from llama_core.training.optimizer import build_optimizer

NUM_STEPS = 2
SEQ_LEN = 16
NUM_TOP = 5
UNTIED = replace(
    model_spec("llama3_8b"),
    name="test",
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    vocab_size=64,
)
TIED = replace(UNTIED, tied_embeddings=True)
SPARSE = replace(
    UNTIED,
    moe=MoE(num_experts=4, expert_size=24, moe_layers=2, balance_loss_coefficient=0.5, z_loss_coefficient=0.05),
)
ADAPTED = replace(UNTIED, lora=LoRA(lora_rank=4, target_modules=TARGETS))
RELATIVE, OTHER_RELATIVE = (
    replace(
        with_every_trait(UNTIED, turn, sliding_window=5, windowed_layers=(0, 2), nope_layers=(1, 2), attention_chunk=6),
        head_dim=12,
        rope_scaling=YarnScaling(4.0, 8),
        windowed_rope_theta=100.0,
        scaled_embedding=True,
        query_temperature_floor=3,
    )
    for turn in (0, 1)
)
"""Llamas with every trait of the relatives, and with other values of those that have several."""
ADAPTED_RELATIVE = replace(
    RELATIVE, lora=LoRA(lora_rank=4, target_modules=TARGETS), trainable=("layers.2.attention.*",)
)
UNFUSED_RELATIVE = replace(RELATIVE, attention_soft_cap=0.5)
"""One whose attention only some kernels compute."""
SPARSE_RELATIVE = replace(OTHER_RELATIVE, moe=MoE(num_experts=4, gates="softmax_all"))
OTHER_SPARSE = replace(
    UNTIED,
    moe=SPARSE.moe.model_copy(
        update={
            "gates": "sigmoid",
            "gate_inputs": True,
            "biases": True,
            "shared_size": 40,
            "balance_bias": True,
            "balance_bias_rate": 0.05,
        }
    ),
)
"""Experts with other values of their traits."""
OF_GPT_OSS = replace(
    UNTIED,
    **GPT_OSS.of_model,
    sliding_window=5,
    windowed_layers=(0, 2),
    rope_scaling=YarnScaling(4.0, 8, truncate=False),
    moe=SPARSE.moe.model_copy(update={"moe_layers": None, "expert_size": 0, **GPT_OSS.of_experts}),
)
"""A GPT-OSS."""
LATENT = replace(
    UNTIED,
    num_kv_heads=4,
    head_dim=12,
    kv_rank=10,
    query_rank=14,
    rope_dim=4,
    value_dim=8,
    score_factor=1.2,
    rope_pairs="adjacent",
)
"""One whose keys, values and queries are made from latents."""
ADAPTED_LATENT = replace(
    LATENT, query_rank=0, value_dim=0, lora=LoRA(method="dora", lora_rank=4, target_modules=MATRICES)
)
LLAMA4 = replace(
    UNTIED,
    rope_pairs="adjacent",
    nope_layers=(1,),
    query_temperature_scale=0.3,
    query_temperature_floor=3,
    attention_chunk=6,
    qk_norm=True,
    qk_norm_weights=False,
    moe=MoE(
        num_experts=4,
        experts_per_token=1,
        moe_layers=2,
        gates="sigmoid",
        gate_inputs=True,
        expert_size=24,
        shared_size=24,
    ),
)
"""A Llama 4."""
DORA = replace(UNTIED, lora=LoRA(method="dora", lora_rank=4, target_modules=MATRICES))
PRINCIPAL = replace(UNTIED, lora=LoRA(lora_rank=4, rslora=True, initial_values="pissa", target_modules=MATRICES))
PACKED = replace(
    UNTIED,
    hidden_size=128,
    head_dim=32,
    ffn_size=256,
    lora=LoRA(base="nf4", lora_rank=4, target_modules=("q_proj", "o_proj", "up_proj")),
)
"""Adapters over matrices in NF4, whose rows are some blocks long."""
HYBRID = replace(
    OTHER_SPARSE,
    lora=LoRA(lora_rank=4, target_modules=TARGETS),
    trainable=("*_norm.*", "norm", "layers.2.attention.wv.weight"),
)
"""Layers with experts and layers with adapters on every matrix, norms trained in full, and one matrix."""
TRAINING = TrainingConfig(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=1.0)


def largest_differences(
    plan,
    *,
    spec=UNTIED,
    dtype=torch.float64,
    documents=True,
    fault=None,
    objective=None,
    optimizer="adamw",
    moments="fp32",
):
    """Return the largest relative difference of losses, norms, first gradients, weights and held-out loss.

    Of an objective of pairs, also that of the rewards, and of the log-probabilities of answers.

    Args:
        plan: what the ranks train under.
        spec: the model; it gets a layer for each pipeline stage and one more, and three at least.
        dtype: of weights and activations.
        documents: whether rows are packed documents.
        fault: a function that changes something on every rank before it trains.
        objective: what is trained for; default: the next token.
        optimizer: what updates the weights.
        moments: in what AdamW keeps its moments.
    """
    spec = replace(spec, num_layers=max(3, plan.num_stages + 1))
    arguments = (spec, dtype, documents, objective, optimizer, moments)
    expected = _alone(plan.batch_size, *arguments)
    ranks = run_ranks(plan.world_size, _differences, plan, *arguments, expected, fault)
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
    answer = number_answers(positions if documents else index.expand_as(targets), targets)
    reference = -5 * torch.rand(targets.shape, generator=generator) * (answer < 0)
    values = {"mask": mask, "answer": answer, "reference": reference, "mismatch": 8 * reference}
    values |= teacher_values(targets, generator)
    return Batch(tokens[:, :-1].contiguous(), targets, positions if documents else None, per_token=values)


def teacher_values(targets, generator):
    """Return what a teacher with drawn logits says of each token."""
    logs = torch.randn((*targets.shape, UNTIED.vocab_size), generator=generator).mul(2).log_softmax(-1)
    tops, tokens = logs.topk(NUM_TOP)
    rest = logs.scatter(-1, tokens, -torch.inf).logsumexp(-1)
    return {"teacher_tokens": tokens.float(), "teacher_log_probabilities": tops, "teacher_rest": rest}


def number_answers(positions, targets):
    """Number the documents of each row as answers, in pairs, with a minus at the first token that has a target.

    The middle of a row begins another document, so that every row has a pair.
    """
    starts = (positions == 0) | (torch.arange(SEQ_LEN) == SEQ_LEN // 2)
    answers = torch.zeros(targets.shape)
    for row, documents in enumerate(starts.long().cumsum(1)):
        has_target = targets[row] != IGNORE_INDEX
        numbered = documents[has_target].unique().tolist()
        for number, document in enumerate(numbered[: len(numbered) // 2 * 2], start=1):
            places = torch.nonzero((documents == document) & has_target).flatten()
            answers[row, places] = number
            answers[row, places[0]] = -number
    return answers


def native_engine(
    plan,
    spec=UNTIED,
    compute_dtype=torch.float32,
    *,
    weight_dtype=torch.float32,
    seed=1,
    objective=None,
    optimizer="adamw",
    moments="fp32",
    training=TRAINING,
):
    """Return this rank's part of a model with drawn weights, and an optimizer for it."""
    parallel = ParallelModel(
        spec,
        plan,
        device=torch.device("cpu"),
        compute_dtype=compute_dtype,
        weight_dtype=weight_dtype,
        objective=objective,
    ).materialize()
    training = training.model_copy(update={"optimizer": optimizer, "moments": moments, "precision": "fp32"})
    engine = NativeEngine(parallel, build_optimizer(parallel.model, training))
    engine.initialize_weights(seed)
    return engine


@torch.no_grad()
def undefined(model):
    """Set the weights of a model, or of a part of one, to NaN, from which no run can continue."""
    for parameter in model.parameters():
        parameter.fill_(torch.nan)


def train(plan, spec, dtype, *, documents, draw=True, objective=None, optimizer="adamw", moments="fp32"):
    """Train, and return losses, norms, gradients, weights and evaluation as numpy arrays by name."""
    engine = native_engine(
        plan, spec, dtype, weight_dtype=dtype, objective=objective, optimizer=optimizer, moments=moments
    )
    if draw:
        draw_adapters(engine.model)
    own = partial(own_microbatches, plan=plan, documents=documents, objective=objective)
    gradients = {}
    forward_backward = engine.forward_backward

    def record_gradients(*arguments, **named):
        loss = forward_backward(*arguments, **named)
        for name, parameter in engine.model.named_parameters():
            if parameter.requires_grad:
                gradients[name] = _whole(parameter.grad)
        engine.forward_backward = forward_backward
        return loss

    engine.forward_backward = record_gradients
    steps = [
        train_step(
            engine,
            own(step),
            learning_rate=TRAINING.learning_rate,
            max_grad_norm=TRAINING.max_grad_norm,
        )
        for step in range(NUM_STEPS)
    ]
    rewards = measured_totals(engine.model, plan)
    evaluated, _ = engine.evaluate(held_out_microbatches(plan, documents, objective))
    held_out_rewards = measured_totals(engine.model, plan)
    of_pairs = {}
    if rewards is not None:
        answers = engine.measure_rows(
            answer_log_probabilities, answers_of_row(SEQ_LEN), held_out_microbatches(plan, documents)
        )
        of_pairs = {
            "rewards": {"": rewards.numpy()},
            "held-out rewards": {"": held_out_rewards.numpy()},
            "answers": {"": answers.numpy()},
        }
    return of_pairs | {
        "losses": {"": _array([step.loss for step in steps])},
        "norms": {"": _array([step.grad_norm for step in steps])},
        "gradients": gradients,
        "weights": {name: _whole(weight.detach()) for name, weight in named_weights(engine.model)},
        "evaluation": {"": _array(evaluated)},
    }


@torch.no_grad()
def draw_adapters(model):
    """Draw what begins at zero, and would keep the gradients of an adapter's other weights at zero."""
    for name, parameter in model.named_parameters():
        if weight_of(name).begins == "zeros":
            generator = torch.Generator().manual_seed(sum(name.encode()))
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.to_local().copy_(distribute_tensor(drawn, mesh, placements, src_data_rank=None).to_local())
            else:
                parameter.copy_(drawn)


@cache
def _alone(batch_size, spec, dtype, documents, objective, optimizer, moments):
    plan = ParallelPlan(num_microbatches=batch_size)
    return train(plan, spec, dtype, documents=documents, objective=objective, optimizer=optimizer, moments=moments)


def _differences(plan, spec, dtype, documents, objective, optimizer, moments, expected, fault):
    logging.disable(logging.WARNING)  # torch warns about gathering sharded tensors for the comparison
    if fault is not None:
        fault()
    ours = train(plan, spec, dtype, documents=documents, objective=objective, optimizer=optimizer, moments=moments)
    return {
        kind: max(_relative(value, expected[kind][name]) for name, value in values.items())
        for kind, values in ours.items()
    }


def own_microbatches(step, plan, documents=True, objective=None):
    """Return the microbatches of a global batch that this rank trains on."""
    batch = make_batch(step, plan.batch_size, documents=documents)
    rank = plan.dp_rank(dist.get_rank()) if dist.is_initialized() else 0
    own = batch.split(len(batch.tokens_BS) // plan.dp)[rank]
    return with_rows_before(own.split(plan.rows_per_forward), objective)


def with_rows_before(batches, objective):
    """Return the batches with what their objective measures first."""
    if not isinstance(objective, PreparingObjective):
        return batches
    return [replace(batch, before=objective.rows_before(batch)) for batch in batches]


def held_out_microbatches(plan, documents=True, objective=None):
    """Return the microbatches that this rank evaluates; data-parallel ranks take the rows in turns."""
    batch = make_batch(99, plan.batch_size, documents=documents)
    rank = plan.dp_rank(dist.get_rank()) if dist.is_initialized() else 0
    own = batch.each_token(lambda tensor: tensor[rank :: plan.dp])
    return with_rows_before(own.split(plan.rows_per_forward), objective)


def _whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone().numpy()


def _array(values):
    return torch.tensor([float(value) for value in values], dtype=torch.float64).numpy()


def _relative(ours, theirs):
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    assert np.isfinite(ours).all()  # NaN is not larger than any bound
    return float(abs(ours - theirs).max() / abs(theirs).max())
