"""Cost of one block on a stage, walked node by node.

In: a block, the layouts of its nodes and of the values it reads, its recomputation mode, unit
prices. Out: its seconds, bytes, and the layouts in which it receives values. Every value is
converted once per block and target, as the runtime does; nothing is taken from the solvers' tables
but the unit prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from ...cost_model.cluster.cluster import Link
from ..costs.choices import inner_collectives, input_specs
from ..costs.host_memory import COPY_SECONDS, host_link
from ..costs.kept_bytes import (
    RECOMPUTE_MODES,
    WHOLE,
    Part,
    again_parts,
    kept_parts,
    last_ops,
    read_parts,
    replay,
    saved_parts,
    weight_grad_parts,
    weight_grad_seconds,
    working_bytes,
)
from ..costs.mesh_prices import Sharding
from ..costs.others_beside import seconds_beside
from ..costs.prices import Prices, Seconds, StateBytes, sent_again
from ..graph.graph import Block, Blocks, Graph, Node, Ref
from ..graph.layout import INVARIANT, Layout, NodeLayout, boundary_layout, conversion_steps
from ..kernels.recompute import has_tiles, is_offloaded, without_offload
from ..ops.attention import is_attention
from ..plan import Recompute
from ..stage.kind_model import GATHERED_BLOCKS
from ..stage.outline import is_own_parameter
from ..stage.structure import Structure
from ..variants.slice_costs import carried_bytes


@dataclass(frozen=True, slots=True)
class StageFacts:
    """Facts shared by all blocks of a stage. ``sharding``: of its states. ``link`` is the link from
    the previous stage. ``slices``: lengths of sequence slices. ``splits``: whether the backward
    defers weight gradients."""

    graph: Graph
    prices: Prices
    sharding: Sharding
    link: Link
    slices: tuple[int, ...] = ()
    splits: bool = False


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layouts of a block's nodes and of everything it reads, in the order of ``Reads``.

    ``values``: the layout in which the stage holds a value, or None if it is received here;
    ``again`` marks values that an earlier block of the stage reads and keeps too. ``leaves``: the
    layout in which an input, constant or buffer is held, None if the plan has none.
    """

    nodes: tuple[NodeLayout, ...]
    values: tuple[Layout | None, ...]
    again: tuple[bool, ...]
    leaves: tuple[NodeLayout | None, ...]
    parameters: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Seconds of a block per micro-batch (states: per step), and bytes per rank of the block and of
    the parameters that only it uses.

    ``receive_seconds``: forward and backward. ``late_seconds``: computing weight gradients, if the
    backward is split; ``late_bytes`` are kept for it. ``gathered_bytes``: gathered parameters,
    recomputed values, and values that wait in host memory until it runs. ``batch_bytes``: the part
    of ``kept_bytes`` that depends on the batch. ``values``: layouts of ``Reads.values``.
    ``hidden_seconds``: exchanges of tokens with experts beside compute. ``host_bytes``: kept in the
    host's memory; ``exposed_copies``: the part of ``seconds`` that waits for copies of them.
    """

    seconds: Seconds
    receive_seconds: tuple[float, float]
    late_seconds: float
    states: StateBytes
    kept_bytes: float
    late_bytes: float
    working_bytes: float
    gathered_bytes: float
    batch_bytes: float
    values: tuple[Layout, ...]
    hidden_seconds: float
    host_bytes: float = 0.0
    exposed_copies: float = 0.0


def block_cost(reads: Reads, layouts: Layouts, mode: Recompute, setting: StageFacts) -> BlockCost:
    """Return the cost of a block under ``layouts`` and recomputation mode ``mode``."""
    return _BlockWalk(reads, layouts, mode, setting).cost()


@dataclass
class _BlockWalk:
    reads: Reads
    layouts: Layouts
    mode: Recompute
    setting: StageFacts
    seconds: Seconds = field(default_factory=Seconds)
    receive: list[float] = field(default_factory=lambda: [0.0, 0.0])
    kept_bytes: float = 0.0
    late: list[float] = field(default_factory=lambda: [0.0, 0.0])
    working_bytes: float = 0.0
    batch_bytes: float = 0.0
    hidden_seconds: float = 0.0
    host_bytes: float = 0.0

    def __post_init__(self) -> None:
        self.graph, self.prices = self.setting.graph, self.setting.prices
        values = zip(self.reads.values, self.layouts.values, strict=True)
        self.made = {ref: layout for ref, layout in values if layout is not None}
        self.parameters = dict(zip(self.reads.parameters, self.layouts.parameters, strict=True))
        self.replay = replay(self.reads.block, self.graph, self.prices)
        self.mode, self.is_offloaded = without_offload(self.mode), is_offloaded(self.mode)
        is_tiled = has_tiles(self.mode) and not self.setting.splits
        self.last = last_ops(self.reads.block, self.graph, self.prices) if is_tiled else WHOLE
        self.skipped = self.replay.skipped.get(self.mode, frozenset(self.reads.block.nodes))
        self.leaves = dict(zip(self.reads.leaves, self.layouts.leaves, strict=True))

    def cost(self) -> BlockCost:
        again_bytes, late = self._block()
        states = [
            self.prices.parameter(self.graph[name].spec, held, *self.setting.sharding)
            for (name, held), shared in zip(self.parameters.items(), self.reads.shared, strict=True)
            if not shared
        ]
        if self.reads.block.parameters:
            self._add(self.prices.block_sync(*self.setting.sharding))
        for seconds, _ in states:
            self._add(seconds)
        total = StateBytes(*map(sum, zip(*(own for _, own in states), strict=True)))
        waits = self._offload()
        again_bytes += self.host_bytes
        return BlockCost(
            self.seconds,
            (self.receive[0], self.receive[1]),
            max(self.late),
            total,
            self.kept_bytes,
            late,
            self.working_bytes,
            GATHERED_BLOCKS * total.gathered + again_bytes,
            self.batch_bytes,
            tuple(self.made[ref] for ref in self.reads.values),
            self.hidden_seconds,
            self.host_bytes,
            waits,
        )

    def _offload(self) -> float:
        """Move the kept bytes to the host if the block is offloaded, and add the seconds in which a
        pass waits for the copies, longer than its compute; return them."""
        if not self.is_offloaded or not self.kept_bytes:
            return 0.0
        self.host_bytes, self.kept_bytes, self.batch_bytes = self.kept_bytes, 0.0, 0.0
        copied = self.host_bytes / host_link(self.prices.device)
        own = self.seconds
        hidden = own.forward_compute, own.backward_compute
        waits = [COPY_SECONDS + max(0.0, copied - each) for each in hidden]
        self._add(Seconds(forward_communication=waits[0], backward_communication=waits[1]))
        return sum(waits)

    def _add(self, seconds: Seconds) -> None:
        self.seconds = self.seconds.plus(seconds)

    def _block(self) -> tuple[float, float]:
        """Add up the costs of all nodes; return the bytes per rank that the backward recomputes,
        and the bytes kept for deferred weight gradients."""
        graph, prices, mode = self.graph, self.prices, self.mode
        wanted: dict[Ref, dict[Layout, None]] = {}
        uses: dict[Ref, list[tuple[str, int]]] = {}
        parts: dict[Part, None] = {}
        selected: dict[Part, None] = {}
        batch: dict[Part, None] = {}
        late: dict[Part, None] = {}
        for name, layout in zip(self.reads.block.nodes, self.layouts.nodes, strict=True):
            node = graph[name]
            self._op(node, layout)
            self.kept_bytes += carried_bytes(
                node, self._pair_bytes(node, layout), self.setting.slices, again=has_tiles(mode)
            )
            for position, (ref, target) in enumerate(zip(node.inputs, layout.inputs, strict=True)):
                self._receive(ref, target)
                wanted.setdefault(ref, {})[target] = None
                uses.setdefault(ref, []).append((name, position))
            for index, made in enumerate(layout.outputs):
                self.made[Ref(name, index)] = made
            saved = partial(again_parts, last=self.last) if has_tiles(mode) else saved_parts
            parts.update(dict.fromkeys(saved(node, layout, graph, prices)))
            if mode in ("selective", "attention"):
                kept_ops = self.replay.kept[mode]
                selected.update(dict.fromkeys(kept_parts(node, layout, graph, prices, of=kept_ops)))
            batch.update(dict.fromkeys(read_parts(node, layout, graph, prices)))
            late.update(dict.fromkeys(weight_grad_parts(node, layout, graph, prices)))
            for at, own in enumerate(weight_grad_seconds(node, layout, graph, prices)):
                self.late[at] += own
            size = self.last.part(name, working_bytes(node, layout, graph, prices))
            self.working_bytes = max(self.working_bytes, size)
        self._meet()
        for ref, targets in wanted.items():
            twice = self._is_repeated(ref, uses[ref])
            for target in targets:
                self._convert(ref, target, twice=twice)
        kept = {"none": parts, "full": batch}.get(mode, selected)
        self.kept_bytes += _total(kept)
        self.batch_bytes = _total(part for part in kept if part in batch)
        if mode == "none":
            return 0.0, _total(late)
        inputs = sum(
            prices.local_bytes(graph.spec(ref), self.made[ref])
            for ref, again in zip(self.reads.values, self.layouts.again, strict=True)
            if not again
        )
        self.kept_bytes += inputs
        return _total(part for part in parts if part not in selected), _total(late)

    def _meet(self) -> None:
        """Raise the host's seconds so that the forward, and the backward or each half of a split
        backward, ends only when both the device and the host that launches its ops have
        finished."""
        own, (computed, issued) = self.seconds, self.late if self.setting.splits else (0.0, 0.0)
        first = max(own.backward_compute - computed, own.backward_issue - issued)
        self.seconds = own._replace(
            forward_issue=max(own.forward_compute, own.forward_issue),
            backward_issue=first + max(computed, issued),
        )

    def _op(self, node: Node, layout: NodeLayout) -> None:
        inner = inner_collectives(node, self.graph, self.prices, layout)
        specs = input_specs(node, self.graph)
        beside = seconds_beside(node, self.reads.block.nodes, self.graph, self.prices)
        own = self.prices.op(node, specs, layout, inner, beside)
        self._add(own)
        self.hidden_seconds += sum(self.prices.exchanges(node, specs, layout, inner, beside).hidden)
        if self.mode == "none":
            return
        is_skipped = node.name in self.skipped
        if not (is_skipped and self.prices.assumptions.keeps_sent):
            inner = sent_again(inner) if is_skipped else inner
            rerun = self.prices.op(node, specs, layout, inner)  # without the ops beside it
            self._add(Seconds(backward_communication=rerun.forward_communication))
        if not is_skipped:
            again = Seconds(backward_compute=own.forward_compute, backward_issue=own.forward_issue)
            self._add(again)

    def _receive(self, ref: Ref, target: Layout) -> None:
        """Add the cost of receiving an earlier stage's value in the layout its first use needs."""
        if ref in self.made or self.graph[ref.name].kind != "op":
            return
        layout = boundary_layout(target)
        self.made[ref] = layout
        forward, backward = self.prices.transfer(self.graph.spec(ref), layout, self.setting.link)
        self.receive[0] += forward
        self.receive[1] += backward

    def _is_repeated(self, ref: Ref, uses: Sequence[tuple[str, int]]) -> bool:
        """Return whether recomputation repeats the conversion of a value's layout. ``uses``: the
        ops that read the value, each with the index of the input."""
        if self.mode == "none":
            return False
        kind, reader = self.graph[ref.name].kind, self.graph[uses[0][0]]
        if kind != "op" and (kind != "parameter" or is_own_parameter(ref, reader, self.graph)):
            return True
        return self.replay.repeats(uses)[RECOMPUTE_MODES.index(self.mode)]

    def _convert(self, ref: Ref, target: Layout, *, twice: bool) -> None:
        node = self.graph[ref.name]
        if node.kind in ("input", "constant", "buffer"):
            held = self.leaves[ref.name]
            source = held.outputs[ref.index] if held else (INVARIANT,) * len(target)
            if not any(step.collectives[0] for step in conversion_steps(source, target)):
                return
        else:
            source = self.parameters[ref.name] if node.kind == "parameter" else self.made[ref]
        forward, backward = self.prices.conversion(self.graph.spec(ref), source, target)
        again = forward if twice else 0.0
        self._add(Seconds(forward_communication=forward, backward_communication=backward + again))

    def _pair_bytes(self, node: Node, layout: NodeLayout) -> int:
        """Return the bytes per rank of an attention op's keys and values; 0 without slices."""
        if not self.setting.slices or not is_attention(node):
            return 0
        pair = zip(node.inputs[1:3], layout.inputs[1:3], strict=True)
        return sum(self.prices.local_bytes(self.graph.spec(ref), held) for ref, held in pair)


