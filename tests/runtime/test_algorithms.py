"""Collective algorithms run over real messages: right results, and the traffic that is priced."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from collective_tables import (
    busiest_bytes,
    bytes_in_rounds,
    final_parts,
    rounds,
    sent_bytes,
    starting_parts,
)
from processes import run_processes

from autoparallel.cost_model.collectives.algorithms import ALGORITHMS, find_table
from autoparallel.cost_model.collectives.tables import Levels, Table
from autoparallel.runtime.messages.all_reduces import TableMessages

LENGTH = 2**8 * 3**3  # divisible by every number of parts used here
NUM_PIECES = 3


def tables(hosts: tuple[int, ...]) -> list[Table]:
    """Every algorithm that exists for ranks so laid out."""
    found = [
        find_table(kind, name, hosts, num_pieces=NUM_PIECES)
        for kind, names in ALGORITHMS.items()
        for name in names
    ]
    return [table for table in found if table is not None]


class Sent(NamedTuple):
    """A message that a rank sent, and the round it was sent in."""

    round: int
    receiver: int
    num_bytes: int


def run_table(table: Table, given: torch.Tensor) -> tuple[torch.Tensor, tuple[Sent, ...]]:
    """Runs a collective on this rank: its result here, and the messages that it sends."""
    rank, group = dist.get_rank(), dist.group.WORLD
    if table.kind == "all_to_all":  # a part for each pair of ranks
        table = replace(table, num_parts=table.num_ranks**2)
    starting = list(starting_parts(table, rank))
    parts = given.new_zeros(table.num_parts, given.numel() // (len(starting) or table.num_parts))
    parts[starting] = given.reshape(-1, parts.shape[1])[: len(starting)]
    messages = TableMessages(table, parts.numel(), group)
    messages(parts.view(-1))
    sent = [
        Sent(number, one.receiver, 8 * sum(stop - start for start, stop in one.spans))
        for number, (_, leaving) in enumerate(messages.rounds)
        for one in leaving
    ]
    return parts[list(final_parts(table, rank))].flatten(), tuple(sent)


def _whole(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(LENGTH, generator=generator, dtype=torch.float64)


def _expected(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's input and what torch.distributed's own collective makes of it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = _whole(rank)
    if kind in ("all_reduce", "reduce_scatter"):
        total = whole.clone()
        dist.all_reduce(total)
        return whole, total if kind == "all_reduce" else total.chunk(n)[rank]
    if kind == "all_gather":
        parts = [torch.empty(LENGTH // n, dtype=torch.float64) for _ in range(n)]
        own = whole[: LENGTH // n].clone()
        dist.all_gather(parts, own)
        return own, torch.cat(parts)
    if kind == "all_to_all":
        received = torch.empty_like(whole)
        dist.all_to_all_single(received, whole)
        return whole, received
    copied = whole.clone()
    dist.broadcast(copied, 0)
    return whole, copied


def _run(layouts: list[tuple[int, ...]]) -> list[tuple[Sent, ...]]:
    traffic = []
    for hosts in layouts:
        for table in tables(hosts):
            given, expected = _expected(table.kind)
            result, sent = run_table(table, given)
            torch.testing.assert_close(
                result, expected, rtol=0, atol=1e-13, msg=lambda text, t=table: f"{t.name}: {text}"
            )
            traffic.append(sent)
    return traffic


def counted(table: Table, traffic: list[tuple[Sent, ...]]) -> tuple[Levels, Levels, Levels]:
    """(rounds, bytes in rounds, busiest rank's bytes) of the messages that were really sent."""
    host = table.host_of()
    port_in_round: dict[tuple[bool, int], dict[tuple[int, str], int]] = {}
    for rank, sent in enumerate(traffic):
        for one in sent:
            ports = port_in_round.setdefault((host[rank] != host[one.receiver], one.round), {})
            for port in ((rank, "out"), (one.receiver, "in")):
                ports[port] = ports.get(port, 0) + one.num_bytes
    crossing = {number for crosses, number in port_in_round if crosses}
    within = {number for _, number in port_in_round} - crossing
    whole = LENGTH * 8
    summed, busiest = [], []
    for level in (False, True):
        per_round = [ports for (crosses, _), ports in port_in_round.items() if crosses == level]
        summed.append(sum(max(ports.values()) for ports in per_round) / whole)
        total: dict[tuple[int, str], int] = {}
        for ports in per_round:
            for port, num_bytes in ports.items():
                total[port] = total.get(port, 0) + num_bytes
        busiest.append(max(total.values(), default=0) / whole)
    return Levels(len(within), len(crossing)), Levels(*summed), Levels(*busiest)


def check(num_ranks: int, layouts: list[tuple[int, ...]]) -> None:
    by_rank = run_processes(num_ranks, _run, layouts)
    run = [table for hosts in layouts for table in tables(hosts)]
    for number, table in enumerate(run):
        traffic = [sent[number] for sent in by_rank]
        name = f"{table.kind} {table.name} {table.hosts}"
        really_rounds, really_summed, really_busiest = counted(table, traffic)
        assert really_rounds == rounds(table), name
        assert really_summed == pytest.approx(bytes_in_rounds(table)), name
        assert really_busiest == pytest.approx(busiest_bytes(table)), name
        for rank, sent in enumerate(traffic):
            num_bytes = sum(one.num_bytes for one in sent)
            assert num_bytes == pytest.approx(sent_bytes(table, rank) * LENGTH * 8), name
        num_messages = sum(map(len, traffic))
        assert num_messages == sum(map(len, table.rounds)), name


@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [(2, [(2,), (1, 1)]), (3, [(3,), (2, 1)]), (4, [(4,), (2, 2), (1, 1, 1, 1)])],
)
def test_every_algorithm_gives_the_collective_with_the_traffic_of_its_table(
    num_ranks: int, layouts: list[tuple[int, ...]]
) -> None:
    check(num_ranks, layouts)


@pytest.mark.slow
def test_every_algorithm_is_right_on_eight_ranks() -> None:
    check(8, [(8,), (4, 4), (2, 2, 2, 2)])


@pytest.mark.slow
def test_every_algorithm_is_right_on_six_ranks() -> None:
    """Not a power of two: butterflies fold, two hosts of three and three hosts of two."""
    check(6, [(6,), (3, 3), (2, 2, 2)])
