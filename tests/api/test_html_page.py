"""The page without a browser: its structure, its labels, its size, and that it is alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from handmade import flat_plan, pipeline_plan
from pages import BASELINES, SECTIONS, Outline, drawn_plan, full_page, full_sources

from autoparallel.html import Sources, page, plan_notebook
from autoparallel.html.charts import candidate_chart, pareto_front
from autoparallel.html.document import candidates
from autoparallel.html.parts import block_cells, cluster_hosts, weight_groups
from autoparallel.html.schedule import UNITS, WAITS, schedule_view
from autoparallel.planner.plan import Plan
from autoparallel.report.drawing import timeline_of

PAGES = {
    "full": full_page,
    "plan alone": lambda: page(pipeline_plan()),
    "no pipeline": lambda: page(flat_plan()),
}


@pytest.mark.parametrize("name", PAGES)
def test_tags_are_closed_ids_are_unique_and_every_reference_has_its_id(name: str) -> None:
    outline = Outline(PAGES[name]())
    assert outline.wrong == []
    ids = outline.attributes("id")
    assert [each for each, count in Counter(ids).items() if count > 1] == []
    labels = outline.attributes("aria-labelledby") + outline.attributes("aria-describedby")
    links = [link[1:] for link in outline.attributes("href") if link.startswith("#")]
    assert set(labels + links) <= set(ids)


@pytest.mark.parametrize("name", PAGES)
def test_every_section_is_there_with_a_heading(name: str) -> None:
    outline = Outline(PAGES[name]())
    sections = [own for tag, own in outline.tags if tag == "section"]
    assert [own["id"] for own in sections] == list(SECTIONS)
    assert [own["aria-labelledby"] for own in sections] == [f"{each}-title" for each in SECTIONS]
    assert [tag for tag, _ in outline.tags].count("h1") == 1
    assert [tag for tag, _ in outline.tags].count("h2") == len(SECTIONS)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_refers_to_nothing_outside(name: str) -> None:
    text = PAGES[name]()
    outline = Outline(text)
    links = [*outline.attributes("src"), *outline.attributes("href")]
    assert all(link.startswith("#") or link == "data:," for link in links)
    assert not re.search(r"https?://|@import|url\(", text)


@pytest.mark.parametrize("name", PAGES)
def test_drawings_and_controls_have_labels_for_those_who_do_not_see_them(name: str) -> None:
    outline = Outline(PAGES[name]())
    for tag, own in outline.tags:
        if tag == "svg":
            assert own.get("aria-hidden") == "true" or own.get("aria-label")
        if own.get("role") in ("img", "region", "group", "application"):
            assert own.get("aria-label")
        if tag == "th":
            assert own.get("scope") in ("col", "row")
        if own.get("tabindex") == "0":
            assert own.get("aria-label")
    language = dict(outline.tags[0][1])
    assert language == {"lang": "en"}


def test_text_of_a_plan_cannot_become_markup() -> None:
    plan = drawn_plan()
    model = replace(plan.model, target="<script>alert(1)</script>.py")
    text = page(replace(plan, model=model), full_sources(plan))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_the_headline_compares_with_the_fastest_baseline_that_fits() -> None:
    """16.5 s against 15 s."""
    text = full_page()
    assert "1.10 ×" in text
    assert "The best of DDP, FSDP and 3-D parallelism is 3-D (Megatron)" in text
    assert "DDP: a batch of 64 samples cannot be divided over dp=3." in text
    assert "the time to price configurations ended after 30" in text


def test_a_plan_that_is_priced_otherwise_now_is_compared_as_it_is_now() -> None:
    """12 s now, not 15: the baseline of 16.5 s is 1.375 times as long."""
    plan = drawn_plan()
    sources = full_sources(plan)
    assert sources.priced is not None
    assert "Priced again now" not in page(plan, sources)
    text = page(plan, replace(sources, priced=replace(sources.priced, step_seconds=12.0)))
    assert "Priced again now, the plan takes 12.0 s a step" in text
    assert "1.38 ×" in text


def test_what_is_missing_is_said_with_the_reason() -> None:
    text = page(pipeline_plan(), Sources(None, "there is no file llama.py (AP101)"))
    assert text.count("there is no file llama.py (AP101)") >= 4
    assert "against baselines" not in text


def test_measured_is_shown_beside_predicted() -> None:
    """15 s predicted, 16 s measured: 6 % too little."""
    text = full_page()
    assert re.search(r"15\.0 s</td><td class=\"n\">16\.0 s</td><td class=\"n\">-6 %", text)
    plan = drawn_plan()
    other = page(replace(plan, num_microbatches=8), full_sources(plan))
    assert "These figures are of another plan" in other
    assert "These figures are of another plan" not in text


def test_the_schedules_boxes_and_waits_add_up_to_the_step() -> None:
    """Rank 0 of two computes 12 of 15 seconds, and waits the rest, which is said why."""
    plan = drawn_plan()
    timeline = timeline_of(plan)
    assert timeline is not None
    view = schedule_view(timeline, ["a", "b"])
    for row, rank in zip(view.rows, view.data["ranks"], strict=True):
        busy = sum(event[1] for event in rank["events"] if event[5] == 0)
        idle = sum(wait[1] for wait in rank["waits"])
        assert busy == pytest.approx(0.8 * UNITS, rel=1e-3)
        assert busy + idle == pytest.approx(UNITS, rel=1e-3)
        assert row.busy == pytest.approx(0.8)
    first, second = (rank["waits"] for rank in view.data["ranks"])
    assert [WAITS[why] for _, _, why, _, _ in second] == ["start", "end"]
    assert {WAITS[why] for _, _, why, _, _ in first} == {"compute"}
    assert {stage for _, _, _, stage, _ in first} == {1}


def test_a_host_is_drawn_once_for_its_like() -> None:
    plan = pipeline_plan()
    host = plan.cluster.hosts[0]
    wide = replace(plan.cluster, hosts=(host,) * 4)
    stages = tuple(
        replace(stage, devices=tuple(range(16 * at, 16 * at + 16)))
        for at, stage in enumerate(plan.stages)
    )
    found = cluster_hosts(replace(plan, cluster=wide, stages=stages))
    assert [(each.names, each.number, set(each.devices)) for each in found] == [
        ("0–1", 2, {0}),
        ("2–3", 2, {1}),
    ]


def test_every_block_is_in_one_cell_of_its_rank() -> None:
    cells = block_cells(pipeline_plan())
    assert [(cell.start, cell.length, cell.rank) for cell in cells] == [(0, 5, 0), (5, 5, 1)]


def test_weights_are_cut_as_their_layouts_say() -> None:
    """qkv is S(0) over tp=2: two strips, in two copies over dp=2; its rows are halved."""
    groups = weight_groups(pipeline_plan(), {"layers.0.attn.qkv.weight": (3072, 1024)})
    weights = {each.name: each for group in groups for each in group.weights}
    qkv, proj, norm = (weights[f"{x}.weight"] for x in ("attn.qkv", "attn.proj", "ln_1"))
    assert (qkv.rows, qkv.columns, qkv.num_copies) == (2, 1, 2)
    assert (qkv.shape, qkv.local_shape) == ("3,072 × 1,024", "1,536 × 1,024")
    assert (proj.rows, proj.columns, proj.num_copies) == (1, 2, 2)
    assert (norm.rows, norm.columns, norm.num_copies) == (1, 1, 4)


def test_no_candidate_on_the_front_is_beaten_by_another() -> None:
    plan = pipeline_plan()
    chart = candidate_chart(candidates(plan, BASELINES), plan.cluster.usable_memory_bytes)
    assert len(chart.candidates) == 1 + len(plan.alternatives) + 2
    shown = [each for each in chart.candidates if each.x]
    placed = [(each.step_seconds, each.memory_bytes, each.is_on_front) for each in shown]
    for step, held, is_on_front in placed:
        is_beaten = any(
            other <= step and size <= held and (other, size) != (step, held)
            for other, size, _ in placed
        )
        assert is_on_front is not is_beaten
    assert pareto_front([(1.0, 1.0)]) == [(1.0, 1.0)]


def wide_plan(num_ranks: int, chunks: int, num_microbatches: int) -> Plan:
    """So many pipeline ranks of 1024 devices each, with a block per stage."""
    plan = drawn_plan()
    host = plan.cluster.hosts[0]
    cluster = replace(plan.cluster, hosts=(host,) * (128 * num_ranks))
    stage = plan.stages[0]
    mesh = replace(stage.mesh, shape=(128, 8))
    stages = tuple(
        replace(
            stage,
            mesh=mesh,
            blocks=(replace(stage.blocks[1], name=f"layers.{at}"),),
            devices=tuple(range(1024 * (at % num_ranks), 1024 * (at % num_ranks) + 1024)),
        )
        for at in range(num_ranks * chunks)
    )
    return replace(
        plan,
        cluster=cluster,
        stages=stages,
        num_microbatches=num_microbatches,
        schedule="interleaved",
        model=replace(plan.model, global_batch=128 * num_microbatches),
    )


def test_the_page_of_128_stages_on_16384_devices_has_less_than_a_megabyte() -> None:
    """As many stages, ranks, micro-batches and devices as Llama-3-405B's plan has."""
    plan = wide_plan(16, 8, 16)
    assert plan.cluster.num_devices == 16_384
    from autoparallel.cost_model.simulator.simulator import simulate
    from autoparallel.planner.schedules.schedules import build_schedule
    from autoparallel.report.drawing import plan_costs

    schedule = build_schedule("interleaved", 128, 16, num_chunks=8)
    step = simulate(schedule, plan_costs(plan)).step_seconds
    plan = replace(plan, prediction=replace(plan.prediction, step_seconds=step))
    text = page(plan, full_sources(plan))
    assert 200_000 < len(text.encode()) < 1_000_000
    data = re.search(r'id="schedule-data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    ranks = json.loads(data.group(1))["ranks"]
    computing = [sum(event[5] == 0 and event[4] >= 0 for event in rank["events"]) for rank in ranks]
    assert computing == [2 * 8 * 16] * 16


def test_a_notebook_gets_a_fragment_with_figures_and_tables() -> None:
    text = plan_notebook(drawn_plan())
    outline = Outline(text)
    assert outline.wrong == []
    assert "<script" not in text
    assert "<style" not in text
    assert "15.0 s" in text
    assert [tag for tag, _ in outline.tags].count("table") == 3


def _colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


def _luminance(colour: str) -> float:
    """https://www.w3.org/TR/WCAG21/#dfn-relative-luminance"""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_that_accessible_pages_need(scheme: str) -> None:
    """4.5 to 1 (WCAG 2.1, 1.4.3): on the paper, on marks, and on the boxes of the schedule."""
    css = full_page().split("<style>")[1].split("</style>")[0]
    light, dark = css.split("prefers-color-scheme: dark")[:2]
    colours = _colours(light)
    if scheme == "dark":
        colours |= _colours(dark.split("\n}\n")[0])
    for name in ("ink", "quiet", "exposed", "limit", "better", "worse"):
        assert _contrast(colours[name], colours["paper"]) >= 4.5, name
    assert _contrast(colours["ink"], colours["marked"]) >= 4.5
    for name in ("forward", "backward", "weight"):
        for box in (name, f"{name}-odd"):
            assert _contrast("#1c1c1a", colours[box]) >= 4.5, box
    assert _contrast(colours["bubble"], colours["paper"]) > 1.2
