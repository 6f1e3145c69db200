"""Collectives run as their tables say, over point-to-point messages that are counted.

In: a ``Table`` of ``cost_model.collectives.tables`` and this rank's tensor; the process group
has a rank per rank of the table. Out: what the collective leaves on this rank, and how many
messages, rounds and bytes it took. It checks the tables that the cost model prices. Training sums
gradients by such tables where its plan says so (``all_reduces``), and uses the collectives of
``torch.distributed`` for all else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...cost_model.collectives.tables import Message, Table, final_parts, starting_parts


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that this rank really sent, and the round it was sent in."""

    round: int
    receiver: int
    num_bytes: int


def run_table(
    table: Table, tensor: Tensor, *, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, tuple[Sent, ...]]:
    """Runs a collective on this rank of ``group``; its result here and the messages it sent.

    ``tensor`` is flat: the whole tensor, one rank's part of it for an all-gather, one rank's
    input for an all-to-all; in a broadcast only rank 0's values matter. Raises ValueError if
    it does not divide into the table's equal parts.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks != table.num_ranks:
        raise ValueError(f"a table of {table.num_ranks} ranks on a group of {ranks}")
    starting = starting_parts(table, rank)
    num_chunks = len(starting) or table.num_parts
    if tensor.dim() != 1 or tensor.numel() % num_chunks:
        raise ValueError(f"{tuple(tensor.shape)} does not make {num_chunks} equal parts")
    chunks = tensor.reshape(num_chunks, -1).unbind(0)
    held = dict(zip(starting, chunks, strict=False))
    sent: list[Sent] = []
    for number, messages in enumerate(table.rounds):
        arrived, sizes = _run_round(messages, rank, held, chunks[0], group)
        held |= arrived
        sent += [Sent(number, receiver, num_bytes) for receiver, num_bytes in sizes]
    return torch.cat([held[part] for part in final_parts(table, rank)]), tuple(sent)


def _run_round(
    messages: Sequence[Message],
    rank: int,
    held: dict[int, Tensor],
    like: Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[dict[int, Tensor], list[tuple[int, int]]]:
    """One round: the parts as they are after it, and (receiver, bytes) of what was sent.

    All messages are under way at once. The tag is a message's place in the round, so that
    two between the same ranks are not confused.
    """
    arriving: list[tuple[Message, Tensor]] = []
    leaving: list[Tensor] = []
    sizes: list[tuple[int, int]] = []
    works = []
    for tag, message in enumerate(messages):
        if message.receiver == rank:
            buffer = like.new_empty(len(message.parts) * like.numel())
            arriving.append((message, buffer))
            works.append(dist.irecv(buffer, group=group, group_src=message.sender, tag=tag))
        elif message.sender == rank:
            content = torch.cat([held[part] for part in message.parts])
            leaving.append(content)  # alive until the round ends
            works.append(dist.isend(content, group=group, group_dst=message.receiver, tag=tag))
            sizes.append((message.receiver, content.numel() * content.element_size()))
    for work in works:
        if work is not None:
            work.wait()
    after: dict[int, Tensor] = {}
    for message, buffer in arriving:
        contents = buffer.chunk(len(message.parts))
        for part, content in zip(message.parts, contents, strict=True):
            own = after.get(part, held.get(part))
            after[part] = own + content if message.adds and own is not None else content
    return after, sizes
