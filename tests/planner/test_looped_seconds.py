"""What a pipeline about takes with its stages cut again: not more than simulations say."""

from __future__ import annotations

import pytest

from autoparallel.cost_model.simulator import step_seconds
from autoparallel.cost_model.stage_costs import StageCosts
from autoparallel.planner.schedules.schedules import build_schedule
from autoparallel.planner.search.quests import looped_seconds, turning_seconds

FORWARD, BACKWARD = 1.0, 2.0


def stages(num_ranks: int, num_microbatches: int) -> list[tuple[float, float]]:
    """q and m of equal stages without messages."""
    both = FORWARD + BACKWARD
    return [(both, (num_microbatches - 1) * both)] * num_ranks


def simulated(name: str, num_ranks: int, chunks: int, num_microbatches: int) -> float:
    number = num_ranks * chunks
    table = build_schedule(name, number, num_microbatches, num_chunks=chunks)
    own = [FORWARD / chunks] * number, [BACKWARD / chunks] * number
    return float(step_seconds(table, StageCosts(*own)))


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8, 16])
def test_no_loop_is_faster_and_the_best_is_near(
    chunks: int, num_ranks: int, num_microbatches: int
) -> None:
    """Within a micro-batch of a stage: of ranks R and chunks K interleaved 1F1B takes
    (N + (R - 1) / K) of those (Narayanan et al. 2021), this says (N + R / K - 1)."""
    least = looped_seconds(stages(num_ranks, num_microbatches), chunks)
    names = ["bfs"] if num_microbatches % num_ranks else ["bfs", "interleaved"]
    steps = [simulated(name, num_ranks, chunks, num_microbatches) for name in names]
    assert least <= min(steps) * (1 + 1e-9)
    assert min(steps) <= least + 2 * (FORWARD + BACKWARD)


@pytest.mark.parametrize("chunks", [2, 4])
def test_of_one_micro_batch_nothing_is_gained(chunks: int) -> None:
    """It goes through all stages one after the other."""
    alone = stages(4, 1)
    assert looped_seconds(alone, chunks) == turning_seconds(alone) == 4 * (FORWARD + BACKWARD)
