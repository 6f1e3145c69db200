"""Seconds of what a device keeps in its host's memory: optimizer states, and activations.

In: a device, formats of states, bytes. Out: seconds of copies over the host's link, and of the
optimizer's step by the host's cores.
"""

from __future__ import annotations

from ...cost_model.cluster.cluster import Device
from ...cost_model.ops.memory import PrecisionPolicy
from .seconds import Seconds

HOST_EFFICIENCY = 0.5
"""Estimated fraction of a host's memory rate that an optimizer's step on its cores reaches."""

HOST_LINK = 12e9
"""Bytes per second to a host without figures of its own: PCIe 3.0 x16."""


def step_bytes(policy: PrecisionPolicy) -> int:
    """Return the memory traffic of an optimizer step in bytes per element: all states are read, and
    all but gradients written.

    A gradient of fewer bytes than the master is first written in the master's format, and read. In
    host memory the master is also written in the compute format, to be sent to the device; a
    gradient that is there is read once more, for the norm.
    """
    if policy.host_bytes:
        cast = 8 if policy.gradient_bytes < 4 else 0
        cast += policy.gradient_bytes * policy.moves_gradients
        return 2 * (policy.host_bytes + policy.gradient_bytes + policy.gathered_bytes) + cast
    held = policy.parameter_bytes + policy.optimizer_bytes
    copied = 2 * policy.parameter_bytes * (policy.gradient_bytes < policy.parameter_bytes)
    return 2 * held + policy.gradient_bytes + copied


COPY_SECONDS = 2e-5
"""Seconds by which the copies of an offloaded block lengthen its forward, and its backward, at the
least: an estimate of their launch and of waiting for them. Blocks that keep little stay as they
are."""


def host_link(device: Device) -> float:
    """Return the bytes per second of copies between a device and its host in one direction."""
    return device.host_link_bytes_per_second or HOST_LINK


def host_update_seconds(
    numel: float, policy: PrecisionPolicy, device: Device, zero: int = 0, shards: int = 1
) -> float:
    """Return the seconds of an optimizer step on ``numel`` elements whose states are in host
    memory, under ZeRO stage ``zero`` over ``shards`` ranks.

    Gradients go to the host and parameters back over the device's link, unless they are in host
    memory, and in between the host's cores move ``step_bytes``; nothing overlaps. A device without
    figures of its host gets the rate of PCIe 3 for link and memory.
    """
    memory = HOST_EFFICIENCY * (device.host_bytes_per_second or HOST_LINK)
    moved = policy.gradient_bytes * (not policy.moves_gradients)
    moved += policy.gathered_bytes - policy.moved_shard(zero, shards)
    return numel * (moved / host_link(device) + step_bytes(policy) / memory)


def state_copies(
    numel: float, policy: PrecisionPolicy, device: Device, zero: int, shards: int
) -> Seconds:
    """Return the seconds per micro-batch of copying a rank's ``numel`` elements of parameters from
    host memory, before each gathering, and of their gradients to it, beside the compute of other
    blocks. The sum of earlier micro-batches is fetched while another gradient is sent, so it takes
    no time of its own.
    """
    link = host_link(device)
    fetched = numel * policy.moved_shard(zero, shards) / link
    sent = fetched + numel * policy.gradient_bytes * policy.moves_gradients / link
    return Seconds(
        forward_states=fetched, backward_states=sent, forward_copies=fetched, backward_copies=sent
    )
