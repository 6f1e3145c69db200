"""TF32: the user's choice, or torch's setting in this process, on the cluster that is planned for.

A process that trains for us is set as its plan says. A script has settings of its own, which
plans follow where nothing else is asked for, and which are left alone.
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
    """The cluster with the products in TF32 that are asked for; None: as torch is set here.

    Raises UsageError AP129 for "all" where no device computes in TF32.
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
    """Families of products in words.

    >>> families_text(("conv", "matmul"))
    'convolutions and matmuls'
    """
    return " and ".join(WORDS[name] for name in sorted(families)) or "nothing"


def set_as_planned(plan: Plan, rank: int) -> None:
    """Sets this process's torch as a plan says; rank 0 says where it was set otherwise.

    A plan that does not say, or of a device without TF32, leaves torch as it is.
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
    """Rank 0 says where a script's torch is not set as the plan was priced."""
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
    """Return the families of a rank's device that a plan has in TF32; None for one without TF32."""
    device = plan.cluster.device(min(rank, plan.cluster.num_devices - 1))
    return device.tf32 if has_tf32(device) else None
