"""One rank as if it had peers: a communicator of one, weights in shards of one, matrices divided over one."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.machine import TIMEOUT_S
from benchmarks.gpu.parity import packed_positions
from benchmarks.gpu.shapes import llama3
from llama_core.config.run import RunConfig
from llama_core.models.batch import Batch
from llama_core.parallel.ranks import joined_ranks
from llama_core.planning.plan import ParallelPlan
from llama_core.training.engine import Engine, build_engine, train_step

NUM_STEPS = 4


class _ShardingPlan(ParallelPlan):
    """A plan of one rank that shards its weights all the same."""

    @property
    def effective_zero_stage(self) -> int:
        return 3


class _DividingPlan(_ShardingPlan):
    """A plan of one rank that also divides its matrices; every mesh has one rank."""

    @property
    def divides_matrices(self) -> bool:
        return True


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
        row = {"ranks": f"a group of one ({dist.get_backend()})"}
        yield bench.attempted(row, _under, bench, config, ParallelPlan(microbatch_size=2), alone)
        ways = {
            "fully_shard": _ShardingPlan(microbatch_size=2),
            "fully_shard and tensor parallelism": _DividingPlan(microbatch_size=2),
            "fully_shard and tensor parallelism, compiled": _DividingPlan(microbatch_size=2, compile=True),
        }
        for name, plan in list(ways.items())[: bench.size(3, 2)]:  # other tests compile it on a CPU
            yield bench.attempted({"ranks": name}, _under, bench, config, plan, alone)


def _alone(bench: Bench, config: RunConfig, losses: list[float]) -> Row:
    losses += _losses(bench, config, build_engine(config, ParallelPlan(microbatch_size=2), bench.device))
    return _compared(losses, losses)


def _under(bench: Bench, config: RunConfig, plan: ParallelPlan, alone: list[float]) -> Row:
    return _compared(_losses(bench, config, build_engine(config, plan, bench.device)), alone)


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
