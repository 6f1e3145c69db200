"""Ops that run beside the exchange of tokens with their experts.

In: the ops of a block. Out: for each layer of experts, the ops that neither make its inputs nor
read its result, such as shared experts. A rank starts to send tokens, runs these ops, and waits for
the tokens after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .expert_dims import is_expert_layer
from .graph import Graph


def ops_beside(nodes: Sequence[str], graph: Graph) -> dict[str, tuple[str, ...]]:
    """Map each layer of experts among the ops ``nodes`` of a block to the ops that can run between
    the start of its exchange and its end, in order. An op that two layers could have is the
    first's; ops of layers without such ops are absent."""
    found: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for at, name in enumerate(nodes):
        if is_expert_layer(graph[name]):
            before, after = nodes[:at], nodes[at + 1 :]
            own = [*_unread(before, name, graph), *_unrelated(after, name, graph)]
            own = [each for each in own if each not in taken]
            if own:
                found[name] = tuple(own)
                taken.update(own)
    return found


def _unread(before: Sequence[str], layer: str, graph: Graph) -> list[str]:
    """Return the ops before a layer that neither it nor an op that stays before it reads."""
    staying = set(_read([layer], graph))
    for name in reversed(before):
        if name in staying or not _is_plain(name, graph):
            staying.update((name, *_read([name], graph)))
    return [name for name in before if name not in staying]


def _unrelated(after: Sequence[str], layer: str, graph: Graph) -> list[str]:
    """Return the ops after a layer that read neither its result nor an op that stays after it."""
    staying = {layer}
    for name in after:
        if not staying.isdisjoint(_read([name], graph)) or not _is_plain(name, graph):
            staying.add(name)
    return [name for name in after if name not in staying]


def _read(names: Iterable[str], graph: Graph) -> set[str]:
    return {ref.name for name in names for ref in graph[name].inputs}


def _is_plain(name: str, graph: Graph) -> bool:
    """Return whether an op may change places with others: it computes its results and nothing
    else."""
    node = graph[name]
    reads_buffer = any(graph[ref.name].kind == "buffer" for ref in node.inputs)
    return node.op.startswith("aten.") and not reads_buffer
