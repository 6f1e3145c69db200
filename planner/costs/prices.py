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
from math import prod

from ...cost_model.cluster.cluster import Link
from ...cost_model.collectives.collectives import Group, Library, p2p_seconds
from ...cost_model.collectives.dispatch import ring_seconds
from ..graph.expert_dims import is_expert_layer
from ..graph.graph import Node, TensorSpec
from ..graph.layout import (
    OF_GROUPS,
    Layout,
    NodeLayout,
    conversion_steps,
    held_layout,
    shard,
)
from ..ops import Rules as Rules
from .expert_prices import ExpertPrices, Inner
from .price_cache import find
from .seconds import Priced
from .seconds import Seconds as Seconds
from .seconds import StateBytes as StateBytes


def sent_again(inner: Inner) -> Inner:
    """Return the collectives inside of an op that recomputation repeats though the op's result is
    kept: all but the messages of ring attention, which are part of its kernels."""
    return tuple((axis, item) for axis, item in inner if item.kind != "ring")


CONVERSION_SECONDS = 1e-8
"""Seconds added to each single-axis step, so that fewer steps win among otherwise equal plans."""


class Prices(ExpertPrices):
    """Prices of ops, conversions, collectives and states on ``mesh``, on the cluster's ranks."""

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

    def compute(
        self, node: Node, inputs: Sequence[TensorSpec], layout: NodeLayout
    ) -> tuple[float, float]:
        """Return the seconds (forward, backward) of an op's compute on a rank. ``inputs``: specs of
        the whole tensors."""
        return self._priced(node, inputs, layout)[:2]

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
            if item.of_keys:
                others = self._parts_of_keys(inputs[1], layout, axis)
            else:
                others = prod(
                    size
                    for other, size in enumerate(self.mesh.shape)
                    if other != axis and any(each[other].is_shard for each in whole)
                )
            num_bytes = item.num_bytes // others
            if item.kind == "ring":
                sent[item.backward] += self._ring(
                    num_bytes, axis, (node, inputs, layout), backward=item.backward
                )
            elif item.kind in ("swap", "halo"):
                sent[item.backward] += self._neighbour(num_bytes, axis)
            else:
                sent[item.backward] += self.collective(item.kind, num_bytes, axis)
        return Seconds(
            own.forward,
            sent[0],
            own.backward + self._summed_halves(inputs, layout),
            sent[1],
            forward_issue=own.forward_issue,
            backward_issue=own.backward_issue,
        )

    def transfer(self, spec: TensorSpec, layout: Layout, link: Link) -> tuple[float, float]:
        """Return the seconds in which a rank receives its part of a value over ``link``: forward,
        and for the gradient backward."""
        forward = self._message(self.local_bytes(spec, layout), link)
        return forward, forward if spec.requires_grad else 0.0

    def _neighbour(self, num_bytes: int, axis: int) -> float:
        """Return the seconds in which each rank of an axis sends ``num_bytes`` to another and
        receives as many, as in swaps and rings.

        Messages of both directions travel at the same time. On an axis over several hosts some of
        them cross hosts; these decide.
        """
        group = self.groups[axis]
        return self._message(num_bytes, group.inter if group.num_hosts > 1 else group.intra)

    def _parts_of_keys(self, key: TensorSpec, layout: NodeLayout, axis: int) -> int:
        """Return the number of equal parts of an attention's keys of which a rank reads one, apart
        from their split along ``axis``: other axes split them, and with ``OF_GROUPS`` the rank
        reads one of the heads that it holds."""
        held = layout.inputs[1]
        sizes = [
            size for at, size in enumerate(self.mesh.shape) if at != axis and held[at].is_shard
        ]
        by_heads = [
            size
            for placement, size in zip(held, self.mesh.shape, strict=True)
            if placement == shard(len(key.shape) - 3)
        ]
        read = key.shape[-3] // prod(by_heads) if OF_GROUPS in layout.labels else 1
        return prod(sizes) * read

    def _ring(
        self,
        num_bytes: int,
        axis: int,
        op: tuple[Node, Sequence[TensorSpec], NodeLayout],
        *,
        backward: bool,
    ) -> float:
        """Return the seconds in which ring attention waits for messages of ``num_bytes``, keys and
        values of one rank, or loses speed to them. Which share of the messages' seconds that is
        follows from the seconds of all sources."""
        every = self if self.only is None else self.unrecorded
        num_ranks, computed = self.mesh.shape[axis], every._priced(*op)
        seconds = every._neighbour(num_bytes, axis)
        if not seconds:
            return 0.0
        step = (computed.backward if backward else computed.forward) / num_ranks
        slowed_share = self._slowed_share("all_to_all")
        exposed = ring_seconds(
            seconds, step, num_ranks, slowed_share=slowed_share, backward=backward
        )
        return exposed / seconds * self._neighbour(num_bytes, axis)

    def _message(self, num_bytes: int, link: Link) -> float:
        library: Library = "nccl" if self.device.kind == "cuda" else "gloo"
        if self.cluster.joins_hosts(link):
            group = Group(2, 1, 2, link, link, library, self.ranks_on_host)
        else:
            group = Group(2, 2, 1, link, link, library)
        key = (num_bytes, group, self.profile)
        found = self.cache.messages.get(key)
        if found is None:
            known = self.profile.p2p(num_bytes, group) if self.profile else None
            seconds, source = known or (p2p_seconds(num_bytes, link), "spec")
            found = self.cache.messages[key] = Priced(seconds, 0.0, source)
            if self.asked is not None and num_bytes > 0:
                self.asked.transfer(("p2p", group, ()), num_bytes, seconds, source)
        return self._counted(found).forward
