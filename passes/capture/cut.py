"""Cutting a graph without repeated layers: few bytes across the cuts, equal work between them.

A dynamic program over the candidate positions minimizes

    sum over blocks of (work / total work)^2  +  sum over cuts of bytes / bytes of all values

which is least for equal blocks and narrow cuts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...planner.graph.graph import Graph, Node

MAX_BLOCKS = 16
_CANDIDATES = 160
_MATMULS = ("aten.matmul.", "aten.bmm.", "aten.mm.", "aten.addmm.", "aten.baddbmm.")


def cut_points(graph: Graph, ops: Sequence[Node], max_blocks: int = MAX_BLOCKS) -> list[int]:
    """Return at most ``max_blocks - 1`` positions in ``ops`` at which a new block starts, for a
    model without repeated layers: few bytes cross, and blocks have similar FLOPs."""
    work = [_work(graph, node) for node in ops]
    num_blocks = min(max_blocks, sum(1 for flops in work if flops) // 2)
    if num_blocks < 2:
        return []
    crossing = crossing_bytes(graph, ops)
    narrow = sorted(range(1, len(ops)), key=lambda i: crossing[i])[:_CANDIDATES]
    bounds = [0, *sorted(narrow), len(ops)]
    total_bytes = sum(spec.num_bytes for node in ops for spec in node.outputs)
    prefix = [0]
    for flops in work:
        prefix.append(prefix[-1] + flops)
    costs = [crossing[b] / total_bytes if 0 < b < len(ops) else 0.0 for b in bounds]
    shares = [prefix[b] / prefix[-1] for b in bounds]
    return [bounds[i] for i in _best_cuts(shares, costs, num_blocks)]


def _best_cuts(shares: list[float], costs: list[float], num_blocks: int) -> list[int]:
    """Return the indices of the candidates at which to cut into at most ``num_blocks`` blocks. For
    each candidate, ``shares`` has the share of all FLOPs before it, ``costs`` the cost of the bytes
    that cross it."""
    last = len(shares) - 1
    best = [{0: 0.0}]
    back: list[dict[int, int]] = [{}]
    for _ in range(num_blocks):
        costs_here: dict[int, float] = {}
        came: dict[int, int] = {}
        for end in range(1, last + 1):
            for start, before in best[-1].items():
                if start < end:
                    cost = before + (shares[end] - shares[start]) ** 2 + costs[end]
                    if cost < costs_here.get(end, float("inf")):
                        costs_here[end], came[end] = cost, start
        best.append(costs_here)
        back.append(came)
    count = min(
        (n for n in range(1, num_blocks + 1) if last in best[n]), key=lambda n: best[n][last]
    )
    cuts, end = [], last
    for n in range(count, 0, -1):
        end = back[n][end]
        cuts.append(end)
    return sorted(cuts)[1:]


def crossing_bytes(graph: Graph, ops: Sequence[Node]) -> list[int]:
    """Return for each position ``i`` the bytes of all values that are made before ``ops[i]`` and
    used by ``ops[i]`` or later ops."""
    position = {node.name: i for i, node in enumerate(ops)}
    change = [0] * (len(ops) + 1)
    for i, node in enumerate(ops):
        users = [position[user] for user in graph.users[node.name] if user in position]
        if users and max(users) > i:
            num_bytes = sum(spec.num_bytes for spec in node.outputs)
            change[i + 1] += num_bytes
            change[max(users) + 1] -= num_bytes
    crossing, total = [], 0
    for delta in change:
        total += delta
        crossing.append(total)
    return crossing


def _work(graph: Graph, node: Node) -> int:
    """Return the FLOPs of a node that is a product with weights, a matmul or attention, else 0."""
    output = node.outputs[0]
    specs = [graph.spec(ref) for ref in node.inputs]
    if node.op.startswith(_MATMULS):
        return 2 * output.numel * specs[0].shape[-1]
    if "scaled_dot_product_attention" in node.op:
        return 4 * specs[0].numel * specs[1].shape[-2]
    if node.op.startswith(("aten.linear.", "aten.conv")):
        weight = specs[1]
        return 2 * output.numel * (weight.numel // weight.shape[0])
    return 0
