"""What the simulator knows of each stage: seconds and bytes, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .actions import Edges, Schedule

OF_EDGES = ("send_", "receive_")
"""What the names of costs begin with that have one entry per edge."""


class Buckets(NamedTuple):
    """The parts in which a stage's parameters are gathered and its gradients summed.

    Each tuple has one share per part, in the order of the forward, and adds up to 1: of the
    forward's compute, of the time to gather, of the backward's compute, of the time to sum.
    """

    forward: tuple[float, ...]
    gathered: tuple[float, ...]
    backward: tuple[float, ...]
    summed: tuple[float, ...]

    @staticmethod
    def equal(number: int) -> Buckets:
        """So many equal parts."""
        return Buckets(*((1 / number,) * number for _ in range(4)))


ONE_BUCKET = Buckets((1,), (1,), (1,), (1,))


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
    ``forward_states_seconds``, ``backward_states_seconds``: collectives of states that run beside a
    micro-batch's compute, whose passes have what they add; for the timeline.
    ``gather_seconds``: gathering sharded parameters, once per step, for the first forward.
    ``gradient_sync_seconds``: summing gradients, once per step, after the last backward. Where
    the ``slowed_share`` is below 1, both run beside that forward and that backward in ``buckets``
    (one where this is empty): a part of the parameters is there before its part of the forward,
    and a part of the gradients is summed after its part of the backward. While one of them runs,
    that share of the rank's compute is lost: 0 where they do not disturb each other. With 1, the
    default, they stop their rank.
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
    slowed_share: Sequence[float] = ()
    forward_states_seconds: Sequence[float] = ()
    backward_states_seconds: Sequence[float] = ()
    buckets: Sequence[Buckets] = ()

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
        if not all(0 <= share <= 1 for share in self.slowed_share):
            raise ValueError(f"shares of compute that is lost: {self.slowed_share}")
        for buckets in self.buckets:
            if len(set(map(len, buckets))) > 1 or not buckets.forward:
                raise ValueError("a stage has at least one bucket, and of each all four shares")


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
