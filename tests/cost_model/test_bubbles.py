"""Bubbles of simulated schedules: closed forms exactly, published rates as their authors."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from zero_bubble_search import Memory, Times, search

from autoparallel.cost_model.simulator.actions import compute_only
from autoparallel.cost_model.simulator.simulator import StageCosts, simulate
from autoparallel.cost_model.simulator.timeline import Timeline
from autoparallel.planner.schedules.check import check_schedule
from autoparallel.planner.schedules.messages import complete
from autoparallel.planner.schedules.orders import slice_lengths
from autoparallel.planner.schedules.schedules import SCHEDULES, build_schedule


def longest_span(timeline: Timeline) -> float:
    """The longest time of a rank from the start of its first compute to the end of its last, which
    papers on zero-bubble schedules report as a step: ranks may begin the next step early."""
    rows = [[each for each in events if each.stream == "compute"] for events in timeline.events]
    return max(row[-1].end_seconds - row[0].start_seconds for row in rows if row)


def equal(num_stages: int, *, f, i, w, send=0) -> StageCosts:
    return StageCosts(
        [Fraction(f)] * num_stages,
        [Fraction(i) + Fraction(w)] * num_stages,
        weight_backward_seconds=[Fraction(w)] * num_stages,
        send_seconds=[Fraction(send)] * (num_stages - 1) if send else (),
    )


def run(name, num_ranks, num_microbatches, *, chunks=None, f=1, i=1, w=1, **options) -> Timeline:
    """F, I and W are those of a rank's whole share of the model."""
    k = chunks or SCHEDULES[name].chunks[0]
    schedule = build_schedule(name, num_ranks * k, num_microbatches, num_chunks=k, **options)
    return simulate(
        schedule, equal(num_ranks * k, f=Fraction(f, k), i=Fraction(i, k), w=Fraction(w, k))
    )


SIZES = [(1, 4), (2, 2), (2, 8), (4, 4), (4, 8), (8, 16)]


@pytest.mark.parametrize(("d", "n"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "inference"])
def test_the_closed_form_of_one_stage_per_rank(name, d, n):
    assert run(name, d, n).bubble_fraction == Fraction(d - 1, d - 1 + n)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("d", "n"), SIZES)
@pytest.mark.parametrize("name", ["interleaved", "bfs"])
def test_the_closed_form_of_chunks(name, d, n, chunks):
    assert run(name, d, n, chunks=chunks).bubble_fraction == Fraction(d - 1, d - 1 + chunks * n)


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 2, 1), (3, 3, 2), (5, 4, 3)])
@pytest.mark.parametrize(("d", "n"), [(2, 4), (4, 8), (4, 16), (8, 24)])
def test_zero_bubble_schedules_lose_what_their_paper_says(d, n, f, i, w):
    """H1: (D-1)(F+I-W); H2: (D-1)(F+I-2W), of a rank's own span: Qi et al. 2023
    (arXiv:2401.10241), section 2.3, table 2; where F, I and W are near each other, W least."""
    work = n * (f + i + w)
    assert longest_span(run("zb-h1", d, n, f=f, i=i, w=w)) - work == (d - 1) * (f + i - w)
    h2 = longest_span(run("zb-h2", d, n, f=f, i=i, w=w)) - work
    assert h2 == (d - 1) * (f + i - 2 * w)


@pytest.mark.parametrize(("d", "n"), [(2, 4), (4, 8), (4, 16), (8, 24)])
def test_the_v_has_no_bubble_where_all_take_equally_long(d, n):
    """Each rank works without a gap; a rank begins as many chunks later as it ends."""
    timeline = run("zbv", d, n)
    assert longest_span(timeline) == 3 * n
    assert timeline.step_seconds == 3 * n + Fraction(d - 1, 2)


@pytest.mark.parametrize("d", [2, 4, 6, 8])
def test_chimera_has_the_bubble_of_its_paper(d):
    """N = D, backward twice the forward: (D-2)/(3N/2+D-2) (arXiv:2107.06925, table 2)."""
    assert run("chimera", d, d).bubble_fraction == Fraction(2 * (d - 2), 3 * d + 2 * (d - 2))


def test_replicas_sum_their_gradients_once_both_are_there():
    """Two ranks, one micro-batch each way: both end at 6, sum part 0 in 1 s and part 1 in 2 s."""
    costs = StageCosts((1, 1), (2, 2), replica_sum_seconds=(1, 2), step_seconds=(3, 4))
    timeline = simulate(build_schedule("chimera", 2, 2), costs)
    assert timeline.step_seconds == 6 + 1 + 2 + 3 + 4
    without = simulate(build_schedule("chimera", 2, 2), StageCosts((1, 1), (2, 2)))
    assert without.step_seconds == 6


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_equal_slices_are_that_many_more_micro_batches(slices):
    """arXiv:2102.07988, section 3.2: with S equal slices (D-1)/(D-1+SN)."""
    timeline = run("terapipe", 4, 2, slices=(1,) * slices)
    assert float(timeline.bubble_fraction) == pytest.approx(3 / (3 + 2 * slices))


