"""The communicators that each device belongs to while a plan runs on GPUs.

In: a plan, and the values between its stages. Out: their number by device. A communicator takes
memory of its own (``cost_model.ops.memory``). There is one of all devices (the loss, the gradient's
norm, tied weights); one for each axis of a stage's mesh that has more than one device, and for each
set of axes over which states are sharded or tokens are sent together; one for each lane, the
messages from one device to another; and one of the devices whose stages exchange parts of values
because of different layouts. The counterpart of ``runtime.messages.groups``,
``runtime.messages.ordered_channels``, ``runtime.messages.local_transfer``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ...planner.costs.conversions import transfers
from ...planner.graph.layout import Mesh, local_region
from ...planner.plan import Plan, StagePlan, grouped_axes, joint_axes
from ...planner.variants.replicas import placed_stages
from ..local.stage_cut import Boundary, with_replicas

Lane = tuple[int, int]


def num_communicators(plan: Plan, crossing: Sequence[Boundary]) -> Counter[int]:
    """Return the number of communicators (process groups) that each device belongs to.
    ``crossing``: values sent between stages."""
    stages, world = placed_stages(plan), plan.cluster.num_devices
    if len(stages) > len(plan.stages):
        crossing = with_replicas(tuple(crossing), len(plan.stages))
    found = Counter({device for stage in stages for device in stage.devices if world > 1})
    together: dict[tuple[tuple[int, ...], Mesh], list[StagePlan]] = {}
    for stage in stages:
        together.setdefault((stage.devices, stage.mesh), []).append(stage)
    for (devices, mesh), members in together.items():
        is_world = len(mesh.shape) == 1 and mesh.size == world
        axes = 0 if is_world else sum(size > 1 for size in mesh.shape)
        joint = sum(mesh.num_ranks(own) < world for own in joint_axes(members))
        joint += 2 * len(grouped_axes(members))
        for device in devices:
            found[device] += axes + joint
    lanes = set[Lane]()
    known: dict[object, tuple[tuple[Lane, ...], ...]] = {}
    swapping = set[tuple[int, ...]]()
    for boundary in crossing:
        ends = stages[boundary.source_stage], stages[boundary.target_stage]
        if set(ends[0].devices) != set(ends[1].devices):
            lanes.update(_lanes(boundary, ends, known))
        elif _regions(boundary, ends, 0) != _regions(boundary, ends, 1):
            swapping.add(tuple(sorted(ends[0].devices)))
    found.update(device for own in (*lanes, *swapping) for device in own)
    return found


def _lanes(
    boundary: Boundary,
    ends: tuple[StagePlan, StagePlan],
    known: dict[object, tuple[tuple[Lane, ...], ...]],
) -> Iterator[Lane]:
    """Yield the (sender, receiver) devices that exchange a value sent between stages, and its
    gradient. ``ends``: its source and target stage; ``known`` caches the pairs, as positions in the
    two meshes."""
    layouts, shape = (boundary.source_layout, boundary.target_layout), boundary.spec.shape
    meshes = ends[0].mesh, ends[1].mesh
    orders = (1, -1) if boundary.spec.requires_grad else (1,)
    key = shape, layouts, meshes, orders
    if key not in known:
        known[key] = tuple(
            tuple(
                (message.source, message.target)
                for message in transfers(
                    shape,
                    layouts[::order][0],
                    meshes[::order][0],
                    layouts[::order][1],
                    meshes[::order][1],
                )
            )
            for order in orders
        )
    for order, pairs in zip(orders, known[key], strict=True):
        source, target = ends[::order]
        for sender, receiver in pairs:
            yield source.devices[sender], target.devices[receiver]


def _regions(boundary: Boundary, ends: tuple[StagePlan, StagePlan], end: int) -> object:
    """Return for each device of one stage the range of indices that it holds of a value sent
    between stages. ``end``: 0 for the source stage of ``ends``, 1 for the target stage."""
    stage, layout = ends[end], (boundary.source_layout, boundary.target_layout)[end]
    return {
        device: local_region(boundary.spec.shape, layout, stage.mesh, stage.mesh.coordinates(at))
        for at, device in enumerate(stage.devices)
    }
