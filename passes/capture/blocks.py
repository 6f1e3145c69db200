"""Blocks: the repeated layers of a model, and the ops before, between and after them.

Layers are found by module path (``model.layers.0``, ``model.layers.1``, …): the outermost numbered
modules at least two of which are equal, then, in a model with such layers, any other numbered
modules. Their structure covers ops, shapes without the batch, literals, wiring by position,
parameters, sharing of these, and copies, so equal blocks correspond node by node. A graph with no
such layers is cut where few bytes cross (``passes/capture/cut.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...planner.graph.graph import Block, Blocks, Graph, Node, Ref, flat_form
from ...planner.ops.storage import Key, copy_of, storage_of
from .branches import before_join, branches_apart
from .cut import cut_points

Layer = tuple[str, int]
"""Numbered module of a model: the path of its module list, and its number in the list."""


@dataclass
class _Part:
    """Sequence of ops that becomes a block. ``layer`` is the repeated layer that it computes; None
    for ops before, between and after layers."""

    layer: Layer | None
    nodes: list[Node]


def find_blocks(graph: Graph) -> Blocks:
    """Cut the graph's ops, in topological order, into blocks: the units that the planner assigns to
    stages, mostly one layer each."""
    ops = [node for node in graph.nodes if node.kind == "op"]
    layers = _find_layers(graph, ops)
    parts = _layer_parts(graph, ops, layers) if layers else _cut_parts(graph, ops)
    parts = _forward_only(graph, parts)
    if layers:
        parts = _branched(graph, parts)
    return Blocks(_named(graph, parts))


def blocks_like(graph: Graph, planned: Blocks) -> Blocks | None:
    """Cut another graph of the same model into blocks that own the same parameters as the
    ``planned`` blocks. Returns None if its ops use the parameters in another order, or if there are
    too few ops."""
    owner = {name: at for at, block in enumerate(planned.blocks) for name in block.parameters}
    ops = [node for node in graph.nodes if node.kind == "op"]
    parts: list[_Part] = [_Part(None, [])]
    for position, node in enumerate(ops):
        wanted = max((owner.get(ref.name, 0) for ref in node.inputs), default=0)
        is_end = len(ops) - position == len(planned.blocks) - len(parts)
        while parts[-1].nodes and (len(parts) <= wanted or is_end):
            parts.append(_Part(None, []))
            is_end = False
        parts[-1].nodes.append(node)
    found = Blocks(_named(graph, parts))
    own = [set(block.parameters) for block in found.blocks]
    return found if own == [set(block.parameters) for block in planned.blocks] else None


def layer_candidates(module: str) -> list[Layer]:
    """Return every numbered module on a module path, outermost first.

    >>> layer_candidates("model.layers.3.experts.1.up")
    [('model.layers', 3), ('model.layers.3.experts', 1)]
    """
    parts = module.split(".")
    return [(".".join(parts[:i]), int(part)) for i, part in enumerate(parts) if part.isdecimal()]


def _find_layers(graph: Graph, ops: Sequence[Node]) -> dict[str, Layer]:
    """Map each op inside a repeated layer to that layer: of nested layers, to the outermost that
    repeats."""
    members: dict[str, dict[Layer, list[Node]]] = {}
    for node in ops:
        for layer in layer_candidates(node.module):
            members.setdefault(layer[0], {}).setdefault(layer, []).append(node)
    order = sorted(members, key=lambda path: path.count(".") + (path != ""))
    chosen: dict[str, Layer] = {}
    for num_equal in (2, 1):
        for prefix in order:
            instances = {
                layer: nodes
                for layer, nodes in members[prefix].items()
                if not any(node.name in chosen for node in nodes) and _has_parameters(graph, nodes)
            }
            hashes = Counter(_outline(graph, nodes) for nodes in instances.values())
            if len(instances) >= 2 and max(hashes.values()) >= num_equal:
                chosen.update({n.name: layer for layer, nodes in instances.items() for n in nodes})
        if not chosen:
            break
    return chosen


def _outline(graph: Graph, nodes: Sequence[Node]) -> tuple[object, ...]:
    """Return a key of the ops and shapes of a layer's nodes. Equal layers of one module list have
    equal keys, even if they read different inputs."""
    own = tuple(graph[name].spec.shape for name in _parameters(graph, nodes, set()))
    return own, tuple((n.op, tuple(spec.shape for spec in n.outputs)) for n in nodes)


def _has_parameters(graph: Graph, nodes: Iterable[Node]) -> bool:
    return any(graph[ref.name].kind == "parameter" for node in nodes for ref in node.inputs)


def _layer_parts(graph: Graph, ops: Sequence[Node], layers: Mapping[str, Layer]) -> list[_Part]:
    """Cut the ops into layers and the ops around them, in order of execution. Ops between two
    layers that use no parameters are added to the layer before or after."""
    runs: list[_Part] = []
    for node in ops:
        layer = layers.get(node.name)
        if not runs or runs[-1].layer != layer:
            runs.append(_Part(layer, []))
        runs[-1].nodes.append(node)
    runs = _reunited(runs)
    options = [_joined(graph, runs, forward) for forward in (False, True)]
    if [part.nodes for part in options[0]] == [part.nodes for part in options[1]]:
        return options[0]
    return min(options, key=lambda parts: len({structure(graph, p.nodes) for p in parts}))


def _reunited(runs: list[_Part]) -> list[_Part]:
    """Join parts that belong to one layer, with all ops executed between these parts, into one
    part."""
    last = {run.layer: i for i, run in enumerate(runs) if run.layer is not None}
    parts: list[_Part] = []
    position = 0
    while position < len(runs):
        run, end = runs[position], position
        while True:
            inside = [last[r.layer] for r in runs[position : end + 1] if r.layer is not None]
            furthest = max(inside, default=end)
            if furthest <= end:
                break
            end = furthest
        nodes = [node for r in runs[position : end + 1] for node in r.nodes]
        parts.append(_Part(run.layer, nodes))
        position = end + 1
    return parts


def _joined(graph: Graph, runs: list[_Part], forward: bool) -> list[_Part]:
    """Add ops between layers that use no parameters to the layer before them; with ``forward``, to
    the layer after them."""
    parts: list[_Part] = []
    pending: list[Node] = []
    between: list[Node] = []
    for position, run in enumerate(runs):
        is_inner = run.layer is None and 0 < position < len(runs) - 1
        if is_inner and not _has_parameters(graph, run.nodes):
            between = run.nodes
            if forward:
                pending = run.nodes
            else:
                parts[-1] = _Part(parts[-1].layer, parts[-1].nodes + run.nodes)
            continue
        parts.append(_Part(run.layer, pending + run.nodes))
        pending = []
    return parts if forward else _tail_joined(graph, parts, between)


def _tail_joined(graph: Graph, parts: list[_Part], between: list[Node]) -> list[_Part]:
    """Move ops that follow the last layer into it if the same ops follow every other layer.
    ``between``: the ops between two layers."""
    if not between or len(parts) < 2 or parts[-1].layer is not None:
        return parts
    head = parts[-1].nodes
    tail, rest = head[: len(between)], head[len(between) :]
    if not rest or [node.op for node in tail] != [node.op for node in between]:
        return parts
    if _has_parameters(graph, tail):
        return parts
    layer = parts[-2]
    return [*parts[:-2], _Part(layer.layer, layer.nodes + tail), _Part(None, rest)]


def _cut_parts(graph: Graph, ops: Sequence[Node]) -> list[_Part]:
    bounds = [0, *cut_points(graph, ops), len(ops)]
    return [_Part(None, list(ops[a:b])) for a, b in pairwise(bounds)]


def _forward_only(graph: Graph, parts: list[_Part]) -> list[_Part]:
    """Move ops that depend on inputs alone, and that only the last part uses (as on loss targets),
    into the last part."""
    if len(parts) < 2:
        return parts
    position = {node.name: i for i, part in enumerate(parts) for node in part.nodes}
    last = len(parts) - 1
    sunk: set[str] = set()
    for node in reversed([node for part in parts[:-1] for node in part.nodes]):
        users = graph.users[node.name]
        if users and all(position[user] == last for user in users) and _light(graph, node):
            sunk.add(node.name)
            position[node.name] = last
    moved = [node for part in parts[:-1] for node in part.nodes if node.name in sunk]
    kept = [_Part(p.layer, [n for n in p.nodes if n.name not in sunk]) for p in parts[:-1]]
    kept.append(_Part(parts[-1].layer, moved + parts[-1].nodes))
    return [part for part in kept if part.nodes]


def _branched(graph: Graph, parts: list[_Part]) -> list[_Part]:
    """Split the ops between and after layers by branch of the model (such as two towers)."""
    if len(parts) < 3:
        return parts
    found = parts[:1]
    for part in parts[1:-1]:
        groups = [part.nodes] if part.layer else branches_apart(graph, part.nodes)
        found += [_Part(part.layer, nodes) for nodes in groups]
    if parts[-1].layer is None:
        ends, rest = before_join(graph, [part.nodes for part in (*found, parts[-1])])
        if rest:
            return [*found, *(_Part(None, nodes) for nodes in ends), _Part(None, rest)]
    return [*found, parts[-1]]


def _light(graph: Graph, node: Node) -> bool:
    """Return whether a node's results need no gradient and depend on no parameter."""
    pending, seen = [node], {node.name}
    while pending:
        current = pending.pop()
        if current.kind == "parameter" or any(spec.requires_grad for spec in current.outputs):
            return False
        for ref in current.inputs:
            if ref.name not in seen:
                seen.add(ref.name)
                pending.append(graph[ref.name])
    return True


