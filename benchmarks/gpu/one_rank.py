"""One rank as if it had peers: a communicator of one, weights in shards of one, matrices divided over one."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.machine import TIMEOUT_S
from benchmarks.gpu.parity import packed_positions
from benchmarks.gpu.shapes import llama3
from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.models.batch import Batch
from llama_core.models.llama import Llama
from llama_core.parallel.apply import ParallelModel
from llama_core.parallel.mesh import Mesh
from llama_core.parallel.ranks import joined_ranks
from llama_core.parallel.recompute import recompute_and_compile
from llama_core.parallel.tensor import apply_tensor_parallel
from llama_core.parallel.zero import Sharded
from llama_core.planning.plan import DocumentAttention, ParallelPlan, document_attention
from llama_core.training.engine import COMPUTE_DTYPES, Engine, NativeEngine, build_engine, train_step
from llama_core.training.optimizer import build_optimizer

NUM_STEPS = 4


class _ShardingPlan(ParallelPlan):
    """A plan of one rank that shards its weights all the same."""

    @property
    def effective_zero_stage(self) -> int:
        return 3


class _DividedModel(ParallelModel):
    """A model on one rank, sharded and perhaps divided, in the order of ``ParallelModel``; every mesh has one rank."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: ParallelPlan,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        documents: DocumentAttention,
        divides_matrices: bool,
    ) -> None:
        self.plan = plan
        self.device = device
        self.mesh = mesh = Mesh.build(plan, device.type)
        with torch.device("meta"):
            self.model = Llama(spec, compute_dtype=compute_dtype)
        if divides_matrices:
            apply_tensor_parallel(self.model, mesh.weights["tp"], sequence_parallel=True)
        recompute_and_compile(self.model, plan, device, documents=documents)
        self._sharded = Sharded(self.model, mesh, plan, compute_dtype=compute_dtype)


def one_rank(bench: Bench) -> Iterator[Row]:
    """Yield the losses of a few steps: without a group, in a group of one, sharded, and divided too."""
    config = RunConfig.from_mapping(
        llama3(bench.size("30M", "tiny"))
        | {
            "training": {"seq_len": bench.size(1024, 64), "batch_size": 2, "precision": "bf16"},
            "launch": {"device": bench.device.type},
        }
    )
    alone: list[float] = []
    yield bench.attempted({"ranks": "alone"}, _alone, bench, config, alone)
    with joined_ranks(bench.device.type, TIMEOUT_S, even_alone=True):
        yield bench.attempted({"ranks": f"a group of one ({dist.get_backend()})"}, _in_group, bench, config, alone)
        ways = (
            ("fully_shard", False, False),
            ("fully_shard and tensor parallelism", True, False),
            ("fully_shard and tensor parallelism, compiled", True, True),
        )
        for name, divides_matrices, compiled in ways[: bench.size(3, 2)]:  # other tests compile it on a CPU
            row = {"ranks": name}
            settings = {"divides_matrices": divides_matrices, "compiled": compiled}
            yield bench.attempted(row, _divided, bench, config, alone, **settings)


def _alone(bench: Bench, config: RunConfig, losses: list[float]) -> Row:
    losses += _losses(bench, config, build_engine(config, ParallelPlan(microbatch_size=2), bench.device))
    return _compared(losses, losses)


def _in_group(bench: Bench, config: RunConfig, alone: list[float]) -> Row:
    engine = build_engine(config, ParallelPlan(microbatch_size=2), bench.device)
    return _compared(_losses(bench, config, engine), alone)


def _divided(bench: Bench, config: RunConfig, alone: list[float], *, divides_matrices: bool, compiled: bool) -> Row:
    plan = _ShardingPlan(microbatch_size=2, compile=compiled)
    parallel = _DividedModel(
        config.spec,
        plan,
        device=bench.device,
        compute_dtype=COMPUTE_DTYPES[config.training.precision],
        documents=document_attention(config, plan),
        divides_matrices=divides_matrices,
    ).materialize()
    engine = NativeEngine(parallel, build_optimizer(parallel.model, config.training))
    return _compared(_losses(bench, config, engine), alone)


def _losses(bench: Bench, config: RunConfig, engine: Engine) -> list[float]:
    engine.initialize_weights(0)
    length = config.seq_len
    losses = []
    for seed in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(seed)
        positions_BS = packed_positions(2, length, length // 4, seed)
        tokens_BS = torch.randint(0, config.spec.vocab_size, positions_BS.shape, generator=generator)
        batch = Batch(tokens_BS, tokens_BS.roll(-1, 1), positions_BS)
        batch = batch if bench.is_tiny else batch.with_documents()  # a CPU has no kernel for documents
        result = train_step(engine, [batch.to(bench.device)], learning_rate=1e-3, max_grad_norm=1.0)
        losses.append(float(result.loss))
    return losses


def _compared(losses: list[float], alone: list[float]) -> Row:
    largest = max(abs(one - other) / other for one, other in zip(losses, alone, strict=True))
    return {"first loss": losses[0], "last loss": losses[-1], "largest relative deviation": largest}
