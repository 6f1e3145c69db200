"""Pins: layouts that the user requires, such as ``layers.*.mlp.up_proj.weight=S(0)@tp``.

In: pins, the graph, its blocks. Out: blocks with different kinds for different pins; for each node
of a kind its pinned placements by mesh axis; the pins that a plan breaks.

A path names a parameter, a module (meaning its result) or an op of the captured program. ``*``
matches anything within one part of the path, ``**`` any parts. A parameter is pinned in the layout
it is stored in, a value in the layout its producer makes. ``R`` requires the whole value on every
rank, with any gradient (``R`` or ``I``); on axes that a mesh lacks values are whole, so ``S``
requires a mesh with that axis.

If every choice of a decision breaks a pin, they cost ``PENALTY_SECONDS`` more. So the solvers need
not know pins: a plan breaks a pin only if every plan does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import UsageError
from ..graph.graph import Block, Blocks, Graph
from ..graph.layout import INVARIANT, Layout, Mesh, Placement, parse_placement
from ..plan import Plan, StagePlan

AXES = ("dp", "ep", "cp", "tp")
"""Names of the axes that meshes may have."""

PENALTY_SECONDS = 1e6
"""Cost in seconds of a choice that breaks a pin: more than any step."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Placement that the user requires of a node's value on one mesh axis. ``pattern`` is the path
    of the node as the user wrote it."""

    pattern: str
    placement: Placement
    axis: str

    def __str__(self) -> str:
        return f"{self.pattern}={self.placement}@{self.axis}"

    def keeps(self, layout: Layout, mesh: Mesh) -> bool:
        """Return whether ``layout`` on ``mesh`` satisfies the pin."""
        return self._kept(_on(layout, mesh, self.axis))

    def _kept(self, placement: Placement) -> bool:
        if self.placement.kind == "R":
            return placement.kind in ("R", "I")
        return placement == self.placement


Pins = Mapping[str, tuple[Pin, ...]]
"""Map from pinned nodes, by their template's name, to their pins."""


def parse_pin(text: str) -> Pin:
    """Parse a pin such as ``layers.*.weight=S(0)@tp``. Raises UsageError AP180 if it does not have
    this form, AP182 for an unknown mesh axis.

    >>> str(parse_pin("layers.*.up_proj.weight = S(0)@tp"))
    'layers.*.up_proj.weight=S(0)@tp'
    """
    pattern, equals, rest = text.rpartition("=")
    layout, at, axis = (part.strip() for part in rest.partition("@"))
    try:
        placement = parse_placement(layout)
    except ValueError:
        placement = None
    if not equals or not at or not pattern.strip() or placement is None:
        raise UsageError(
            "AP180",
            f"--pin {text!r} is not PATH=LAYOUT@AXIS",
            why=f"{layout!r} is not a layout" if equals and at and placement is None else "",
            fix="for example: --pin 'layers.*.mlp.up_proj.weight=S(0)@tp'; layouts are S(dim), "
            "R (replicated), I and P",
        )
    if axis not in AXES:
        raise UsageError(
            "AP182",
            f"--pin {text!r}: unknown axis {axis!r}",
            fix=f"one of {', '.join(AXES)}",
        )
    return Pin(pattern.strip(), placement, axis)


def pattern_of(text: str) -> re.Pattern[str]:
    """Compile a dotted path to a regular expression. ``*`` matches any text without dots, ``**``
    any text, ``?`` one letter.

    >>> [bool(pattern_of("layers.*.up").fullmatch(path)) for path in
    ...  ("layers.3.up", "layers.3.mlp.up")]
    [True, False]
    """
    parts = re.split(r"(\*\*|\*|\?)", text)
    special = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    return re.compile("".join(special.get(part, re.escape(part)) for part in parts))


def paths(graph: Graph) -> dict[str, str]:
    """Map each path that can be pinned (of a parameter, module or op) to the name of its node."""
    found: dict[str, str] = {}
    for node in graph:
        if node.kind == "op":
            parts = node.module.split(".") if node.module else []
            for end in range(1, len(parts) + 1):
                found[".".join(parts[:end])] = node.name
    found |= {node.name: node.name for node in graph if node.kind in ("op", "parameter")}
    return found | {name: held for name, held in graph.tied.items() if held in graph.by_name}


