"""Seconds of an op's own work on a rank, from its shapes there or from a profile.

Times come from the profile if it has them (measured, or interpolated from measurements), else from
the figures of devices ("spec").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

from ...cost_model.cluster.cluster import Source
from ...cost_model.cluster.tf32 import TFLOAT32, product_dtype
from ...cost_model.collectives.dispatch import ROW_COPIES
from ...cost_model.ops.compute import OpWork, eight_bit_seconds, host_seconds, rate, work_seconds
from ...cost_model.profile.lookup import Profile
from ..graph.expert_dims import is_expert_layer
from ..graph.graph import Node, TensorSpec
from ..graph.layout import Layout, NodeLayout, balanced_axes, is_halved, local_shape
from ..ops.attention import ring_traffic
from ..ops.experts import as_half, as_run, expert_traffic, num_kernels, num_senders
from .basis import SCALINGS, QueriedOp
from .mesh_prices import MeshPrices
from .op_case import op_case
from .precision import EIGHT_BITS
from .price_cache import PriceCache
from .seconds import Priced


class OpPrices(MeshPrices):
    """Prices of the work of ops, with experts' tokens spread evenly."""

    @cached_property
    def unrecorded(self) -> Self:
        """Return the same prices from all sources, without a record of queries."""
        return replace(self, only=None, asked=None, cache=PriceCache(groups=self.cache.groups))

    def local(self, spec: TensorSpec, layout: Layout) -> TensorSpec:
        """Return the spec of a rank's part of a tensor that has a layout."""
        shape = local_shape(spec.shape, layout, self.mesh.shape)
        return TensorSpec(shape, spec.dtype, spec.requires_grad, spec.stored)

    def local_bytes(self, spec: TensorSpec, layout: Layout) -> int:
        return spec.num_bytes // self.num_parts(layout)

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
        if any(moved := ring_traffic(node, inputs, outputs)):
            copy = rate(self.device, "copy", node.spec.dtype).seconds_per_byte
            forward += moved[0] * copy
            backward += moved[1] * copy if backward else 0.0
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