def _named(graph: Graph, parts: list[_Part]) -> tuple[Block, ...]:
    owned: set[str] = set()
    blocks: list[Block] = []
    names = _base_kinds(parts)
    owners = storage_of(graph)
    uses = Counter(name for part in parts for name in _parameters(graph, part.nodes, set()))
    kinds: dict[tuple[Any, ...], str] = {}
    used: Counter[str] = Counter()
    taken: set[str] = set()
    for part in parts:
        parameters = _parameters(graph, part.nodes, owned)
        owned.update(parameters)
        name, base = _name(graph, part, parts, names)
        is_shared = tuple(uses[each] > 1 for each in parameters)
        memory = _memory(graph, part.nodes, owners)
        key = base, structure(graph, part.nodes, parameters), is_shared, memory
        if key not in kinds:
            kinds[key] = f"{base}.{used[base]}" if used[base] else base
            used[base] += 1
        while name in taken:
            name += "_"
        taken.add(name)
        blocks.append(Block(name, kinds[key], tuple(n.name for n in part.nodes), parameters))
    return tuple(blocks)


def _memory(
    graph: Graph, nodes: Sequence[Node], owners: Mapping[Key, Key]
) -> tuple[bool | tuple[int, int], ...]:
    """Return the properties of a block that decide how much memory its outer values and views take,
    as a key. For each value from outside of the block: a number for the tensor whose storage holds
    it, and that tensor's number of elements. For each op: whether it copies its inputs, and whether
    its outputs own their storage. ``owners`` maps each value to the value that owns its storage."""
    inside, outside = {node.name for node in nodes}, dict[Key, tuple[int, int]]()
    for node in nodes:
        for ref in node.inputs:
            name, index = owners[ref.name, ref.index]
            if name not in inside and graph[name].kind in ("op", "input"):
                size = graph[name].outputs[index].numel
                outside.setdefault((name, index), (len(outside), size))
    reads = {(ref.name, ref.index): None for node in nodes for ref in node.inputs}
    read_outside = (outside[owners[key]] for key in reads if owners[key] in outside)
    return *read_outside, *(
        key
        for node in nodes
        for key in (
            *(copy_of(node.name, at) in owners for at in range(len(node.inputs))),
            *(owners[node.name, at][0] == node.name for at in range(len(node.outputs))),
        )
    )


