"""Prices of collectives and parameters on one stage's mesh.

In: a mesh on ranks of a cluster; the bytes of a collective, or a parameter with its layout and ZeRO
stage. Out: seconds, and bytes per device. The seconds of a parameter are the sum of its gradient
synchronization, its gathers and its optimizer step, which is measured, or derived from the
device's memory bandwidth.

A parameter that is whole on an axis has a partial gradient there, summed once per step (once per
micro-batch under ZeRO 2 and 3). One collective shards its states, or sums its gradient, over all
data-, expert- and context-parallel ranks that hold it whole (``Mesh.joint_axes``), or over those of
a group of neighbours, usually of one host; then each shard of the gradient is summed over the
groups once per step (hybrid sharding, Zhao et al. 2023, "PyTorch FSDP", section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from typing import Any, NamedTuple, Self

from ...cost_model.cluster.cluster import Cluster, Device, Source
from ...cost_model.collectives.collectives import (
    CollectiveKind,
    Group,
    collective_seconds,
    group_of,
)
from ...cost_model.ops.compute import with_attention
from ...cost_model.ops.memory import (
    DEFAULT,
    PrecisionPolicy,
    StateOptions,
    exchange_bytes,
    policy,
    policy_on,
    state_bytes,
)
from ...cost_model.profile.lookup import Profile
from ...cost_model.profile.transfers import TransferCurve, transfer_curve
from ..graph.graph import TensorSpec
from ..graph.layout import Layout, Mesh
from ..graph.state_sharding import StateSharding, joint_groups, state_sharding
from ..ops import Rules
from ..plan import Precision
from .basis import RUNTIME, CostAssumptions, CostQueries
from .host_memory import host_update_seconds, state_copies, step_bytes
from .price_cache import ConversionCache, PriceCache, find
from .seconds import Priced, Seconds, StateBytes

STATE_KINDS = {"all_gather": "zero_gather", "reduce_scatter": "zero_scatter"}
"""ZeRO's collectives by their names in a profile, which include copies to and from buffers."""


ZEROS = (0, 1, 2, 3)

ONE_HOST, NO_GROUPS = 0, 1
"""Values of ``CostAssumptions.shard_degree``: ZeRO shards over all ranks or over those of one host;
always over all ranks. Another value forces this number of ranks."""


class Sharding(NamedTuple):
    """Choice how to shard the states of a stage: ZeRO stage, and number of neighbouring ranks in a
    group that shards them; 0 if all ranks that hold a parameter whole are one group."""

    zero: int
    degree: int = 0


