"""Laws of the simulated month: where the time goes, against closed forms."""

from dataclasses import astuple, replace

import pytest

from benchmarks.failures import Cluster, goodput, simulate

DAY = 86400.0
CLUSTER = Cluster(spare_nodes=10**6)


def test_the_time_is_all_accounted_for():
    for seed in range(20):
        assert sum(astuple(simulate(replace(CLUSTER, spare_nodes=2), 30 * DAY, seed))) >= 30 * DAY * (1 - 1e-9)


def test_without_failures_only_the_saves_cost_time():
    shares = simulate(replace(CLUSTER, gpus=1), DAY)
    assert shares.goodput == pytest.approx(1 - CLUSTER.stall_s / CLUSTER.interval_s, rel=1e-3)
    assert shares.lost == shares.restarting == shares.without_nodes == 0


def test_a_failure_costs_half_an_interval_and_a_restart():
    """And the write during which the newest checkpoint is not durable yet; for intervals much below the mean time."""
    cluster = replace(CLUSTER, interval_s=100.0, stall_s=0.0)
    cost = cluster.interval_s / 2 + cluster.save_s + cluster.restart_s + cluster.save_s
    assert 1 / goodput(cluster) - 1 == pytest.approx(cost / cluster.mean_time_s, rel=0.05)


def test_a_slow_gpu_costs_its_share_of_the_time_until_it_is_left_out():
    kept_s = 3600.0
    slow = replace(CLUSTER, slowdowns_per_failure=0.1, left_out_after_s=kept_s, restart_leaves_out=False)
    shares = simulate(slow, 4000 * DAY)
    # after one is left out, the next becomes slow in the mean time
    is_slow = kept_s / (kept_s + slow.mean_time_s / slow.slowdowns_per_failure)
    assert shares.slowed / (shares.slowed + shares.progress) == pytest.approx(slow.slow_share * is_slow, rel=0.1)
    assert goodput(replace(slow, restart_leaves_out=True)) > goodput(slow)
    assert goodput(slow) > goodput(replace(slow, left_out_after_s=10 * kept_s))


def test_the_best_interval_is_that_of_young():
    stall, mean = 60.0, CLUSTER.mean_time_s
    best = (2 * stall * mean) ** 0.5
    at = {factor: goodput(replace(CLUSTER, stall_s=stall, interval_s=factor * best)) for factor in (0.4, 1.0, 2.5)}
    assert at[1.0] > at[0.4]
    assert at[1.0] > at[2.5]


def test_more_spare_nodes_never_cost_time():
    waits = [simulate(replace(CLUSTER, spare_nodes=nodes), 30 * DAY, seed=1).without_nodes for nodes in range(0, 24, 4)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 0 == waits[-1]
