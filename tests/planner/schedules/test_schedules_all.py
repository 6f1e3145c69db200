"""Properties of every schedule: no deadlock, published memory, torch's own tables."""

import pytest
from schedule_tables import peak_in_flight

from autoparallel.cost_model.simulator.actions import (
    COMPUTE,
    Action,
    Schedule,
    compute_only,
    format_table,
    parse_table,
    weight_versions,
)
from autoparallel.planner.errors import PlanError, UsageError
from autoparallel.planner.schedules.check import (
    check_schedule,
    peak_of_ranks,
    sends_under_way,
)
from autoparallel.planner.schedules.orders import depths, round_size
from autoparallel.planner.schedules.schedules import (
    ALIASES,
    SCHEDULES,
    build_schedule,
    find_schedule,
)

SIZES = [(1, 3), (2, 1), (2, 5), (2, 8), (3, 3), (3, 9), (4, 2), (4, 8), (4, 16), (5, 10), (6, 13)]


def built(name: str, num_ranks: int, num_microbatches: int, **options) -> Schedule:
    """With three chunks where any number is allowed, and three slices where there are slices."""
    low, high = SCHEDULES[name].chunks
    chunks = options.pop("num_chunks", min(high, max(low, 3)))
    slices = (5, 4, 3) if name == "terapipe" else ()
    return build_schedule(
        name, num_ranks * chunks, num_microbatches, num_chunks=chunks, slices=slices, **options
    )


def fits(name: str, num_ranks: int, num_microbatches: int) -> bool:
    """Whether the schedule is defined for so many; see ``docs/schedules.md``."""
    if name == "chimera":
        return num_ranks % 2 == 0 and num_microbatches > 1
    if name == "dualpipev":
        return num_microbatches >= 2 * num_ranks
    if name in ("interleaved", "zb-h1"):
        return round_size(num_ranks, num_microbatches) > 0
    return True


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_schedule_is_complete_and_ends_though_receives_hold_up_what_is_behind(name, size):
    if not fits(name, *size):
        with pytest.raises(UsageError):
            built(name, *size)
        return
    schedule = built(name, *size)
    check_schedule(schedule)
    assert parse_table(format_table(schedule.table)) == schedule.table


@pytest.mark.parametrize(
    ("name", "chunks", "most"),
    [
        ("gpipe", 1, 1),
        ("1f1b", 1, 1),
        ("eager-1f1b", 1, 1),
        ("zb-h1", 1, 1),
        ("zb-h2", 1, 1),
        ("interleaved", 2, 2),
        ("zbv", 2, 2),
        ("dualpipev", 2, 2),
        ("chimera", 1, 1),
        ("bfs", 2, 4),
    ],
)
def test_how_many_sends_are_under_way_does_not_grow_with_the_micro_batches(name, chunks, most):
    """Of two ranks and 8 or 64 micro-batches; breadth-first rounds send all before they receive."""
    for count in (8, 64):
        factor = count // 8 if name == "bfs" else 1
        schedule = build_schedule(name, 2 * chunks, count, num_chunks=chunks)
        assert sends_under_way(schedule) == most * factor


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 8), (4, 8), (4, 20), (6, 18)])
def test_peak_activations_are_the_published_ones(num_ranks, num_microbatches):
    """In chunks: with K chunks a rank's share of the model is K of them.

    Sources: the papers of ``schedules_list``. Interleaved 1F1B: D·K + D-1 chunks, that is
    D (1 + (D-1)/(D·K)) shares (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). Chimera's
    ranks hold D/2 + 1 to D (Li and Hoefler 2021, arXiv:2107.06925, table 2).
    """
    d, n = num_ranks, num_microbatches

    def peaks(name: str, **options) -> tuple[int, ...]:
        return peak_of_ranks(built(name, d, n, **options))

    assert peaks("gpipe") == peaks("terapipe") == (n,) * d
    for name in ("1f1b", "pipedream", "pipedream-2bw", "ampnet"):
        assert peaks(name) == tuple(range(d, 0, -1))
    assert peaks("eager-1f1b") == tuple(min(n, 2 * left - 1) for left in range(d, 0, -1))
    assert peaks("bfs", num_chunks=2) == (2 * n,) * d
    assert peaks("zb-h1", num_chunks=1) == (d,) * d
    assert peaks("zb-h2") == (min(n, 2 * d - 1),) * d
    assert max(peaks("zbv")) == 2 * d
    assert max(peaks("inference")) == 1
    if n % d == 0:
        assert max(peaks("interleaved", num_chunks=2)) == min(2 * n, 2 * d + d - 1)
        assert max(peaks("chimera")) <= d
        assert min(peaks("chimera")) >= d // 2 + 1
    if n >= 2 * d:
        assert max(peaks("dualpipev")) <= 2 * d + 1


