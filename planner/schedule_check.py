"""Static checks of an action table: nothing is missing, nothing deadlocks.

In: a Schedule. Out: nothing if it is sound, else a PlanError that names the first action
at fault. The rules are those of the interpreter: a compute action waits for its receives
and its own rank's earlier results, a receive is only posted, a send never waits, and the
messages from one rank to another arrive in the order they were sent, matched with the
receives in the order these were posted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from itertools import pairwise

from ..cost_model.actions import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
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
)
from .errors import PlanError


def check_schedule(schedule: Schedule) -> None:
    """Raises PlanError if the table is not a correct training (or inference) step."""
    trains = any(a.kind in (BACKWARD, INPUT_BACKWARD) for row in schedule.table for a in row)
    _check_ownership(schedule)
    _check_passes(schedule, trains)
    _check_pairs(schedule)
    _check_progress(schedule)
    if trains:
        _check_step(schedule)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each stage, the most micro-batches whose activations are held at once.

    A micro-batch is held from its forward to its backward (its weight backward where the
    backward is split); without a backward it is held during its forward only.
    """
    peaks = [0] * schedule.num_stages
    for row in schedule.table:
        held: Counter[int] = Counter()
        frees = {(a.stage, a.microbatch) for a in row if a.kind in (BACKWARD, WEIGHT_BACKWARD)}
        for action in row:
            if action.kind == FORWARD:
                held[action.stage] += 1
                peaks[action.stage] = max(peaks[action.stage], held[action.stage])
                if (action.stage, action.microbatch) not in frees:
                    held[action.stage] -= 1
            elif action.kind in (BACKWARD, WEIGHT_BACKWARD):
                held[action.stage] -= 1
    return tuple(peaks)


def requirements(action: Action, schedule: Schedule, split: Set[Action]) -> Iterator[Action]:
    """The actions that ``action`` needs done before it: a receive stands for its message.

    ``split`` holds the input backwards of the table.
    """
    stage, m = action.stage, action.microbatch
    ranks, wiring = schedule.stage_rank, schedule.wiring
    if action.kind == FORWARD:
        for other in wiring.producers[stage]:
            remote = ranks[other] != ranks[stage]
            yield Action(RECV_FORWARD, stage, m) if remote else Action(FORWARD, other, m)
    elif action.kind in (BACKWARD, INPUT_BACKWARD):
        yield Action(FORWARD, stage, m)
        for other in wiring.consumers[stage]:
            remote = ranks[other] != ranks[stage]
            yield Action(RECV_BACKWARD, stage, m) if remote else _gradient(split, other, m)
    elif action.kind == WEIGHT_BACKWARD:
        yield Action(INPUT_BACKWARD, stage, m)
    elif action.kind == SEND_FORWARD:
        yield Action(FORWARD, stage, m)
    elif action.kind == SEND_BACKWARD:
        yield _gradient(split, stage, m)


def _gradient(split: Set[Action], stage: int, microbatch: int) -> Action:
    """The action of a stage that makes the gradients of its inputs."""
    half = Action(INPUT_BACKWARD, stage, microbatch)
    return half if half in split else Action(BACKWARD, stage, microbatch)


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
    """Each micro-batch passes each stage once, forward before backward."""
    for stage, rank in enumerate(schedule.stage_rank):
        position = _positions(schedule, schedule.table[rank])
        for m in range(schedule.num_microbatches):
            forward, whole = Action(FORWARD, stage, m), Action(BACKWARD, stage, m)
            halves = (Action(INPUT_BACKWARD, stage, m), Action(WEIGHT_BACKWARD, stage, m))
            if forward not in position:
                raise _fault(schedule, f"{forward} is missing")
            if not trains:
                continue
            if whole in position and any(half in position for half in halves):
                raise _fault(schedule, f"{whole} and its halves are both there")
            split = any(half in position for half in halves)
            order = (forward, *halves) if split else (forward, whole)
            for before, after in pairwise(order):
                if after not in position:
                    raise _fault(schedule, f"{after} is missing")
                if position[before] > position[after]:
                    raise _fault(schedule, f"{after} comes before {before}")


