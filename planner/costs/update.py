"""Seconds of the optimizer's step on a parameter, from measurements or figures of the host.

In: a profile, an optimizer's name. Out: the seconds of a step as a curve over the bytes of the
master parameters that a rank steps. A profile stores them among its transfers, at the level of one
device.
"""

from __future__ import annotations

from ...cost_model.cluster.cluster import Device
from ...cost_model.ops.memory import PrecisionPolicy
from ...cost_model.profile.lookup import Profile
from ...cost_model.profile.transfers import TransferCurve, transfer_curve

HOST_EFFICIENCY = 0.5
"""Estimated fraction of a host's memory rate that an optimizer's step on its cores reaches."""

HOST_LINK = 12e9
"""Bytes per second to a host without figures of its own: PCIe 3.0 x16."""

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


def step_bytes(policy: PrecisionPolicy) -> int:
    """Return the memory traffic of an optimizer step in bytes per element: all states are read, and
    all but gradients written.

    A gradient of fewer bytes than the master is first written in the master's format, and read. In
    host memory the master is also written in the compute format, to be sent to the device.
    """
    if policy.host_bytes:
        cast = 8 if policy.gradient_bytes < 4 else 0
        return 2 * (policy.host_bytes + policy.gradient_bytes + policy.gathered_bytes) + cast
    held = policy.parameter_bytes + policy.optimizer_bytes
    copied = 2 * policy.parameter_bytes * (policy.gradient_bytes < policy.parameter_bytes)
    return 2 * held + policy.gradient_bytes + copied


def host_update_seconds(numel: float, policy: PrecisionPolicy, device: Device) -> float:
    """Return the seconds of an optimizer step on ``numel`` elements whose states are in host
    memory.

    Gradients go to the host and parameters back over the device's link, and in between the host's
    cores move ``step_bytes``; nothing overlaps. A device without figures of its host gets the rate
    of PCIe 3 for link and memory.
    """
    link = device.host_link_bytes_per_second or HOST_LINK
    memory = HOST_EFFICIENCY * (device.host_bytes_per_second or HOST_LINK)
    moved = policy.gradient_bytes + policy.gathered_bytes
    return numel * (moved / link + step_bytes(policy) / memory)
