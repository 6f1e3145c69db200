"""Why a search gives no plan, in words: what is missing, by how much, what to try."""

from __future__ import annotations

from ...cost_model.cluster import Cluster
from ..errors import InfeasibleError, UsageError
from ..intra_op.intra_op import Limits
from ..pricing.basis import Basis
from ..requests.request import Request


def check_measured(basis: Basis, request: Request) -> None:
    """Raises AP170 where the search asked for a time that was not measured."""
    missing = basis.asked.unmeasured if basis.asked is not None else []
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if missing[8:] else "")
        raise UsageError(
            "AP170",
            f"--profile measured: {len(missing)} kinds of op or transfer have not been measured",
            why=shown,
            fix=f"autoparallel profile {request.target or 'TARGET'} with the same options and a "
            "larger --budget, or plan with --profile auto",
        )


def does_not_fit(
    excess: float, limits: Limits, request: Request, cluster: Cluster
) -> InfeasibleError:
    """AP301: the nearest plan needs ``excess`` bytes more than a device has."""
    limit = limits.memory_bytes
    tries = []
    if limits.recompute == "none":
        tries.append("recompute=full")
    if max(limits.zeros) < 3 and cluster.num_devices > 1:
        tries.append("zero=3")
    if request.microbatch_size is not None and request.microbatch_size > 1:
        tries.append("a smaller micro-batch")
    devices = -(-int(cluster.num_devices * (limit + excess)) // int(limit)) + 1
    tries.append(f"about {devices} devices")
    return InfeasibleError(
        "AP301",
        "the model does not fit"
        + (
            f": the nearest plan is about {excess / 1e9:.3g} GB over the limit"
            if excess > 0
            else ""
        ),
        why=f"each device has {limit / 1e9:.3g} GB",
        fix=" or ".join(tries),
    )