def _base_kinds(parts: Sequence[_Part]) -> dict[str, str]:
    """Map the path of each module list to a name for its layers: the last word of the path, or the
    whole path if two lists share the last word."""
    prefixes = sorted({part.layer[0] for part in parts if part.layer is not None})
    short = {prefix: prefix.rsplit(".", 1)[-1] or "layers" for prefix in prefixes}
    counts = Counter(short.values())
    return {
        prefix: name if counts[name] == 1 and not name.isdecimal() else prefix
        for prefix, name in short.items()
    }


def _name(
    graph: Graph, part: _Part, parts: Sequence[_Part], kinds: Mapping[str, str]
) -> tuple[str, str]:
    """Return the name of a block and the name of its kind; blocks of equal structure share the
    kind."""
    if part.layer is not None:
        prefix, number = part.layer
        return f"{prefix}.{number}".removeprefix("."), kinds[prefix]
    if len(parts) == 1:
        return "model", "model"
    if part is parts[-1]:
        return "head", "head"
    if part is parts[0]:
        name = "embedding" if any("embedding" in n.op for n in part.nodes) else "stem"
        return name, name
    module = common_module([node.module for node in part.nodes if node.module])
    words = [word for word in module.split(".") if not word.isdecimal()]
    return module or "middle", words[-1] if words and words[-1] else "middle"


