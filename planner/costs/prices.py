"""Prices of conversions and ops on one stage's mesh, in addition to ``mesh_prices``.

In: a mesh on ranks of a cluster, a number format, an optimizer. Out: seconds and bytes per device.
The solver's tables and ``evaluate`` both use these prices, but walk over the graph separately.

A conversion is the sum of its single-axis steps; a step on an axis moves the tensor that is whole
on that axis and local on the others. An op's time is its forward and backward work at local shapes
plus the collectives that its strategy needs inside.

Times come from the profile if it has them (measured, or interpolated from measurements), else from
the figures of devices and links ("spec").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from ...cost_model.cluster.cluster import Link, Source
from ...cost_model.cluster.tf32 import TFLOAT32, product_dtype
from ...cost_model.collectives.collectives import Group, Library, p2p_seconds
from ...cost_model.collectives.dispatch import ROW_COPIES, dispatch_seconds, hidden_seconds
from ...cost_model.ops.compute import OpWork, eight_bit_seconds, host_seconds, rate, work_seconds
from ...cost_model.profile.lookup import Profile, level_of
from ..graph.expert_dims import FIRST_WEIGHT, is_expert_layer
from ..graph.graph import Node, TensorSpec
from ..graph.layout import (
    InnerCollective,
    Layout,
    NodeLayout,
    balanced_axes,
    conversion_steps,
    held_layout,
    is_halved,
    local_shape,
    shard,
)
from ..ops import Rules as Rules
from ..ops.experts import as_half, as_run, expert_traffic, num_kernels, num_senders
from .basis import SCALINGS, QueriedOp
from .expert_loads import ExpertLoads
from .mesh_prices import MeshPrices
from .op_case import op_case
from .precision import EIGHT_BITS
from .price_cache import PriceCache, find
from .seconds import ExpertSpread, Priced
from .seconds import Seconds as Seconds
from .seconds import StateBytes as StateBytes

CONVERSION_SECONDS = 1e-8
"""Seconds added to each single-axis step, so that fewer steps win among otherwise equal plans."""

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


class Prices(MeshPrices):
    """Prices of ops, conversions, collectives and states on ``mesh``, on the cluster's ranks."""

    @cached_property
    def unrecorded(self) -> Prices:
        """Return the same prices from all sources, without a record of queries."""
        return replace(self, only=None, asked=None, cache=PriceCache(groups=self.cache.groups))

    def conversion(self, spec: TensorSpec, source: Layout, target: Layout) -> tuple[float, float]:
        """Return the seconds, forward and backward, of converting a value between two layouts."""
        if not spec.requires_grad:
            source, target = held_layout(source), held_layout(target)
        if source == target:
            return 0.0, 0.0
        key = (spec, source, target)
        return find(self.converted.seconds, key, lambda: self._conversion(spec, source, target))

    def _conversion(self, spec: TensorSpec, source: Layout, target: Layout) -> tuple[float, float]:
        forward = backward = 0.0
        current = list(source)
        for step in conversion_steps(source, target):
            others = prod(
                size
                for axis, size in enumerate(self.mesh.shape)
                if axis != step.axis and current[axis].is_shard
            )
            num_bytes = spec.num_bytes // others
            there, back = step.collectives
            if there == "all_to_all":
                num_bytes //= self.mesh.shape[step.axis]
            forward += CONVERSION_SECONDS * self.has_spec
            if there is not None:
                forward += self.collective(there, num_bytes, step.axis)
            if back is not None and spec.requires_grad:
                backward += self.collective(back, num_bytes, step.axis)
            current[step.axis] = step.target
        return forward, backward

    def local(self, spec: TensorSpec, layout: Layout) -> TensorSpec:
        """Return the spec of a rank's part of a tensor that has a layout."""
        shape = local_shape(spec.shape, layout, self.mesh.shape)
        return TensorSpec(shape, spec.dtype, spec.requires_grad, spec.stored)

    def local_bytes(self, spec: TensorSpec, layout: Layout) -> int:
        return spec.num_bytes // self.num_parts(layout)

    def compute(
        self, node: Node, inputs: Sequence[TensorSpec], layout: NodeLayout
    ) -> tuple[float, float]:
        """Return the seconds (forward, backward) of an op's compute on a rank. ``inputs``: specs of
        the whole tensors."""
        return self._priced(node, inputs, layout)[:2]

    def _evenly_priced(
        self, node: Node, inputs: Sequence[TensorSpec], layout: NodeLayout
    ) -> Priced:
        sizes = self.mesh.shape
        key = (
            node.name,
            self.speed,
            self.profile,
            balanced_axes(layout),
            is_halved(layout),
            num_senders(node, layout, sizes),
            tuple(
                [
                    local_shape(spec.shape, each, sizes)
                    for spec, each in zip(
                        (*inputs, *node.outputs), (*layout.inputs, *layout.outputs), strict=True
                    )
                ]
            ),
        )
        found = self.cache.ops.get(key)
        if found is None:
            local_inputs = tuple(
                self.local(spec, each) for spec, each in zip(inputs, layout.inputs, strict=True)
            )
            local_outputs = tuple(
                self.local(spec, each)
                for spec, each in zip(node.outputs, layout.outputs, strict=True)
            )
            run = as_run(node, layout, sizes)
            found = self._compute(run, local_inputs, local_outputs, num_parts=int(run is not node))
            if is_halved(layout):
                half = self._compute(as_half(run), local_inputs, local_outputs, num_parts=2)
                found = found.at_least_twice(half)
            self.cache.ops[key] = found
        return self._counted(found)

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

    def _compute(
        self,
        node: Node,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        num_parts: int,
    ) -> Priced:
        work = self._work(node, inputs, outputs, num_parts)
        issue = host_seconds(self.device, work)
        forward, backward = self._analytic(node, work)
        if is_expert_layer(node):
            around = self._around_experts(node, inputs, is_sent=num_parts > 0)
            forward = forward + around[0]
            backward = backward + around[1] if backward else 0.0
        analytic = self._with_dequantized(Priced(forward, backward, "spec", *issue), inputs)
        has_no_case = node.fused is not None or node.product_dtype
        if (self.profile is None and self.asked is None) or has_no_case:
            return analytic
        in_tf32 = product_dtype(self.device, work.family, node.spec.dtype) == TFLOAT32
        case = op_case(node, inputs, outputs, work, in_tf32=in_tf32)
        known = self.profile.op(case) if self.profile is not None and case is not None else None
        bare = analytic
        if known is not None:
            bare = Priced(known.forward_seconds, known.backward_seconds, known.source, *issue)
            bare = self._with_dequantized(bare, inputs)
        num_bytes = sum(spec.num_bytes for spec in (*inputs, *outputs))
        found = bare if self.profile is None else _scaled(bare, self.profile, node.name, num_bytes)
        if case is None:
            if self.asked is not None and found.forward + found.backward > 0:
                self.asked.unwritten.add(node.op)
        elif self.asked is not None:
            op = QueriedOp(case, bare.source, error=known.error if known is not None else 0.0)
            self.asked.op(node.name, op, found.forward + found.backward)
        return found

    def _work(
        self,
        node: Node,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        num_parts: int,
    ) -> Any:
        work = self.rules.work(node, inputs, outputs)
        kernels = self.assumptions.expert_kernels
        issued = num_kernels(node, kernels, num_parts) if is_expert_layer(node) else None
        if issued is not None:
            backward = issued[1] if work.kernels_backward else 0
            work = replace(work, kernels_forward=issued[0], kernels_backward=backward)
        return work

    def _with_dequantized(self, found: Priced, inputs: Sequence[TensorSpec]) -> Priced:
        """Add to an op's price a kernel for each quantized weight that it reads, in its forward and
        in its backward, if any: the kernel reads the weight as held and writes it as used."""
        for spec in inputs:
            if not spec.stored:
                continue
            copy, issue = rate(self.device, "copy", spec.dtype), self.device.issue_seconds
            seconds = copy.seconds(0.0, spec.stored_bytes + spec.num_bytes)
            runs = 1.0 if found.backward else 0.0
            found = found._replace(
                forward=found.forward + seconds,
                backward=found.backward + runs * seconds,
                forward_issue=found.forward_issue + issue,
                backward_issue=found.backward_issue + runs * issue,
            )
        return found

    @property
    def casts_experts(self) -> bool:
        """Return whether the products of experts run in 8 bits."""
        return self.assumptions.casts_experts and self.precision == "fp8"

    @property
    def cast_element_bytes(self) -> float:
        """Return the bytes of an element cast for an 8-bit product, with its share of scales."""
        return SCALINGS[self.assumptions.scaling][1]

    def _analytic(self, node: Node, work: OpWork) -> tuple[float, float]:
        is_cast = self.casts_experts and is_expert_layer(node)
        product_dtype = EIGHT_BITS if is_cast else node.product_dtype
        if not product_dtype:
            in_kernel = node.fused.product_dtype if node.fused is not None else ""
            return work_seconds(self.device, work, in_kernel or node.spec.dtype)
        own, form = self.assumptions, product_dtype
        form = SCALINGS[own.scaling][0] if form == EIGHT_BITS else form
        return eight_bit_seconds(self.device, work, node.spec.dtype, form, own.cast_bytes)

    def _around_experts(
        self, node: Node, inputs: Sequence[TensorSpec], *, is_sent: bool
    ) -> tuple[float, float]:
        """Return (forward, backward) seconds of an expert layer's memory traffic beside matmuls."""
        own = self.assumptions
        copies = ROW_COPIES[own.dispatcher if is_sent else "gather"]
        per_byte = rate(self.device, "copy", node.spec.dtype).seconds_per_byte
        forward, backward = expert_traffic(node, inputs, own.expert_kernels, copies)
        return forward * per_byte, backward * per_byte

    def op(
        self,
        node: Node,
        inputs: Sequence[TensorSpec],
        layout: NodeLayout,
        inner: Inner = (),
        beside: tuple[float, float] = (0.0, 0.0),
    ) -> Seconds:
        """Return the seconds of an op; ``inner``: (axis, collective) that the op runs itself;
        ``beside``: seconds (forward, backward) of ops that run while it exchanges tokens."""
        own = self._priced(node, inputs, layout)
        sent = list(self.exchanges(node, inputs, layout, inner, beside).exposed)
        whole = (*layout.inputs, *layout.outputs)
        if is_expert_layer(node):
            sent[0] += self._gathered_counts(inputs, layout, inner)
            inner = self._as_sent(inner)
        for axis, item in inner:
            if item.kind == "dispatch":
                continue
            others = prod(
                size
                for other, size in enumerate(self.mesh.shape)
                if other != axis and any(each[other].is_shard for each in whole)
            )
            num_bytes = item.num_bytes // others
            sent[item.backward] += (
                self._swap(num_bytes, self.groups[axis])
                if item.kind == "swap"
                else self.collective(item.kind, num_bytes, axis)
            )
        return Seconds(
            own.forward,
            sent[0],
            own.backward + self._summed_halves(inputs, layout),
            sent[1],
            forward_issue=own.forward_issue,
            backward_issue=own.backward_issue,
        )

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
            # A message travels over all of these axes.
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

    def transfer(self, spec: TensorSpec, layout: Layout, link: Link) -> tuple[float, float]:
        """Return the seconds in which a rank receives its part of a value over ``link``: forward,
        and for the gradient backward."""
        forward = self._message(self.local_bytes(spec, layout), link)
        return forward, forward if spec.requires_grad else 0.0

    def _swap(self, num_bytes: int, group: Group) -> float:
        """Return the seconds in which ranks r and n - 1 - r of a group exchange ``num_bytes``.

        Messages of both directions travel at the same time; over several hosts most pairs cross
        hosts.
        """
        return self._message(num_bytes, group.inter if group.num_hosts > 1 else group.intra)

    def _message(self, num_bytes: int, link: Link) -> float:
        is_inter = self.cluster.joins_hosts(link)
        library: Library = "nccl" if self.device.kind == "cuda" else "gloo"
        per_host, hosts = (1, 2) if is_inter else (2, 1)
        group = Group(2, per_host, hosts, link, link, library=library)
        key = (num_bytes, group, self.profile)
        found = self.cache.messages.get(key)
        if found is None:
            known = self.profile.p2p(num_bytes, level_of(group), library) if self.profile else None
            seconds, source = known or (p2p_seconds(num_bytes, link), "spec")
            found = self.cache.messages[key] = Priced(seconds, 0.0, source)
            if self.asked is not None and num_bytes > 0:
                self.asked.transfer(("p2p", group, ()), num_bytes, seconds, source)
        return self._counted(found).forward


def _axes_of(inner: Inner, kind: str) -> list[int]:
    """Return the mesh axes of an op's collectives of one kind."""
    return sorted({axis for axis, item in inner if item.kind == kind})


def _scaled(bare: Priced, profile: Profile, name: str, num_bytes: int) -> Priced:
    """Return an op's price times the factor of its block: seconds measured for the whole block /
    sum over its ops. Without a factor of its own, an unmeasured op gets the profile's mean factor.

    If the op has as many bytes as in the measured block, the result counts as measured.
    """
    own = profile.factors.get(name)
    if own is None:
        forward, backward = profile.rest if bare.source == "spec" else (1.0, 1.0)
        source: Source = bare.source
    else:
        forward, backward = own.forward, own.backward
        source = "interpolated" if bare.source == "spec" else bare.source
        source = "measured" if num_bytes == own.num_bytes else source
    return bare._replace(
        forward=bare.forward * forward, backward=bare.backward * backward, source=source
    )
