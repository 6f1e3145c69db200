"""The comparison as a page: its figures, its structure, and how a browser shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import DARK, check_frames, needs_browser, probed
from pages import GIB, Outline, compared_items, drawn_plan

from autoparallel.analysis.compare import Item
from autoparallel.html.compared import SECTIONS, compared_notebook, compared_page
from autoparallel.html.notebooks import Comparison

WHAT = """
const table = doc.querySelector("#figures table"), heads = [...table.tHead.rows[0].cells];
const order = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent.trim());
const press_step = () => heads[1].querySelector("button").click();
press_step(); own.by_step = [order(), heads[1].getAttribute("aria-sort")];
press_step(); own.by_step_down = order();
own.points = [...doc.querySelectorAll("#picture circle")].map((each) =>
  [each.getAttribute("class"), each.getBoundingClientRect().x, each.getBoundingClientRect().y]);
own.labels = [...doc.querySelectorAll("#picture text.strong")].map((each) => each.textContent);
const width = (each) => each.getBoundingClientRect().width;
own.bars = [...doc.querySelectorAll("#memory .stack")].map((bar) =>
  [...bar.querySelectorAll("i")].map(width).reduce((sum, each) => sum + each, 0));
own.marked = [...doc.querySelectorAll("mark")].map((each) => each.textContent);
const details = doc.querySelector("details"); details.open = true;
own.opened = details.getBoundingClientRect().height;
"""


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return probed(compared_page(compared_items()), WHAT, tmp_path_factory.mktemp("compared"))


@needs_browser
def test_every_section_renders_without_errors_and_fits_the_width(
    frames: list[dict[str, Any]],
) -> None:
    check_frames(frames, tuple(SECTIONS))


@needs_browser
def test_a_click_sorts_the_items_and_the_picture_and_bars_show_them(
    frames: list[dict[str, Any]],
) -> None:
    """15 s, 18 s and 12.5 s; 55, 90 and 40 GiB: the run lies lowest and leftmost."""
    for found in frames:
        assert found["by_step"] == [["C", "A", "B"], "ascending"]
        assert found["by_step_down"] == ["B", "A", "C"]
        places = {kind.split()[1]: (x, y) for kind, x, y in found["points"]}
        assert places["run"][0] < places["plan"][0]
        assert places["run"][1] > places["plan"][1]  # downwards is faster
        assert found["labels"] == ["A", "B", "C"]
        assert len(found["bars"]) == 2
        assert all(width > 10 for width in found["bars"])
        assert found["marked"] == ["GPipe", "8 × 8"]
        assert found["opened"] > 60


@needs_browser
def test_the_page_is_dark_where_the_reader_wants_it(
    frames: list[dict[str, Any]], tmp_path: Path
) -> None:
    dark = probed(compared_page(compared_items()), WHAT, tmp_path, DARK)
    assert frames[0]["background"] == "rgb(255, 255, 251)"
    assert dark[0]["background"] == "rgb(23, 23, 21)"
    assert dark[0]["errors"] == []


def test_the_page_is_whole_alone_and_labelled() -> None:
    text = compared_page(compared_items())
    outline = Outline(text)
    assert outline.wrong == []
    sections = [own for tag, own in outline.tags if tag == "section"]
    assert [own["id"] for own in sections] == list(SECTIONS)
    ids = outline.attributes("id")
    assert len(ids) == len(set(ids))
    links = [*outline.attributes("src"), *outline.attributes("href")]
    assert all(link.startswith("#") or link == "data:," for link in links)
    for tag, own in outline.tags:
        if own.get("tabindex") == "0" or own.get("role") in ("img", "region") or tag == "svg":
            assert own.get("aria-label")
        if tag == "th":
            assert own.get("scope") in ("col", "row")
    assert "<fsdp>" not in text
    assert "&lt;fsdp&gt;" in text


def test_differences_and_what_was_measured_are_in_words() -> None:
    """18 s are 20 % more than 15 s; 15 s predicted are 6.2 % below 16 s measured."""
    outline = Outline(compared_page(compared_items()))
    texts = [text for _, text in outline.texts]
    assert "+20.0 %" in texts
    assert texts[texts.index("+20.0 %") + 1] == "worse"
    assert "-6.2 %" in texts
    assert "does not fit: 18.0 GiB too much" in texts
    assert "12.5 s" in texts


def test_equal_plans_and_runs_alone_have_pages_too() -> None:
    plan, run = Item("plan.json", drawn_plan()), compared_items()[2]
    assert "The plans chose the same." in compared_page((plan, plan))
    assert "no parts are known" in compared_page((run, replace(run, name="other.jsonl")))


def test_a_comparison_shows_itself_in_notebooks_as_text_and_to_pandas() -> None:
    found = Comparison(compared_items())
    text = found._repr_html_()
    assert text == compared_notebook(found.items)
    assert Outline(f"<html>{text}</html>").wrong == []
    assert "+20.0 %" in text
    assert "+20.0 %" in str(found)
    assert "Figures" in str(found)
    assert found.page() == compared_page(found.items)
    frame = found.to_frame()
    assert list(frame["name"]) == ["runs/plan.json", "<fsdp>", "run.jsonl"]
    assert frame["step_seconds_difference"][1] == pytest.approx(0.2)
    assert frame["measured_step_seconds"][0] == 16.0
    assert frame["memory_bytes"][2] == 40 * GIB
    json.loads(frame.to_json())
