"""Static checks of an action table: actions are complete and in order, and no rank deadlocks.

In: a Schedule. Out: nothing if it is sound, else a PlanError that names the first wrong action. The
rules are stricter than the interpreter's: a compute action needs earlier results of its own rank, a
receive blocks all later actions of its rank until its message has been sent (on a GPU it may), and
a send never waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from itertools import pairwise

from ...cost_model.simulator.actions import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    NO_MICROBATCH,
    RECEIVES,
    RECV_BACKWARD,
    RECV_FORWARD,
    REDUCE,
    SEND_BACKWARD,
    SEND_FORWARD,
    SENDS,
    STEP,
    WEIGHT_BACKWARD,
    Action,
    Row,
    Schedule,
    matching_receives,
    weight_versions,
)
from ..errors import PlanError


def check_schedule(schedule: Schedule) -> None:
    """Raise PlanError AP540 if a schedule's table is not a correct training (or inference) step."""
    trains = any(a.kind in (BACKWARD, INPUT_BACKWARD) for row in schedule.table for a in row)
    _check_ownership(schedule)
    _check_passes(schedule, trains)
    _check_pairs(schedule)
    _check_progress(schedule)
    if trains:
        _check_step(schedule)
        _check_versions(schedule)


def peak_of_ranks(schedule: Schedule) -> tuple[int, ...]:
    """Return, for each rank, the most micro-batches that its stages together hold at once."""
    return tuple(
        max((sum(held.values()) for held in _held_through(row)), default=0)
        for row in schedule.table
    )


def _held_through(row: Row) -> Iterator[Counter[int]]:
    """Yield, at each forward of a rank's row, the number of micro-batches in flight by stage."""
    held: Counter[int] = Counter()
    slices: Counter[tuple[int, int]] = Counter()
    frees = {(a.stage, a.microbatch) for a in row if a.kind in (BACKWARD, WEIGHT_BACKWARD)}
    for action in row:
        unit = (action.stage, action.microbatch)
        if action.kind == FORWARD:
            slices[unit] += 1
            held[action.stage] += slices[unit] == 1
            yield held
        if action.kind in (BACKWARD, WEIGHT_BACKWARD) or (
            action.kind == FORWARD and unit not in frees
        ):
            slices[unit] -= 1
            held[action.stage] -= slices[unit] == 0


def requirements(action: Action, schedule: Schedule, split: Set[Action]) -> Iterator[Action]:
    """Yield the actions that must precede ``action`` on its rank. For an input from another rank
    this is the receive of its message. ``split`` is the set of all input backwards in the table."""
    kind, stage, m, part = action
    ranks, wiring = schedule.stage_rank, schedule.wiring
    if kind == FORWARD:
        if part:
            yield Action(FORWARD, stage, m, part - 1)
        for other in wiring.producers[stage]:
            remote = ranks[other] != ranks[stage]
            yield Action(RECV_FORWARD if remote else FORWARD, stage if remote else other, m, part)
    elif kind in (BACKWARD, INPUT_BACKWARD):
        yield Action(FORWARD, stage, m, part)
        if part + 1 < schedule.num_slices:
            yield _gradient(split, stage, m, part + 1)
        for other in wiring.consumers[stage]:
            remote = ranks[other] != ranks[stage]
            yield (
                Action(RECV_BACKWARD, stage, m, part)
                if remote
                else _gradient(split, other, m, part)
            )
    elif kind == WEIGHT_BACKWARD:
        yield Action(INPUT_BACKWARD, stage, m, part)
    elif kind == SEND_FORWARD:
        yield Action(FORWARD, stage, m, part)
    elif kind == SEND_BACKWARD:
        yield _gradient(split, stage, m, part)


def _gradient(split: Set[Action], stage: int, microbatch: int, part: int) -> Action:
    """Return the action that computes a stage's input gradients: its input backward if ``split``,
    the set of the table's input backwards, contains it; else its whole backward."""
    half = Action(INPUT_BACKWARD, stage, microbatch, part)
    return half if half in split else half._replace(kind=BACKWARD)


def _fault(schedule: Schedule, what: str, why: str = "") -> PlanError:
    return PlanError("AP540", f"schedule {schedule.name!r}: {what}", why=why, where="schedule")


