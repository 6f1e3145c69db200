"""The line that tells a configuration."""

from __future__ import annotations

from dataclasses import replace

from handmade import flat_plan, pipeline_plan

from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.schedules.catalogue import SCHEDULES
from autoparallel.planner.summary import (
    SCHEDULE_TITLES,
    RankSummary,
    plan_summary,
    schedule_text,
    summary_text,
)


def rank(dp: int, tp: int, zero: int = 0, **figures: int) -> RankSummary:
    return RankSummary(Mesh(("dp", "tp"), (dp, tp)), zero, num_blocks=4, **figures)


def test_a_pipeline_of_equal_stages_has_its_degrees() -> None:
    assert plan_summary(pipeline_plan()) == "dp=2 tp=2 pp=2 · ZeRO 1 · 1F1B · 16 × 4"


def test_one_stage_has_no_schedule() -> None:
    assert "pp" not in plan_summary(flat_plan())
    assert "1F1B" not in plan_summary(flat_plan())
    assert summary_text([rank(1, 1)], "1F1B", 1, 8) == "one device · ZeRO 0 · 1 × 8"
    assert summary_text([rank(1, 1)] * 2, "1F1B", 1, 8) == "pp=2 · ZeRO 0 · 1F1B · 1 × 8"


def test_stages_that_differ_are_told_one_by_one_and_equal_neighbours_are_counted() -> None:
    ranks = [rank(2, 8, 1), rank(2, 8, 1), rank(2, 4, 1)]
    text = "3 stages: 2 × dp=2 tp=8 | dp=2 tp=4 · ZeRO 1 · 1F1B · 16 × 4"
    assert summary_text(ranks, "1F1B", 16, 4) == text


def test_zero_stages_and_shares_that_differ_are_told_by_stage() -> None:
    uneven = replace(rank(2, 1, 1), shares=(3, 5))
    text = "2 stages: dp=2 samples 3:5 ZeRO 1 | one device ZeRO 0 · GPipe · 2 × 8"
    assert summary_text([uneven, rank(1, 1)], "GPipe", 2, 8) == text


def test_recomputed_blocks_are_counted_unless_all_are() -> None:
    some = [rank(4, 1, modes=("full",) * 4), rank(4, 1, modes=("full", "full", "selective"))]
    text = summary_text(some, "1F1B", 4, 8)
    assert "full recompute 6/8 blocks · selective recompute 1/8 blocks · 1F1B" in text
    assert "· full recompute · " in summary_text(
        [rank(4, 1, modes=("full",) * 4)] * 2, "1F1B", 4, 8
    )


def test_chunks_of_one_rank_count_as_one_stage() -> None:
    plan = pipeline_plan()
    halves = replace(plan, stages=(*plan.stages, *plan.stages), schedule="interleaved")
    text = "dp=2 tp=2 pp=2 · ZeRO 1 · interleaved × 2 chunks · 16 × 4"
    assert plan_summary(halves) == text


def test_titles_spell_the_options_values() -> None:
    assert all(title.lower() == name for name, title in SCHEDULE_TITLES.items())
    assert SCHEDULE_TITLES.keys() <= SCHEDULES.keys()
    assert schedule_text("terapipe", num_slices=8) == "TeraPipe × 8 slices"
