"""Memory of the ranks of a configuration besides their stages: messages and communicators.

In: a configuration's schedule and mesh, the bytes its stages send. Out: by pipeline rank the bytes
of ``communication``, the peak bytes of its messages while it computes (``messages_held``), and of
``communicators``: one of all devices, one for each axis of the mesh with more than one device, one
for each direction between a device and its counterpart in another pipeline rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ...cost_model.ops.memory import communicator_bytes, reserve_bytes
from ...cost_model.simulator.actions import Schedule
from ...cost_model.simulator.timeline import Timeline
from ..graph import Graph, Ref
from ..layout import Mesh
from ..pricing.stage_cost import StageCost, combine_bytes
from ..pricing.structure import Run
from ..schedules.held import MessageBytes, messages_held, sends_kept
from ..schedules.schedules import parts_of_ranks

ONCE = ("transient", "buffers", "reserve")
"""Memory categories that the stages of a rank share instead of adding up."""


def stage_bytes(
    schedule: str, num_ranks: int, num_chunks: int, costs: Sequence[StageCost], timeline: Timeline
) -> list[dict[str, float]]:
    """Return the bytes of the stages of every pipeline rank, by category.

    With several stages per rank, the timeline gives the peak of their activations.
    """
    found = []
    for rank, parts in enumerate(parts_of_ranks(schedule, num_ranks, num_chunks)):
        memory = combine_bytes((costs[part].memory_bytes for part in parts), ONCE)
        if len(parts) > 1:
            memory["activations"] = float(timeline.peak_activation_bytes[rank])
        found.append(dict(memory))
    return found


def sent_bytes(graph: Graph, run: Run, parts: int) -> float:
    """Return the bytes a stage sends per micro-batch from each of ``parts`` devices."""
    specs = ((graph.spec(Ref(name, index)), count) for (name, index), count in run.sent.items())
    return sum(spec.num_bytes * count for spec, count in specs) / parts


def beside_stages(
    schedule: Schedule, sent: Sequence[float], mesh: Mesh, kind: Literal["cuda", "cpu"]
) -> tuple[Mapping[str, float], ...]:
    """Return the memory of each pipeline rank; ``sent`` has every model part but the last.

    >>> from ..schedules.schedules import build_schedule
    >>> mesh = Mesh(("dp", "tp"), (4, 2))
    >>> beside_stages(build_schedule("1f1b", 2, 8), [1e6], mesh, "cuda")[0]["communicators"]
    1250000000.0
    """
    pairs: dict[tuple[int, int], float] = {}
    for source, targets in enumerate(schedule.wiring.consumers):
        for target in targets:
            size = sent[schedule.part(source)]
            pairs |= {(source, target): size, (target, source): size}
    messages = MessageBytes(pairs, pairs)
    most = sends_kept(schedule, is_gpu=kind != "cpu")
    ranks = schedule.stage_rank
    lanes = {(ranks[s], ranks[t]) for s, t in pairs if ranks[s] != ranks[t]}
    found = []
    for rank in range(schedule.num_ranks):
        held = max((size for _, size in messages_held(schedule, rank, messages, most)), default=0.0)
        is_world = schedule.num_ranks == 1 and len(mesh.shape) == 1
        count = sum(size > 1 for size in mesh.shape) + sum(rank in lane for lane in lanes)
        count += schedule.num_ranks * mesh.size > 1 and not is_world
        found.append(
            {
                "communication": held,
                "communicators": float(communicator_bytes(kind, count)),
                "reserve": float(reserve_bytes(kind, 0)),
            }
        )
    return tuple(found)
