"""What NCCL keeps on a device follows from the groups that a rank is in."""

import pytest

from llama_core.planning.plan import ParallelPlan
from llama_core.rehearsal.device_overhead import num_connections

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
