"""Simulated parameter servers against times derived by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.cost_model.simulator.consistency import Consistency, bound_of
from autoparallel.cost_model.simulator.server_simulation import ServerJob, simulate_servers

RATE = 1e8


def job(
    consistency: Consistency,
    slowness: tuple[float, ...],
    *,
    staleness: int = 0,
    num_bytes: float = 1e6,
    blocks: int = 1,
    update: float = 0.0,
    servers: int = 1,
    beside: bool = False,
) -> ServerJob:
    """Workers of 10 ms forward and 20 ms backward times ``slowness``, over all blocks."""
    workers = len(slowness)
    return ServerJob(
        worker_ranks=tuple(range(workers)),
        server_ranks=tuple(range(servers) if beside else range(workers, workers + servers)),
        forward=tuple((0.01 * slow / blocks,) * blocks for slow in slowness),
        between=(0.0,) * workers,
        backward=tuple((0.02 * slow / blocks,) * blocks for slow in slowness),
        block_bytes=((num_bytes / blocks / servers,) * servers,) * blocks,
        update_seconds=((update,) * servers,) * blocks,
        bytes_per_second=(RATE,) * (workers + servers),
        latency_seconds=0.0,
        bound=bound_of(consistency, staleness),
    )


def seconds(each: ServerJob, iterations: int = 12) -> float:
    """Between two iterations of one worker, all workers together."""
    return len(each.worker_ranks) / simulate_servers(each, iterations).iterations_per_second()


def test_one_worker_takes_compute_push_update_and_pull_one_after_the_other() -> None:
    """30 ms, 1 MB at 100 MB/s to the server and back, an update, four messages' latency."""
    found = seconds(replace(job("bsp", (1.0,), update=0.003), latency_seconds=0.001))
    assert found == pytest.approx(0.03 + 0.01 + 0.01 + 0.003 + 4 * 0.001)


def test_pushes_of_several_workers_share_the_port_of_the_server() -> None:
    assert seconds(job("bsp", (1.0, 1.0, 1.0))) == pytest.approx(0.03 + 3 * (0.01 + 0.01))


def test_more_servers_divide_what_a_port_carries() -> None:
    """The workers' own ports then carry the most: 1 MB each way."""
    assert seconds(job("bsp", (1.0, 1.0), servers=2)) == pytest.approx(0.03 + 0.01 + 0.01)


def test_a_server_beside_its_only_worker_costs_no_transfer() -> None:
    assert seconds(job("bsp", (1.0,), beside=True)) == pytest.approx(0.03)


def test_blocks_are_pushed_beside_the_backward_and_pulled_beside_the_forward() -> None:
    """Of 10 blocks, each 1 ms of transfer per way and 2 ms of backward, 1 ms of forward: only the
    first block's push and pull have nothing beside them."""
    found = seconds(job("bsp", (1.0,), blocks=10))
    assert found == pytest.approx(0.03 + 0.001 + 0.001)


def test_under_bsp_and_ssp_all_go_at_the_pace_of_the_slowest_and_under_asp_none_does() -> None:
    """At a negligible transfer a worker takes 30 ms, the slow one 90 ms."""
    slow = (1.0, 3.0)
    small = 1.0
    bsp = seconds(job("bsp", slow, num_bytes=small))
    ssp = seconds(job("ssp", slow, staleness=2, num_bytes=small), 40)
    asp = seconds(job("asp", slow, num_bytes=small), 40)
    assert bsp == pytest.approx(0.09, rel=0.01)
    assert ssp == pytest.approx(0.09, rel=0.01)
    assert asp == pytest.approx(2 / (1 / 0.03 + 1 / 0.09), rel=0.01)


def test_ssp_lets_a_fast_worker_run_ahead_by_its_bound() -> None:
    """After three iterations of the fast one (bound 2) it waits for the slow one's first."""
    found = simulate_servers(job("ssp", (1.0, 5.0), staleness=2, num_bytes=1.0), 4)
    fast, slow = found.finished
    assert fast[:3] == pytest.approx([0.03, 0.06, 0.09], rel=1e-3)
    assert fast[3] == pytest.approx(slow[0] + 0.03, rel=1e-3)


def test_replicas_send_what_is_pushed_once_more() -> None:
    """A push of 0.5 MB to each of two servers goes on to the other one before the next begins."""
    alone = job("bsp", (1.0,), servers=2)
    kept = replace(alone, replica=(1, 0))
    assert seconds(kept) - seconds(alone) == pytest.approx(0.005, rel=0.01)


def test_more_bytes_and_slower_workers_are_never_faster() -> None:
    base = seconds(job("bsp", (1.0, 1.0), blocks=4))
    assert seconds(job("bsp", (1.0, 1.0), blocks=4, num_bytes=2e6)) > base
    assert seconds(job("bsp", (1.0, 1.5), blocks=4)) > base
