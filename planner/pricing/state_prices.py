"""What holding parameters costs on one stage's mesh: sums, gathering, the optimizer's step, bytes.

In: a parameter and how it is held, a ZeRO stage. Out: seconds and bytes per device. A parameter
that is held whole on an axis has a partial gradient there, summed once per step (once per
micro-batch under ZeRO 2 and 3). States are sharded over axis "dp"; of other programs over all
data-, expert- and context-parallel ranks, in one collective (``CostAssumptions.joint_states``).
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Any

from ...cost_model.cluster import Device
from ...cost_model.collectives import CollectiveKind, Group
from ...cost_model.memory import PrecisionPolicy, exchange_bytes, state_bytes
from ...cost_model.profile.lookup import Profile
from ..graph import TensorSpec
from ..layout import Layout, Mesh
from .basis import Asked, CostAssumptions
from .price_cache import PriceCache, find
from .seconds import Priced, Seconds, StateBytes
from .update import host_update_seconds, step_bytes, update_curve

JOINT_AXES = ("dp", "ep", "cp")
"""The axes whose ranks hold a parameter whole but for experts' weights, the data axis first."""

STATE_KINDS = {"all_gather": "zero_gather", "reduce_scatter": "zero_scatter"}
"""ZeRO's collectives as they are measured: with the copies into and out of their buffers."""


