"""Every way to run one pipeline stage on one mesh, priced: one half of the brute force.

In: a graph at a micro-batch's rows, its blocks, a run of them, unit prices of a mesh, the axes
that must split the batch. Out: for every ZeRO stage and number of recomputed blocks, seconds and
bytes of every assignment of layouts, as arrays over the whole product of the nodes' layouts.

Written for itself: of the planner only the op rules, unit prices (one conversion, one op, one
parameter) and the layout arithmetic are used; not its enumeration, merging, pruning, programs
or tables. The walk is the runtime's: a value is converted once per block and target, a stage
receives a value as its first use wants it and brings what it sends to the boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, product

import numpy as np
from brute_force_layouts import NO_CUTS, Choices, Cuts, Floats, Ints, shardings
from brute_force_modes import MODES, OFFLOADED, SEARCHED, Modes, held_by_mode, waits
from brute_force_overlap import ahead_and_behind, all_at_once, one_ahead
from brute_force_sums import OF_STATES, new_only, of_states

from autoparallel.cost_model.ops.memory import reserve_bytes
from autoparallel.cost_model.simulator.stage_costs import Buckets
from autoparallel.planner.costs.kept_bytes import (
    RECOMPUTE_MODES,
    Part,
    Replay,
    read_parts,
    replay,
    saved_parts,
    working_bytes,
)
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.graph.graph import Block, Blocks, Graph, Node, Ref
from autoparallel.planner.graph.layout import INVARIANT, Layout, NodeLayout, boundary_layout
from autoparallel.planner.plan import Recompute

LEAVES = ("input", "constant", "buffer")
PASSES = (
    "forward_compute",
    "backward_compute",
    "forward_communication",
    "backward_communication",
    "forward_issue",
    "backward_issue",
)
"""What a pass takes: compute while the host issues it, then communication."""

Held = tuple[tuple[int, int], ...]
"""(Micro-batches kept whole, those of which only the gradients of weights are to come), as many
as are held at the same time; none of the latter where no schedule splits backwards."""


@dataclass(frozen=True)
class Points:
    """For one ZeRO stage and recomputation, a row of figures per assignment that fits.

    ``forward``/``backward`` per micro-batch, ``end`` (gradient sums and step) per step;
    ``which`` numbers the assignments.
    """

    zero: int
    modes: Modes
    seconds: Floats
    gathers: Floats
    which: Ints


class Stage(Choices):
    """The blocks ``start`` to ``stop`` on a mesh, priced under every assignment of layouts."""

    def __init__(
        self,
        graph: Graph,
        blocks: Blocks,
        prices: Prices,
        span: tuple[int, int],
        *,
        batch_axes: Sequence[int] = (),
        cuts: Cuts = NO_CUTS,
        reduce: bool = True,
        modes: Modes = SEARCHED,
    ) -> None:
        self.modes = modes
        super().__init__(
            graph, blocks, prices, span, batch_axes=batch_axes, cuts=cuts, reduce=reduce
        )
        self._price()

    def _price(self) -> None:
        num = self.num_assignments
        self.passes: list[Floats] = []
        self.skipped: list[dict[Recompute, Floats]] = []
        self.bytes: list[dict[Recompute, Floats]] = []
        self.host_bytes: list[dict[Recompute, Floats]] = []
        self.late = np.zeros(num)
        self.late_passes: list[Floats] = []
        self.late_bytes = np.zeros(num)
        self.made_again: list[dict[Recompute, Floats]] = []
        self.receive = np.zeros((2, num))
        self.ends = np.zeros((2, num))
        self.working = np.zeros(num)
        self.read: set[Ref] = set()
        self.arrived: dict[Ref, tuple[list[Layout], Ints]] = {}
        for block in self.blocks:
            self._price_block(block)
        self._price_ends()
        self._price_parameters()

    def _price_block(self, block: Block) -> None:
        seconds = np.zeros((len(PASSES), self.num_assignments))
        skipped = {mode: np.zeros((len(PASSES), self.num_assignments)) for mode in RECOMPUTE_MODES}
        again = self._replay(block)
        late = np.zeros((2, self.num_assignments))
        uses: dict[Ref, list[tuple[str, int]]] = {}
        for name in block.nodes:
            node = self.graph[name]
            own = self._op(name)
            seconds += own
            late += self._late(name) * own[[1, 5]]
            for mode in RECOMPUTE_MODES:
                if self.key(name) in again.skipped[mode]:
                    skipped[mode][[0, 2, 4]] += [own[0], self.ring_seconds(name), own[4]]
            for position, ref in enumerate(node.inputs):
                if self.graph[ref.name].kind not in LEAVES:
                    uses.setdefault(ref, []).append((name, position))
        read = np.zeros(self.num_assignments)
        for ref, where in uses.items():
            source = self._source(ref, where[0])
            converting = self._conversions(ref, source, where)
            seconds[2:4] += converting
            for mode in RECOMPUTE_MODES:
                alone = self.graph[ref.name].kind == "parameter" and len(where) == 1
                unread = all((self.key(n), at) in again.unread[mode] for n, at in where)
                if unread and not (alone and self.num_blocks(ref.name) == 1):
                    skipped[mode][2] += converting[0]
            is_new = ref not in self.read
            if self.graph[ref.name].kind == "op" and ref.name not in block.nodes and is_new:
                self.read.add(ref)
                layouts, ids = source
                held = [self.prices.local_bytes(self.graph.spec(ref), each) for each in layouts]
                read += np.array(held, dtype=float)[ids]
        self.passes.append(seconds)
        self.skipped.append(skipped)
        self.late_passes.append(late)
        self.late += late.max(axis=0)
        self._hold(block, read)

    def _replay(self, block: Block) -> Replay:
        return replay(self.all_blocks.kinds[block.kind], self.graph, self.prices)

    def _late(self, name: str) -> float:
        """The share of an op's backward that is its weight's gradient: of ``linear`` half, and
        all where its data is a batch input; of ``embedding`` all."""
        node = self.graph[self.key(name)]
        if node.op == "aten.linear.default":
            return 0.5 if self.graph.spec(node.inputs[0]).requires_grad else 1.0
        return float(node.op == "aten.embedding.default")

    def _late_parts(
        self, node: Node, layout: NodeLayout, graph: Graph, prices: Prices
    ) -> set[Part]:
        """The data and the gradient of the result of such an op."""
        if not self._late(node.name):
            return set()
        data = node.inputs[node.op == "aten.embedding.default"]
        result = prices.local_bytes(node.spec, layout.outputs[0])
        parts = {(f"gradient of {node.name}", result)}
        for root, size in saved_parts(node, layout, graph, prices):
            spec = prices.local_bytes(graph.spec(data), layout.inputs[node.inputs.index(data)])
            if size == spec and graph[root.split(":")[0]].kind in ("op", "input"):
                parts.add((root, size))
        return parts

    def _hold(self, block: Block, read: Floats) -> None:
        """Bytes that a block keeps, and makes again in its backward, in each mode."""
        saved = self._sum_of_parts(block, saved_parts)
        self.late_bytes += self._sum_of_parts(block, self._late_parts)
        batch = self._sum_of_parts(block, read_parts)
        sum_of = partial(self._sum_of_parts, block)
        kept, made, host = held_by_mode(saved, (read, batch), self._replay(block), sum_of)
        self.host_bytes.append(host)
        self.bytes.append(kept)
        self.made_again.append(made)

    def _op(self, name: str) -> Floats:
        key = self.key(name)
        node, graph = self.graph[key], self.graph
        specs = [graph.spec(ref) for ref in node.inputs]
        rows, sizes = [], []
        for option in self.options[key]:
            own = self.prices.op(node, specs, option.layout, option.inner)
            rows.append([getattr(own, name) for name in PASSES])
            sizes.append(working_bytes(node, option.layout, graph, self.prices))
        np.maximum(self.working, np.array(sizes)[self.index[key]], out=self.working)
        found: Floats = np.array(rows).T[:, self.index[key]]
        return found

    def _source(self, ref: Ref, first: tuple[str, int]) -> tuple[list[Layout], Ints]:
        """In which layouts a value is there: made in the stage, held, or received."""
        node = self.graph[ref.name]
        inside = self.start <= self.all_blocks.of_node.get(ref.name, -1) < self.stop
        if node.kind == "parameter" or inside:
            return self.made(ref)
        if ref not in self.arrived:
            layouts, ids = self.wanted(*first)
            at_boundary = [boundary_layout(each) for each in layouts]
            ranks = self.prices.ranks
            link = self.prices.cluster.entry_link(ranks[0], len(ranks))
            spec = self.graph.spec(ref)
            pairs = [self.prices.transfer(spec, each, link) for each in at_boundary]
            self.receive += np.array(pairs).T[:, ids]
            self.arrived[ref] = at_boundary, ids
        return self.arrived[ref]

    def _conversions(
        self, ref: Ref, source: tuple[list[Layout], Ints], where: Sequence[tuple[str, int]]
    ) -> Floats:
        """Of a value to all its uses in a block, each distinct target once."""
        layouts, rows = source
        spec = self.graph.spec(ref)
        found = np.zeros((2, self.num_assignments))
        targets: list[Layout] = []
        columns: list[Ints] = []
        for name, position in where:
            wanted, ids = self.wanted(name, position)
            targets += [each for each in wanted if each not in targets]
            columns.append(np.array([targets.index(each) for each in wanted])[ids])
        table = np.array([[self.prices.conversion(spec, s, t) for t in targets] for s in layouts])
        for number, column in enumerate(columns):
            new = np.ones(self.num_assignments, dtype=bool)
            for earlier in columns[:number]:
                new &= earlier != column
            found += table[rows, column].T * new
        return found

    def _sum_of_parts(self, block: Block, of: Callable[..., Iterable[Part]]) -> Floats:
        """Bytes of a block's storages, each storage's distinct sizes counted once."""
        columns: dict[str, list[Floats]] = {}
        for name in block.nodes:
            key = self.key(name)
            parts = [
                sorted(set(of(self.graph[key], option.layout, self.graph, self.prices)))
                for option in self.options[key]
            ]
            for root in dict.fromkeys(root for own in parts for root, _ in own):
                sizes = [[float(size) for r, size in own if r == root] for own in parts]
                for rank in range(max(map(len, sizes))):
                    values = [own[rank] if rank < len(own) else 0.0 for own in sizes]
                    columns.setdefault(root, []).append(np.array(values)[self.index[key]])
        total = np.zeros(self.num_assignments)
        for own in columns.values():
            total += sum(new_only(own), np.zeros(self.num_assignments))
        return total

    def _price_ends(self) -> None:
        """What brings sent values to the boundary and the loss to every rank."""
        position = self.all_blocks.of_node
        sent = dict.fromkeys(
            ref
            for block in self.all_blocks.blocks[self.stop :]
            for name in block.nodes
            for ref in self.graph[name].inputs
            if self.start <= position.get(ref.name, -1) < self.stop
            and self.graph[ref.name].kind == "op"
        )
        for ref in sent:
            layouts, ids = self.made(ref)
            self._end(ref, [boundary_layout(each) for each in layouts], (layouts, ids))
        if self.start <= position[self.graph.loss.name] < self.stop:
            layouts, ids = self.made(self.graph.loss)
            whole = (INVARIANT,) * len(self.prices.mesh.shape)
            self._end(self.graph.loss, [whole] * len(layouts), (layouts, ids))

    def _end(self, ref: Ref, targets: Sequence[Layout], source: tuple[list[Layout], Ints]) -> None:
        layouts, ids = source
        spec = self.graph.spec(ref)
        pairs = [self.prices.conversion(spec, s, t) for s, t in zip(layouts, targets, strict=True)]
        self.ends += np.array(pairs).T[:, ids]

    def _price_parameters(self) -> None:
        """Per ZeRO stage: seconds of the states by ``OF_STATES``; their bytes, and those gathered,
        per block."""
        num, self.shardings = self.num_assignments, shardings(self.prices)
        self.states = np.zeros((len(self.shardings), len(self.blocks), len(OF_STATES), num))
        self.state_bytes = np.zeros((len(self.shardings), num))
        self.gathered = np.zeros((len(self.shardings), len(self.blocks), num))
        self.parameters: dict[str, int] = {}
        for number, block in enumerate(self.blocks):
            for name in block.nodes:
                for ref in self.graph[name].inputs:
                    if self.graph[ref.name].kind == "parameter":
                        self.parameters.setdefault(ref.name, number)
            if block.parameters:
                for zero, own in enumerate(self.shardings):
                    latency = np.array([of_states(self.prices.block_sync(*own))]).T
                    self.states[zero, number] += latency
        for name, number in self.parameters.items():
            layouts, ids = self.made(Ref(name))
            spec = self.graph[name].spec
            for zero, sharding in enumerate(self.shardings):
                priced = [self.prices.parameter(spec, each, *sharding) for each in layouts]
                is_shared = self.num_blocks(name) > 1
                own = np.array([of_states(p[0]) for p in priced]).T[:, ids]
                self.states[zero, 0 if is_shared else number] += own
                held = np.array([p[1] for p in priced]).T[:, ids]
                self.state_bytes[zero] += held[:3].sum(axis=0)
                if self.num_blocks(name) == 1:
                    self.gathered[zero, number] += held[3]

    @property
    def zeros(self) -> tuple[int, ...]:
        least = {"gradients": 2, "parameters": 3}.get(self.prices.states.offload, 0)
        every = tuple(at for at, own in enumerate(self.shardings) if own[0] >= least)
        return every if self.prices.shards > 1 else (0,)

    @cached_property
    def recomputations(self) -> list[Modes]:
        """Every choice of recomputation by block; the first recomputes nothing.

        Among equal blocks the earlier ones are recomputed at least as much as the later ones.
        """
        numbers = [self._number(block) for block in range(len(self.blocks))]
        return [
            tuple(self.modes[place] for place in places)
            for places in product(range(len(self.modes)), repeat=len(numbers))
            if all(
                places[i] >= places[j]
                for i, j in combinations(range(len(numbers)), 2)
                if numbers[i] == numbers[j]
            )
        ]

    def _number(self, block: int) -> int:
        """Of the first block that costs the same."""
        return next(other for other in range(block + 1) if self._are_equal(other, block))

    def _are_equal(self, one: int, other: int) -> bool:
        own, others = self._figures(one), self._figures(other)
        return all(np.array_equal(a, b) for a, b in zip(own, others, strict=True))

    def _figures(self, block: int) -> list[Floats]:
        held = [self.bytes[block][mode] for mode in MODES]
        skipped, late = (
            [self.skipped[block][mode] for mode in RECOMPUTE_MODES],
            self.late_passes[block],
        )
        return [self.passes[block], *skipped, late, *held, self.gathered[:, block]]

    def seconds(self, zero: int, modes: Modes, *, halved: bool = False) -> Floats:
        """Forward, backward, receive forward and backward, end: a row per assignment. ``halved``:
        the backward is that of both halves, and a sixth column is the second half."""
        passes, beside = self._beside(zero, modes, halved=halved)
        forward = [own[0] for own in beside]
        states = [dict(zip(OF_STATES, own, strict=True)) for own in self.states[zero]]
        gather, both = (
            [tuple(own[way + name] for name in ("states", "slowed", "copies")) for own in states]
            for way in ("forward_", "backward_")
        )
        pairs = zip(both, gather, strict=True)
        scatter = [tuple(a - b for a, b in zip(*each, strict=True)) for each in pairs]
        rate, none = self.prices.device.host_link_bytes_per_second or 12e9, 0.0 * forward[0]
        moved = [self.host_bytes[at].get(mode, none) / rate for at, mode in enumerate(modes)]
        passes[0] += one_ahead(gather, forward, moved)
        passes[1] += ahead_and_behind(gather, scatter, [own[1] for own in beside], moved)
        end = sum(own["optimizer"] for own in states)
        end = end + self.first_gather(zero, modes)
        sync = [(own["gradient_sync"], own["sync_slowed"]) for own in states]
        end = end + all_at_once(sync, [own[1] for own in beside])
        found = np.stack([*passes, *self.receive, end], axis=1)
        return np.column_stack([found, self.late]) if halved else found

    def first_gather(self, zero: int, modes: Modes) -> Floats:
        """Seconds of gathers, a part of the end, that may run before a step's first forward."""
        _, beside = self._beside(zero, modes, halved=False)
        states = [dict(zip(OF_STATES, own, strict=True)) for own in self.states[zero]]
        once = [(own["parameter_gather"], own["gather_slowed"]) for own in states]
        return all_at_once(once, [own[0] for own in beside])

    def _beside(self, zero: int, modes: Modes, *, halved: bool) -> tuple[Floats, list[Floats]]:
        """Seconds of forward and backward, and for each block the seconds beside which collectives
        of states run."""
        blocks = self._ways(modes, halved=halved)
        compute = sum((own for own, _ in blocks), np.zeros(self.ends.shape))
        communication = sum((sent for _, sent in blocks), self.ends)
        shares_links = self.prices.shares_links(self.shardings[zero][1])
        hides = compute if shares_links else compute + communication
        scale = np.divide(hides, compute, out=np.zeros_like(hides), where=compute > 0)
        return compute + communication, [own * scale for own, _ in blocks]

    def _ways(self, modes: Modes, *, halved: bool) -> list[tuple[Floats, Floats]]:
        """For each block its compute and its communication, each with forward and backward."""
        ways = self._halved_ways if halved else self._both_ways
        return [tuple(ways[block][mode]) for block, mode in enumerate(modes)]

    def of_step(
        self, zero: int, modes: Modes, which: int, *, halved: bool = False
    ) -> tuple[float, float, float, Buckets, float]:
        """What an assignment does once per step: the seconds to gather parameters, those to sum
        gradients, the share of compute lost beside both, the buckets, the optimizer's seconds."""
        own = [dict(zip(OF_STATES, each[:, which], strict=True)) for each in self.states[zero]]
        ways = self._ways(modes, halved=halved)
        parts = [
            [each[0][0, which] for each in ways],
            [each["parameter_gather"] for each in own],
            [each[0][1, which] for each in ways],
            [each["gradient_sync"] for each in own],
        ]
        gather, sync = sum(parts[1]), sum(parts[3])
        slowed = sum(each["gather_slowed"] + each["sync_slowed"] for each in own)
        share = min(1.0, slowed / (gather + sync)) if gather + sync else 0.0
        number = len(self.blocks)
        shares = [
            tuple(each / sum(part) for each in part) if sum(part) else (1 / number,) * number
            for part in parts
        ]
        return gather, sync, share, Buckets(*shares), sum(each["optimizer"] for each in own)

    @cached_property
    def _both_ways(self) -> list[dict[Recompute, Floats]]:
        """Per block and mode, compute and communication, each forward and backward."""
        return self._without([np.zeros_like(late) for late in self.late_passes])

    @cached_property
    def _halved_ways(self) -> list[dict[Recompute, Floats]]:
        """The same where each half of a backward ends when both device and host are done."""
        found = self._without(self.late_passes)
        for by_mode, late in zip(found, self.late_passes, strict=True):
            for compute, _ in by_mode.values():
                compute[1] += late.max(axis=0)
        return found

    def _without(self, every_late: Sequence[Floats]) -> list[dict[Recompute, Floats]]:
        """The same, backward without what is late."""
        found: list[dict[Recompute, Floats]] = []
        every = zip(self.passes, self.skipped, every_late, self.host_bytes, strict=True)
        for own, skipped, late, host in every:
            by_mode: dict[Recompute, Floats] = {}
            for mode in MODES:
                passes, base = own.copy(), OFFLOADED.get(mode, mode)
                passes[[1, 5]] -= late
                if base != "none":
                    passes[1::2] += passes[::2] - skipped[base][::2]
                hides = passes[:2] + np.stack([np.zeros_like(late[0]), late[0]])
                passes[2:4] += waits(host.get(mode), self.prices.device, hides)
                compute, communication, issue = passes.reshape(3, 2, -1)
                by_mode[mode] = np.stack([np.maximum(compute, issue), communication])
            found.append(by_mode)
        return found

    def num_bytes(self, zero: int, modes: Modes, in_flight: Held) -> Floats:
        """On the fullest rank, per assignment."""
        kept = np.zeros(self.num_assignments)
        most = np.zeros(self.num_assignments)
        moved = np.zeros(self.num_assignments)
        for block, mode in enumerate(modes):
            kept += self.bytes[block][mode]
            np.maximum(moved, self.host_bytes[block].get(mode, moved), out=moved)
            made = self.made_again[block][mode]
            np.maximum(most, 2 * self.gathered[zero, block] + made, out=most)
        kept = np.max([whole * kept + late * self.late_bytes for whole, late in in_flight], axis=0)
        kept += most + moved
        kept += self.state_bytes[zero]
        kept += self.working
        kept += self._fixed_bytes
        return kept

    @cached_property
    def _fixed_bytes(self) -> float:
        """Of inputs and constants, a rank's rows of them, and what belongs to no tensor."""
        leaves = {
            ref.name
            for block in self.blocks
            for name in block.nodes
            for ref in self.graph[name].inputs
            if self.graph[ref.name].kind in LEAVES
        }
        rows = self.graph.batch_size / self.prices.mesh.row_parts
        local = self.graph.with_batch_size(int(rows)) if rows >= 1 else self.graph
        fixed = sum(spec.num_bytes for name in leaves for spec in local[name].outputs)
        groups = sum(size > 1 for size in self.prices.mesh.shape)
        return float(fixed + reserve_bytes(self.prices.device.kind, groups))

    def points(self, in_flight: Held, limit_bytes: float) -> Iterator[Points]:
        """Of every ZeRO stage and recomputation, what fits; none again where all fits without."""
        for zero in self.zeros:
            for number, modes in enumerate(self.recomputations):
                num_bytes = self.num_bytes(zero, modes, in_flight)
                fits = np.flatnonzero(num_bytes <= limit_bytes)
                if len(fits):
                    halved = any(late for _, late in in_flight)
                    seconds = self.seconds(zero, modes, halved=halved)[fits]
                    gathers = self.first_gather(zero, modes)[fits]
                    yield Points(zero, modes, seconds, gathers, fits)
                if number == 0 and len(fits) == self.num_assignments:
                    break
