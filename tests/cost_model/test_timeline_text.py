"""The drawing of a step."""

from event_simulation import beside_compute

from autoparallel.cost_model.simulator.simulator import simulate
from autoparallel.cost_model.simulator.stage_costs import Buckets, StageCosts
from autoparallel.cost_model.simulator.timeline_text import draw
from autoparallel.planner.schedules.schedules import build_schedule


def test_1f1b_is_drawn_as_its_picture():
    """One character per second: forwards of 1 s, backwards of 2 s."""
    costs = StageCosts([1.0] * 3, [2.0] * 3)
    timeline = simulate(build_schedule("1f1b", 3, 3), costs)
    assert draw(timeline, 15) == (
        "rank 0  FFF....BB.BB.BB",
        "rank 1  .FF..BBFBB.BB..",
        "rank 2  ..FBBFBBFBB....",
    )


def test_every_second_chunk_is_in_small_letters():
    costs = StageCosts([1.0] * 4, [1.0] * 4)
    timeline = simulate(build_schedule("bfs", 4, 2, num_chunks=2), costs)
    assert draw(timeline, 10) == ("rank 0  FFff..bbBB", "rank 1  .FFffbbBB.")


def test_only_what_no_compute_hides_of_a_collective_is_drawn():
    """Buckets at ½ and 1, forward ½–1½, backward to 3½, sums 2½–3½–4½, optimizer to 5½."""
    costs = StageCosts(
        [1.0],
        [2.0],
        step_seconds=[1.0],
        gradient_sync_seconds=[2.0],
        gather_seconds=[1.0],
    )
    schedule = build_schedule("1f1b", 1, 1)
    beside = simulate(schedule, beside_compute(costs, 1, [Buckets.equal(2)]))
    assert draw(beside, 11) == ("rank 0  gFFBBBBrrss",)
    assert draw(simulate(schedule, costs), 7) == ("rank 0  gFBBrrs",)


def test_the_middle_of_a_long_pipeline_is_left_out():
    costs = StageCosts([1.0] * 30, [1.0] * 30)
    lines = draw(simulate(build_schedule("gpipe", 30, 2), costs), 20, limit=6)
    assert [line.split()[1] for line in lines] == ["0", "1", "2", "24", "27", "28", "29"]
    assert lines[3].endswith("24 more")
    assert len({len(line) for line in (*lines[:3], *lines[4:])}) == 1