class StatePrices:
    """The part of ``Prices`` that prices states; the rest of it is what is declared here."""

    mesh: Mesh
    groups: tuple[Group, ...]
    device: Device
    policy: PrecisionPolicy
    assumptions: CostAssumptions
    profile: Profile | None
    asked: Asked | None
    cache: PriceCache
    optimizer: str
    speed: str

    def collective(self, kind: Any, num_bytes: float, *axes: int, measured_as: Any = None) -> float:
        """See ``Prices``."""
        raise NotImplementedError

    def num_parts(self, layout: Layout) -> int:
        """See ``Prices``."""
        raise NotImplementedError

    @property
    def has_spec(self) -> bool:
        """See ``Prices``."""
        raise NotImplementedError

    def _counted(self, found: Priced) -> Priced:
        raise NotImplementedError

    def _group(self, axes: tuple[int, ...]) -> Group:
        raise NotImplementedError

    @cached_property
    def state_axes(self) -> tuple[int, ...]:
        """The axes over which a replicated parameter's states are sharded and gradients summed."""
        names = JOINT_AXES if self.assumptions.joint_states else JOINT_AXES[:1]
        sizes = zip(self.mesh.axes, self.mesh.shape, strict=True)
        found = [axis for axis, (name, size) in enumerate(sizes) if name in names and size > 1]
        return tuple(found)

    @property
    def shards(self) -> int:
        """The number of ranks that ZeRO may shard a replicated parameter over."""
        return self._size(self.state_axes)

    def _size(self, axes: tuple[int, ...]) -> int:
        return prod(self.mesh.shape[axis] for axis in axes)

    def parameter(self, spec: TensorSpec, held: Layout, zero: int) -> tuple[Seconds, StateBytes]:
        """Seconds and bytes of holding a parameter: its gradient's sums and its step.

        Latency per collective is left out over ``state_axes``, where a block's parameters travel
        together; ``block_sync`` has it once per block.
        """
        numel = spec.numel // self.num_parts(held)
        gradient_bytes = numel * self.policy.gradient_bytes
        axes = tuple(axis for axis in self.state_axes if not held[axis].is_shard)
        shards = self._size(axes)
        if not spec.requires_grad:
            return self._frozen(numel, zero if shards > 1 else 0, axes)
        seconds = Seconds()
        if shards > 1:
            gather = self._streamed("all_gather", numel * self.policy.gathered_bytes, axes)
            sync: CollectiveKind = "reduce_scatter" if zero else "all_reduce"
            seconds = self._states_of(zero, gather, self._streamed(sync, gradient_bytes, axes))
            seconds = seconds.plus(self._copies(zero, numel, numel))
        sharded = shards if zero else 1
        runs_beside = shards == 1
        for axis, placement in enumerate(held):
            if not placement.is_shard and axis not in axes and self.mesh.shape[axis] > 1:
                summed = self.collective("all_reduce", gradient_bytes // sharded, axis)
                share = self._slowed_share("all_reduce") if runs_beside else 1.0
                seconds = seconds.plus(Seconds(gradient_sync=summed, sync_slowed=share * summed))
                runs_beside = False
        states = state_bytes(numel, self.policy, zero if shards > 1 else 0, shards)
        seconds = seconds._replace(optimizer=self._update(numel / sharded))
        gathered = exchange_bytes(numel, self.policy, zero, shards)
        return seconds, StateBytes(states.parameters, states.gradients, states.optimizer, gathered)

    def _states_of(self, zero: int, gather: float, sync: float) -> Seconds:
        """Gathering parameters and summing gradients as often as a ZeRO stage does."""
        summed = self._slowed_share("reduce_scatter" if zero else "all_reduce") * sync
        if zero == 0:
            return Seconds(gradient_sync=sync, sync_slowed=summed)
        gathered = self._slowed_share("all_gather") * gather
        if zero == 3:
            return Seconds(
                forward_states=gather, forward_slowed=gathered,
                backward_states=gather + sync, backward_slowed=gathered + summed,
            )  # fmt: skip
        once = Seconds(parameter_gather=gather, gather_slowed=gathered)
        if zero == 1:
            return once._replace(gradient_sync=sync, sync_slowed=summed)
        return once._replace(backward_states=sync, backward_slowed=summed)

    def _copies(self, zero: int, gathered: int, reduced: int) -> Seconds:
        """The copies around ZeRO's collectives: they lengthen these, and slow compute beside them.

        Parameters are copied out of the buffer in which they were gathered, and gradients are cast
        into the one that is reduced (``fully_shard``). The device moves these bytes while it
        computes. A profile measures the collectives with their copies.
        """
        is_measured = self.profile is not None or not self.has_spec
        if zero < 2 or is_measured or not self.assumptions.copies_states:
            return Seconds()
        rate = self.device.memory_bytes_per_second * self.device.efficiency.get("copy", 1.0)
        out = 2 * gathered * self.policy.gathered_bytes / rate if zero == 3 else 0.0
        into = reduced * (self.policy.gathered_bytes + self.policy.gradient_bytes) / rate
        both = out + into
        return Seconds(
            forward_states=out, forward_slowed=out, backward_states=both, backward_slowed=both
        )

    def _slowed_share(self, kind: CollectiveKind) -> float:
        """The share of its compute that a device loses beside a collective of states."""
        given = self.assumptions.slowdown
        if given is not None:
            return 1 - 1 / given
        known = None
        if self.profile is not None and kind not in self.device.slowdown:
            known = self.profile.slowed_share(kind, self._state_group)
        return self.device.slowed_share(kind) if known is None else known

    @property
    def _state_group(self) -> Group:
        return self._group(self.state_axes or (0,))

    @property
    def shares_links(self) -> bool:
        """Whether collectives of states use the links of the stage's other collectives.

        Over several hosts they are bound by the links between hosts.
        """
        own = self.state_axes or (0,)
        sizes = enumerate(self.mesh.shape)
        others = [self.groups[axis] for axis, size in sizes if axis not in own and size > 1]
        crosses = self._state_group.num_hosts > 1
        return any((group.num_hosts > 1) == crosses for group in others)

    def _update(self, numel: float) -> float:
        """Seconds of the optimizer's step on one parameter."""
        key = (numel, self.optimizer, self.policy, self.speed, self.profile)
        return self._counted(find(self.cache.updates, key, lambda: self._step(numel))).forward

    def _step(self, numel: float) -> Priced:
        if self.policy.host_bytes and self.device.kind != "cpu":
            return Priced(host_update_seconds(numel, self.policy, self.device), 0.0, "spec")
        curve = update_curve(self.profile, self.optimizer) if self.profile else None
        if curve is not None:
            seconds, source = curve.at(numel * self.policy.parameter_bytes)
            return Priced(seconds, 0.0, source)
        if self.asked is not None:
            self.asked.unwritten.add("the optimizer's step")
        rate = self.device.memory_bytes_per_second * self.device.efficiency.get("copy", 1.0)
        return Priced(numel * step_bytes(self.policy) / rate, 0.0, "spec")

    def _frozen(self, numel: int, zero: int, axes: tuple[int, ...]) -> tuple[Seconds, StateBytes]:
        """A parameter that is not trained: sharded and gathered like others, and no more."""
        gathered_bytes = numel * self.policy.gathered_bytes
        held = state_bytes(numel, self.policy, zero, self._size(axes))
        states = StateBytes(parameters=held.parameters)
        if zero == 0:
            return Seconds(), states
        gather = self._streamed("all_gather", gathered_bytes, axes)
        seconds = self._states_of(zero, gather, 0.0).plus(self._copies(zero, numel, 0))
        gathered = gathered_bytes if zero == 3 else 0.0
        return seconds, StateBytes(parameters=held.parameters, gathered=gathered)

    def _streamed(self, kind: str, num_bytes: float, axes: tuple[int, ...]) -> float:
        return max(0.0, self._states(kind, num_bytes, axes) - self._states(kind, 1, axes))

    def _states(self, kind: str, num_bytes: float, axes: tuple[int, ...]) -> float:
        """Seconds of a collective of states, with the copies around it."""
        return self.collective(kind, num_bytes, *axes, measured_as=STATE_KINDS.get(kind))

    def block_sync(self, zero: int) -> Seconds:
        """The latency of a block's collectives of gradients and parameters."""
        axes = self.state_axes
        if not axes:
            return Seconds()
        sync: CollectiveKind = "reduce_scatter" if zero else "all_reduce"
        return self._states_of(
            zero, self._states("all_gather", 1, axes), self._states(sync, 1, axes)
        )
