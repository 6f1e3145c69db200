"""What no plan takes less than because its ops have to be computed: known at once, of any job.

In: a job, the sizes of its micro-batches. Out: a lower bound of the step over all cuts, tilings,
meshes, layouts, ZeRO stages, recomputation policies, schedules and numbers of stages per rank.

Whatever the layouts, the devices that share an op do all of its FLOPs and touch all of its bytes
between them, at their peak at best (``compute``): of D devices the busiest computes at least

    N/D · Σ over ops of  max(flops · seconds per FLOP, bytes · seconds per byte)

forward and backward, with the rates of the fastest device. Of matrix products and attention,
which a GPU computes in tiles, the FLOPs alone are counted. An op's work at r rows is at most
linear in r and N·r is the batch, so the sum is least for the largest micro-batch: that is taken
for all. Communication, recomputation and idle time are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...cost_model.cluster import Device
from ...cost_model.compute import COMPUTE_FAMILIES, rate
from ..pricing.choices import input_specs
from .job import Job


def work_bound(job: Job, rows: Sequence[int]) -> float:
    """No plan takes less than this; 0 where prices are measured, which peaks do not bound."""
    if job.basis.used is not None or job.basis.only not in (None, "spec"):
        return 0.0
    largest = max(rows)
    structure = job.at(largest)
    devices = list({host.device.speed: host.device for host in job.cluster.hosts}.values())
    total = 0.0
    for kind, count in Counter(block.kind for block in structure.blocks.blocks).items():
        nodes = structure.blocks.kinds[kind].nodes
        total += count * sum(_least_seconds(job, largest, name, devices) for name in nodes)
    return job.num_microbatches(largest) * total / job.cluster.num_devices


def _least_seconds(job: Job, rows: int, name: str, devices: Sequence[Device]) -> float:
    """Both passes of a whole op on the fastest of the devices."""
    graph = job.at(rows).graph
    node = graph[name]
    work = job.rules.work(node, input_specs(node, graph), node.outputs)
    passes = (
        (work.flops_forward, work.bytes_forward), (work.flops_backward, work.bytes_backward)
    )  # fmt: skip
    least = float("inf")
    for device in devices:
        own = rate(device, work.family, node.spec.dtype)
        per_byte = 0.0 if work.family in COMPUTE_FAMILIES else own.seconds_per_byte
        seconds = sum(max(f * own.seconds_per_flop, b * per_byte) for f, b in passes)
        least = min(least, seconds)
    return least