def _check_ownership(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.table):
        for action in row:
            if not 0 <= action.stage < schedule.num_stages:
                raise _fault(schedule, f"{action} names a stage that does not exist")
            if schedule.stage_rank[action.stage] != rank:
                raise _fault(
                    schedule,
                    f"{action} is in the row of pipeline rank {rank}",
                    f"stage {action.stage} belongs to rank {schedule.stage_rank[action.stage]}",
                )


def _check_passes(schedule: Schedule, trains: bool) -> None:
    """Check that each slice of each micro-batch runs once through every part of the model, on one
    of the stages that hold this part. With ``trains`` its backward is checked too."""
    positions = [_positions(schedule, row) for row in schedule.table]
    stages: dict[int, list[int]] = {}
    for stage in range(schedule.num_stages):
        stages.setdefault(schedule.part(stage), []).append(stage)
    for replicas in stages.values():
        for m in range(schedule.num_microbatches):
            first = Action(FORWARD, replicas[0], m)
            passed = [
                stage
                for stage in replicas
                if first._replace(stage=stage) in positions[schedule.stage_rank[stage]]
            ]
            if not passed:
                raise _fault(schedule, f"{first} is missing")
            if len(passed) > 1:
                raise _fault(schedule, f"{first} is run by several replicas, stages {passed}")
            position = positions[schedule.stage_rank[passed[0]]]
            for part in range(schedule.num_slices):
                forward = Action(FORWARD, passed[0], m, part)
                _check_pass(schedule, position, forward, trains=trains)


def _check_pass(
    schedule: Schedule, position: Mapping[Action, int], forward: Action, *, trains: bool
) -> None:
    """Check that ``forward`` is in a rank's row and, if the table trains, precedes its backward or
    its input and weight backward. ``position`` maps the row's actions to their indices."""
    whole = forward._replace(kind=BACKWARD)
    halves = (forward._replace(kind=INPUT_BACKWARD), forward._replace(kind=WEIGHT_BACKWARD))
    if forward not in position:
        raise _fault(schedule, f"{forward} is missing")
    if not trains:
        return
    split = any(half in position for half in halves)
    if whole in position and split:
        raise _fault(schedule, f"{whole} appears both whole and in halves")
    for before, after in pairwise((forward, *halves) if split else (forward, whole)):
        if after not in position:
            raise _fault(schedule, f"{after} is missing")
        if position[before] > position[after]:
            raise _fault(schedule, f"{after} comes before {before}")


def _positions(schedule: Schedule, row: Row) -> dict[Action, int]:
    position: dict[Action, int] = {}
    for index, action in enumerate(row):
        if action in position:
            raise _fault(schedule, f"{action} appears twice")
        whole_step = action.kind in (REDUCE, STEP) and action.microbatch == NO_MICROBATCH
        if not whole_step and not 0 <= action.microbatch < schedule.num_microbatches:
            raise _fault(schedule, f"{action} names a micro-batch that does not exist")
        if not 0 <= action.slice < schedule.num_slices:
            raise _fault(schedule, f"{action} names a slice that does not exist")
        position[action] = index
    return position


def _check_pairs(schedule: Schedule) -> None:
    """Check that every send is received by all stages that need it, and that every receive has a
    send from each stage that it waits for."""
    sent: Counter[tuple[int, Action]] = Counter()
    received: Counter[tuple[int, Action]] = Counter()
    for row in schedule.table:
        for action in row:
            if action.kind in SENDS:
                targets = _receives_of(action, schedule)
                if not targets:
                    raise _fault(schedule, f"{action} has no stage to send to")
                sent.update((action.stage, receive) for receive in targets)
            elif action.kind in RECEIVES:
                sources = _senders_of(action, schedule)
                if not sources:
                    raise _fault(schedule, f"{action} has no stage to receive from")
                received.update((source, action) for source in sources)
    for _, action in sorted(sent - received, key=str):
        raise _fault(schedule, f"{action} is missing: its message is sent but never received")
    for _, action in sorted(received - sent, key=str):
        raise _fault(schedule, f"{action} waits for a message that is never sent")


