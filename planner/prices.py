"""What things cost on one stage's mesh: conversions, ops, parameters.

In: a mesh on ranks of a cluster, a number format, an optimizer. Out: seconds and bytes per
device. Both the solver's tables and ``evaluate`` ask here, each walking the graph its own way.

A conversion is the sum of its single-axis steps; a step on an axis moves the tensor that is
whole on that axis and local on the others. An op's time is its forward and backward work at
local shapes plus the collectives its strategy needs inside. A parameter that is held whole
on an axis has a partial gradient there, summed once per step (once per micro-batch over the
sharding axis "dp" under ZeRO 2 and 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import add
from typing import Any, NamedTuple, Protocol

from ..cost_model.cluster import Cluster, Device, Link
from ..cost_model.collectives import Group, collective_seconds, group_of, p2p_seconds
from ..cost_model.compute import work_seconds
from ..cost_model.memory import PrecisionPolicy, policy, state_bytes
from .graph import Graph, Node, Ref, TensorSpec
from .layout import INVARIANT, Layout, Mesh, conversion_steps, local_shape
from .plan import Precision
from .strategy import AxisStrategy, InnerCollective, NodeLayout

CONVERSION_SECONDS = 1e-8
"""Added to every single-axis step, so that of equal plans the one with fewer steps wins."""


class Rules(Protocol):
    """What ``planner.rules`` offers: how an op can be split and what it costs locally."""

    def axis_strategies(
        self, node: Node, graph: Graph, axis_size: int
    ) -> tuple[AxisStrategy, ...]: ...
    def work(
        self, node: Node, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> Any: ...
    def saved(self, node: Node, graph: Graph | None = None) -> tuple[Ref, ...]: ...
    def saved_extra_bytes(
        self, node: Node, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> int: ...
    def storage_of(self, graph: Graph) -> Mapping[tuple[str, int], tuple[str, int]]: ...


class Seconds(NamedTuple):
    """Seconds of a micro-batch by direction and resource; the last two are of a step.

    ``forward_states``/``backward_states``: gathering parameters and scattering gradients in
    every micro-batch (ZeRO 2 and 3), which recomputation does not repeat.
    """

    forward_compute: float = 0.0
    forward_communication: float = 0.0
    backward_compute: float = 0.0
    backward_communication: float = 0.0
    forward_states: float = 0.0
    backward_states: float = 0.0
    gradient_sync: float = 0.0
    optimizer: float = 0.0

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(*map(add, self, other))


class StateBytes(NamedTuple):
    """Bytes that a parameter holds all the time, and its whole copy while in use."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0


