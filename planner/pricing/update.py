"""What a parameter takes in the optimizer's step, from measurements.

In: a profile, an optimizer's name. Out: seconds per parameter over the bytes of its master
that a rank steps. They are kept among the profile's transfers, on the level of one device.
"""

from __future__ import annotations

from ...cost_model.memory import PrecisionPolicy
from ...cost_model.profile.lookup import Profile
from ...cost_model.profile.transfers import TransferCurve, transfer_curve

LEVEL = "device"
LIBRARY = "torch"


def update_kind(optimizer: str) -> str:
    """The kind under which an optimizer's step is kept.

    >>> update_kind("adamw")
    'update.adamw'
    """
    return f"update.{optimizer}"


def update_curve(profile: Profile, optimizer: str) -> TransferCurve | None:
    """Seconds of the step over bytes of a parameter; None where it was not measured.

    The model's own optimizer counts before the one by name.
    """
    for name in (profile.update, optimizer):
        kind = update_kind(name)
        found = [each for each in profile.transfers if (each.level, each.kind) == (LEVEL, kind)]
        if found:
            return transfer_curve(found)
    return None


def step_bytes(policy: PrecisionPolicy) -> int:
    """Bytes that a step moves per parameter: all states read, all but the gradient written.

    A gradient of fewer bytes than the master is first written in its format, and read.
    """
    held = policy.parameter_bytes + policy.optimizer_bytes
    copied = 2 * policy.parameter_bytes * (policy.gradient_bytes < policy.parameter_bytes)
    return 2 * held + policy.gradient_bytes + copied
