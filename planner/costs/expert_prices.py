"""Seconds of layers of experts: the busiest rank, and exchanges of tokens, also beside compute.

In: a layer of experts in a layout, assumptions about the program, measured loads if there are any.
Out: its price on the rank with most tokens, and the seconds of its exchanges. Ranks may compute
copies of experts of other ranks, as many as make the layer fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ...cost_model.collectives.dispatch import dispatch_seconds, hidden_seconds
from ...cost_model.ops.compute import rate
from ..graph.expert_dims import FIRST_WEIGHT, is_expert_layer
from ..graph.graph import Node, TensorSpec
from ..graph.layout import InnerCollective, NodeLayout, is_halved, shard
from .expert_loads import ExpertLoads
from .op_prices import OpPrices
from .price_cache import find
from .seconds import ExpertSpread, Priced

COUNT_BYTES = 8
"""Bytes of a number of tokens."""

Inner = Sequence[tuple[int, InnerCollective]]
"""Collectives that an op runs itself, each with its mesh axis."""


class Exchanges(NamedTuple):
    """Seconds (forward, backward) in which an expert layer exchanges tokens: ``exposed``, while
    nothing is computed, and ``hidden``, beside compute."""

    exposed: tuple[float, float]
    hidden: tuple[float, float]


NO_EXCHANGES = Exchanges((0.0, 0.0), (0.0, 0.0))


class ExpertPrices(OpPrices):
    """Prices of layers of experts, beside those of other ops."""

    def _priced(self, node: Node, inputs: Sequence[TensorSpec], layout: NodeLayout) -> Priced:
        """Return an op's price on the busiest rank."""
        found = self._evenly_priced(node, inputs, layout)
        if not is_expert_layer(node):
            return found
        spread = self.spread(node, inputs, layout)
        copying = spread.copying_seconds * self.has_spec
        return found._replace(
            forward=spread.busiest * found.forward + copying,
            backward=spread.busiest * found.backward + 2 * copying if found.backward else 0.0,
        )

    def spread(self, node: Node, inputs: Sequence[TensorSpec], layout: NodeLayout) -> ExpertSpread:
        """Return the balance of a layer of experts between ranks: as assumed, or by its measured
        loads, with the number of copies of experts that makes forward and backward shortest."""
        loads = self.assumptions.loads
        if loads is None:
            return ExpertSpread(self.assumptions.imbalance, self.assumptions.imbalance)
        places = (self.mesh, self.groups, self.own)
        key = (node.name, inputs[0], layout, places, self.speed, self.profile)

        def choose() -> ExpertSpread:
            return replace(self, only=None)._spread_of(loads, node, inputs, layout)

        return find(self.cache.spreads, key, choose)

    def _spread_of(
        self,
        loads: ExpertLoads,
        node: Node,
        inputs: Sequence[TensorSpec],
        layout: NodeLayout,
    ) -> ExpertSpread:
        tokens, weights = layout.inputs[0], layout.inputs[FIRST_WEIGHT]
        axes = [axis for axis, held in enumerate(weights) if held == shard(0)]
        is_sliced = any(held.is_shard and held != shard(0) for held in weights)
        sizes = [self.mesh.shape[axis] for axis in axes]
        sent = [at for at, axis in enumerate(axes) if tokens[axis].is_shard]
        plain = ExpertSpread(
            loads.balance(node.name, sizes, range(len(axes))).busiest,
            loads.balance(node.name, sizes, sent).busiest,
        )
        if not axes or len(sent) < len(axes) or is_sliced or self.own:
            return plain
        own = self._evenly_priced(node, inputs, layout)
        rows = inputs[1].shape[-1] * inputs[0].num_bytes / self.num_parts(tokens)
        trips = 4 if inputs[0].requires_grad else 2
        twice = 2 if inputs[FIRST_WEIGHT].requires_grad else 1
        options = [
            self._with_copies(loads, node, inputs, axes, copies) if copies else plain
            for copies in loads.most_copies
        ]
        seconds = [
            max(each.busiest * own.forward, own.forward_issue)
            + max(each.busiest * own.backward, own.backward_issue)
            + trips * self.collective("all_to_all", each.busiest * rows, *axes)
            + 3 * each.copying_seconds
            + twice * self.collective("all_to_all", each.moved_bytes, *axes)
            for each in options
        ]
        return options[min(range(len(options)), key=seconds.__getitem__)]

    def _with_copies(
        self,
        loads: ExpertLoads,
        node: Node,
        inputs: Sequence[TensorSpec],
        axes: Sequence[int],
        copies: int,
    ) -> ExpertSpread:
        """Return the balance if each rank along ``axes`` computes up to ``copies`` experts of other
        ranks. The exchange of weights takes as long as the rank that sends or receives most."""
        num_ranks = self.mesh.num_ranks(tuple(axes))
        num_experts = inputs[FIRST_WEIGHT].shape[0]
        balance = loads.placed(node.name, num_ranks, copies)
        expert_bytes = sum(each.num_bytes for each in inputs[FIRST_WEIGHT:]) / num_experts
        moved = balance.moved * expert_bytes * num_ranks / (num_ranks - 1)
        held_bytes = int((num_experts // num_ranks + copies) * expert_bytes)
        copying = 2 * held_bytes * rate(self.device, "copy", node.spec.dtype).seconds_per_byte
        return ExpertSpread(
            balance.busiest,
            balance.busiest,
            copies,
            held_bytes,
            moved,
            copying,
        )

    def exchanges(
        self,
        node: Node,
        inputs: Sequence[TensorSpec],
        layout: NodeLayout,
        inner: Inner,
        beside: tuple[float, float],
    ) -> Exchanges:
        """Return the seconds in which an expert layer exchanges tokens and results, also beside
        compute; see ``op``. Which share runs beside compute follows from the seconds of all
        sources."""
        axes, parts = _axes_of(inner, "dispatch"), 1 + is_halved(layout)
        if not axes:
            return NO_EXCHANGES
        exposed, hidden = [0.0, 0.0], [0.0, 0.0]
        for backward in (False, True):
            # A token is sent once, over all axes together: each axis lists the same exchanges.
            items = [i for axis, i in inner if axis == axes[0] and i.backward == backward]
            if items:
                share = self._hidden_share(node, inputs, layout, items, axes, beside[backward])
                each = (self._dispatch(item, node, inputs, layout, axes) for item in items)
                sent = parts * sum(each)
                hidden[backward] = share * sent
                exposed[backward] = sent - hidden[backward]
        if self.assumptions.dispatcher == "alltoall":
            # Ranks first tell each other how many tokens of each expert they send.
            counts = COUNT_BYTES * inputs[FIRST_WEIGHT].shape[0] * parts
            exposed[0] += self.collective("all_to_all", counts, *axes)
        if moved_bytes := self.spread(node, inputs, layout).moved_bytes:
            moved = self.collective("all_to_all", moved_bytes, *axes)
            exposed[0] += moved
            exposed[1] += moved * inputs[FIRST_WEIGHT].requires_grad
        return Exchanges((exposed[0], exposed[1]), (hidden[0], hidden[1]))

    def _hidden_share(
        self,
        node: Node,
        inputs: Sequence[TensorSpec],
        layout: NodeLayout,
        items: Sequence[InnerCollective],
        axes: Sequence[int],
        beside: float,
    ) -> float:
        """Return the share of an expert layer's exchanges in one direction that runs beside
        compute. ``items``: the exchanges of tokens and of results, or of their gradients."""
        halved = is_halved(layout)
        if not self.assumptions.hides_exchanges or not (halved or beside):
            return 0.0
        every = self if self.only is None else self.unrecorded
        first, last = (every._dispatch(item, node, inputs, layout, axes) for item in items)
        own = every._priced(node, inputs, layout)
        hidden = hidden_seconds(
            first,
            (own.backward if items[0].backward else own.forward) / 2,
            last,
            others=beside,
            slowed_share=self._slowed_share("all_to_all"),
            halved=halved,
        )
        return hidden / ((1 + halved) * (first + last)) if hidden else 0.0

    def _dispatch(
        self,
        item: InnerCollective,
        node: Node,
        inputs: Sequence[TensorSpec],
        layout: NodeLayout,
        axes: Sequence[int],
    ) -> float:
        """Return the seconds of one exchange that sends tokens to their experts over mesh axes, or
        back: of all tokens, or of half of them."""
        own, busiest = self.assumptions, self.spread(node, inputs, layout).busiest_sent
        num_bytes = item.num_bytes / self.num_parts(layout.inputs[0]) / (1 + is_halved(layout))
        if own.dispatcher == "alltoall":
            sent_bytes = num_bytes * item.copies
            if own.loads is None:  # validated as a factor of the seconds, latency included
                return busiest * self.collective("all_to_all", sent_bytes, *axes)
            return self.collective("all_to_all", busiest * sent_bytes, *axes)
        seconds = dispatch_seconds(
            num_bytes,
            item.copies,
            inputs[FIRST_WEIGHT].shape[0],
            self.group(*axes),
            own.dispatcher,
            own.routing,
            item.limit,
        )
        return self._counted(Priced(busiest * seconds, 0.0, "spec")).forward

    def _as_sent(self, inner: Inner) -> Inner:
        """Return the collectives of an expert layer as the program runs them: without exchanges of
        columns if slices are plain; else rows are gathered and summed by exchanges of rows."""
        if self.assumptions.plain_slices:
            return [(axis, item) for axis, item in inner if item.kind != "all_to_all"]
        return [
            (axis, item if item.kind == "dispatch" else replace(item, kind="all_to_all"))
            for axis, item in inner
        ]

    def _gathered_counts(
        self, inputs: Sequence[TensorSpec], layout: NodeLayout, inner: Inner
    ) -> float:
        """Return the seconds in which the ranks that hold slices of the same experts tell each
        other how many tokens of each they receive."""
        if self.assumptions.dispatcher != "alltoall" or self.assumptions.plain_slices:
            return 0.0
        num_bytes = COUNT_BYTES * inputs[FIRST_WEIGHT].shape[0] * (1 + is_halved(layout))
        return sum(
            self.collective("all_gather", num_bytes * self.mesh.shape[axis], axis)
            for axis in _axes_of(inner, "all_gather")
        )

    def _summed_halves(self, inputs: Sequence[TensorSpec], layout: NodeLayout) -> float:
        """Return the seconds of adding up the gradients of weights of experts that compute two
        halves: two are read, and one written."""
        if not is_halved(layout):
            return 0.0
        copy = rate(self.device, "copy", inputs[0].dtype)
        pairs = zip(inputs[FIRST_WEIGHT:], layout.inputs[FIRST_WEIGHT:], strict=True)
        sizes = [self.local_bytes(spec, each) for spec, each in pairs if spec.requires_grad]
        seconds = sum(copy.seconds(0.0, 3 * size) for size in sizes)
        return self._counted(Priced(seconds, 0.0, "spec")).forward


def _axes_of(inner: Inner, kind: str) -> list[int]:
    """Return the mesh axes of an op's collectives of one kind."""
    return sorted({axis for axis, item in inner if item.kind == kind})
