"""Summing gradients over the mesh axes on which a parameter is held whole.

In: the local gradients of one rank. Out: these gradients, summed over each parameter's
``reduce_axes`` (by one all-reduce over the joint axes), in the buckets of
``planner.variants.gradient_buckets``. Buckets whose parameters are not ZeRO-sharded are launched
during the last backward as soon as their gradients are there, and run beside it; the others after
it. Each bucket is summed by the algorithm that the plan names (``all_reduces``). Every rank of a
group runs the same graph, so all launch their buckets in the same order.

Where the plan has an order of its own ("priority"), buckets are summed in parts, in that order: a
part begins when its bucket has its gradients and all parts before it have begun.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh

from ...cost_model.cluster.cluster import Cluster
from ...cost_model.collectives.all_reduce import LIBRARY
from ...planner.errors import PlanError
from ...planner.plan import GradientSum, Plan, StagePlan
from ...planner.variants.gradient_buckets import HeldGradient, make_buckets
from ..messages.all_reduces import AllReduces
from ..messages.groups import sum_groups
from ..parameters.parameters import StageParameter, attach_gradient_hook

PLACED_BYTES = 65_536
"""Size from which a gradient is copied into its bucket at once, while it is in the cache."""

ALONE = 2
"""Number of references to a storage, in torch's count, that always exist: tensor and caller."""

NEVER = ""
"""Name that no parameter has: a bucket that waits for it is summed only after the last backward."""

_users_of: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


@dataclass(frozen=True, slots=True)
class PlannedSums:
    """A plan's instructions how to sum a stage's gradients over ranks: ``sums`` lists buckets, or
    parts of buckets, with their all-reduce algorithms; if empty, the library's all-reduce sums each
    bucket. ``in_order``: sums are started in the order of ``sums``."""

    sums: tuple[GradientSum, ...] = ()
    cluster: Cluster | None = None
    in_order: bool = False

    @staticmethod
    def of(plan: Plan, stage: StagePlan) -> PlannedSums:
        """Return a plan's gradient sums of a stage; empty for GPUs, where NCCL chooses the
        algorithms."""
        if any(host.device.kind != "cpu" for host in plan.cluster.hosts):
            return PlannedSums()
        return PlannedSums(stage.gradient_sums, plan.cluster, plan.gradient_order == "priority")


