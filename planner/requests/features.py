"""Features of parallelism that a plan may use: options ``--allow`` and ``--deny``.

Features come in groups. Allowing some features of a group denies the others of that group; groups
of which no feature is named stay unrestricted. Denying a feature always removes it. ``allowed``
returns the strategies of an op that use no denied feature: split rows, positions or experts.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import UsageError
from ..graph.graph import Graph, Node, Ref
from ..graph.layout import RINGS, AxisStrategy, Mesh, shard
from ..graph.positions import Dims
from ..ops.attention import is_attention
from ..plan import Recompute

PLAIN_MODES: tuple[Recompute, ...] = ("none", "selective", "full")
"""Recomputation modes that every search considers, in descending order of kept activations."""

OFFERED_MODES: tuple[Recompute, ...] = ("attention", "attention-offloaded", "none-offloaded")
"""Recomputation modes that a search considers if they are offered: allowed by name, or where they
help (``find_plan.with_offers``)."""

MODES: tuple[Recompute, ...] = (*PLAIN_MODES[:-1], *OFFERED_MODES, PLAIN_MODES[-1])
"""All recomputation modes; the last keeps the fewest activations."""

GROUPS: dict[str, tuple[str, ...]] = {
    "parallelism": ("dp", "tp", "pp", "cp", "sp", "ep"),
    "zero": ("zero1", "zero2", "zero3", "hsdp"),
    "recompute": ("selective", "full", *OFFERED_MODES),
    "shapes": ("2d-mesh", "3d-mesh", "mixed-stages", "branches", "uneven-shares"),
    "memory": ("offload", "tiles"),
    "cp-attention": ("gather", "ring", "ulysses"),
}
"""Features by group; the schedules form one more group.