def _check_progress(schedule: Schedule) -> None:
    stuck = _stuck(schedule)
    if stuck:
        raise _fault(schedule, "deadlock", "; ".join(stuck))


def sends_under_way(schedule: Schedule) -> int:
    """Return the least number of unreceived messages per (sender, receiver) pair of ranks that lets
    the table complete, if a further send waits. It is rounded up to a power of two.

    A rank need not keep more sent messages than this, however far its host runs ahead.

    >>> from .schedules import build_schedule
    >>> sends_under_way(build_schedule("1f1b", 4, 16))
    1
    >>> sends_under_way(build_schedule("bfs", 8, 16, num_chunks=2))
    4
    """
    most, longest = 1, max(map(len, schedule.table))
    while most < longest and _stuck(schedule, most):
        most *= 2
    return most


def _stuck(schedule: Schedule, under_way: int | None = None) -> list[str]:
    """Simulate the table; return a text for each rank that deadlocks, with the action where it
    waits. With ``under_way`` a send waits while this many sends to the same rank are unreceived."""
    ranks = schedule.stage_rank
    split = {a for row in schedule.table for a in row if a.kind == INPUT_BACKWARD}
    done: set[Action] = set()
    sent: Counter[Action] = Counter()
    waiting: Counter[tuple[int, int]] = Counter()
    cursor = [0] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(schedule.table):
            while cursor[rank] < len(row):
                action = row[cursor[rank]]
                senders = _senders_of(action, schedule) if action.kind in RECEIVES else ()
                takers = (
                    matching_receives(action, schedule.messages) if action.kind in SENDS else ()
                )
                lanes = [(rank, ranks[taker.stage]) for taker in takers]
                if (
                    sent[action] < len(senders)
                    or (under_way and any(waiting[lane] >= under_way for lane in lanes))
                    or not done.issuperset(requirements(action, schedule, split))
                ):
                    break
                done.add(action)
                sent.update(takers)
                waiting.update(lanes)
                waiting.subtract((ranks[sender], rank) for sender in senders)
                cursor[rank] += 1
                progress = True
    return [
        f"rank {rank} at {row[cursor[rank]]}"
        for rank, row in enumerate(schedule.table)
        if cursor[rank] < len(row)
    ]


def _senders_of(receive: Action, schedule: Schedule) -> tuple[int, ...]:
    """Return the stages on other ranks that send the message, or messages, of ``receive``."""
    return schedule.messages[receive.kind == RECV_BACKWARD][receive.stage]


def _receives_of(send: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Return the receives on other ranks that take the message of ``send``."""
    return matching_receives(send, schedule.messages)


def _check_step(schedule: Schedule) -> None:
    """Check that after the last backward of each update a stage has a REDUCE (its gradients' sum),
    then a STEP (its optimizer step).

    All stages update equally often; with a synchronous schedule, once.
    """
    updates = set()
    for stage, rank in enumerate(schedule.stage_rank):
        open_backward = reduced = False
        steps = 0
        for action in schedule.table[rank]:
            if action.stage != stage:
                continue
            if action.kind in (BACKWARD, WEIGHT_BACKWARD):
                open_backward, reduced = True, False
            elif action.kind == REDUCE:
                reduced = True
            elif action.kind == STEP:
                if not reduced:
                    raise _fault(schedule, f"{action} has no REDUCE after the last backward")
                open_backward, reduced, steps = False, False, steps + 1
        if open_backward or steps == 0:
            raise _fault(schedule, f"{Action(STEP, stage)} is missing after the last backward")
        updates.add(steps)
    if len(updates) > 1 or (schedule.weights == "flushed" and updates != {1}):
        raise _fault(schedule, f"stages step {sorted(updates)} times")


def _check_versions(schedule: Schedule) -> None:
    """Check, for an asynchronous schedule, that each version of a stage's weights is made, by an
    optimizer step, before an action uses it."""
    if schedule.weights == "flushed":
        return
    versions = weight_versions(schedule)
    for row in schedule.table:
        made = [0] * schedule.num_stages
        for action in row:
            if action.kind == STEP:
                made[action.stage] += 1
            elif versions.get(action, 0) > made[action.stage]:
                raise _fault(
                    schedule, f"{action} needs a version of the weights that does not exist yet"
                )
