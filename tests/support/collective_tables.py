"""Checks of tables of messages: whether they compute their collective, and how much they send."""

from __future__ import annotations

from autoparallel.cost_model.collectives.tables import Levels, Rounds, Table, busiest_port


def starting_parts(table: Table, rank: int) -> tuple[int, ...]:
    """Return the ids of the tensor parts that ``rank`` holds before the collective."""
    n, parts = table.num_ranks, table.num_parts
    if table.kind == "all_gather":
        return tuple(range(rank * parts // n, (rank + 1) * parts // n))
    if table.kind == "all_to_all":
        return tuple(range(rank * n, (rank + 1) * n))
    return tuple(range(parts)) if table.kind != "broadcast" or rank == 0 else ()


def final_parts(table: Table, rank: int) -> tuple[int, ...]:
    """Return the ids of the tensor parts that ``rank`` must hold after the collective."""
    n, parts = table.num_ranks, table.num_parts
    if table.kind == "reduce_scatter":
        return tuple(range(rank * parts // n, (rank + 1) * parts // n))
    if table.kind == "all_to_all":
        return tuple(range(rank, n * n, n))
    return tuple(range(parts))


def wrong_parts(table: Table) -> list[str]:
    """Describe, one text each, the tensor parts that ranks lack or hold with wrong contents after
    all messages of a table; empty for a correct table. A part's contents are followed as the list
    of ranks whose values are summed in it."""
    ranks = range(table.num_ranks)
    held: list[dict[int, tuple[int, ...]]] = [
        dict.fromkeys(starting_parts(table, rank), (rank,)) for rank in ranks
    ]
    wrong = []
    for number, messages in enumerate(table.rounds):
        sent = [(m, [held[m.sender].get(part) for part in m.parts]) for m in messages]
        for message, contents in sent:
            for part, content in zip(message.parts, contents, strict=True):
                if content is None:
                    wrong.append(f"round {number}: rank {message.sender} lacks part {part}")
                    continue
                own = held[message.receiver].get(part, ()) if message.adds else ()
                held[message.receiver][part] = own + content
    summed = tuple(ranks) if table.kind in ("all_reduce", "reduce_scatter") else None
    for rank in ranks:
        for part in final_parts(table, rank):
            found = tuple(sorted(held[rank].get(part, ())))
            source = {"all_gather": part * len(ranks) // table.num_parts, "broadcast": 0}
            expected = summed or (source.get(table.kind, part // len(ranks)),)
            if found != expected:
                wrong.append(f"rank {rank}, part {part}: sum of {found}, not {expected}")
    return wrong


def rounds(table: Table) -> Levels:
    """Count the rounds of a table: ``intra``, in which all messages stay within hosts, and
    ``inter``, in which a message crosses hosts."""
    host = table.host_of()
    inter = sum(any(host[m.sender] != host[m.receiver] for m in r) for r in table.rounds)
    return Levels(len(table.rounds) - inter, inter)


def chain(table: Table) -> Levels:
    """Count the messages, within and between hosts, of the longest chain in which each message
    passes on parts that the previous message delivered. If chains differ, messages between hosts
    decide, as they take longer. The result is a lower bound of the latency of a pipelined
    algorithm, whose rings or trees run independently."""
    host = table.host_of()
    longest: dict[tuple[int, int], tuple[int, int]] = {}
    for messages in table.rounds:
        arrivals = []
        for message in messages:
            keys = [(message.sender, part) for part in message.parts]
            inter, intra = max(longest.get(key, (0, 0)) for key in keys)
            crosses = host[message.sender] != host[message.receiver]
            arrivals.append((message, (inter + crosses, intra + (not crosses))))
        for message, length in arrivals:
            for part in message.parts:
                key = (message.receiver, part)
                longest[key] = max(longest.get(key, (0, 0)), length)
    inter, intra = max(longest.values(), default=(0, 0))
    return Levels(intra, inter)


def bytes_in_rounds(table: Table) -> Levels:
    """Return the bytes that the busiest rank sends or receives in each round, summed over the
    rounds of a table, within and between hosts. The unit is the bytes of the tensor (for an
    all-to-all, of one rank's input)."""
    return _busiest_tensors(table, table.rounds)


def busiest_bytes(table: Table) -> Levels:
    """Return the bytes that the busiest rank sends or receives over the whole table, within and
    between hosts, as multiples of the tensor's bytes. They bound a pipelined algorithm's time from
    below."""
    return _busiest_tensors(table, (tuple(m for each in table.rounds for m in each),))


def _busiest_tensors(table: Table, rounds: Rounds) -> Levels:
    host = table.host_of()
    levels = (
        [busiest_port(each, host, crosses=crosses) for each in rounds] for crosses in (False, True)
    )
    return Levels(*(sum(parts) / table.num_parts for parts in levels))


def sent_bytes(table: Table, rank: int) -> float:
    """Return the bytes that ``rank`` sends in all, as a multiple of the tensor's bytes."""
    sent = sum(len(m.parts) for each in table.rounds for m in each if m.sender == rank)
    return sent / table.num_parts
