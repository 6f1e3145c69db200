"""The report: what a person must be able to read off a plan."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from handmade import GIB, flat_plan, pipeline_plan
from rich.console import Console

from autoparallel import describe
from autoparallel.analysis.facts import (
    busiest_rank,
    fullest_rank,
    merged_alternatives,
    rank_seconds,
    stage_rows,
    stages_of_ranks,
)
from autoparallel.analysis.sharding import merged_splits
from autoparallel.planner.plan import Alternative, GoalReport, Plan, Tried
from autoparallel.report.page import commands
from autoparallel.report.printing import PlainConsole, print_to_text
from autoparallel.report.tables import shown_stages, stages


def test_no_line_is_wider_than_80_columns() -> None:
    for plan in (pipeline_plan(), flat_plan()):
        for short in (False, True):
            assert max(map(len, describe(plan, short=short).splitlines())) <= 80


def test_control_characters_are_escaped_but_for_those_of_the_console() -> None:
    hostile = flat_plan()
    hostile = replace(hostile, model=replace(hostile.model, target="a\x1b[31m\x9bb.py"))
    assert describe(hostile).startswith(r"a\x1b[31m\x9bb.py ")
    colored = PlainConsole(
        file=io.StringIO(), force_terminal=True, color_system="standard", highlight=False
    )
    colored.print("x\x1b[5m", style="red")
    assert colored.file.getvalue() == "\x1b[31mx\\x1b[5m\x1b[0m\n"


def test_the_head_names_the_model_the_batch_and_the_cluster() -> None:
    head = describe(pipeline_plan()).splitlines()[:6]
    assert head[0] == "llama.py  8.03 B parameters  layers=8"
    assert head[1] == "batch 64 × 4096 tokens, bf16, eager, adamw, on 8xH100 (8 × H100-SXM)"
    assert head[3] == "dp=2 tp=2 pp=2 · ZeRO 1 · 1F1B · 16 micro-batches of 4 (2 a rank)"
    assert "step 2.10 s" in head[4]
    assert "memory 55.0 of 72.0 GiB" in head[4]


def head_of(plan: Plan) -> str:
    return describe(plan).split("Stages")[0]


def test_the_head_says_by_how_much_a_plan_does_not_fit() -> None:
    plan = pipeline_plan()
    limit = plan.cluster.usable_memory_bytes
    assert "does not fit" not in head_of(plan)
    prediction = replace(plan.prediction, peak_memory_bytes=limit + 3 * GIB)
    assert "does not fit: 3.00 GiB too much" in head_of(replace(plan, prediction=prediction))


def test_a_plan_without_pipeline_mentions_neither_stages_nor_bubble() -> None:
    text = describe(flat_plan())
    assert "bubble" not in text
    assert "pp=" not in text
    assert "1F1B" not in text


def test_equal_kinds_of_several_stages_are_told_once() -> None:
    text = describe(pipeline_plan())
    assert text.count("dim 0 sharded over tp  attn.qkv.weight, mlp.up\n") == 1
    assert "layers.0–7  ×8" in text


def test_parameters_are_named_within_their_block() -> None:
    plan = pipeline_plan()
    layer = next(s for s in merged_splits(plan, list(plan.stages)) if "layers.0" in s.blocks)
    assert layer.groups["replicated"] == ("ln_1.weight", "ln_2.weight")
    assert layer.groups["dim 1 sharded over tp"] == ("attn.proj.weight", "mlp.down.weight")


def test_the_worst_rank_is_the_one_with_the_most_memory() -> None:
    plan = pipeline_plan()
    first, second = plan.stages
    bigger = replace(
        second, prediction=replace(second.prediction, memory_bytes={"parameters": 60 * GIB})
    )
    plan = replace(plan, stages=(first, bigger))
    rank = fullest_rank(plan)
    assert (rank.stages, rank.held) == ((1,), {"parameters": 60 * GIB})
    assert "Peak memory (rank 4, stage 1): 60.0 of 72.0 GiB" in describe(plan)


def test_the_parts_of_the_step_add_up_to_the_step() -> None:
    plan = pipeline_plan()
    parts = rank_seconds(plan, busiest_rank(plan))
    assert sum(parts.values()) == pytest.approx(plan.prediction.step_seconds)
    assert parts["compute"] == pytest.approx(16 * 0.101)
    assert "waiting for other stages" in parts


def test_the_memory_of_a_rank_is_of_all_its_stages_with_what_is_transient_once() -> None:
    plan = with_two_stages_per_rank(pipeline_plan())
    sizes = {"parameters": 10 * GIB, "transient": 3 * GIB, "reserve": GIB}
    stages = tuple(
        replace(s, prediction=replace(s.prediction, memory_bytes=sizes)) for s in plan.stages
    )
    plan = replace(plan, stages=stages)
    rank = fullest_rank(plan)
    held = {"parameters": 20 * GIB, "transient": 3 * GIB, "reserve": GIB}
    assert (rank.stages, rank.held) == ((0, 2), held)
    assert "stages 0 and 2): 24.0 of" in describe(plan)


def with_two_stages_per_rank(plan: Plan) -> Plan:
    """Each stage cut in two halves on its devices, in the order of interleaved stages."""
    halves = tuple(
        replace(
            stage,
            prediction=replace(
                stage.prediction,
                seconds={name: value / 2 for name, value in stage.prediction.seconds.items()},
            ),
        )
        for stage in plan.stages
    )
    return replace(plan, stages=(*halves, *halves), schedule="interleaved")


def test_a_rank_of_several_stages_waits_for_what_none_of_them_takes() -> None:
    """Cut in two, the stages of a rank take together what the one took, and wait as long."""
    one = pipeline_plan()
    two = with_two_stages_per_rank(one)
    assert stages_of_ranks(one) == ((0,), (1,))
    assert stages_of_ranks(two) == ((0, 2), (1, 3))
    whole, parts = rank_seconds(one, busiest_rank(one)), rank_seconds(two, busiest_rank(two))
    assert parts.keys() == whole.keys()
    for name, seconds in whole.items():
        assert parts[name] == pytest.approx(seconds)
    names = " and ".join(map(str, busiest_rank(two)))
    assert f"Step time of the slowest rank (stages {names}): " in describe(two)


def test_a_rank_of_two_replicas_runs_half_of_the_micro_batches_through_each() -> None:
    plan = replace(pipeline_plan(), schedule="chimera")
    assert stages_of_ranks(plan) == ((0, 1), (1, 0))
    own = [stage.prediction.seconds["compute"] for stage in plan.stages]
    found = rank_seconds(plan, (0, 1))
    assert found["compute"] == pytest.approx(plan.num_microbatches * sum(own) / 2)


def test_alternatives_are_listed_with_their_distance_and_reason() -> None:
    text = describe(pipeline_plan())
    assert "dp=4 tp=2 · ZeRO 2 · 16 × 4" in text
    assert "2.31 s  +10.0 %  61.0 GiB" in text
    assert "does not fit: 70 GiB too much" in text


def test_alternatives_that_read_the_same_are_listed_once() -> None:
    """Two schedules with equal figures share a row; a third has its own; a repetition has none."""
    base = Alternative("dp=4 pp=2 · ZeRO 0 · ZB-H1 · 1 × 32", 2.31, GIB, "bubble +9.0 %")
    twin = replace(base, summary="dp=4 pp=2 · ZeRO 0 · ZB-H2 · 1 × 32")
    slower = replace(base, summary="dp=4 pp=2 · ZeRO 0 · GPipe · 1 × 32", step_seconds=2.5)
    other = replace(base, summary="dp=2 pp=4 · ZeRO 1 · ZB-H1 · 1 × 32")
    found = merged_alternatives([base, twin, base, slower, other])
    assert [each.summary for each in found] == [
        "dp=4 pp=2 · ZeRO 0 · ZB-H1/ZB-H2 · 1 × 32",
        slower.summary,
        other.summary,
    ]


def test_ops_without_a_rule_are_listed() -> None:
    plan = replace(
        pipeline_plan(),
        replicated_ops=("my.op.default",),
        replicated_seconds={"my.op.default": 0.012},
    )
    text = describe(plan)
    assert "replicated ops (no sharding rule), per step: my.op.default 12.0 ms" in text


def test_the_objective_is_reported_with_what_was_tried() -> None:
    tried = (
        Tried("1xH100", 1, 2.0, 5e6),
        Tried("2xH100", 2, 0.0, None, "the model does not fit"),
    )
    goal = GoalReport("cost", "1xH100: 1 of 2 devices", 2.5, 5e6, 3.0, tried)
    text = describe(replace(flat_plan(), goal=goal))
    assert "Objective: most tokens per dollar" in text
    assert "chosen: 1xH100: 1 of 2 devices" in text
    assert "per dollar at $2.50 an hour" in text
    assert "deadline: 3.00 s per step" in text
    assert "2xH100: the model does not fit" in text
    assert "dollar" not in describe(flat_plan())


def test_a_search_that_was_ended_early_is_told() -> None:
    plan = pipeline_plan()
    solver = replace(plan.solver, gap=0.25, bound_seconds=1.0, stopped="Ctrl-C")
    for short in (False, True):
        text = " ".join(describe(replace(plan, solver=solver), short=short).split())
        assert "optimality gap: at most 25 %" in text
        assert "the search was ended early by Ctrl-C" in text
        assert "ended early" not in describe(plan, short=short)


def test_what_is_proven_of_the_layouts_is_told_where_it_says_more_than_the_bound() -> None:
    plan = pipeline_plan()
    solver = replace(plan.solver, gap=0.08, bound_seconds=1.0, layouts_gap=0.004)
    text = " ".join(describe(replace(plan, solver=solver)).split())
    assert "layout gap: at most 0.4 % (for these stages)" in text
    for gap in (None, 0.08):
        assert "layout gap" not in describe(replace(plan, solver=replace(solver, layouts_gap=gap)))


def test_of_many_stages_the_first_the_slowest_the_fullest_and_the_last_are_shown() -> None:
    plan = pipeline_plan()
    seconds = [{"forward": 0.5 if at == 40 else 0.1, "backward": 0.2} for at in range(64)]
    held = [{"parameters": (9 if at == 50 else 3) * GIB} for at in range(64)]
    predictions = [
        replace(plan.stages[0].prediction, seconds=own, memory_bytes=size)
        for own, size in zip(seconds, held, strict=True)
    ]
    many = replace(plan, stages=tuple(replace(plan.stages[0], prediction=p) for p in predictions))
    assert shown_stages(stage_rows(many), 16) == [*range(13), 40, 50, 63]
    assert shown_stages(stage_rows(many), 64) == list(range(64))
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as captured:
        console.print(stages(many, limit=16))
    assert "and 48 stages between them" in captured.get()


def test_names_of_blocks_stay_whole_and_zero_has_a_column_where_it_differs() -> None:
    plan = pipeline_plan()
    first = plan.stages[0]
    named = [replace(block, name="model.layers.15") for block in first.blocks[:1]]
    mesh = replace(first.mesh, shape=(128, 8))
    devices = tuple(range(15360, 16384))
    one = replace(first, blocks=tuple(named), devices=devices, mesh=mesh)
    same = replace(plan, stages=(one, replace(plan.stages[1], zero=first.zero)))
    text = print_to_text(lambda console: console.print(stages(same, limit=4)))
    assert re.search(r"model\.layers\.15 +15360–16383 +dp=128 tp=8 ", text)
    assert max(map(len, text.splitlines())) <= 78
    assert "ZeRO" not in text
    other = replace(plan, stages=(first, replace(plan.stages[1], zero=3 - first.zero)))
    assert "ZeRO" in print_to_text(lambda console: console.print(stages(other, limit=4)))


def test_next_steps_are_commands_alone_where_their_file_has_a_long_name() -> None:
    def lines(path: str) -> list[str]:
        steps = [(f"autoparallel run {path}", "train and measure")]
        return print_to_text(lambda console: console.print(commands(steps, 78))).splitlines()

    assert lines("plan.json")[0].split("  ")[1] == "train and measure"
    long = "runs/" + "x" * 50 + ".json"
    assert [line.rstrip() for line in lines(long)] == [f"autoparallel run {long}"]
