"""What NCCL keeps on a device follows from the groups that a rank is in."""

import pytest

from llama_core.config.models import model_spec
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.work import Work
from llama_core.rehearsal.device_overhead import held_messages_bytes, num_connections

WORLD, GROUP, DIRECTION = 2, 2, 1
CASES = [
    ({}, 0, 0),
    ({"dp_shard": 8, "zero_stage": 3}, 0, WORLD),  # the group of all ranks shards the weights
    ({"dp_shard": 4, "dp_replicate": 2, "zero_stage": 3}, 0, WORLD + 2 * GROUP),
    ({"tp": 4, "dp_replicate": 2}, 0, WORLD + 2 * GROUP),
    ({"cp": 8, "zero_stage": 3}, 0, WORLD + GROUP),  # the ring has a group of its own
    ({"pp": 4, "num_microbatches": 8}, 0, WORLD + 2 * DIRECTION),
    ({"pp": 4, "num_microbatches": 8}, 1, WORLD + 4 * DIRECTION),
    ({"pp": 4, "num_microbatches": 8, "schedule": "interleaved", "num_chunks": 2}, 0, WORLD + 4 * DIRECTION),
    ({"pp": 4, "num_microbatches": 8, "schedule": "chimera"}, 0, WORLD + GROUP + 2 * DIRECTION),
    ({"ep": 2, "dp_shard": 4, "zero_stage": 2}, 0, WORLD + 2 * GROUP),
]


@pytest.mark.parametrize(("degrees", "pp_rank", "connections"), CASES)
def test_connections_are_those_of_the_groups_that_communicate(degrees, pp_rank, connections):
    assert num_connections(ParallelPlan(**degrees), pp_rank) == connections


@pytest.mark.parametrize(
    ("degrees", "pp_rank", "messages"),
    [
        ({}, 0, 0),
        ({"pp": 4, "num_microbatches": 8}, 0, 2 * 2),
        ({"pp": 4, "num_microbatches": 8}, 1, 2 * 4),
        ({"pp": 4, "num_microbatches": 8, "tp": 2}, 1, 2 * 4 / 2),
        ({"pp": 4, "num_microbatches": 8, "cp": 2}, 1, 2 * 4 / 2),
        ({"pp": 4, "num_microbatches": 8, "microbatch_size": 2}, 1, 2 * 4 * 2),
    ],
)
def test_two_tensors_of_each_direction_outlive_their_transfer(degrees, pp_rank, messages):
    work = Work(model_spec("llama3_8b"), ParallelPlan(**degrees), 2048, "bf16")
    stream = 2048 * 4096 * 2
    assert held_messages_bytes(work, pp_rank) == messages * stream
