"""The groups of a plan's ranks as they are made on CUDA, where gloo and a recorder stand in for NCCL."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from parity import SPARSE, UNTIED, largest_differences
from test_parity import FOLDED_PLANS, PLANS, SPARSE_PLANS
from tiers import nightly
from torch.testing._internal.distributed.fake_pg import FakeStore

from llama_core.parallel import mesh, ranks
from llama_core.parallel.mesh import Mesh
from llama_core.parallel.ranks import joined_ranks, wait_for_all
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
    ("plan", "spec"),
    [
        (PLANS["pp2 1f1b"], UNTIED),
        nightly(PLANS["pp2 zero3 dp2"], UNTIED),
        nightly(PLANS["tp2 pp2 zero2 dp2"], UNTIED),
        nightly(PLANS["pp2 cp2"], UNTIED),
        nightly(PLANS["pp2 chimera hsdp2x2"], UNTIED),
        nightly(SPARSE_PLANS["ep2 pp2 chimera zero2"], SPARSE),
        nightly(FOLDED_PLANS["ep2"], SPARSE),
        nightly(FOLDED_PLANS["ep4 zero3"], SPARSE),
    ],
)
def test_a_plan_trains_over_the_groups_of_cuda_with_the_numbers_of_one_process(plan, spec):
    """In float64, as in ``test_parity``."""
    differences = largest_differences(plan, spec=spec, fault=groups_as_on_cuda)
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
            shared = built.groups_across_pipeline((0, plan.pp - 1))
        members = {
            "cp": built.cp_group and dist.get_process_group_ranks(built.cp_group),
            "routes": {route: group.group_name for route, group in built.transfers.items()},
            "shared": shared and (tuple(dist.get_process_group_ranks(shared)), shared.group_name),
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
    axes, ring, routes, ends = [[5, 13], [5], [1, 3, 5, 7], [4, 5]], [[5, 7]], [[5, 13], [5, 13]], [[5, 13]]
    assert own == axes + ring + routes + ends
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
        first = [transfers[:1] for transfers in waiting]
        source, target = next(route[0] for route in first if route and first[route[0][0]] == first[route[0][1]])
        del waiting[source][0], waiting[target][0]


@pytest.mark.parametrize("plan", DEEP, ids=lambda plan: plan.schedule)
def test_the_ranks_of_a_group_know_it_by_one_name(as_rank, plan):
    """NCCL's flight recorder tells groups apart by name, and groups are destroyed in the order of their names."""
    names = {}
    for rank in range(plan.world_size):
        *_, members = as_rank(plan, rank)
        groups = members["routes"] | dict([members["shared"]] if members["shared"] else [])
        for ranks_of_group, name in groups.items():
            names.setdefault(ranks_of_group, set()).add(name)
    assert all(len(found) == 1 for found in names.values())
    assert len({name for found in names.values() for name in found}) == len(names)


def test_a_long_pipeline_makes_its_groups_in_four_splits(as_rank):
    _, splits, *_ = as_rank(ParallelPlan(pp=8, num_microbatches=8), rank=3)
    of_lone_ranks = of_both_ends = 1
    assert len(splits) == of_lone_ranks + 4 + of_both_ends


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


def test_ranks_that_wait_for_each_other_again_make_no_new_group(monkeypatch):
    """Each group of gloo keeps a connection and a thread for every other rank."""
    made, waited = [], []
    monkeypatch.setattr(dist, "new_group", lambda **options: made.append(options) or options)
    monkeypatch.setattr(dist, "barrier", waited.append)
    for _ in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        for _ in range(3):
            wait_for_all()
        dist.destroy_process_group()
    assert (len(made), len(waited)) == (2, 6)


@pytest.fixture
def joined(monkeypatch):
    """The arguments with which rank 11 of 16, on the fourth of eight GPUs, joins, and the state of the process then."""
    joined = {"devices": []}

    def join(backend, **options):
        joined.update(options, backend=backend, is_deterministic=torch.are_deterministic_algorithms_enabled())

    environment = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "node0", "MASTER_PORT": "20000"}
    monkeypatch.setattr(os, "environ", os.environ | environment)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", joined["devices"].append)
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **options: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    yield joined
    torch.use_deterministic_algorithms(False)


def test_a_cuda_rank_is_bound_to_its_device_when_it_joins(joined):
    with joined_ranks("cuda", timeout_s=60):
        device = torch.device("cuda", 3)
        assert joined["devices"] == [device]  # before NCCL connects, or all ranks of a node would use its first device
        assert (joined["backend"], joined["device_id"]) == ("cpu:gloo,cuda:nccl", device)
        assert (joined["rank"], joined["world_size"], joined["timeout"]) == (11, 16, timedelta(seconds=60))
        assert not joined["is_deterministic"]


def test_deterministic_kernels_are_asked_for_before_nccl_connects(joined):
    """NCCL's constructor reads the flag, and then leaves out NVLS, whose sums have no fixed order."""
    with joined_ranks("cuda", timeout_s=60, deterministic=True):
        assert joined["is_deterministic"]
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
