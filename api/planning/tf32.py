"""TF32 in planning and running: the user's choice, or torch's setting in this process.

``autoparallel run`` sets torch in its processes as the plan says. A script's settings are never
changed; its plans follow them, unless the user chooses.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

from autoparallel.cost_model.cluster.tf32 import (
    FAMILIES,
    Tf32,
    has_tf32,
    set_torch,
    torch_families,
    with_tf32,
)
from autoparallel.planner.errors import UsageError

if TYPE_CHECKING:
    from autoparallel.cost_model.cluster.cluster import Cluster
    from autoparallel.planner.plan import Plan

WORDS = {"conv": "convolutions", "matmul": "matmuls"}


def with_choice(cluster: Cluster, choice: Tf32 | None) -> Cluster:
    """Return the cluster with the kinds of ops that compute in TF32 as ``choice`` says; None takes
    torch's flags in this process.

    Raises UsageError AP129 for "all" if no device supports TF32.
    """
    if choice is None:
        return with_tf32(cluster, torch_families())
    devices = [host.device for host in cluster.hosts]
    if choice == "all" and not any(map(has_tf32, devices)):
        names = ", ".join(dict.fromkeys(device.name for device in devices))
        raise UsageError(
            "AP129",
            f"{names} does not compute in TF32",
            why="it has no peak_flops for tfloat32; GPUs have units for it from compute "
            "capability 8.0 on (A100)",
            where=f"cluster {cluster.name}",
            fix="--tf32 none; in a cluster file, give peak_flops.tfloat32 of a device that has "
            "such units",
        )
    return with_tf32(cluster, FAMILIES[choice])


def families_text(families: Collection[str]) -> str:
    """Describe in words families of ops (convolutions, matrix products) that can use TF32.

    >>> families_text(("conv", "matmul"))
    'convolutions and matmuls'
    """
    return " and ".join(WORDS[name] for name in sorted(families)) or "nothing"


def set_as_planned(plan: Plan, rank: int) -> None:
    """Set torch's TF32 flags in this process as a plan says; rank 0 reports a change.

    A plan without a TF32 setting, or for a device without TF32, leaves torch unchanged.
    """
    planned, now = _planned(plan, rank), torch_families()
    if planned is None or planned == now:
        return
    set_torch(planned)
    if rank == 0:
        print(
            f"autoparallel: {families_text(planned)} in TF32, as planned; torch was set to "
            f"{families_text(now)}",
            file=sys.stderr,
        )


def tell_difference(plan: Plan, rank: int) -> None:
    """Warn on rank 0 if a script's TF32 setting differs from the setting that was priced."""
    planned, now = _planned(plan, rank), torch_families()
    if rank == 0 and planned is not None and planned != now:
        print(
            f"autoparallel: the plan was priced with {families_text(planned)} in TF32, this "
            f"script's torch computes {families_text(now)} in it; see "
            "torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32, or plan "
            "with another tf32",
            file=sys.stderr,
        )


def _planned(plan: Plan, rank: int) -> tuple[str, ...] | None:
    """Return the kinds of ops that the plan computes in TF32 on a rank; None on other devices."""
    device = plan.cluster.device(min(rank, plan.cluster.num_devices - 1))
    return device.tf32 if has_tf32(device) else None