def test_slices_that_take_longer_hold_up_the_rest():
    """Two stages, shares 1/4 and 3/4 of 4 s forward and 8 s back: 1 + 3 + 3 and twice that."""
    schedule = build_schedule("terapipe", 2, 1, slices=(1, 1))
    shares = (Fraction(1, 4), Fraction(3, 4))
    costs = StageCosts(
        (4, 4),
        (8, 8),
        activation_bytes=(7, 7),
        slice_forward_shares=shares,
        slice_backward_shares=shares,
    )
    timeline = simulate(schedule, costs)
    assert timeline.step_seconds == 1 + 3 + 3 + 6 + 6 + 2
    assert timeline.peak_activation_bytes == (7, 7)


def brute_force(seconds, length, num_stages):
    """The least of sum + (stages - 1) · longest over all 2^(length - 1) cuts."""
    best = float("inf")
    for mask in range(2 ** (length - 1)):
        cuts = [0, *(k + 1 for k in range(length - 1) if mask >> k & 1), length]
        times = [seconds(b - a, a) for a, b in pairwise(cuts)]
        best = min(best, sum(times) + (num_stages - 1) * max(times))
    return best


@pytest.mark.parametrize("num_stages", [1, 2, 4, 16])
@pytest.mark.parametrize("context", [0.0, 0.05, 0.4])
def test_slice_lengths_are_the_best_of_all_cuts(context, num_stages):
    """A slice costs a launch, its positions, and their attention to all before."""

    def seconds(n: int, before: int) -> float:
        return 0.7 + 0.3 * n + context * n * (before + (n + 1) / 2)

    found = slice_lengths(seconds, 10, num_stages)
    assert sum(found) == 10
    times = [seconds(n, sum(found[:k])) for k, n in enumerate(found)]
    total = sum(times) + (num_stages - 1) * max(times)
    assert total == pytest.approx(brute_force(seconds, 10, num_stages))
    if context and len(found) > 1:
        assert found[0] >= found[-1]


PROFILED = {
    ("1.5B", 8): {
        24: (18.522, 18.086, 9.337, 0.601),
        32: (18.513, 18.086, 9.331, 0.626),
        64: (18.546, 18.097, 9.321, 0.762),
    },
    ("6.2B", 8): {
        24: (29.718, 29.444, 19.927, 0.527),
        32: (29.802, 29.428, 19.530, 0.577),
        64: (29.935, 29.621, 19.388, 0.535),
    },
    ("14.6B", 16): {
        48: (11.347, 11.248, 8.132, 0.377),
        64: (11.307, 11.254, 8.101, 0.379),
        128: (11.325, 11.308, 8.109, 0.378),
    },
    ("28.3B", 32): {
        96: (10.419, 10.207, 7.715, 0.408),
        128: (10.408, 10.204, 7.703, 0.408),
        256: (10.402, 10.248, 7.698, 0.460),
    },
}
"""Milliseconds of F, I, W and a message by (model, stages) and micro-batches: what Qi et al. 2023
(arXiv:2401.10241) profiled, as ``iclr_bubble_rates`` of their repository lists it
(sail-sg/zero-bubble-pipeline-parallelism, commit f68d387, pipeline_parallel/efficiency.py)."""

PUBLISHED = {
    "1.5B": {
        24: (0.2431, 0.1585, 0.1083, 0.1055),
        32: (0.1985, 0.1242, 0.0837, 0.0818),
        64: (0.1240, 0.0674, 0.0444, 0.0443),
    },
    "6.2B": {
        24: (0.2347, 0.1323, 0.0698, 0.0808),
        32: (0.1898, 0.1045, 0.0559, 0.0628),
        64: (0.1091, 0.0554, 0.0294, 0.0320),
    },
    "14.6B": {
        48: (0.2552, 0.1397, 0.0672, 0.1104),
        64: (0.2082, 0.1088, 0.0516, 0.0852),
        128: (0.1251, 0.0576, 0.0266, 0.0445),
    },
    "28.3B": {
        96: (0.2646, 0.1421, 0.0641, 0.1493),
        128: (0.2168, 0.1106, 0.0490, 0.1164),
        256: (0.1352, 0.0594, 0.0257, 0.0624),
    },
}
"""Bubble rates of 1F1B, ZB-H1, ZB-H2 and interleaved 1F1B: the paper's table 5. ZB-1p has the
rates of ZB-H1."""

