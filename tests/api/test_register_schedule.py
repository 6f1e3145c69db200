"""register_schedule: what own schedules cost and hold, run by commands, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from commands import run_python
from marks import slow
from schedule_tables import peak_in_flight
from small_graphs import cluster, mlp

import autoparallel
from autoparallel.__main__ import run_command
from autoparallel.cache.cached_plan import plan_key
from autoparallel.cost_model.simulator.simulator import StageCosts, simulate
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.costs.basis import DEFAULT
from autoparallel.planner.errors import UsageError
from autoparallel.planner.find_plan import plan
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planner.schedules.catalogue import stages_of_ranks
from autoparallel.planner.schedules.held import half_pairs, stage_half_pairs
from autoparallel.planner.schedules.schedules import (
    REGISTERED,
    build_schedule,
    can_have,
    compute_orders,
    parts_of_ranks,
)
from autoparallel.target.load import load_target

MODEL = Path("tests/models/own_schedules.py").resolve()


@pytest.fixture(autouse=True)
def _only_schedules_of_this_test() -> Iterator[None]:
    known = dict(REGISTERED)
    REGISTERED.clear()
    yield
    REGISTERED.clear()
    REGISTERED.update(known)


@pytest.fixture
def models_own() -> None:
    load_target(str(MODEL))


def one_at_a_time(num_ranks: int, num_microbatches: int) -> list[list[str]]:
    """A micro-batch is done before the next one begins."""
    return [
        [f"{rank}{kind}{m}" for m in range(num_microbatches) for kind in "FB"]
        for rank in range(num_ranks)
    ]


def add(function: Callable[..., Any], **options: Any) -> None:
    autoparallel.register_schedule("mine", **options)(function)


def test_a_step_of_one_micro_batch_at_a_time_takes_as_long_as_derived_by_hand() -> None:
    """Nothing overlaps, so T = N (D (F + B) + 2 (D - 1) messages): 3 (4 * 3 + 2 * 3 / 2) = 45."""
    add(one_at_a_time)
    schedule = build_schedule("mine", 4, 3)
    half = Fraction(1, 2)
    costs = StageCosts([Fraction(1)] * 4, [Fraction(2)] * 4, send_seconds=[half] * 3)
    assert simulate(schedule, costs).step_seconds == 45
    assert peak_in_flight(schedule) == (1, 1, 1, 1)
    assert half_pairs("mine", 4, 4, 3) == ((1, 0),)


def test_a_v_of_two_chunks_takes_as_long_as_derived_by_hand(models_own: None) -> None:
    """v-rounds on 2 ranks, one round of micro-batches 0 and 1, every action of one second.

    ====== =========================================================
    rank 0 0F0 0F1 .   .   3F0 3F1 3I0 3I1 .   .   0I0 0I1 W W W W
    rank 1 .   1F0 1F1 2F0 2F1 .   .   2I0 2I1 1I0 1I1 W W W W
    ====== =========================================================

    Rank 0 runs 3F0 when 2F0 has ended, at 4, and 0I0 when 1I0 has ended, at 10: 16 seconds.
    """
    schedule = build_schedule("v-rounds", 4, 2, num_chunks=2)
    one, two = [Fraction(1)] * 4, [Fraction(2)] * 4
    costs = StageCosts(one, two, weight_backward_seconds=one)
    assert simulate(schedule, costs).step_seconds == 16
    assert schedule.stage_rank == (0, 1, 1, 0)
    assert parts_of_ranks("v-rounds", 2, 2) == ((0, 3), (1, 2))
    assert stages_of_ranks(2, 3, is_v=True) == ((0, 3, 4), (1, 2, 5))
    assert stage_half_pairs("v-rounds", 4, 2, 2) == (((2, 0), (1, 1), (0, 2)),) * 4


def test_a_longer_warm_up_holds_one_micro_batch_more_than_1f1b(models_own: None) -> None:
    for depth in range(1, 5):
        assert half_pairs("warm-1f1b", depth, 4, 8) == ((depth + 1, 0),)
        assert half_pairs("1f1b", depth, 4, 8) == ((depth, 0),)


def test_only_a_forced_schedule_is_searched(models_own: None) -> None:
    every = Request(8)
    assert "warm-1f1b" not in (*every.schedules, *every.chunked_schedules)
    assert Request(8, forced=Forced(schedule="warm-1f1b")).schedules == ("warm-1f1b",)
    assert Request(8, forced=Forced(schedule="v-rounds")).chunked_schedules == ("v-rounds",)
    with pytest.raises(UsageError, match="unknown feature 'warm-1f1b'"):
        PlanOptions(global_batch=8, allow=("warm-1f1b",))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpipe", {}),
        ("1f1b", {}),
        ("zb-h1", {"split_backward": True}),
        ("bfs", {"chunks": 2}),
        ("zbv", {"chunks": 2, "shape": "v", "split_backward": True}),
    ],
)
def test_a_copy_of_a_built_in_schedule_is_planned_as_the_original(
    name: str, options: dict[str, Any]
) -> None:
    graph, blocks = mlp(6, rows=8)
    chunks = options.get("chunks", 1)
    add(lambda ranks, count: compute_orders(name, ranks * chunks, count, chunks), **options)
    original, copy = (
        plan(graph, blocks, cluster(2), Request(32, time_limit_seconds=600.0, forced=forced))
        for forced in (
            Forced(pp=2, zero=0, chunks=chunks, num_microbatches=4, schedule=each)
            for each in (name, "mine")
        )
    )
    assert copy.schedule == "mine"
    assert copy.stages == original.stages
    assert copy.prediction.step_seconds == original.prediction.step_seconds
    assert copy.prediction.bubble_fraction == original.prediction.bubble_fraction


CASES = (
    ("pp=2,microbatches=8,schedule=warm-1f1b", 2),
    ("pp=2,microbatches=4,schedule=v-rounds", 2),
    slow("pp=3,microbatches=4,schedule=half-split", 3),
    slow("pp=2,microbatches=4,schedule=looped,chunks=3", 2),
)


@pytest.mark.parametrize(("parallel", "ranks"), CASES)
def test_own_schedules_compute_what_one_device_computes(
    parallel: str, ranks: int, tmp_path: Path
) -> None:
    """Processes of their own run the plan, compared with one device in float64."""
    (tmp_path / "model.py").write_text(MODEL.read_text())
    asked = ("--cluster", f"cpu:{ranks}", "--global-batch", "16", "--parallel", parallel)
    found = run_python(
        "-m", "autoparallel", "plan", "model.py", *asked, "-o", "p.json", folder=tmp_path
    )
    assert found.returncode == 0, found.stderr
    name = parallel.partition("schedule=")[2].partition(",")[0]
    assert json.loads((tmp_path / "p.json").read_text())["schedule"] == name
    found = run_python("-m", "autoparallel", "verify", "p.json", folder=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "compared with one device in float64" in found.stdout


def test_commands_draw_list_and_simulate_the_schedules_of_a_target(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = ["--target", str(MODEL)]
    assert (
        run_command(
            ["show", "schedules", "warm-1f1b", "--stages", "2", "--microbatches", "3", *own]
        )
        == 0
    )
    drawn = capsys.readouterr().out
    assert "rank 0  F0 F1 F2 .  .  B0 -- .  B1 -- B2 --" in drawn
    assert "by rank: 3 2" in drawn
    assert run_command(["show", "schedules", "--json", *own]) == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)["result"]}
    assert listed["v-rounds"]["runs"]
    assert listed["v-rounds"]["source"].startswith(f"{MODEL}:")
    asked = ["--cluster", "cpu:2", "--global-batch", "8", "--json"]
    parallel = ["--parallel", "pp=2,microbatches=4,schedule=v-rounds"]
    assert run_command(["simulate", str(MODEL), *asked, *parallel]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["configuration"]["chunks"] == 2


def test_a_plan_whose_schedule_nothing_registers_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = MODEL.read_text()
    Path("model.py").write_text(text)
    asked = ["--cluster", "cpu:2", "--global-batch", "8", "-o", "p.json"]
    parallel = ["--parallel", "pp=2,microbatches=4,schedule=warm-1f1b"]
    assert run_command(["plan", "model.py", *asked, *parallel]) == 0
    Path("model.py").write_text(text.replace('"warm-1f1b"', '"another-1f1b"'))
    REGISTERED.clear()
    for command in (["verify", "p.json"], ["run", "p.json", "--steps", "1"]):
        assert run_command(command) == 2
        told = capsys.readouterr().err
        assert "error[AP150]: unknown schedule 'warm-1f1b'" in told
        assert '@autoparallel.register_schedule("warm-1f1b") in the model file' in told


def test_a_schedule_that_takes_no_size_of_the_search_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = MODEL.read_text().replace("if num_microbatches % 2:", "if num_ranks != 3:")
    (tmp_path / "model.py").write_text(text.replace('chunks=2, shape="v", ', ""))
    asked = ["--cluster", "cpu:2", "--global-batch", "8", "--parallel", "schedule=v-rounds"]
    assert run_command(["plan", str(tmp_path / "model.py"), *asked]) == 2
    told = capsys.readouterr().err
    assert "no pipeline of these devices can run under schedule=v-rounds" in told
    assert "pp= and microbatches= that its function takes" in told


def test_keys_of_plans_follow_the_table() -> None:
    graph, blocks = mlp(2, rows=8)

    def key(forced: Forced) -> str:
        return plan_key(graph, blocks, cluster(2), Request(32, forced=forced), DEFAULT)

    asked = Forced(pp=2, num_microbatches=4, schedule="mine")
    add(one_at_a_time)
    first = key(asked)
    add(
        lambda ranks, count: [
            [f"{r}{k}{m}" for k in "FB" for m in range(count)] for r in range(ranks)
        ]
    )
    assert key(asked) != first
    add(one_at_a_time)
    assert key(asked) == first


def rows(*texts: str) -> Callable[[int, int], list[str]]:
    return lambda num_ranks, num_microbatches: list(texts)


GOOD = "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"


@pytest.mark.parametrize(
    ("own", "options", "code", "said"),
    [
        (rows(GOOD[0], "1F0 1B0 1F1"), {}, "AP159", "1B1 is missing"),
        (rows(GOOD[0], "1B0 1B1"), {}, "AP159", "1F0 is missing.*\n.*\n.*add it to rank 1"),
        (rows("0F0 0F1", "1F0 1F1"), {}, "AP159", "0B0 is missing"),
        (rows("0F0 0F1 0B0 0B1 0F1", GOOD[1]), {}, "AP159", "0F1 appears twice"),
        (rows("0F0 0B1 0F1 0B0", GOOD[1]), {}, "AP159", "0B1 comes before 0F1"),
        (rows("0F0 0F1 0F2 0B0 0B1 0B2", GOOD[1]), {}, "AP159", "0F2 names a micro-batch that"),
        (
            rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            {},
            "AP159",
            "deadlock, rank 0 at 0RECV_B0; rank 1 at 1RECV_F1\n",
        ),
        (rows(GOOD[1], GOOD[0]), {}, "AP159", "rank 0 has 1F0\n.*\n.*its stages are 0"),
        (rows(*GOOD, "2F0 2B0"), {}, "AP159", "it has 3 rows\n.*\n.*a row for each rank"),
        (rows("0F0 0SEND_F0", GOOD[1]), {}, "AP159", "rank 0 has 0SEND_F0"),
        (rows("0F0 0X0", GOOD[1]), {}, "AP159", "'0X0' is not an action"),
        (rows("0F0 0F1 0I0 0W0 0B1", GOOD[1]), {}, "AP159", "rank 0 has 0I0\n.*\n.*\n.*split_back"),
        (rows(*GOOD), {"split_backward": True}, "AP159", "0I0 is missing"),
        (lambda ranks, count: [f"{count / 0}"], {}, "AP162", "ZeroDivisionError: division by zero"),
        (lambda ranks, count: None, {}, "AP162", "NoneType"),
        (lambda ranks: [], {}, "AP162", "takes 1 positional argument"),
        (lambda ranks, count: int("two"), {}, "AP153", "does not run on 2 ranks with 2 micro-b"),
    ],
)
def test_a_wrong_table_is_refused_at_its_first_use(
    own: Callable[..., Any], options: dict[str, Any], code: str, said: str
) -> None:
    add(own, **options)
    with pytest.raises(UsageError, match=said) as caught:
        build_schedule("mine", 2, 2)
    assert caught.value.code == code
    assert f"{__file__}:" in caught.value.where
    if code == "AP153":
        assert not can_have("mine", 2, 2, 1)


def test_a_wrong_table_ends_a_plan_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = MODEL.read_text().replace("yield row + backwards[", "yield row + backwards[1 + ")
    (tmp_path / "model.py").write_text(text)
    asked = ["--cluster", "cpu:2", "--global-batch", "8"]
    parallel = ["--parallel", "pp=2,microbatches=4,schedule=warm-1f1b"]
    assert run_command(["plan", str(tmp_path / "model.py"), *asked, *parallel]) == 2
    told = capsys.readouterr().err
    assert "schedule 'warm-1f1b' on 2 ranks with 4 micro-batches: 0B2 is missing" in told
    assert "model.py:14" in told


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("1f1b", {}, "it is built in"),
        ("interleaved-1f1b", {}, "it is built in"),
        ("My schedule", {}, "other signs"),
        ("mine", {"chunks": 0}, "chunks=0"),
        ("mine", {"chunks": (3, 2)}, "chunks="),
        ("mine", {"shape": "w"}, "shape='w'"),
        (one_at_a_time, {}, "it has no name"),
    ],
)
def test_a_wrong_registration_is_refused(name: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        autoparallel.register_schedule(name, **options)(one_at_a_time)
    assert caught.value.code == "AP168"


def test_another_file_cannot_take_a_name_and_the_same_file_can() -> None:
    load_target(str(MODEL))
    load_target(str(MODEL))
    with pytest.raises(UsageError, match=f"it is also defined at {MODEL}"):
        autoparallel.register_schedule("warm-1f1b")(one_at_a_time)