def match_pins(graph: Graph, pins: Iterable[Pin]) -> dict[str, tuple[Pin, ...]]:
    """Map the name of each pinned node to its pins. Raises UsageError AP181 if a pin matches no
    node, AP183 if it cannot be met."""
    known = paths(graph)
    found: dict[str, dict[Pin, None]] = {}
    for pin in pins:
        pattern = pattern_of(pin.pattern)
        names = dict.fromkeys(node for path, node in known.items() if pattern.fullmatch(path))
        if not names:
            raise _unknown(pin, known)
        for name in names:
            _check(pin, name, graph)
            found.setdefault(name, {})[pin] = None
    for name, own in found.items():
        _check_agreement(name, tuple(own))
    return {name: tuple(own) for name, own in found.items()}


def _unknown(pin: Pin, known: Iterable[str]) -> UsageError:
    return UsageError(
        "AP181",
        f"--pin {pin}: no parameter, module or op is named {pin.pattern!r}",
        fix=suggest(pin.pattern, known),
    )


def suggest(text: str, known: Iterable[str], *, is_pattern: bool = True) -> str:
    """Return a sentence with the few known paths that are most similar to ``text``; "" without any.

    Equal layers, whose paths differ only in numbers, are suggested once: with ``*`` for the number
    if ``text`` is a pattern, else as the layer most similar to ``text``.

    >>> known = ["layers.0.up.weight", "layers.1.up.weight", "head"]
    >>> suggest("layers.*.up.wieght", known), suggest("layers.1.up.wieght", known, is_pattern=False)
    ('similar names: layers.*.up.weight', 'similar names: layers.1.up.weight')
    """
    general: dict[str, list[str]] = {}
    for path in dict.fromkeys(known):
        general.setdefault(re.sub(r"\b\d+\b", "*", path), []).append(path)
    wanted = re.sub(r"\b\d+\b", "*", text)
    close = difflib.get_close_matches(wanted, general, n=3, cutoff=0.5)
    if not is_pattern:
        close = [difflib.get_close_matches(text, general[each], 1, 0.0)[0] for each in close]
    return f"similar names: {', '.join(close)}" if close else ""


def _check(pin: Pin, name: str, graph: Graph) -> None:
    """Raise UsageError AP183 if no mesh can give node ``name`` the pinned placement."""
    node, placement = graph[name], pin.placement
    shape = node.spec.shape
    why = ""
    if placement.is_shard and placement.dim >= len(shape):
        why = f"{name} has {len(shape)} dimensions, so the last is S({len(shape) - 1})"
    elif placement.kind == "P" and node.kind == "parameter":
        why = f"{name} is a parameter, which is sharded or replicated"
    elif placement.is_shard and node.spec.stored:
        why = f"{name} is held in {node.spec.stored}, whole on every rank: a split cuts its blocks"
    if why:
        raise UsageError("AP183", f"--pin {pin} cannot be met", why=why, fix="another layout")


def _check_agreement(name: str, pins: Sequence[Pin]) -> None:
    for pin in pins:
        for other in pins:
            if pin.axis == other.axis and pin.placement != other.placement:
                raise UsageError(
                    "AP183",
                    f"--pin {pin} cannot be met",
                    why=f"--pin {other} requires another layout of {name}",
                    fix="remove one of the two",
                )


def pinned_blocks(graph: Graph, blocks: Blocks, pins: Sequence[Pin]) -> Blocks:
    """Return the blocks with kinds split, so that blocks of one kind (planned alike) have equal
    pins. Raises UsageError AP181, AP183."""
    if not pins:
        return blocks
    by_name = match_pins(graph, pins)
    return blocks.split_kinds(
        lambda block: tuple(by_name.get(name, ()) for name in (*block.nodes, *block.parameters))
    )


def by_template(graph: Graph, blocks: Blocks, pins: Sequence[Pin]) -> Pins:
    """Map nodes to their pins, under their own names and under the names of the corresponding nodes
    in the first block of their kind. ``blocks`` are the result of ``pinned_blocks``."""
    template = blocks.template if pins else {}
    found: dict[str, tuple[Pin, ...]] = {}
    for name, own in match_pins(graph, pins).items():
        found[name] = found[template.get(name, name)] = own
    return found


def in_given_kinds(plan: Plan, blocks: Blocks, given: Blocks) -> Plan:
    """Convert a plan for ``blocks``, whose kinds are split by pins, to a plan for the original
    blocks ``given``. Layouts of blocks whose kind was split off are stored by their nodes' own
    names."""
    if blocks is given:
        return plan
    start, stages = 0, []
    for stage in plan.stages:
        positions = range(start, start + len(stage.blocks))
        stages.append(_renamed(stage, blocks, given, positions))
        start = positions.stop
    return replace(plan, stages=tuple(stages))