``dp``, ``tp``, ``cp``: mesh axes of more than one rank; ``dp`` also: rows split on any axis;
``pp``: several stages; ``cp`` also: attention on split positions; ``sp``: any other op on split
positions; ``ep``: weights of experts split by expert; ``selective``, ``full``: recomputation;
``attention``: recomputation of all but attention; ``attention-offloaded``, ``none-offloaded``: kept
activations in host memory;
``2d-mesh``: two axes; ``mixed-stages``: stages of different sizes; ``branches``: separate devices
for parallel branches; ``uneven-shares``: unequal batch shares for unlike devices; ``offload``:
masters and optimizer states in host memory; ``tiles``: full recomputation runs the last ops of a
block tile by tile; ``gather``, ``ring``, ``ulysses``: attention on an axis ``cp`` gathers keys and
values, passes them from rank to rank (with a window those of its halo alone), or splits heads after
an all-to-all; ``hsdp``: ZeRO within
groups of ranks.
"""

CHANGES = ("servers", "ssp", "asp")
"""Features that the search uses only if allowed by name: parameter servers, whose prices are less
certain, and ``ssp`` and ``asp``, which change the result of a step."""

DERIVED_SCHEDULES = ("chimera", "terapipe")
"""Schedules derived from others; the search uses them only if forced, allowed by name, or if the
number of stages is forced."""

WHOLE_GROUPS = ("zero", "recompute")
"""Groups whose name may be given to mean all their features."""


@dataclass(frozen=True, slots=True)
class Features:
    """Features of parallelism, named as in ``--allow`` and ``--deny``, that a plan must not use,
    and the features of ``CHANGES``, ``DERIVED_SCHEDULES`` and ``OFFERED_MODES`` that the user
    allowed by name (the last also: that the search offers)."""

    denied: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()

    def allows(self, name: str) -> bool:
        return name not in self.denied

    def allows_change(self, name: str) -> bool:
        """Return whether the user allowed ``name``, a feature of ``CHANGES`` or a derived schedule,
        by name."""
        return name in self.changes and name not in self.denied

    def allows_mesh(self, mesh: Mesh, max_tp: int | None = None) -> bool:
        """Return whether a stage may be on a mesh: its axes, their number, and its tensor-parallel
        degree, at most ``max_tp``, are all allowed.

        >>> features = Features(frozenset({"2d-mesh"}))
        >>> features.allows_mesh(Mesh(("tp",), (4,)))
        True
        >>> features.allows_mesh(Mesh(("dp", "tp"), (2, 2)))
        False
        """
        sizes = {name: size for name, size in zip(mesh.axes, mesh.shape, strict=True) if size > 1}
        if max_tp is not None and sizes.get("tp", 1) > max_tp:
            return False
        shapes = {2: "2d-mesh", 3: "3d-mesh"}
        return all(map(self.allows, sizes)) and self.allows(shapes.get(len(sizes), ""))

    @property
    def zeros(self) -> tuple[int, ...]:
        """Return the allowed ZeRO stages."""
        return (0, *(zero for zero in (1, 2, 3) if self.allows(f"zero{zero}")))

    @property
    def recompute(self) -> tuple[Recompute, ...]:
        """Return the allowed recomputation modes, including "none"."""
        return tuple(mode for mode in MODES if mode == "none" or self._offers(mode))

    def _offers(self, mode: Recompute) -> bool:
        return self.allows(mode) and (mode in PLAIN_MODES or mode in self.changes)


def features_of(allow: Iterable[str], deny: Iterable[str], schedules: tuple[str, ...]) -> Features:
    """Return the features denied by the lists ``--allow`` and ``--deny``. Allowing some features of
    a group denies the rest of the group. Raises UsageError AP185 and AP186.

    >>> sorted(features_of(["zero1"], ["pp"], ("1f1b", "gpipe")).denied)
    ['hsdp', 'pp', 'zero2', 'zero3']
    """
    groups = {**GROUPS, "schedules": schedules}
    allowed, denied = _expanded(allow, groups, "--allow"), _expanded(deny, groups, "--deny")
    both = sorted(allowed & denied)
    if both:
        raise UsageError(
            "AP186", f"{both[0]} is both allowed and denied", fix="remove it from --allow or --deny"
        )
    for members in groups.values():
        named = allowed & set(members)
        if named:
            denied |= set(members) - named
    if set(schedules) <= denied:
        raise UsageError(
            "AP186", "every schedule is denied", fix=f"allow at least one of {', '.join(schedules)}"
        )
    named = allowed & {*CHANGES, *DERIVED_SCHEDULES, *OFFERED_MODES}
    return Features(frozenset(denied), frozenset(named))


def _expanded(names: Iterable[str], groups: dict[str, tuple[str, ...]], option: str) -> set[str]:
    known = [*(name for members in groups.values() for name in members), *CHANGES]
    found: set[str] = set()
    for text in names:
        for name in (part.strip().lower() for part in text.split(",")):
            if name in WHOLE_GROUPS:
                found |= set(groups[name])
            elif name in known:
                found.add(name)
            elif name:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise UsageError(
                    "AP185",
                    f"{option}: unknown feature {name!r}",
                    fix=f"{hint}the features are {', '.join((*known, *WHOLE_GROUPS))}",
                )
    return found


def allowed(
    node: Node,
    graph: Graph,
    strategies: tuple[AxisStrategy, ...],
    dims: Callable[[], Dims],
    features: Features,
) -> tuple[AxisStrategy, ...]:
    """Return an op's sharding strategies on one mesh axis that use no denied feature; all
    strategies if none remains. ``dims`` returns the tensor dimensions that are sequence
    positions."""
    own = "cp" if is_attention(node) else "sp"
    found = strategies
    if not features.allows("dp") and graph.batch_dims:
        found = tuple(each for each in found if not _splits_rows(node, graph, each))
    if not features.allows(own):
        known = dims()
        found = tuple(each for each in found if not _splits_positions(node, graph, each, known))
    if not features.allows("ep"):
        found = tuple(each for each in found if not _splits_experts(node, graph, each))
    return found or strategies


def attention_ways(
    strategies: tuple[AxisStrategy, ...],
    by_heads: tuple[AxisStrategy, ...],
    features: Features,
) -> tuple[AxisStrategy, ...]:
    """Return the strategies of attention on an axis that splits positions: those of ``strategies``
    that split them, in a ring (with a window: by a halo) or not, and those that split heads
    (``by_heads``), as far as ``features`` allows; if it allows none of them, all that split
    positions."""
    groups = {
        "gather": tuple(each for each in strategies if each.label not in RINGS),
        "ring": tuple(each for each in strategies if each.label in RINGS),
        "ulysses": by_heads,
    }
    found = [each for name, own in groups.items() if features.allows(name) for each in own]
    return tuple(found) or strategies


def _splits_rows(node: Node, graph: Graph, strategy: AxisStrategy) -> bool:
    """Return whether a strategy shards an input or output of an op along the batch dimension."""
    rows = [graph.batch_dims[ref.name][ref.index] for ref in node.inputs]
    rows += graph.batch_dims[node.name]
    placements = (*strategy.inputs, *strategy.outputs)
    return any(
        row is not None and placement == shard(row)
        for row, placement in zip(rows, placements, strict=True)
    )


def _splits_positions(node: Node, graph: Graph, strategy: AxisStrategy, dims: Dims) -> bool:
    """Return whether a strategy shards an op's input or output along positions (``dims``)."""
    refs = (*node.inputs, *(Ref(node.name, index) for index in range(len(node.outputs))))
    placements = (*strategy.inputs, *strategy.outputs)
    for ref, placement in zip(refs, placements, strict=True):
        rows = graph.batch_dims[ref.name][ref.index] if graph.batch_dims else None
        if placement.is_shard and placement.dim in dims.get(ref, frozenset()) - {rows}:
            return True
    return False


def _splits_experts(node: Node, graph: Graph, strategy: AxisStrategy) -> bool:
    """Return whether a strategy shards a three-dimensional weight along its first dim, experts."""
    if "conv" in node.op:
        return False
    return any(
        graph[ref.name].kind == "parameter"
        and len(graph.spec(ref).shape) == 3
        and placement == shard(0)
        for ref, placement in zip(node.inputs, strategy.inputs, strict=True)
    )