@dataclass(frozen=True)
class MeshPrices:
    """Prices of collectives and states on ``mesh``, on the cluster's ``ranks`` in row-major order.

    ``cache`` may be shared by all uses with one cluster and one graph. ``asked`` records every new
    query. With ``only``, seconds from other sources count as zero. ``own``: the ranks that compute,
    if ranks differ in their compute. ``ranks_on_host``: the least number of ranks on a host,
    which send to other hosts at once. ``shardings``: choices of ZeRO; ``shard_groups``: the slowest
    ranks that shard states within a group, and that replicate them, if a choice has groups.
    """

    mesh: Mesh
    cluster: Cluster
    ranks: tuple[int, ...]
    precision: Precision
    optimizer: str
    rules: Rules
    cache: PriceCache = field(default_factory=PriceCache, repr=False)
    profile: Profile | None = None
    asked: CostQueries | None = field(default=None, repr=False)
    only: Source | None = None
    own: tuple[int, ...] = ()
    assumptions: CostAssumptions = RUNTIME
    states: StateOptions = DEFAULT
    device: Device = field(init=False)
    groups: tuple[Group, ...] = field(init=False)
    ranks_on_host: int = field(init=False)
    policy: PrecisionPolicy = field(init=False)
    speed: str = field(init=False, repr=False)
    converted: ConversionCache = field(init=False, repr=False, compare=False)
    shardings: tuple[Sharding, ...] = field(init=False, repr=False)
    shard_groups: tuple[Group, ...] = field(init=False, repr=False)
    _divided: dict[Mesh, Self] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        slowest = self.cluster.slowest_device(self.own or self.ranks)
        set_field(self, "device", with_attention(slowest, self.assumptions.attention))
        set_field(self, "speed", self.device.speed)
        axes = range(len(self.mesh.axes))
        set_field(self, "groups", tuple(self._slowest_group(axis) for axis in axes))
        set_field(self, "ranks_on_host", self._slowest_group(*axes).ranks_per_host)
        given = self.assumptions.policy
        rules = given or policy(self.precision, self.optimizer, self.states)
        set_field(self, "policy", policy_on(self.device.kind, rules))
        key = (self.mesh, self.groups, self.profile, self.only)
        set_field(self, "converted", find(self.cache.conversions, key, ConversionCache))
        degree = self._group_degree()
        within = tuple(Sharding(zero, degree) for zero in ZEROS[1:] if degree)
        set_field(self, "shardings", (*map(Sharding, ZEROS), *within))
        set_field(self, "_divided", {})
        sharding = state_sharding(self.mesh, self.mesh.joint_axes, degree)
        along = [sharding.sharded, sharding.replicated] if degree else []
        groups = (self._on(sharding.mesh).group(*own) for own in along)
        set_field(self, "shard_groups", tuple(groups))

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key of all facts that prices depend on, except links between stages."""
        return (
            type(self),
            self.mesh,
            self.groups,
            self.ranks_on_host,
            self.speed,
            self.precision,
            self.optimizer,
            self.policy,
            self.profile,
            self.only,
            self.assumptions,
            self.shardings,
            self.shard_groups,
        )

    def _group_degree(self) -> int:
        """Return the number of ranks of a group that may shard states instead of all ranks: the
        requested number, or of each host's ranks if every host has several; 0 without groups."""
        degree, joint = self.assumptions.shard_degree, self.mesh.joint_axes
        if degree == ONE_HOST and self.group(*(joint or (0,))).num_hosts > 1:
            host_of = self.cluster.host_of
            hosts = [[host_of[self.ranks[i]] for i in own] for own in self.mesh.groups(*joint)]
            sizes = {len([*run]) for own in hosts for _, run in groupby(own)}
            degree = sizes.pop() if len(sizes) == 1 else NO_GROUPS
        is_part = 1 < degree < self.shards
        return degree if is_part and joint_groups(self.mesh, degree) is not None else 0

    def sharding_number(self, sharding: Sharding) -> int:
        """Return the number of a choice among ``shardings``."""
        return self.shardings.index(sharding)

    def allowed_shardings(self, zeros: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of the allowed ``shardings``, given the allowed ZeRO stages: only 0 if
        the mesh cannot shard states. The last has the least states."""
        if self.shards == 1:
            return (0,)
        is_forced = self.assumptions.shard_degree not in (ONE_HOST, NO_GROUPS)
        degrees = {own.degree for own in self.shardings if own.degree or not is_forced} or {0}
        allowed = [
            (zero == ZEROS[-1], bool(zero) and not degree, number)
            for number, (zero, degree) in enumerate(self.shardings)
            if zero in zeros and degree in degrees and (zero or not is_forced)
        ]
        return tuple(number for *_, number in sorted(allowed))

    def sharding_more(self, number: int, zeros: Sequence[int]) -> tuple[int, ...]:
        """Return the number of a choice among ``shardings`` and of the allowed choices that shard
        more states than it, or the same over more ranks."""
        own = self.shardings[number]
        more = {
            each
            for each in self.allowed_shardings(zeros)
            if self.shardings[each].zero > own.zero
            or (self.shardings[each].zero == own.zero and own.degree)
        }
        return (number, *sorted(more - {number}, key=self.shardings.__getitem__))

    def group(self, *axes: int) -> Group:
        """Return the slowest of the groups of ranks along the mesh axes ``axes``."""
        return self.groups[axes[0]] if len(axes) == 1 else self._slowest_group(*axes)

    def _slowest_group(self, *axes: int) -> Group:
        """Return the slowest group of ranks along ``axes``. Cached, as a mesh has many groups."""

        def find_slowest() -> tuple[Cluster, Group]:
            groups = [
                group_of(self.cluster, tuple(self.ranks[index] for index in members))
                for members in self.mesh.groups(*axes)
            ]
            slowest = max(
                groups, key=lambda group: collective_seconds("all_reduce", 1 << 20, group)
            )
            return self.cluster, slowest

        # The cluster stays alive beside its group, so that its id stays unique.
        key = (id(self.cluster), self.mesh, self.ranks, axes)
        return find(self.cache.groups, key, find_slowest)[1]

    def collective(self, kind: Any, num_bytes: float, *axes: int, measured_as: Any = None) -> float:
        """Return the seconds of a collective over all ranks of the mesh axes ``axes``.

        ``num_bytes`` is the size of the whole tensor. ``measured_as``: name of the collective in a
        profile, if it differs from ``kind``.
        """
        group, name = self.group(*axes), measured_as or kind
        key = (name, num_bytes, group, self.profile)
        found = self.cache.collectives.get(key)
        if found is None:
            known = self.profile.collective(name, num_bytes, group) if self.profile else None
            seconds, source = known or (collective_seconds(kind, int(num_bytes), group), "spec")
            found = self.cache.collectives[key] = Priced(seconds, 0.0, source)
            if self.asked is not None and group.num_ranks > 1 and num_bytes > 0:
                what = (name, group, self._partition(axes))
                self.asked.transfer(what, num_bytes, seconds, source)
        return self._counted(found).forward

    def _partition(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.ranks[i] for i in members) for members in self.mesh.groups(*axes))

    def _counted(self, found: Priced) -> Priced:
        if self.only is None:
            return found
        counts = self.only == found.source
        return Priced(found.forward * counts, found.backward * counts, found.source)

    @property
    def has_spec(self) -> bool:
        """Return whether prices from device specifications count (``only`` may exclude them)."""
        return self.only in (None, "spec")

    def num_parts(self, layout: Layout) -> int:
        """Return the number of different parts into which a layout splits a tensor."""
        return prod(
            size
            for placement, size in zip(layout, self.mesh.shape, strict=True)
            if placement.is_shard
        )

    @property
    def shards(self) -> int:
        """Return the number of ranks that ZeRO shards a replicated parameter over."""
        return self.mesh.num_ranks(self.mesh.joint_axes)

    def parameter(
        self, spec: TensorSpec, held: Layout, zero: int, degree: int = 0
    ) -> tuple[Seconds, StateBytes]:
        """Return a parameter's seconds (gathers, gradient sum, optimizer step) and bytes per rank.
        ``held``: layout in which it is stored; ``zero``, ``degree``: as in ``Sharding``.

        Latencies of collectives over the ranks that shard states are not included, as a block's
        parameters travel together; ``block_sync`` has them once per block.
        """
        numel = spec.numel // self.num_parts(held)
        gradient_bytes = numel * self.policy.gradient_bytes
        joint = self.mesh.joint_axes
        axes = tuple(axis for axis in joint if not held[axis].is_shard)
        sharding = state_sharding(self.mesh, axes, degree if zero else 0)
        if sharding.num_shards == 1:
            zero, sharding = 0, state_sharding(self.mesh, axes)
        shards = sharding.num_shards
        if not spec.requires_grad:
            if spec.stored:
                return Seconds(), StateBytes(parameters=spec.stored_bytes)
            return self._frozen(numel, zero if shards > 1 else 0, sharding)
        seconds = Seconds()
        if shards > 1:
            gather = self._streamed("all_gather", numel * self.policy.gathered_bytes, sharding)
            sync: CollectiveKind = "reduce_scatter" if zero else "all_reduce"
            seconds = self._states_of(
                zero, gather, self._streamed(sync, gradient_bytes, sharding), sharding
            )
            seconds = seconds.plus(self._copies(zero, numel, numel))
            seconds = seconds.plus(self._sum_of_groups(gradient_bytes // shards, sharding))
        sharded, rules = shards if zero else 1, self.policy
        for axis, placement in enumerate(held):
            if not placement.is_shard and axis not in joint and self.mesh.shape[axis] > 1:
                summed = self.collective("all_reduce", gradient_bytes // sharded, axis)
                share = self._slowed_share("all_reduce") if shards == 1 else 1.0
                seconds = seconds.plus(Seconds(gradient_sync=summed, sync_slowed=share * summed))
                rules = self.policy.on_device
        seconds = seconds.plus(self._moved(rules, numel / sharded, zero, shards))
        states = state_bytes(numel, rules, zero if shards > 1 else 0, shards)
        gathered = exchange_bytes(numel, rules, zero, shards)
        return seconds, StateBytes(states.parameters, states.gradients, states.optimizer, gathered)

    def _moved(self, rules: PrecisionPolicy, numel: float, zero: int, shards: int) -> Seconds:
        """Return the seconds of the optimizer's step on ``numel`` elements of a rank, and of copies
        of them to and from host memory, by ``rules``."""
        update = Seconds(optimizer=self._update(numel, rules, zero, shards))
        if not (rules.moves_gradients or rules.moves_parameters) or not self.has_spec:
            return update
        return update.plus(state_copies(numel, rules, self.device, zero, shards))

    def _sum_of_groups(self, num_bytes: float, sharding: StateSharding) -> Seconds:
        """Return the seconds per step of summing shards of gradients over the groups of ranks that
        each shard states, beside the last backward: without latency, or that alone for one byte.
        Gradients that go to host memory are summed in every micro-batch."""
        if sharding.num_replicas == 1:
            return Seconds()
        prices, axes = self._on(sharding.mesh), sharding.replicated
        summed = prices.collective("all_reduce", 1, *axes)
        if num_bytes > 1:
            summed = max(0.0, prices.collective("all_reduce", num_bytes, *axes) - summed)
        slowed = self._share_of_sums(sharding) * summed
        if self.policy.moves_gradients:
            return Seconds(backward_states=summed, backward_slowed=slowed)
        return Seconds(gradient_sync=summed, sync_slowed=slowed)

    def _share_of_sums(self, sharding: StateSharding, kind: CollectiveKind = "all_reduce") -> float:
        """Return the fraction of compute lost while gradients are summed. On a CPU the host waits
        for ``fully_shard``'s sums over groups, and for the reduce-scatters before them."""
        if sharding.num_replicas > 1 and self.device.kind == "cpu":
            return 1.0
        return self._slowed_share(kind)

    def _on(self, mesh: Mesh) -> Self:
        """Return the prices on ``mesh``, this mesh or the same with an axis divided in two."""
        if mesh == self.mesh:
            return self
        if mesh not in self._divided:
            own = replace(self.assumptions, shard_degree=NO_GROUPS)
            self._divided[mesh] = replace(self, mesh=mesh, assumptions=own)
        return self._divided[mesh]

    def _states_of(self, zero: int, gather: float, sync: float, sharding: StateSharding) -> Seconds:
        """Return the seconds of ``gather`` (parameters) and ``sync`` (gradients), each given as the
        seconds of one collective, as often as the ZeRO stage runs them."""
        kind: CollectiveKind = "reduce_scatter" if zero else "all_reduce"
        summed = self._share_of_sums(sharding, kind) * sync
        if zero == 0:
            return Seconds(gradient_sync=sync, sync_slowed=summed)
        gathered = self._slowed_share("all_gather") * gather
        if zero == 3:
            return Seconds(
                forward_states=gather,
                forward_slowed=gathered,
                backward_states=gather + sync,
                backward_slowed=gathered + summed,
            )
        once = Seconds(parameter_gather=gather, gather_slowed=gathered)
        if zero == 1:
            return once._replace(gradient_sync=sync, sync_slowed=summed)
        return once._replace(backward_states=sync, backward_slowed=summed)

    def _copies(self, zero: int, gathered: int, reduced: int) -> Seconds:
        """Return the seconds that copies around ZeRO's collectives add to them and to compute.

        Parameters are copied out of the buffer in which they are gathered, and gradients are cast
        into the buffer that is reduced (``fully_shard``), while the device computes. ``gathered``,
        ``reduced``: elements per rank. 0 if measured, as a profile includes the copies.
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
        """Return the fraction of compute that is lost during a collective of ZeRO's states."""
        given = self.assumptions.slowdown
        if given is not None:
            return 1 - 1 / given
        known = None
        if self.profile is not None and kind not in self.device.slowdown:
            known = self.profile.slowed_share(kind, self._state_group)
        return self.device.slowed_share(kind) if known is None else known

    @property
    def _state_group(self) -> Group:
        return self.group(*(self.mesh.joint_axes or (0,)))

    def shares_links(self, degree: int = 0) -> bool:
        """Return whether collectives of states use the same links as the stage's others.

        Collectives over several hosts are limited by the links between hosts. If groups of
        ``degree`` ranks shard states, both kinds of links are used.
        """
        own = self.mesh.joint_axes or (0,)
        sizes = enumerate(self.mesh.shape)
        others = [self.groups[axis] for axis, size in sizes if axis not in own and size > 1]
        crosses = self._state_group.num_hosts > 1
        return any(degree or (group.num_hosts > 1) == crosses for group in others)

    def _update(self, numel: float, rules: PrecisionPolicy, zero: int, shards: int) -> float:
        """Return the seconds of the optimizer's step on ``numel`` elements of a parameter."""
        if rules.host_bytes and self.device.kind != "cpu":
            seconds = host_update_seconds(numel, rules, self.device, zero, shards)
            return self._counted(Priced(seconds, 0.0, "spec")).forward
        key = (numel, self.optimizer, self.policy, self.speed, self.profile)
        return self._counted(find(self.cache.updates, key, lambda: self._step(numel))).forward

    def _step(self, numel: float) -> Priced:
        curve = update_curve(self.profile, self.optimizer) if self.profile else None
        if curve is not None:
            seconds, source = curve.at(numel * self.policy.parameter_bytes)
            return Priced(seconds, 0.0, source)
        if self.asked is not None:
            self.asked.unwritten.add("the optimizer's step")
        rate = self.device.memory_bytes_per_second * self.device.efficiency.get("copy", 1.0)
        return Priced(numel * step_bytes(self.policy) / rate, 0.0, "spec")

    def _frozen(self, numel: int, zero: int, sharding: StateSharding) -> tuple[Seconds, StateBytes]:
        """Return seconds and bytes of a frozen parameter of ``numel`` elements: whole on every
        rank, or sharded and gathered under ZeRO 3."""
        gathered_bytes = numel * self.policy.gathered_bytes
        if zero < 3:
            return Seconds(), StateBytes(parameters=gathered_bytes)
        held = state_bytes(numel, self.policy.frozen, zero, sharding.num_shards)
        gather = self._streamed("all_gather", gathered_bytes, sharding)
        seconds = self._states_of(zero, gather, 0.0, sharding).plus(self._copies(zero, numel, 0))
        return seconds, StateBytes(parameters=held.parameters, gathered=gathered_bytes)

    def _streamed(self, kind: str, num_bytes: float, sharding: StateSharding) -> float:
        latency = self._states(kind, 1, sharding)
        return max(0.0, self._states(kind, num_bytes, sharding) - latency)

    def _states(self, kind: str, num_bytes: float, sharding: StateSharding) -> float:
        """Return the seconds of ZeRO's collective ``kind``, with its copies if measured."""
        prices, measured_as = self._on(sharding.mesh), STATE_KINDS.get(kind)
        return prices.collective(kind, num_bytes, *sharding.sharded, measured_as=measured_as)

    def block_sync(self, zero: int, degree: int = 0) -> Seconds:
        """Return the latencies of a block's parameter gathers and gradient sums, which
        ``parameter`` leaves out."""
        axes = self.mesh.joint_axes
        if not axes:
            return Seconds()
        sync: CollectiveKind = "reduce_scatter" if zero else "all_reduce"
        sharding = state_sharding(self.mesh, axes, degree if zero else 0)
        gather, summed = (self._states(kind, 1, sharding) for kind in ("all_gather", sync))
        found = self._states_of(zero, gather, summed, sharding)
        return found.plus(self._sum_of_groups(1, sharding))


LEVEL = "device"
LIBRARY = "torch"


def update_kind(optimizer: str) -> str:
    """Return the name by which a profile stores measured optimizer steps.

    >>> update_kind("adamw")
    'update.adamw'
    """
    return f"update.{optimizer}"


def update_curve(profile: Profile, optimizer: str) -> TransferCurve | None:
    """Return the measured seconds of optimizer steps as a curve over bytes of a parameter; None if
    fewer than two sizes were measured.

    The model's own optimizer takes precedence over ``optimizer``.
    """
    for name in (profile.update, optimizer):
        kind = update_kind(name)
        found = [each for each in profile.transfers if (each.level, each.kind) == (LEVEL, kind)]
        if len(found) > 1:  # one small size is all overhead, and says nothing of larger ones
            return transfer_curve(found)
    return None