def torch_rows(torch_name: str, ranks: int, num_microbatches: int) -> list[str]:
    """torch's list of a V-shaped schedule, without idle slots, its pairs one after the other."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(pipelining, torch_name):
        pytest.skip("this torch has no such schedule")
    theirs = object.__new__(getattr(pipelining, torch_name))
    theirs.pp_group_size, theirs.num_stages = ranks, 2 * ranks
    theirs._n_microbatches = num_microbatches
    rows = []
    for rank in range(ranks):
        actions = theirs._calculate_single_rank_operations(rank)
        flat = [b for a in actions if a is not None for b in (a.sub_actions or (a,))]
        rows.append(" ".join(str(action) for action in flat))
    return rows


@pytest.mark.parametrize(
    ("name", "torch_name", "ranks", "num_microbatches"),
    [
        *(("zbv", "ScheduleZBVZeroBubble", *s) for s in ((1, 1), (1, 4), (2, 3), (2, 8), (4, 5))),
        *(("zbv", "ScheduleZBVZeroBubble", *s) for s in ((4, 8), (4, 16), (8, 20))),
        *(("dualpipev", "ScheduleDualPipeV", *s) for s in ((1, 2), (2, 4), (2, 7), (4, 8))),
        *(("dualpipev", "ScheduleDualPipeV", *s) for s in ((3, 9), (4, 20), (8, 16))),
    ],
)
def test_v_shaped_orders_equal_torch_pipelining(name, torch_name, ranks, num_microbatches):
    table = build_schedule(name, 2 * ranks, num_microbatches).table
    ours = [" ".join(map(str, compute_only(row))) for row in table]
    assert ours == torch_rows(torch_name, ranks, num_microbatches)


def test_the_v_is_on_the_ranks_back_and_forth():
    assert build_schedule("zbv", 8, 8).stage_rank == (0, 1, 2, 3, 3, 2, 1, 0)
    assert build_schedule("zbv", 8, 8).stages(1) == (1, 6)


def test_chimera_is_the_picture_of_its_paper():
    """Li and Hoefler 2021 (arXiv:2107.06925), figure 3: D = N = 4, micro-batches 2 and 3 go up.

    Stages 4 to 7 compute parts 0 to 3 on ranks 3 to 0.
    """
    schedule = build_schedule("chimera", 4, 4)
    orders = [" ".join(map(str, compute_only(row))) for row in schedule.table]
    assert orders[0] == "0F0 0F1 7F2 7B2 7F3 7B3 0B0 0B1"
    assert orders[1] == "1F0 6F2 1F1 6F3 6B2 1B0 6B3 1B1"
    assert orders[3] == "4F2 4F3 3F0 3B0 3F1 3B1 4B2 4B3"
    assert schedule.parts == (0, 1, 2, 3, 0, 1, 2, 3)
    assert schedule.replicas(1) == (1, 5)
    reduces = [[str(a) for a in row if a.kind == "REDUCE"] for row in schedule.table]
    assert reduces == [
        ["0REDUCE", "7REDUCE"],
        ["1REDUCE", "6REDUCE"],
        ["6REDUCE", "1REDUCE"],
        ["4REDUCE", "3REDUCE"],
    ] or reduces[2] == ["5REDUCE", "2REDUCE"]


def test_replicas_that_take_the_same_micro_batch_are_refused():
    table = parse_table("0F0 0B0 0REDUCE 0STEP\n1F0 1B0 1REDUCE 1STEP")
    twice = Schedule("twice", 1, (0, 1), table, edges=(), parts=(0, 0))
    with pytest.raises(PlanError, match="run by several replicas"):
        check_schedule(twice)


def test_slices_go_forward_in_order_and_back_in_reverse():
    rows = [
        " ".join(map(str, compute_only(row)))
        for row in build_schedule("terapipe", 2, 2, slices=(3, 2)).table
    ]
    assert rows[0] == "0F0 0F0.1 0F1 0F1.1 0B0.1 0B0 0B1.1 0B1"
    back = parse_table("0F0 0F0.1 0B0 0B0.1 0REDUCE 0STEP")
    with pytest.raises(PlanError, match="deadlock"):
        check_schedule(Schedule("wrong", 1, (0,), back, slices=(3, 2)))


def versions(name: str, num_stages: int, num_microbatches: int, stage: int) -> str:
    found = weight_versions(build_schedule(name, num_stages, num_microbatches))
    return " ".join(f"{a.kind}{a.microbatch}:{v}" for a, v in found.items() if a.stage == stage)


def test_pipedream_computes_a_backward_with_the_weights_of_its_forward():
    """Stage s of n: micro-batch t's forward misses the n-1-s updates still under way."""
    assert versions("pipedream", 2, 4, 0) == "F0:0 F1:0 B0:0 F2:1 B1:0 F3:2 B2:1 B3:2"
    assert versions("pipedream", 2, 4, 1) == "F0:0 B0:0 F1:1 B1:1 F2:2 B2:2 F3:3 B3:3"