def _total(parts: Iterable[Part]) -> float:
    return float(sum(size for _, size in parts))


Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Reads:
    """A block and the values it reads from outside, each listed once in the order of first use.

    ``values`` are outputs of other blocks, ``leaves`` names of inputs, constants and buffers;
    ``shared`` marks ``parameters`` that other blocks use too. ``sends``: (value, index in the block
    of the op that computes it, position of the last block that reads it) for values that later
    blocks read.
    """

    block: Block
    values: tuple[Ref, ...]
    leaves: tuple[str, ...]
    parameters: tuple[str, ...]
    shared: tuple[bool, ...]
    sends: tuple[tuple[Ref, int, int], ...]


@dataclass(frozen=True)
class BlockForms:
    """Blocks grouped by form: blocks of one form cost the same under equal layouts. ``storages``
    maps each value to the value that owns its memory (a view shares memory)."""

    structure: Structure
    storages: Mapping[Key, Key]

    @property
    def graph(self) -> Graph:
        return self.structure.graph

    @property
    def blocks(self) -> Blocks:
        return self.structure.blocks

    @cached_property
    def reads(self) -> tuple[Reads, ...]:
        """Return, for each block, the values that it reads from outside."""
        return tuple(map(self._reads, range(len(self.blocks.blocks))))

    @cached_property
    def forms(self) -> tuple[int, ...]:
        """Map each block to the first block that costs the same under equal layouts (positions)."""
        first: dict[tuple[Any, ...], int] = {}
        return tuple(
            first.setdefault(self._form(reads), position)
            for position, reads in enumerate(self.reads)
        )

    def _reads(self, position: int) -> Reads:
        block, graph = self.blocks.blocks[position], self.graph
        inside = set(block.nodes)
        values: dict[Ref, None] = {}
        leaves: dict[str, None] = {}
        parameters: dict[str, None] = {}
        for name in block.nodes:
            for ref in graph[name].inputs:
                if ref.name in inside:
                    continue
                kind = graph[ref.name].kind
                if kind == "op":
                    values[ref] = None
                elif kind == "parameter":
                    parameters[ref.name] = None
                else:
                    leaves[ref.name] = None
        return Reads(
            block,
            tuple(values),
            tuple(leaves),
            tuple(parameters),
            tuple(self.structure.is_shared(name) for name in parameters),
            self._sends[position],
        )

    @cached_property
    def _sends(self) -> list[tuple[tuple[Ref, int, int], ...]]:
        """Return, for each block, (value, index of its op in the block, last block that reads it)
        of the values that later blocks read."""
        found: list[list[tuple[Ref, int]]] = [[] for _ in self.blocks.blocks]
        for ref, made, last in self.structure.crossing:
            found[made].append((ref, last))
        sends = []
        for block, own in zip(self.blocks.blocks, found, strict=True):
            places = {name: place for place, name in enumerate(block.nodes)} if own else {}
            placed = [(ref, places[ref.name], last) for ref, last in own]
            sends.append(tuple(sorted(placed, key=lambda each: (each[1], each[0].index))))
        return sends

    def _form(self, reads: Reads) -> tuple[Any, ...]:
        """Return a key of a block: everything except layouts that determines its cost."""
        graph, inside = self.graph, set(reads.block.nodes)
        numbers: dict[Key, int] = {}
        parts: list[Any] = [reads.block.kind, bool(reads.block.parameters), reads.shared]

        def number(key: Key) -> None:
            if key[0] not in inside and key not in numbers:
                numbers[key] = len(numbers)
                node = graph[key[0]]
                dims = graph.batch_dims.get(key[0])
                dim = None if dims is None else dims[key[1]]
                alone = self.of_parameters[key[0]]
                parts.append((node.kind, node.outputs[key[1]], dim, alone))

        places = {name: -1 - place for place, name in enumerate(reads.block.nodes)}
        for name in reads.block.nodes:
            node = graph[name]
            for ref in node.inputs:
                if ref.name not in inside:
                    key = ref.name, ref.index
                    number(key)
                    number(self.storages[key])
                    parts += (numbers[key], self._place(self.storages[key], numbers, places))
            for index in range(len(node.outputs)):
                root = self.storages[name, index]
                if root[0] != name:
                    number(root)
                    parts.append(self._place(root, numbers, places))
        return tuple(parts)

    @staticmethod
    def _place(key: Key, numbers: Mapping[Key, int], places: Mapping[str, int]) -> tuple[int, int]:
        """Return a key of a value that is independent of names: the index of its op in the block,
        or its number among the values from outside."""
        return (numbers[key] if key in numbers else places[key[0]]), key[1]

    @cached_property
    def of_parameters(self) -> dict[str, bool]:
        """Map each node's name to whether it is a parameter or computed from parameters alone."""
        known: dict[str, bool] = {}
        for node in self.graph:
            known[node.name] = node.kind == "parameter" or (
                node.kind == "op"
                and bool(node.inputs)
                and all(known[each.name] for each in node.inputs)
            )
        return known