def with_precision(graph: Graph, precision: Precision) -> Graph:
    """The graph as it runs: float32 becomes the format that is computed in.

    A model captured in that format stays as it is, with what it keeps in float32.
    """
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}[precision]
    if dtype == "float32" or any(node.spec.dtype == dtype for node in graph.parameters):
        return graph
    nodes = tuple(
        replace(
            node,
            outputs=tuple(
                replace(spec, dtype=dtype) if spec.dtype == "float32" else spec
                for spec in node.outputs
            ),
        )
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def held_layout(layout: Layout) -> Layout:
    """The layout with R written as I: without a gradient they are the same."""
    return tuple(INVARIANT if each.kind == "R" else each for each in layout)


def boundary_layout(layout: Layout) -> Layout:
    """How a value lies between stages: what is not split is whole."""
    return tuple(each if each.is_shard else INVARIANT for each in layout)


@dataclass(frozen=True)
class Prices:
    """Prices on ``mesh``, whose devices are the cluster's ``ranks`` in row-major order.

    ``cache`` may be shared by every use with one cluster and one graph.
    """

    mesh: Mesh
    cluster: Cluster
    ranks: tuple[int, ...]
    precision: Precision
    optimizer: str
    rules: Rules
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)
    device: Device = field(init=False)
    groups: tuple[Group, ...] = field(init=False)
    policy: PrecisionPolicy = field(init=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "device", self.cluster.slowest_device(self.ranks))
        set_field(self, "groups", tuple(self._slowest_group(a) for a in range(len(self.mesh.axes))))
        set_field(self, "policy", policy(self.precision, self.optimizer))

    def _slowest_group(self, axis: int) -> Group:
        groups = [
            group_of(self.cluster, tuple(self.ranks[index] for index in members))
            for members in self.mesh.groups(axis)
        ]
        return max(groups, key=lambda group: collective_seconds("all_reduce", 1 << 20, group))

    def collective(self, kind: Any, num_bytes: float, axis: int) -> float:
        """Seconds of one collective on an axis; ``num_bytes`` is the whole tensor's."""
        key = ("collective", kind, num_bytes, self.groups[axis])
        found: float | None = self.cache.get(key)
        if found is None:
            found = collective_seconds(kind, int(num_bytes), self.groups[axis])
            self.cache[key] = found
        return found

    def conversion(self, spec: TensorSpec, source: Layout, target: Layout) -> tuple[float, float]:
        """Seconds forward and backward to bring a value from one layout to another."""
        if not spec.requires_grad:
            source, target = held_layout(source), held_layout(target)
        if source == target:
            return 0.0, 0.0
        key = ("conversion", spec, source, target, self.mesh, self.groups)
        found: tuple[float, float] | None = self.cache.get(key)
        if found is None:
            found = self._conversion(spec, source, target)
            self.cache[key] = found
        return found

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
            forward += CONVERSION_SECONDS
            if there is not None:
                forward += self.collective(there, num_bytes, step.axis)
            if back is not None and spec.requires_grad:
                backward += self.collective(back, num_bytes, step.axis)
            current[step.axis] = step.target
        return forward, backward

    def local(self, spec: TensorSpec, layout: Layout) -> TensorSpec:
        """A rank's part of a tensor."""
        return replace(spec, shape=local_shape(spec.shape, layout, self.mesh.shape))

    def local_bytes(self, spec: TensorSpec, layout: Layout) -> int:
        return spec.num_bytes // self.num_parts(layout)

    def num_parts(self, layout: Layout) -> int:
        """Into how many different parts a layout cuts a tensor."""
        return prod(
            size
            for placement, size in zip(layout, self.mesh.shape, strict=True)
            if placement.is_shard
        )

    def compute(
        self, node: Node, inputs: Sequence[TensorSpec], layout: NodeLayout
    ) -> tuple[float, float]:
        """Seconds forward and backward of an op's local work; ``inputs`` are global specs."""
        local_inputs = tuple(
            self.local(spec, each) for spec, each in zip(inputs, layout.inputs, strict=True)
        )
        local_outputs = tuple(
            self.local(spec, each) for spec, each in zip(node.outputs, layout.outputs, strict=True)
        )
        key = ("op", node.name, local_inputs, local_outputs, self.device.name)
        found: tuple[float, float] | None = self.cache.get(key)
        if found is None:
            work = self.rules.work(node, local_inputs, local_outputs)
            found = work_seconds(self.device, work, node.spec.dtype)
            self.cache[key] = found
        return found

    def op(
        self,
        node: Node,
        inputs: Sequence[TensorSpec],
        layout: NodeLayout,
        inner: Sequence[tuple[int, InnerCollective]] = (),
    ) -> Seconds:
        """Seconds of an op; ``inner`` are its own collectives by axis."""
        forward, backward = self.compute(node, inputs, layout)
        sent = [0.0, 0.0]
        whole = (*layout.inputs, *layout.outputs)
        for axis, item in inner:
            others = prod(
                size
                for other, size in enumerate(self.mesh.shape)
                if other != axis and any(each[other].is_shard for each in whole)
            )
            sent[item.backward] += self.collective(item.kind, item.num_bytes // others, axis)
        return Seconds(forward, sent[0], backward, sent[1])

    @property
    def shards(self) -> int:
        """How many ranks ZeRO may shard a replicated parameter over: axis "dp"'s size."""
        return self.mesh.shape[0] if self.mesh.axes[0] == "dp" else 1

    def parameter(self, spec: TensorSpec, held: Layout, zero: int) -> tuple[Seconds, StateBytes]:
        """Seconds and bytes of holding a parameter: its gradient's sums and its step.

        Latency per collective is left out over "dp", where a block's parameters travel
        together; ``block_sync`` has it once per block.
        """
        numel = spec.numel // self.num_parts(held)
        gradient_bytes = numel * self.policy.gradient_bytes
        parameter_bytes = numel * self.policy.gathered_bytes
        sync = forward = backward = 0.0
        shards = 1 if held[0].is_shard else self.shards
        if not spec.requires_grad:
            return self._frozen(numel, zero if shards > 1 else 0, shards)
        if shards > 1:
            gather = self._streamed("all_gather", parameter_bytes)
            scatter = self._streamed("reduce_scatter", gradient_bytes)
            if zero == 0:
                sync += self._streamed("all_reduce", gradient_bytes)
            elif zero == 1:
                sync += scatter + gather
            elif zero == 2:
                sync += gather
                backward += scatter
            else:
                forward += gather
                backward += gather + scatter
        sharded = shards if zero else 1
        for axis, placement in enumerate(held):
            is_sharding_axis = axis == 0 and self.mesh.axes[0] == "dp"
            if not placement.is_shard and not is_sharding_axis and self.mesh.shape[axis] > 1:
                sync += self.collective("all_reduce", gradient_bytes // sharded, axis)
        states = state_bytes(
            numel, self.policy, zero if shards > 1 else 0, shards, wrapped=shards > 1
        )
        touched = numel * self._step_bytes / sharded
        step = touched / self.device.memory_bytes_per_second
        seconds = Seconds(
            forward_states=forward, backward_states=backward, gradient_sync=sync, optimizer=step
        )
        gathered = parameter_bytes if zero == 3 and shards > 1 else 0
        return seconds, StateBytes(states.parameters, states.gradients, states.optimizer, gathered)

    def _frozen(self, numel: int, zero: int, shards: int) -> tuple[Seconds, StateBytes]:
        """A parameter that is not trained: sharded and gathered like others, and no more."""
        gathered_bytes = numel * self.policy.gathered_bytes
        held = state_bytes(numel, self.policy, zero, shards, wrapped=shards > 1 and zero > 0)
        states = StateBytes(parameters=held.parameters)
        if zero == 0:
            return Seconds(), states
        gather = self._streamed("all_gather", gathered_bytes)
        if zero < 3:
            return Seconds(gradient_sync=gather), states
        return (
            Seconds(forward_states=gather, backward_states=gather),
            StateBytes(parameters=held.parameters, gathered=gathered_bytes),
        )

    @property
    def _step_bytes(self) -> int:
        """Bytes that a step moves per parameter: all states read, all but the gradient written."""
        held = self.policy.parameter_bytes + self.policy.optimizer_bytes
        return 2 * held + self.policy.gradient_bytes

    def _streamed(self, kind: str, num_bytes: float) -> float:
        return max(0.0, self.collective(kind, num_bytes, 0) - self.collective(kind, 1, 0))

    def block_sync(self, zero: int) -> Seconds:
        """The latency of a block's collectives of gradients and parameters over "dp"."""
        if self.shards == 1:
            return Seconds()
        scatter = self.collective("reduce_scatter", 1, 0)
        gather = self.collective("all_gather", 1, 0)
        if zero == 0:
            return Seconds(gradient_sync=self.collective("all_reduce", 1, 0))
        if zero == 1:
            return Seconds(gradient_sync=scatter + gather)
        if zero == 2:
            return Seconds(gradient_sync=gather, backward_states=scatter)
        return Seconds(forward_states=gather, backward_states=gather + scatter)

    def transfer(self, spec: TensorSpec, layout: Layout, link: Link) -> tuple[float, float]:
        """Seconds forward and backward of what one rank gets from another stage."""
        forward = p2p_seconds(self.local_bytes(spec, layout), link)
        return forward, forward if spec.requires_grad else 0.0