@dataclass(eq=False)
class Part:
    """A part of a bucket with an all-reduce of its own: the elements from ``start`` to ``stop``.
    ``work`` is its running all-reduce. If ``is_in_lane``, ``AllReduces`` runs it over all groups of
    the bucket; else it is over one group at a time."""

    bucket: Bucket
    start: int
    stop: int
    algorithm: str
    work: Any = None
    is_in_lane: bool = False


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are summed together, in one flat tensor, over each of ``groups``.

    ``waiting`` names the parameters without a gradient so far; the bucket ``is_ready`` when all
    have one. While it ``is_open``, gradients are copied into ``slots``, views of ``flat``.
    ``with_gradient`` are the parameters with a gradient on this rank; for the others zeros are
    summed.
    """

    groups: tuple[dist.ProcessGroup, ...]
    block: int
    parameters: list[StageParameter]
    parts: list[Part] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)
    is_ready: bool = False
    with_gradient: list[StageParameter] = field(default_factory=list)
    flat: Tensor | None = None
    slots: dict[str, Tensor] = field(default_factory=dict)
    is_open: bool = False

    @property
    def is_under_way(self) -> bool:
        return any(part.work is not None for part in self.parts)

    def open(self) -> None:
        """Allocate memory for a step's gradients, or reuse the last step's if nothing else uses it.
        On a CPU new memory costs more than writing to it: 2 ms for 4 MB, which the kernel gives
        page by page. On a GPU the caching allocator makes reuse needless."""
        self.is_open = True
        if self.flat is not None and _users_of is not None:
            users = _users_of(self.flat.untyped_storage()._cdata)
            # A slot of no elements is a tensor of its own.
            ours = ALONE + sum(slot.numel() > 0 for slot in self.slots.values())
            if self.flat.device.type == "cpu" and users == ours:
                return
        locals_ = [parameter.local for parameter in self.parameters]
        first = self.parameters[0]
        self.flat = torch.empty(
            sum(local.numel() for local in locals_),
            dtype=first.formats.gradient,
            device=first.held.device,
        )
        views = _unflatten_dense_tensors(self.flat, locals_)  # type: ignore[no-untyped-call]
        names = (parameter.name for parameter in self.parameters)
        self.slots = dict(zip(names, views, strict=True))

    def place(self, parameters: Sequence[StageParameter]) -> None:
        """Copy the gradients of ``parameters`` into their slots of the flat tensor; a missing
        gradient becomes zeros."""
        missing, slots, gradients = [], [], []
        for parameter in parameters:
            slot, gradient = self.slots[parameter.name], parameter.gradient
            if gradient is None:
                missing.append(slot)
            elif gradient.data_ptr() != slot.data_ptr():
                slots.append(slot)
                gradients.append(gradient)
                parameter.gradient = slot.detach()
        if missing:
            torch._foreach_zero_(missing)
        if slots:
            torch._foreach_copy_(slots, gradients)


class GradientReducer:
    """The gradient sums (all-reduces) of one stage on one rank."""

    def __init__(
        self,
        parameters: Iterable[StageParameter],
        device_mesh: DeviceMesh,
        planned: PlannedSums = PlannedSums(),
    ) -> None:
        """Prepare the sums. Collective over the stage if the plan names algorithms or an order.
        Raises PlanError AP198 if ``planned`` is for other gradient buckets than ``parameters``
        form."""
        own = {parameter.name: parameter for parameter in parameters}
        self.buckets = _make_buckets(own, device_mesh, by_block=planned.in_order)
        self._bucket_of = {
            parameter.name: bucket for bucket in self.buckets for parameter in bucket.parameters
        }
        self.parts = _make_parts(self.buckets, planned.sums)
        self.in_order = planned.in_order
        self._next = 0
        self._is_last = False
        self._all_reduces: AllReduces | None = None
        named = [part for part in self.parts if part.algorithm != LIBRARY]
        groups = [group for bucket in self.buckets for group in bucket.groups]
        is_on_gloo = all(dist.get_backend(group) == "gloo" for group in groups)
        if planned.cluster is not None and (named or self.in_order) and is_on_gloo:
            self._all_reduces = AllReduces(groups, planned.cluster)

    @property
    def can_defer(self) -> bool:
        """Tell whether each bucket's sums can be waited for alone, as deferred updates need."""
        return self.in_order and self._all_reduces is not None

    def attach(self, parameters: Iterable[StageParameter]) -> None:
        """Register hooks on parameters whose gradients are summed over ranks, or in another
        dtype."""
        for parameter in parameters:
            if parameter.name in self._bucket_of or parameter.sums_apart:
                attach_gradient_hook(parameter, self._arrived)

    def begin_backward(self, *, last: bool, among: Container[str] | None = None) -> None:
        """Prepare for a backward; only in the last backward of a step are gradient sums started.

        ``among`` names the parameters that get a gradient, once each; all other gradients are
        complete. A parameter of several blocks gets its gradient in parts, so its sum starts in
        ``finish``.
        """
        self._is_last = last
        self._next = 0
        self.abandon()
        for bucket in self.buckets:
            names = {parameter.name for parameter in bucket.parameters}
            if among is not None:
                is_shared = any(p.block is None for p in bucket.parameters)
                names = {*names, NEVER} if is_shared else {n for n in names if n in among}
            bucket.waiting, bucket.is_ready = names, False

    def abandon(self) -> None:
        """Forget the running sums of a backward that an error ended; their memory is not reused, as
        it may still be written."""
        for bucket in self.buckets:
            if bucket.is_open or bucket.is_under_way:
                bucket.is_open, bucket.flat, bucket.slots = False, None, {}
                for part in bucket.parts:
                    part.work = None

    def _arrived(self, parameter: StageParameter) -> None:
        bucket = self._bucket_of.get(parameter.name)
        if bucket is None or not self._is_last:
            return
        if parameter.local_bytes >= PLACED_BYTES:
            if not bucket.is_open:
                bucket.open()
            with torch.no_grad():
                bucket.place((parameter,))
        bucket.waiting.discard(parameter.name)
        if not bucket.waiting:
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        """Start the sums of a bucket or, in a plan's order, of all parts whose turn has come."""
        bucket.is_ready = True
        bucket.with_gradient = [p for p in bucket.parameters if p.gradient is not None]
        if bucket.with_gradient:
            if not bucket.is_open:
                bucket.open()
            with torch.no_grad():
                bucket.place(bucket.parameters)
        if not self.in_order:
            for part in bucket.parts:
                self._start(part, 0)
            return
        while self._next < len(self.parts) and self.parts[self._next].bucket.is_ready:
            self._start(self.parts[self._next], 0)
            self._next += 1

    def _start(self, part: Part, position: int) -> None:
        bucket = part.bucket
        if not bucket.with_gradient:
            return
        assert bucket.flat is not None
        tensor, reduces = bucket.flat[part.start : part.stop], self._all_reduces
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor).view(-1)
        if reduces is not None and (self.in_order or part.algorithm != LIBRARY):
            part.is_in_lane = True
            part.work = reduces.start(part.algorithm, tensor, bucket.groups)
            return
        part.work = dist.all_reduce(tensor, group=bucket.groups[position], async_op=True)

    def launch_all(self) -> None:
        """Start the sums of the remaining buckets after the last backward."""
        for bucket in self.buckets:
            if not bucket.is_ready:
                self._launch(bucket)
        self._is_last = False

    def finish(self) -> None:
        """After the last backward, start the sums of remaining buckets and wait for all sums."""
        self.launch_all()
        for position in range(max((len(bucket.groups) for bucket in self.buckets), default=0)):
            pending = [
                part
                for part in self.parts
                if part.work is not None
                and position < (1 if part.is_in_lane else len(part.bucket.groups))
            ]
            if position:
                for part in pending:
                    self._start(part, position)
            for part in pending:
                part.work.wait()
        for bucket in self.buckets:
            self._close(bucket)

    def wait(self, bucket: Bucket) -> None:
        """Wait for the sums of one bucket; its ``slots`` then have the summed gradients. Only for
        plans that order the sums (``can_defer``)."""
        for part in bucket.parts:
            if part.work is not None:
                part.work.wait()
        self._close(bucket)

    def _close(self, bucket: Bucket) -> None:
        for part in bucket.parts:
            part.work = None
        bucket.is_open = False
        if bucket.flat is not None and bucket.flat.device.type != "cpu":
            bucket.flat, bucket.slots = None, {}