def common_module(paths: Sequence[str]) -> str:
    """Return the deepest module path that contains all of ``paths``.

    >>> common_module(["a.b.c", "a.b.d"])
    'a.b'
    """
    split = [path.split(".") for path in paths]
    common: list[str] = []
    for level in zip(*split, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common)


def _parameters(graph: Graph, nodes: Iterable[Node], owned: set[str]) -> tuple[str, ...]:
    """Return the parameters and buffers that nodes use, in order of first use, without the names in
    ``owned``, which earlier blocks own."""
    found: dict[str, None] = {}
    for node in nodes:
        for ref in node.inputs:
            if graph[ref.name].kind in ("parameter", "buffer") and ref.name not in owned:
                found[ref.name] = None
    return tuple(found)


def structure(
    graph: Graph, nodes: Sequence[Node], parameters: Sequence[str] | None = None
) -> tuple[Any, ...]:
    """Return a key of the computation of ``nodes``: equal for two sequences of nodes that compute
    the same, position by position. ``parameters`` are owned by the nodes (default: all that they
    use). A value from outside is represented by its place in the order of first use, its shape and
    its kind (input, constant, shared parameter or result of another block). The ``number`` that
    identifies a random call is not part of the key."""
    own = parameters if parameters is not None else _parameters(graph, nodes, set())
    inside = {node.name: place for place, node in enumerate(nodes)}
    inside |= {name: -1 - place for place, name in enumerate(own)}
    outside: dict[Ref, tuple[Any, ...]] = {}

    def named(ref: Ref) -> tuple[Any, ...]:
        if ref.name in inside:
            return inside[ref.name], ref.index
        if ref not in outside:
            outside[ref] = "outside", len(outside), graph[ref.name].kind, graph.spec(ref)
        return outside[ref]

    parts: list[Any] = [len(own), *(graph[name].spec for name in own)]
    for node in nodes:
        is_used_outside = any(user not in inside for user in graph.users[node.name])
        kwargs = {key: value for key, value in node.kwargs.items() if key != "number"}
        parts += (node.op, node.outputs, is_used_outside)
        flat_form((node.args, kwargs), named, parts)
    return tuple(parts)
