"""What stages hold at once under each schedule."""

from __future__ import annotations

from autoparallel.planner.requests.request import SCHEDULES
from autoparallel.planner.schedules.held import half_pairs


def test_no_schedule_of_one_stage_per_rank_holds_less_than_1f1b() -> None:
    for depth in range(1, 12):
        for count in range(1, 24):
            own = {name: half_pairs(name, depth, 2, count)[0][0] for name in SCHEDULES}
            assert min(own.values()) == own["1f1b"], (depth, count, own)