def _make_buckets(
    parameters: Mapping[str, StageParameter], device_mesh: DeviceMesh, *, by_block: bool
) -> list[Bucket]:
    held = [
        HeldGradient(
            parameter.name,
            parameter.block,
            parameter.reduce_axes,
            bool(parameter.shard_axes),
            prod(stop - start for start, stop in parameter.region),
            parameter.spec.is_complex,
        )
        for parameter in parameters.values()
        if parameter.spec.requires_grad
    ]
    return [
        Bucket(
            sum_groups(device_mesh, contents.axes),
            contents.block,
            [parameters[name] for name in contents.names],
        )
        for contents in make_buckets(held, by_block=by_block)
    ]


def _make_parts(buckets: Sequence[Bucket], sums: Sequence[GradientSum]) -> list[Part]:
    """Divide the buckets into the parts that the plan sums, in its order; without a plan, one part
    per bucket."""
    parts = []
    whole = [GradientSum(number, 0, 0, (), LIBRARY) for number in range(len(buckets))]
    if sums and {own.bucket for own in sums} != set(range(len(buckets))):
        raise PlanError(
            "AP198",
            f"the plan sums {len({own.bucket for own in sums})} buckets of gradients, but the "
            f"model has {len(buckets)}",
            where="gradient_sums",
            fix="plan again",
        )
    for own in sums or whole:
        bucket = buckets[own.bucket]
        numel = sum(prod(b - a for a, b in each.region) for each in bucket.parameters)
        bounds = [part * numel // own.num_parts for part in (own.part, own.part + 1)]
        parts.append(Part(bucket, bounds[0], bounds[1], own.algorithm))
        bucket.parts.append(parts[-1])
    return parts