def _positions(schedule: Schedule, row: Row) -> dict[Action, int]:
    position: dict[Action, int] = {}
    for index, action in enumerate(row):
        if action in position:
            raise _fault(schedule, f"{action} is there twice")
        if action.kind not in (REDUCE, STEP) and not (
            0 <= action.microbatch < schedule.num_microbatches
        ):
            raise _fault(schedule, f"{action} names a micro-batch that does not exist")
        position[action] = index
    return position


def _check_pairs(schedule: Schedule) -> None:
    """Every send has its one receive, and both sides of a pair of ranks list the same order."""
    ranks = schedule.stage_rank
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(schedule.table):
        for action in row:
            if action.kind in SENDS:
                targets = matching_receives(action, schedule.wiring)
                if not targets:
                    raise _fault(schedule, f"{action} has no stage to send to")
                for receive in targets:
                    sent.setdefault((rank, ranks[receive.stage]), []).append(receive)
            elif action.kind in RECEIVES:
                sources = schedule.wiring[action.kind == RECV_BACKWARD][action.stage]
                if not sources:
                    raise _fault(schedule, f"{action} has no stage to receive from")
                for source in sources:
                    received.setdefault((ranks[source], rank), []).append(action)
    for pair in sent.keys() | received.keys():
        _check_pair(schedule, pair, sent.get(pair, []), received.get(pair, []))


def _check_pair(
    schedule: Schedule, pair: tuple[int, int], sent: list[Action], received: list[Action]
) -> None:
    for action in sorted(set(sent) - set(received), key=str):
        raise _fault(schedule, f"{action} is missing: its message is sent, never received")
    for action in sorted(set(received) - set(sent), key=str):
        raise _fault(schedule, f"{action} waits for a message that nobody sends")
    for expected, action in zip(sent, received, strict=True):
        if expected != action:
            raise _fault(
                schedule,
                f"rank {pair[1]} posts {action} where rank {pair[0]} sends for {expected}",
                "messages between two ranks match in the order they are posted",
            )


def _check_progress(schedule: Schedule) -> None:
    """Runs the table; what cannot go on is a deadlock."""
    split = {a for row in schedule.table for a in row if a.kind == INPUT_BACKWARD}
    done: set[Action] = set()
    sent: Counter[Action] = Counter()
    cursor = [0] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(schedule.table):
            while cursor[rank] < len(row):
                action = row[cursor[rank]]
                if not all(
                    need in done
                    and (need.kind not in RECEIVES or sent[need] == _num_senders(need, schedule))
                    for need in requirements(action, schedule, split)
                ):
                    break
                done.add(action)
                if action.kind in SENDS:
                    sent.update(matching_receives(action, schedule.wiring))
                cursor[rank] += 1
                progress = True
    stuck = [
        f"rank {rank} at {row[cursor[rank]]}"
        for rank, row in enumerate(schedule.table)
        if cursor[rank] < len(row)
    ]
    if stuck:
        raise _fault(schedule, "deadlock", "; ".join(stuck))


def _num_senders(receive: Action, schedule: Schedule) -> int:
    return len(schedule.wiring[receive.kind == RECV_BACKWARD][receive.stage])


def _check_step(schedule: Schedule) -> None:
    """Each stage reduces once, after its last backward, and steps once, after that."""
    for stage, rank in enumerate(schedule.stage_rank):
        mine = [action for action in schedule.table[rank] if action.stage == stage]
        reduce, step = Action(REDUCE, stage), Action(STEP, stage)
        if reduce not in mine or step not in mine:
            raise _fault(schedule, f"{reduce if reduce not in mine else step} is missing")
        later = mine[mine.index(reduce) + 1 :]
        if step not in later or any(a.kind in (BACKWARD, WEIGHT_BACKWARD) for a in later):
            raise _fault(schedule, f"{reduce} is not between the last backward and {step}")
