"""How many connections the ranks of a large job keep."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from distributed import FORKS

from llama_core.launch.ports import free_port
from llama_core.parallel import ranks
from llama_core.parallel.ranks import from_first_rank, joined_ranks, most_over_ranks, wait_for_all

pytestmark = pytest.mark.wide


def own_sockets():
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own is gone
            found += str(entry.readlink()).startswith("socket:")
    return found


def join(rank, num_ranks, connects_to_all, port, sender):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port)}
    ranks.CONNECTS_TO_ALL = connects_to_all
    before = own_sockets()
    with joined_ranks("cpu", timeout_s=120):
        told = from_first_rank(rank), *most_over_ranks(rank)
        dist.all_gather_object([None] * num_ranks, rank)
        wait_for_all()
        sender.send((told, own_sockets() - before))
        wait_for_all()  # a rank that leaves earlier would cut the others off


def answers_of(num_ranks, *, connects_to_all):
    """Return what each rank was told by the others, and its sockets once all have talked."""
    port = free_port()
    receivers, processes = [], []
    for rank in range(num_ranks):
        receiver, sender = FORKS.Pipe(duplex=False)
        processes.append(FORKS.Process(target=join, args=(rank, num_ranks, connects_to_all, port, sender), daemon=True))
        processes[-1].start()
        sender.close()
        receivers.append(receiver)
    answers = [receiver.recv() for receiver in receivers]
    for process in processes:
        process.join()
    return answers


def test_a_rank_of_many_connects_only_to_those_that_it_talks_to():
    """But for the first one, which gathers from all. In a small job every rank sees at once that any other is lost."""
    num_ranks = 24
    to_all, to_few = (answers_of(num_ranks, connects_to_all=most) for most in (num_ranks, num_ranks - 1))
    assert {told for told, _ in to_few} == {told for told, _ in to_all} == {(0, num_ranks - 1)}
    assert min(sockets for _, sockets in to_all) > 2 * (num_ranks - 1)  # in two groups, and to the store
    assert sum(sockets for _, sockets in to_few[1:]) < sum(sockets for _, sockets in to_all[1:]) / 2
