"""The groups of a plan's ranks as they are made on CUDA, where gloo and a recorder stand in for NCCL."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from parity import SPARSE, UNTIED, largest_differences
from test_parity import PLANS, SPARSE_PLANS
from torch.testing._internal.distributed.fake_pg import FakeStore
from width import wide

from llama_core.parallel import mesh, ranks
from llama_core.parallel.mesh import Mesh
from llama_core.parallel.ranks import joined_ranks
from llama_core.planning.plan import ParallelPlan

DEEP = [
    ParallelPlan(pp=4, num_microbatches=6, dp_replicate=2),
    ParallelPlan(pp=4, schedule="interleaved", num_chunks=2, num_microbatches=8),
    ParallelPlan(pp=4, schedule="chimera", num_microbatches=8, tp=2),
    ParallelPlan(pp=4, schedule="zbv", num_microbatches=8),
]


def groups_as_on_cuda():
    mesh.has_bound_device = lambda: True


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("pp2 1f1b", UNTIED),
        wide("pp2 zero3 dp2", UNTIED),
        wide("tp2 pp2 zero2 dp2", UNTIED),
        wide("pp2 cp2", UNTIED),
        wide("pp2 chimera hsdp2x2", UNTIED),
        wide("ep2 pp2 chimera zero2", SPARSE),
    ],
)
def test_a_plan_trains_over_the_groups_of_cuda_with_the_numbers_of_one_process(name, spec):
    """In float64, as in ``test_parity``."""
    differences = largest_differences((PLANS | SPARSE_PLANS)[name], spec=spec, fault=groups_as_on_cuda)
    assert max(differences.values()) < 1e-8, differences


@pytest.fixture
def as_rank(monkeypatch):
    """Return a function that builds the groups of one rank, and what it records: splits, and first transfers."""

    def build(plan, rank):
        splits, connected = [], []
        make = dist.new_group

        def split_group(split_ranks, backend):
            splits.append((split_ranks, backend))
            own = [members for members in split_ranks if rank in members]
            return make(own[0], backend="fake", use_local_synchronization=True) if own else None

        with monkeypatch.context() as patch:
            patch.setattr(mesh, "has_bound_device", lambda: True)
            patch.setattr(ranks, "has_bound_device", lambda: True)
            patch.setattr(dist, "split_group", split_group)
            patch.setattr(dist, "new_group", lambda *_, **options: pytest.fail("a group that is not split"))
            patch.setattr(dist, "send", lambda x, target, group: connected.append((rank, target)))
            patch.setattr(dist, "recv", lambda x, source, group: connected.append((source, rank)))
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
            built = Mesh.build(plan, "cpu")
        members = {
            "cp": built.cp_group and dist.get_process_group_ranks(built.cp_group),
            "names": [group.group_name for group in (built.cp_group, *built.transfers.values()) if group],
            "axes": [built.weights.get_group(axis).group_name for axis in ("pp", "replicate", "shard", "tp")],
        }
        dist.destroy_process_group()
        return built, splits, connected, members

    return build


def test_groups_are_split_from_the_communicator_of_all_ranks_without_gloo(as_rank):
    plan = ParallelPlan(pp=2, tp=2, cp=2, dp_shard=2, zero_stage=3, num_microbatches=4)
    _, splits, _, members = as_rank(plan, rank=5)
    assert {backend for _, backend in splits} == {"cuda:nccl"}
    own = [next(part for part in partition if 5 in part) for partition, _ in splits]
    axes, ring, routes = [[5, 13], [5], [1, 3, 5, 7], [4, 5]], [[5, 7]], [[5, 13], [5, 13]]
    assert own == axes + ring + routes
    assert members["cp"] == [5, 7]


def test_a_torch_that_cannot_leave_gloo_out_of_a_split_makes_groups_of_nccl(monkeypatch):
    made = []
    monkeypatch.setattr(ranks, "has_bound_device", lambda: True)
    monkeypatch.setattr(dist, "split_group", lambda split_ranks=None: pytest.fail("it would split gloo too"))
    monkeypatch.setattr(dist, "new_group", lambda members, backend: made.append((members, backend)) or members)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    assert ranks.split_ranks([[0, 2], [1, 3]]) == [1, 3]
    assert made == [([0, 2], "nccl"), ([1, 3], "nccl")]


def test_the_ring_and_the_pipeline_share_no_group_with_weights_or_gradients(as_rank):
    """Even where the same ranks divide sequences and shard weights."""
    built, _, _, members = as_rank(ParallelPlan(pp=2, cp=2, zero_stage=3, num_microbatches=4), rank=0)
    assert set(built.transfers) == {(0, 2), (2, 0)}
    assert len(set(members["names"])) == 3
    assert set(members["names"]).isdisjoint(members["axes"])


@pytest.mark.parametrize("plan", DEEP, ids=lambda plan: plan.schedule)
def test_all_ranks_make_the_same_groups_and_connect_in_one_order(as_rank, plan):
    """Then no rank waits for one that waits for it, even though a first transfer blocks both of its ranks."""
    built = [as_rank(plan, rank) for rank in range(plan.world_size)]
    assert all(splits == built[0][1] for _, splits, _, _ in built)
    waiting = [list(connected) for _, _, connected, _ in built]
    while any(waiting):
        source, target = next(route[0] for route in waiting if route and waiting[route[0][0]][0] == route[0])
        assert waiting[source].pop(0) == waiting[target].pop(0) == (source, target)


@pytest.mark.parametrize("plan", DEEP, ids=lambda plan: plan.schedule)
def test_every_transfer_of_a_schedule_has_a_group(as_rank, plan):
    ranks_per_stage = plan.world_size // plan.pp
    rank = ranks_per_stage  # on the second pipeline rank
    built, *_ = as_rank(plan, rank)
    schedule = plan.build_schedule()
    there = {"SEND_F": 1, "RECV_B": 1, "SEND_B": -1, "RECV_F": -1}
    transfers = [action for action in schedule.with_communication()[1] if action.kind.name in there]
    assert transfers
    for action in transfers:
        peer = schedule.rank_of(action.stage + there[action.kind.name], action.microbatch) * ranks_per_stage
        route = (rank, peer) if action.kind.name.startswith("SEND") else (peer, rank)
        assert route in built.transfers


def test_a_cuda_rank_is_bound_to_its_device_when_it_joins(monkeypatch):
    joined, chosen = {}, []
    environment = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "node0", "MASTER_PORT": "20000"}
    monkeypatch.setattr(os, "environ", os.environ | environment)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **options: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: joined.update(options, backend=backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with joined_ranks("cuda", timeout_s=60):
        device = torch.device("cuda", 3)
        assert chosen == [device]  # before NCCL connects, or all ranks of a node would use its first device
        assert (joined["backend"], joined["device_id"]) == ("cpu:gloo,cuda:nccl", device)
        assert (joined["rank"], joined["world_size"], joined["timeout"]) == (11, 16, timedelta(seconds=60))