def test_two_buffered_weights_are_one_update_late():
    """Updates of two micro-batches; the k-th one's gradients are at version k - 1."""
    for stage in (0, 1):
        found = versions("pipedream-2bw", 2, 8, stage).split()
        assert [v for v in found if v[0] == "F"] == [
            "F0:0",
            "F1:0",
            "F2:0",
            "F3:0",
            "F4:1",
            "F5:1",
            "F6:2",
            "F7:2",
        ]
        assert [v[1:] for v in found if v[0] == "B"] == [v[1:] for v in found if v[0] == "F"]


def test_ampnet_computes_with_the_newest_weights():
    assert versions("ampnet", 2, 4, 0) == "F0:0 F1:0 B0:0 F2:1 B1:1 F3:2 B2:2 B3:3"


def test_weights_that_are_not_made_yet_are_refused():
    """Updates of one micro-batch: the third forward of stage 0 would need what comes later."""
    table = parse_table(
        "0F0 0F1 0F2 0F3 0B0 0REDUCE0 0STEP0 0B1 0REDUCE1 0STEP1 "
        "0B2 0REDUCE2 0STEP2 0B3 0REDUCE3 0STEP3"
    )
    with pytest.raises(
        PlanError, match="0F2 needs a version of the weights that does not exist yet"
    ):
        check_schedule(Schedule("late", 4, (0,), table, weights="double-buffered"))


def test_other_names_find_the_same_schedule():
    for alias, name in ALIASES.items():
        assert find_schedule(alias) is SCHEDULES[name]
    with pytest.raises(UsageError, match="does not split sequences"):
        build_schedule("1f1b", 2, 2, slices=(1, 1))
    assert Action("F", 0, 0).kind in COMPUTE
    assert peak_in_flight(build_schedule("zb-h1", 2, 4)) == (2, 2)
    assert depths(build_schedule("zbv", 4, 3).wiring) == (4, 3, 2, 1)
