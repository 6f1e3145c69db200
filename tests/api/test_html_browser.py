"""The page in a real browser: it renders, its script runs, it reads well wide and narrow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from browser import DARK, check_frames, needs_browser, probed
from pages import SECTIONS, full_page

pytestmark = needs_browser

WHAT = """
own.ticks = [...doc.querySelectorAll(".ticks span")].map((each) => each.textContent);
const said = doc.getElementById("schedule-said"), svg = doc.querySelector(".plot svg");
const forwards = [...svg.querySelectorAll("path.F")];
own.boxes = forwards.map((each) => each.getBoundingClientRect().width);
press("timeline", "ArrowRight"); own.first = said.textContent;
press("timeline", "ArrowRight"); own.second = said.textContent;
press("timeline", "ArrowDown"); own.below = said.textContent;
own.marked = !doc.querySelector(".selected").hidden;
own.before = svg.getAttribute("viewBox");
doc.querySelector("[data-zoom=in]").click(); own.zoomed = svg.getAttribute("viewBox");
press("timeline", "Home"); own.after = svg.getAttribute("viewBox");
press("memory-chart", "ArrowRight"); own.memory = doc.getElementById("memory-said").textContent;
const table = doc.querySelector("#candidates table"), head = table.tHead.rows[0].cells[1];
const steps = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[1].dataset.value));
const sorted = () => [steps(), head.getAttribute("aria-sort")];
head.querySelector("button").click(); own.ascending = sorted();
head.querySelector("button").click(); own.descending = sorted();
"""


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return probed(full_page(), WHAT, tmp_path_factory.mktemp("browser"))


def test_every_section_renders_without_errors_and_fits_the_width(
    frames: list[dict[str, Any]],
) -> None:
    check_frames(frames, SECTIONS)


def test_the_schedule_is_drawn_and_zooms(frames: list[dict[str, Any]]) -> None:
    for found in frames:
        assert found["ticks"][0] == "0 s"
        assert len(found["ticks"]) >= 3
        assert min(found["boxes"]) > 100
        assert found["zoomed"] != found["before"] == found["after"]
        start, _, width, _ = map(float, found["zoomed"].split())
        assert (start, width) != (0, 100_000)
        assert width == 50_000


def test_the_keyboard_moves_over_the_schedule_and_says_what_is_there(
    frames: list[dict[str, Any]],
) -> None:
    """Rank 0 starts with the forwards of micro-batches 0 and 1; rank 1 waits for the first."""
    for found in frames:
        assert found["first"].startswith(
            "Rank 0: Forward, stage 0, micro-batch 0: 1.00 s, from 0 s"
        )
        assert "micro-batch 1: 1.00 s, from 1.00 s to 2.00 s" in found["second"]
        assert found["below"].startswith("Rank 1: ")
        assert found["marked"]


def test_the_memory_of_a_moment_is_said(frames: list[dict[str, Any]]) -> None:
    for found in frames:
        assert re.match(r"[\d.]+ m?s, \d+[FBIW]\d+: [\d.]+ GiB — ", found["memory"])


def test_the_candidates_are_sorted_by_a_click_on_a_heading(frames: list[dict[str, Any]]) -> None:
    for found in frames:
        up, ascending = found["ascending"]
        down, descending = found["descending"]
        assert (ascending, descending) == ("ascending", "descending")
        assert up == sorted(up)
        assert down == sorted(down, reverse=True)
        assert len(up) >= 4


def test_the_page_is_dark_where_the_reader_wants_it(
    frames: list[dict[str, Any]], tmp_path: Path
) -> None:
    dark = probed(full_page(), WHAT, tmp_path, DARK)
    assert frames[0]["background"] == "rgb(255, 255, 251)"
    assert dark[0]["background"] == "rgb(23, 23, 21)"
    assert dark[0]["errors"] == []
