"""What planning knows of forwards that keep nothing: those before a step, over other rows, and before a run, over all.

Memory, time, transfers and costs multiply with these numbers, and none of them asks an objective's row.
"""

from llama_core.config.models import ModelSpec
from llama_core.config.pretrained import settings_of_weights
from llama_core.config.run import RunConfig
from llama_core.objectives.traits import ObjectiveType
from llama_core.planning.inference import passing_width, weight_bytes
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.ends import LOSS_NUM_BLOCKS, loss_chunk_tokens
from llama_core.planning.program.operations import FP32_BYTES, INT64_BYTES, itemsize_of


def forwards_before_step(objective: ObjectiveType) -> int:
    """Return how many forwards over other rows, as many and as long as its own, each step begins with."""
    return 1 if objective.prepares else 0


def forwards_before_run(objective: ObjectiveType) -> int:
    """Return how many forwards over all rows, held-out ones too, there are before the first step."""
    return 0 if objective.reference is None else objective.reference.num_forwards


def weights_before_run(config: RunConfig) -> str | None:
    """Return where the weights are whose forward there is before the first step; None if they are the run's own."""
    reference = config.objective.reference
    if reference is None or not reference.weights:
        return None
    weights: str = getattr(config.training, reference.weights)
    return weights


def bytes_before_run(config: RunConfig, plan: ParallelPlan) -> int:
    """Return the bytes that the fullest rank holds in a forward of other weights before the first step.

    They are held before the model that is trained, in the dtype of its activations. It is 0 without other weights, and
    if their folder is gone, which a run that goes on no longer reads.
    """
    weights_of = weights_before_run(config)
    if weights_of is None or not settings_of_weights(weights_of):
        return 0
    spec = spec_before_run(config)
    itemsize = itemsize_of(config.training.precision)
    own_tokens = plan.rows_per_forward * config.seq_len // plan.cp
    weights = weight_bytes(spec, plan, itemsize)
    if plan.uses_fully_shard:
        gathered = weights if plan.zero_stage < 3 else _gathered_bytes(spec, plan, itemsize)
        weights = gathered + weights // plan.dp_shard
    passing = own_tokens * itemsize * passing_width(spec, plan.tp)
    numbers = sum(config.objective.values_per_token.values())
    logits = _logits_bytes(spec, plan, itemsize, own_tokens) + 2 * own_tokens * numbers * FP32_BYTES
    rows = plan.rows_per_forward * plan.num_microbatches
    tokens = rows * config.seq_len
    # of the batch, of each microbatch, of all of them; and of all ranks, which are added up and divided
    copies = 3 if plan.world_size == 1 else 3 + 2 * plan.dp
    batch = tokens * 3 * INT64_BYTES
    return weights + max(passing, logits) + batch + copies * tokens * numbers * FP32_BYTES


def _gathered_bytes(spec: ModelSpec, plan: ParallelPlan, itemsize: int) -> int:
    """Return the bytes that a rank gathers at once of weights that all ranks shard: tables, and two layers."""
    num_tables = 1 if spec.tied_embeddings else 2
    layer = (spec.num_parameters - num_tables * spec.embedding_parameters) // spec.num_layers
    tables = spec.embedding_parameters * (num_tables if plan.pp == 1 else 1)
    return (tables + 2 * layer) * itemsize // plan.tp


def _logits_bytes(spec: ModelSpec, plan: ParallelPlan, itemsize: int, tokens: int) -> int:
    """Return the bytes of a chunk of logits, and of the rows in which they are ordered and summed in fp32."""
    vocab_size = spec.vocab_size // plan.tp
    chunk = min(tokens, loss_chunk_tokens(vocab_size, spec.hidden_size, itemsize))
    block = -(-chunk // LOSS_NUM_BLOCKS)
    return chunk * vocab_size * itemsize + block * vocab_size * (2 * FP32_BYTES + 1)


def spec_before_run(config: RunConfig) -> ModelSpec:
    """Return the model whose forward there is before the first step: the run's own, unless other weights are there.

    Raises:
        ConfigError: if the folder of its weights does not describe one.
    """
    weights = weights_before_run(config)
    if weights is None or not settings_of_weights(weights):
        return config.spec
    return RunConfig.from_mapping({"training": {"init_from": weights}}).spec