def _renamed(stage: StagePlan, blocks: Blocks, given: Blocks, positions: range) -> StagePlan:
    layouts = dict(stage.layouts)
    for position in positions:
        own = blocks.blocks[position]
        for name in (*own.nodes, *own.parameters):
            template = blocks.template[name]
            if template != given.template[name] and template in stage.layouts:
                layouts[name] = stage.layouts[template]
    plans = tuple(
        replace(block, kind=given.blocks[position].kind)
        for block, position in zip(stage.blocks, positions, strict=True)
    )
    return replace(stage, layouts=dict(sorted(layouts.items())), blocks=plans)


def _on(layout: Layout, mesh: Mesh, axis: str) -> Placement:
    """Return the placement of a layout on ``axis``; I (whole) if the mesh lacks the axis."""
    if axis not in mesh.axes or mesh.shape[mesh.axes.index(axis)] == 1:
        return INVARIANT
    return layout[mesh.axes.index(axis)]


def keep_pinned(layouts: Sequence[Layout], pins: Sequence[Pin], mesh: Mesh) -> tuple[Layout, ...]:
    """Return the layouts that satisfy all pins, or all layouts if none does."""
    if not pins:
        return tuple(layouts)
    return tuple(each for each in layouts if num_broken(each, pins, mesh) == 0) or tuple(layouts)


def num_broken(layout: Layout, pins: Sequence[Pin], mesh: Mesh) -> int:
    """Return the number of pins that ``layout`` does not satisfy on ``mesh``."""
    return sum(not pin.keeps(layout, mesh) for pin in pins)


def broken_pins(plan: Plan, graph: Graph, blocks: Blocks, pins: Sequence[Pin]) -> dict[Pin, str]:
    """Map each pin that a plan breaks to a text that names a node and its layout."""
    found: dict[Pin, str] = {}
    start = 0
    by_name = match_pins(graph, pins)
    for stage in plan.stages:
        own = blocks.blocks[start : start + len(stage.blocks)]
        start += len(stage.blocks)
        for name in dict.fromkeys(name for block in own for name in _read(block, graph)):
            layout = stage.layout_of(name, blocks)
            if layout is None:
                continue
            for pin in by_name.get(name, ()):
                if not pin.keeps(layout.outputs[0], stage.mesh):
                    placement = _on(layout.outputs[0], stage.mesh, pin.axis)
                    found.setdefault(pin, f"{name} has the layout {placement} on {pin.axis}")
    return found


def _read(block: Block, graph: Graph) -> Iterable[str]:
    """Yield the names of a block's ops and of the parameters that they read."""
    yield from block.nodes
    for name in block.nodes:
        for ref in graph[name].inputs:
            if graph[ref.name].kind == "parameter":
                yield ref.name


def check_kept(plan: Plan, graph: Graph, blocks: Blocks, pins: Sequence[Pin]) -> Plan:
    """Return the plan without alternatives that break pins. Raises UsageError AP184 if the plan
    itself breaks a pin."""
    if not pins:
        return plan
    found = broken_pins(plan, graph, blocks, pins)
    if found:
        pin, what = next(iter(found.items()))
        others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UsageError(
            "AP184",
            f"no plan meets --pin {pin}{others}",
            why=f"{what} in the nearest plan; {_reason(pin, graph)}",
            fix="remove the pin, or fix the axis it needs: "
            f"--parallel {pin.axis}=N with an N that divides the dimension",
        )
    kept_ones = tuple(a for a in plan.alternatives if a.step_seconds < PENALTY_SECONDS)
    return replace(plan, alternatives=kept_ones)


def check_priced(seconds: Iterable[float], pins: Sequence[Pin]) -> None:
    """Raise UsageError AP184 if one of a configuration's ``seconds`` includes the penalty of a
    broken pin (``PENALTY_SECONDS``)."""
    if pins and max(seconds) >= PENALTY_SECONDS:
        raise UsageError(
            "AP184",
            f"the configuration cannot meet --pin {' --pin '.join(map(str, pins))}",
            why="no mesh of this configuration has the required axis",
            fix="remove a pin, or set the required axis in --parallel",
        )


def plain_kind(kind: str) -> str:
    """Return a block's kind without the suffix that pins add.

    >>> plain_kind("layers.0@1"), plain_kind("layers.0")
    ('layers.0', 'layers.0')
    """
    return kind.partition("@")[0]


def _reason(pin: Pin, graph: Graph) -> str:
    name = next(name for name, own in match_pins(graph, (pin,)).items() if pin in own)
    shape = " × ".join(map(str, graph[name].spec.shape))
    return f"it is {shape}, and no allowed mesh that fits shards it this way"