SEARCHED = {
    "1.5B": {24: 0.0433, 32: 0.0039, 64: 0.0026},
    "6.2B": {24: 0.0029, 32: 0.0022, 64: 0.0010},
    "14.6B": {48: 0.0066, 64: 0.0054, 128: 0.0028},
    "28.3B": {96: 0.0038, 128: 0.0029, 256: 0.0018},
}
"""Of ZB-2p: the same table."""

SHAPES = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}
"""Width and heads, from which the authors count what a token keeps; sequences have 1024."""

CHUNKS = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}
"""Chunks of one layer each, as in that file: 24, 32, 48 and 64 layers."""

CASES = [
    (model, d, n) if n == min(counts) else pytest.param(model, d, n, marks=pytest.mark.slow)
    for (model, d), counts in PROFILED.items()
    for n in counts
]


def rate(schedule, model) -> float:
    """What a rank's longest span has above its work, over that span."""
    d, n = schedule.num_ranks, schedule.num_microbatches
    f, i, w, send = PROFILED[model, d][n]
    stages = schedule.num_stages
    chunks = stages // d
    costs = StageCosts(
        [f / chunks] * stages,
        [(i + w) / chunks] * stages,
        send_seconds=[send] * (stages - 1),
        weight_backward_seconds=[w / chunks] * stages,
    )
    return 1 - n * (f + i + w) / longest_span(simulate(schedule, costs))


def as_the_authors_count(schedule):
    """Without the messages between the first and the last rank that their program never waits for.

    Where ``get_interleave_schedule`` of that file comes to a forward of the first rank, or a
    backward of the last one, that takes over from another chunk, it looks at when the message
    was sent only for the first micro-batch of a round. All the others start as if theirs were
    there.
    """
    d = schedule.num_ranks

    def waited_for(action) -> bool:
        stage, is_first = action.stage, action.microbatch % d == 0
        from_last = {"SEND_F": stage % d == d - 1, "RECV_F": stage % d == 0}
        from_first = {"SEND_B": stage % d == 0, "RECV_B": stage % d == d - 1}
        return is_first or not (from_last | from_first).get(action.kind, False)

    table = tuple(tuple(filter(waited_for, row)) for row in schedule.table)
    return replace(schedule, table=table)


@pytest.mark.parametrize(("model", "d", "n"), CASES)
@pytest.mark.parametrize(("place", "name"), list(enumerate(["1f1b", "zb-h1", "zb-h2"])))
def test_published_bubble_rates_follow_from_the_profiled_times(place, name, model, d, n):
    """To the four digits that are printed, with messages that the authors take as under way."""
    found = rate(build_schedule(name, d, n, ahead=2), model)
    assert found == pytest.approx(PUBLISHED[model][n][place], abs=6e-5)


@pytest.mark.parametrize(("model", "d", "n"), CASES)
def test_published_rates_of_interleaved_1f1b_leave_out_messages(model, d, n):
    """To the four digits with the messages that the authors count, above them with all."""
    k, ahead = CHUNKS[model], max(d, n // d) + 1
    schedule = build_schedule("interleaved", d * k, n, num_chunks=k, ahead=ahead)
    published = PUBLISHED[model][n][3]
    assert rate(as_the_authors_count(schedule), model) == pytest.approx(published, abs=6e-5)
    assert 0.0005 < rate(schedule, model) - published < 0.004


SEARCHED_CASES = [
    case if case in CASES and case[1] < 32 else pytest.param(*case, marks=pytest.mark.slow)
    for case in ((model, d, n) for (model, d), counts in PROFILED.items() for n in counts)
]
"""Orders for 32 stages are searched for long."""


@pytest.mark.parametrize(("model", "d", "n"), SEARCHED_CASES)
@pytest.mark.parametrize("memories", [1, 2])
def test_published_rates_of_searched_orders_follow_from_the_profiled_times(memories, model, d, n):
    """ZB-1p and ZB-2p: the paper's search in once and twice the memory of 1F1B, then simulated."""
    width, heads = SHAPES[model]
    kept = 34 * width + 5 * heads * 1024
    memory = Memory(kept, 32 * width, memories * d * kept)
    schedule = search(d, n, Times(*PROFILED[model, d][n]), memory)
    waiting = tuple(map(compute_only, schedule.table))
    check_schedule(replace(schedule, table=complete(waiting)[1]))
    published = PUBLISHED[model][n][1] if memories == 1 else SEARCHED[model][n]
    assert rate(schedule, model) == pytest.approx(published, abs=6e-5)
