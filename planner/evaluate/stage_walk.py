"""Independent cost of one stage of a plan, summed block by block: the check on the solvers.

In: the graph with its blocks by form, a plan, a stage's unit prices. Out: the stage's cost. Blocks
of one form with equal layouts are priced once (``block_walk``), also across stages and plans of the
same graph: ``Walked`` caches their costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...cost_model.cluster.cluster import Cluster, Link
from ...cost_model.ops.memory import reserve_bytes
from ..costs.host_memory import host_link
from ..costs.mesh_prices import Sharding
from ..costs.price_cache import PriceCache
from ..costs.prices import Prices, Rules, Seconds, StateBytes
from ..costs.seconds import Groups
from ..errors import PlanError
from ..graph.graph import Block, Blocks, Graph, Ref
from ..graph.layout import INVARIANT, Layout, NodeLayout, boundary_layout
from ..plan import Plan, Recompute
from ..schedules.held import HalfPairs, held_bytes, splits
from ..stage.stage_cost import StageCost
from ..stage.structure import Structure, leaf_bytes
from ..variants.asynchronous import version_bytes
from .block_walk import BlockCost, BlockForms, Layouts, Reads, StageFacts, block_cost


@dataclass(frozen=True)
class Walked:
    """Cache of the costs of a graph's blocks at one batch size, keyed by everything they depend on.
    ``layouts`` lists the distinct layouts so far; keys contain positions in this list."""

    forms: BlockForms
    costs: dict[Any, dict[Any, BlockCost]] = field(default_factory=dict)
    layouts: list[NodeLayout] = field(default_factory=list)
    _numbers: dict[NodeLayout, int] = field(default_factory=dict)
    _of_object: dict[int, tuple[NodeLayout, int]] = field(default_factory=dict)
    _caches: dict[int, tuple[Cluster, PriceCache]] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.forms.graph

    def cache(self, cluster: Cluster) -> PriceCache:
        """Return the cache of prices of ops and conversions on ``cluster``."""
        if id(cluster) not in self._caches:
            known = PriceCache(
                storages={self.graph.batch_size: self.forms.storages},
                from_parameters=self.forms.of_parameters,
            )
            self._caches[id(cluster)] = cluster, known  # keeps its id unique
        return self._caches[id(cluster)][1]

    def number(self, layout: NodeLayout) -> int:
        """Return the position of a layout in ``layouts``, to which it is added if new."""
        found = self._of_object.get(id(layout))
        if found is None:
            number = self._numbers.setdefault(layout, len(self.layouts))
            if number == len(self.layouts):
                self.layouts.append(layout)
            found = self._of_object[id(layout)] = layout, number  # keeps its id unique
        return found[1]

    def of_setting(self, setting: StageFacts) -> dict[Any, BlockCost]:
        """Return the cached costs of blocks on stages with the facts ``setting``."""
        prices = setting.prices
        key = (
            prices.mesh,
            prices.groups,
            prices.speed,
            prices.precision,
            prices.optimizer,
            prices.policy,
            prices.profile,
            prices.only,
            prices.assumptions.tiles,
            setting.splits,
            setting.graph.batch_size,
            setting.sharding,
            prices.shard_groups,
            setting.slices,
            setting.link,
            prices.cluster.joins_hosts(setting.link),
        )
        return self.costs.setdefault(key, {})


def walked_none(graph: Graph, blocks: Blocks, rules: Rules) -> Walked:
    """Return an empty cache of block costs for a graph."""
    return Walked(BlockForms(Structure(graph, blocks), rules.storage_of(graph)))


@dataclass
class StageWalk:
    """Computation of a stage's cost, block by block from block ``start`` on. ``held``: largest
    pairs (micro-batches before their backward, with deferred weight gradients) held at one time."""

    walked: Walked
    graph: Graph
    plan: Plan
    index: int
    prices: Prices
    start: int
    held: HalfPairs
    made: dict[Ref, Layout] = field(default_factory=dict)
    shared: dict[str, Layout] = field(default_factory=dict)
    read: set[Ref] = field(default_factory=set)
    found: list[BlockCost] = field(default_factory=list)

    def __post_init__(self) -> None:
        stage = self.plan.stages[self.index]
        self.stage, self.stop = stage, self.start + len(stage.blocks)
        before = self.plan.stages[self.index - 1].devices
        link = _entry_link(self.prices.cluster, before, stage.devices)
        halves = splits(self.plan.schedule)
        sharding = Sharding(stage.zero, stage.shard_degree)
        self.setting = StageFacts(
            self.graph, self.prices, sharding, link, self.plan.slices, splits=halves
        )
        self.costs = self.walked.of_setting(self.setting)
        number = self.walked.number
        self.numbers = {name: number(layout) for name, layout in stage.layouts.items()}
        self._of_kind: dict[str, tuple[int, ...]] = {}

    def cost(self) -> StageCost:
        """Return the cost of the whole stage."""
        reads = self.walked.forms.reads[self.start : self.stop]
        for own, decided in zip(reads, self.stage.blocks, strict=True):
            self.found.append(self._block(own, decided.recompute))
        seconds, states = self._ends(), StateBytes()
        for each in self.found:
            seconds = seconds.plus(each.seconds)
            states = StateBytes(*(a + b for a, b in zip(states, each.states, strict=True)))
        for own_seconds, own_bytes in self.of_shared():
            seconds = seconds.plus(own_seconds)
            states = StateBytes(*(a + b for a, b in zip(states, own_bytes, strict=True)))
        kept = float(sum(each.kept_bytes for each in self.found))
        late = sum(each.late_seconds for each in self.found)
        host_bytes = sum(each.host_bytes for each in self.found)
        return StageCost(
            seconds,
            (
                sum(each.receive_seconds[0] for each in self.found),
                sum(each.receive_seconds[1] for each in self.found),
            ),
            self._memory(states, kept),
            kept,
            late if self.setting.splits else None,
            self._groups(),
            self.prices.shares_links(self.stage.shard_degree),
            sum(each.hidden_seconds for each in self.found),
            host_bytes,
            sum(each.exposed_copies for each in self.found),
            host_bytes / host_link(self.prices.device),
        )

    def _groups(self) -> Groups:
        """Return each block's seconds; a parameter of several blocks counts with the first."""
        seconds = np.array([each.seconds for each in self.found])
        for own, _ in self.of_shared():
            seconds[0] += own
        moved = np.array([each.host_bytes for each in self.found]) / host_link(self.prices.device)
        return Groups(seconds, np.ones(len(seconds), dtype=np.int64), moved)

    def of_shared(self) -> list[tuple[Seconds, StateBytes]]:
        """Return, for each parameter that several blocks use, the seconds per step of its states
        and its bytes per rank."""
        sharding, prices = self.setting.sharding, self.prices
        held = self.shared.items()
        return [prices.parameter(self.graph[name].spec, each, *sharding) for name, each in held]

    def _block(self, reads: Reads, mode: Recompute) -> BlockCost:
        """Return a block's cost; record the layouts of the values that it receives and sends."""
        nodes = self._nodes(reads.block)
        parameters = tuple([self._number(name) for name in reads.parameters])
        values = tuple([self.made.get(ref) for ref in reads.values])
        again = tuple([ref in self.read for ref in reads.values])
        leaves = tuple([self.numbers.get(name) for name in reads.leaves])
        form = self.walked.forms.forms[self.start + len(self.found)]
        key = form, mode, nodes, values, again, leaves, parameters
        found = None if self.prices.asked else self.costs.get(key)
        layouts = self.walked.layouts
        if found is None:
            of_form = reads if self.prices.asked else self.walked.forms.reads[form]
            given = Layouts(
                tuple(layouts[number] for number in nodes),
                values,
                again,
                tuple(None if number is None else layouts[number] for number in leaves),
                tuple(layouts[number].outputs[0] for number in parameters),
            )
            found = self.costs[key] = block_cost(of_form, given, mode, self.setting)
        self.made.update(zip(reads.values, found.values, strict=True))
        self.read.update(reads.values)
        for ref, place, _ in reads.sends:
            self.made[ref] = layouts[nodes[place]].outputs[ref.index]
        for name, number, shared in zip(reads.parameters, parameters, reads.shared, strict=True):
            if shared:
                self.shared[name] = layouts[number].outputs[0]
        return found

    def _number(self, name: str) -> int:
        """Return the number of a node's layout. The plan may store it under the name of the
        corresponding node in the first block of the same kind. Raises PlanError AP525 if the plan
        has none."""
        found = self.walked.forms.blocks.entry(self.numbers, name)
        if found is None:
            raise PlanError("AP525", f"the plan has no layout for {name}", fix="plan again")
        return found

    def _nodes(self, block: Block) -> tuple[int, ...]:
        """Return the numbers of the layouts of a block's nodes. Cached by kind of block."""
        first = self.walked.forms.blocks.kinds[block.kind]
        if block is not first and not self.numbers.keys().isdisjoint(block.nodes):
            return tuple([self._number(name) for name in block.nodes])
        if block.kind not in self._of_kind:
            self._of_kind[block.kind] = tuple([self._number(name) for name in first.nodes])
        return self._of_kind[block.kind]

    def _ends(self) -> Seconds:
        """Return the seconds per micro-batch of converting the layouts of values that later stages
        read, and of the loss."""
        total, loss = Seconds(), self.graph.loss
        reads, position = self.walked.forms.reads, self.walked.forms.structure.position
        for own in reads[self.start : self.stop]:
            for ref, _, last in own.sends:
                if last >= self.stop:
                    made = self.made[ref]
                    total = total.plus(self._conversion(ref, made, boundary_layout(made)))
        if self.start <= position[loss.name] < self.stop:
            made = self.walked.layouts[self._number(loss.name)].outputs[loss.index]
            target = (INVARIANT,) * len(self.stage.mesh.shape)
            total = total.plus(self._conversion(loss, made, target))
        return total

    def _conversion(self, ref: Ref, made: Layout, target: Layout) -> Seconds:
        forward, backward = self.prices.conversion(self.graph.spec(ref), made, target)
        return Seconds(forward_communication=forward, backward_communication=backward)

    def leaf_bytes(self, *kinds: str) -> float:
        """Return the bytes per rank of the nodes of ``kinds`` ("input", "constant", "buffer") that
        the stage reads."""
        reads = self.walked.forms.reads[self.start : self.stop]
        nodes = (self.graph[name] for name in {name for own in reads for name in own.leaves})
        whole = (INVARIANT,) * len(self.stage.mesh.shape)
        total = 0.0
        for node in nodes:
            number = self.numbers.get(node.name)
            held = whole if number is None else self.walked.layouts[number].outputs[0]
            total += self.prices.local_bytes(node.spec, held) if node.kind in kinds else 0.0
        return total

    def _memory(self, states: StateBytes, kept_bytes: float) -> Mapping[str, float]:
        reads = self.walked.forms.reads[self.start : self.stop]
        leaves = {name for own in reads for name in own.leaves}
        groups = sum(size > 1 for size in self.stage.mesh.shape)
        versions = version_bytes(self.plan, self.index, states.parameters)
        late = sum(each.late_bytes for each in self.found)
        gathered = max((each.gathered_bytes for each in self.found), default=0.0)
        gathered += max((each.host_bytes for each in self.found), default=0.0)  # on their way
        working = max((each.working_bytes for each in self.found), default=0.0)
        return {
            "parameters": states.parameters,
            **({"versions": versions} if versions else {}),
            "gradients": states.gradients,
            "optimizer": states.optimizer,
            "activations": held_bytes(self.held, kept_bytes, late),
            "transient": gathered + working,
            "buffers": float(leaf_bytes(self.graph, leaves, self.stage.mesh.row_parts)),
            "reserve": float(reserve_bytes(self.prices.device.kind, groups)),
        }


def _entry_link(cluster: Cluster, before: Sequence[int], devices: Sequence[int]) -> Link:
    """Return the link over which a stage on ``devices`` receives values of the stage on ``before``.

    The ranks of a stage may not be consecutive if the search reordered the hosts.
    """
    is_one_run = devices[-1] - devices[0] == len(devices) - 1
    if is_one_run and before[-1] + 1 == devices[0]:
        return cluster.entry_link(devices[0], len(devices))
    return cluster.send_link(before, devices)
