"""What the simulator knows of each stage: seconds and bytes, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .actions import Edges, Schedule

MEASURED_SLOWDOWN = 1.189
"""Compute beside communication takes this much longer: 18.9 % on average and 40 % at most,
over A100, H100, MI210 and MI250 training GPT and LLaMA models (arXiv:2507.03114, abstract).
That average counts whole iterations, so while both really run it is a lower estimate."""


OF_EDGES = ("send_", "receive_")
"""What the names of costs begin with that have one entry per edge."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Collectives of gradients and parameters run beside compute, which they slow down.

    ``slowdown``: seconds that a second's work takes while one of them runs on the same device.
    ``gradient_buckets``: into how many equal parts the gradients and parameters of each part of
    the model travel (its blocks); into one where this is empty.
    """

    slowdown: float = MEASURED_SLOWDOWN
    gradient_buckets: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.slowdown < 1:
            raise ValueError(f"a slowdown of {self.slowdown} would be a speedup")
        if any(buckets < 1 for buckets in self.gradient_buckets):
            raise ValueError("a stage's gradients are at least one bucket")


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds and bytes by stage, one entry per stage. What is left empty is zero.

    ``forward_seconds``, ``backward_seconds``: one micro-batch, with the collectives inside,
    which ``forward_communication_seconds`` and ``backward_communication_seconds`` give again.
    ``send_seconds[s]``: one micro-batch's message from stage s to s+1, and the same backwards
    unless ``send_backward_seconds[s]`` (from s+1 to s) says otherwise; one entry less than
    there are stages. With ``edges`` between stages they have one entry per edge.
    ``send_latency_seconds``: of them, those that a message is on its way without keeping its
    ranks from sending and receiving others. ``send_call_seconds``, ``receive_call_seconds``:
    the time of a rank itself to send such a message and to post its receive; a message is on its
    way from the beginning of the call. All three are for both directions.
    ``gather_seconds``: gathering sharded parameters, once, before the first forward.
    ``gradient_sync_seconds``: summing gradients, once, after the last backward; with an
    ``Overlap`` both go bucket by bucket beside that forward and that backward.
    ``step_seconds``: the optimizer, once.
    ``activation_bytes``: what one micro-batch keeps until its backward, on the worst rank.
    ``static_bytes``: everything held throughout. ``weight_backward_seconds``: the part of the
    backward that a split schedule may delay, half of it by default.
    ``slice_forward_shares``, ``slice_backward_shares``: of a micro-batch in slices, the part of
    its time that each slice takes, in every stage; that of its length by default.
    ``replica_sum_seconds``: summing a stage's gradients with those of its replicas in other
    pipeline ranks, once, where the schedule has replicas.
    """

    forward_seconds: Sequence[float]
    backward_seconds: Sequence[float]
    send_seconds: Sequence[float] = ()
    step_seconds: Sequence[float] = ()
    activation_bytes: Sequence[int] = ()
    static_bytes: Sequence[int] = ()
    send_backward_seconds: Sequence[float] = ()
    weight_backward_seconds: Sequence[float] = ()
    gradient_sync_seconds: Sequence[float] = ()
    gather_seconds: Sequence[float] = ()
    forward_communication_seconds: Sequence[float] = ()
    backward_communication_seconds: Sequence[float] = ()
    edges: Edges | None = None
    replica_sum_seconds: Sequence[float] = ()
    slice_forward_shares: Sequence[float] = ()
    slice_backward_shares: Sequence[float] = ()
    send_latency_seconds: Sequence[float] = ()
    send_call_seconds: Sequence[float] = ()
    receive_call_seconds: Sequence[float] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward_seconds)
        num_edges = stages - 1 if self.edges is None else len(self.edges)
        for name in self.__slots__:
            if name == "edges" or name.startswith("slice_"):
                continue
            found = len(getattr(self, name))
            length = num_edges if name.startswith(OF_EDGES) else stages
            if found != length and not (found == 0 and name != "backward_seconds"):
                raise ValueError(f"{name} has {found} entries for {stages} stages, not {length}")


def of_replicas(costs: StageCosts, schedule: Schedule) -> StageCosts:
    """The costs of a schedule's stages from those of the parts of the model they compute."""
    if not schedule.parts:
        return costs
    if costs.edges is not None:
        raise ValueError("replicas of stages that are no chain")
    spread: dict[str, tuple[float, ...]] = {}
    for name in costs.__slots__:
        values = getattr(costs, name)
        if name in ("edges", "slice_forward_shares", "slice_backward_shares") or not values:
            continue
        if name.startswith(OF_EDGES):
            assert schedule.edges is not None
            spread[name] = tuple(values[schedule.parts[source]] for source, _ in schedule.edges)
        else:
            spread[name] = tuple(values[part] for part in schedule.parts)
    return replace(costs, edges=schedule.edges, **spread)  # type: ignore[arg-type]
