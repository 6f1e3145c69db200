"""What the stages of a rank hold together, against every moment of the schedule's table."""

from __future__ import annotations

import pytest

from autoparallel.cost_model.actions import BACKWARD, FORWARD, INPUT_BACKWARD
from autoparallel.planner.requests.request import CHUNKED_SCHEDULES
from autoparallel.planner.schedules.rank_held import rank_held
from autoparallel.planner.schedules.schedules import can_have, compute_orders


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", CHUNKED_SCHEDULES)
def test_every_rank_holds_as_much_at_some_moment(name: str, ranks: int, chunks: int) -> None:
    """Also where more micro-batches are run than were looked at."""
    for count in (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 64, 96):
        found = rank_held(name, ranks, chunks, count)
        assert (found is None) != can_have(name, ranks * chunks, count, chunks)
        if found is None:
            continue
        for row in compute_orders(name, ranks * chunks, count, chunks):
            held = dict.fromkeys((action[1] for action in row), 0)
            moments = []
            for kind, stage, *_ in row:
                held[stage] += kind == FORWARD
                held[stage] -= kind in (BACKWARD, INPUT_BACKWARD)
                moments.append(all(number >= found[own] for own, number in held.items()))
            assert any(moments)
            assert sum(found[own] for own in held) > 0
