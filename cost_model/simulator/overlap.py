"""Compute beside collectives, on one rank: exact times at piecewise constant rates.

While a collective of the rank runs, a share of its compute is lost, so that it goes at the rate ``1
- share``, else at 1. A collective stream carries one after the other, each from when it is ready. A
collective is ready once something that the rank has already computed is done, so when a piece of
compute is timed, all that runs beside it is known and has no gaps: it lasts to ``busy_until``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .actions import GATHER, REDUCE, Action
from .stage_costs import ONE_BUCKET, Buckets, StageCosts
from .timeline import Event, Stream


@dataclass(slots=True)
class Collectives:
    """Collectives of parameters and gradients that one rank has launched so far in a simulated
    step; the last of them ends at time ``busy_until``. ``gathered[stage]``: times at which the
    buckets of the stage's parameters are gathered, in order; ``reduced[stage]``: time at which all
    its gradients are summed. ``lost_seconds``: additional seconds of compute due to collectives
    that run at the same time. ``slowed_share``: share of compute speed that the last launched
    collective costs."""

    slowed_share: float
    busy_until: float
    free: dict[Stream, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    gathered: dict[int, list[float]] = field(default_factory=dict)
    reduced: dict[int, float] = field(default_factory=dict)
    lost_seconds: float = 0

    def launch(self, action: Action, stream: Stream, ready: float, seconds: float) -> float:
        """Start a collective of ``seconds`` on a stream, when the time ``ready`` is reached and the
        stream is free; return the time at which it ends."""
        start = max(ready, self.free.get(stream, ready))
        end = start + seconds
        self.free[stream] = end
        self.busy_until = max(self.busy_until, end)
        self.events.append(Event(action, start, end, stream))
        return end

    def gather(self, stage: int, costs: StageCosts, now: float) -> None:
        """Launch at time ``now`` the all-gathers of a stage's parameters, bucket by bucket."""
        seconds = costs.gather_seconds[stage]
        self.gathered[stage] = [
            self.launch(Action(GATHER, stage), "parameter gather", now, seconds * share)
            for share in self._launched_buckets(stage, costs).gathered
        ]

    def _launched_buckets(self, stage: int, costs: StageCosts) -> Buckets:
        """Return the buckets of a stage's parameters, and set ``slowed_share`` to the share of
        compute speed that their collectives cost."""
        if costs.slowed_share:
            self.slowed_share = costs.slowed_share[stage]
        return _buckets(stage, costs)

    def finish(self, start: float, work: float) -> float:
        """Return the time at which compute ends that starts at ``start`` and would take ``work``
        seconds alone; collectives that run at the same time slow it down.

        >>> Collectives(0.5, busy_until=3.0).finish(1.0, 2.5)
        4.5
        """
        beside = self.busy_until - start
        if beside <= 0:
            return start + work
        rate = 1 - self.slowed_share
        done = beside * rate
        if work <= done:
            end = start + work / rate if rate else start
            self.lost_seconds += end - start - work
            return end
        self.lost_seconds += beside - done
        return self.busy_until + work - done

    def first_forward(
        self, stage: int, costs: StageCosts, start: float, work: float
    ) -> tuple[float, float, float]:
        """Simulate a step's first forward of a stage, which takes ``work`` seconds and waits, part
        by part, until a bucket of parameters is gathered. Return its start, its end and the seconds
        waited."""
        ends = self.gathered[stage]
        shares = _buckets(stage, costs).forward
        began = now = max(start, ends[0])
        waited = now - start
        for there, share in zip(ends, shares, strict=True):
            if there > now:
                waited += there - now
                now = there
            now = self.finish(now, work * share)
        return began, now, waited

    def last_backward(self, stage: int, costs: StageCosts, start: float, work: float) -> float:
        """Simulate a step's last backward of a stage, which takes ``work`` seconds from ``start``
        on; each part of it completes a bucket of gradients, whose sum is launched. Return its
        end."""
        buckets = self._launched_buckets(stage, costs)
        seconds = costs.gradient_sync_seconds[stage]
        now = start
        for share, part in zip(reversed(buckets.backward), reversed(buckets.summed), strict=True):
            now = self.finish(now, work * share)
            self.reduced[stage] = self.launch(
                Action(REDUCE, stage), "gradient sync", now, seconds * part
            )
        return now


def _buckets(stage: int, costs: StageCosts) -> Buckets:
    return costs.buckets[stage] if costs.buckets else ONE_BUCKET
