"""Separation of ops between and after layers that belong to different branches of a model.

In: the ops between two lists of layers, or after the last. Out: groups that do not read from each
other and that each hold parameters: the end of one tower and the beginning of the next, which
follow each other in the program but could run at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx as nx

from ...planner.graph.graph import Graph, Node


def branches_apart(graph: Graph, nodes: Sequence[Node]) -> list[list[Node]]:
    """Group ops by the branch of the model that they belong to, in order of the groups' first ops;
    each group is in program order. Ops that use no parameters and exchange no values with a group
    join the next group, or the last."""
    found: list[list[Node]] = []
    loose: list[Node] = []
    for group in _connected(nodes):
        loose += group
        if _has_parameters(graph, group):
            found.append(loose)
            loose = []
    if not found:
        return [list(nodes)]
    found[-1] += loose
    order = {node.name: position for position, node in enumerate(nodes)}
    return [sorted(group, key=lambda node: order[node.name]) for group in found]


def before_join(
    graph: Graph, parts: Sequence[Sequence[Node]]
) -> tuple[list[list[Node]], list[Node]]:
    """Split the last of ``parts`` into groups of ops that each end one branch, and the ops after
    the branches have met. An op belongs to a branch if there is an earlier part with parameters on
    which it does not depend."""
    *before, last = parts
    every = sum(1 << part for part, nodes in enumerate(before) if _has_parameters(graph, nodes))
    leads = _parts_that_lead(graph, parts)
    own = [node for node in last if leads[node.name] & every != every]
    ends = [
        group
        for group in _connected(own)
        if _has_parameters(graph, group) and any(leads[node.name] & every for node in group)
    ]
    taken = {node.name for group in ends for node in group}
    return ends, [node for node in last if node.name not in taken]


def _parts_that_lead(graph: Graph, parts: Sequence[Sequence[Node]]) -> Mapping[str, int]:
    """Map each node to the set of parts whose results it depends on, as an integer with a bit per
    part."""
    leads: dict[str, int] = {}
    for part, nodes in enumerate(parts):
        bit = 0 if part == len(parts) - 1 else 1 << part
        for node in nodes:
            found = bit
            for ref in node.inputs:
                found |= leads.get(ref.name, 0)
            leads[node.name] = found
    return leads


def _connected(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return the connected components of the nodes, each in program order: no component reads a
    value of another."""
    inside = {node.name: position for position, node in enumerate(nodes)}
    links: nx.Graph[int] = nx.Graph()
    links.add_nodes_from(range(len(nodes)))
    links.add_edges_from(
        (inside[ref.name], position)
        for position, node in enumerate(nodes)
        for ref in node.inputs
        if ref.name in inside
    )
    groups = sorted(sorted(group) for group in nx.connected_components(links))
    return [[nodes[position] for position in group] for group in groups]


def _has_parameters(graph: Graph, nodes: Sequence[Node]) -> bool:
    return any(graph[ref.name].kind == "parameter" for node in nodes for ref in node.inputs)
