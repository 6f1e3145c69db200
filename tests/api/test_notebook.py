"""A real notebook: its cells run in a kernel, and what they show is what a front end gets."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

def example_batch(global_batch, seq=None):
    return {"input": torch.zeros(global_batch, 64)}

def loss_fn(outputs, batch):
    return outputs.square().mean()
"""

CELLS = {
    "plan": "import autoparallel\n"
    "plan = autoparallel.plan('net.py', cluster='2xH100', global_batch=8)",
    "shown": "plan",
    "compared": "autoparallel.compare(plan, 'fsdp')",
    "estimated": "autoparallel.estimate('net.py', devices='H100', global_batch=8, processes=1)",
    "silent": "autoparallel.plan('net.py', cluster='2xH100', global_batch=8, progress=False)"
    ".num_microbatches",
    "frame": "plan.to_frame('candidates')",
    "described": "print(autoparallel.describe(plan, short=True))",
}


class Kernel(nbclient.NotebookClient):  # type: ignore[misc]
    """Runs a notebook and counts the messages of each kind by cell."""

    def __init__(self, notebook: Any, **options: Any) -> None:
        super().__init__(notebook, **options)
        self.counts: dict[int, Counter[str]] = {}
        self.bars: list[str] = []

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        self.counts.setdefault(cell_index, Counter())[msg["msg_type"]] += 1
        if msg["msg_type"] == "update_display_data":
            self.bars.append(msg["content"]["data"]["text/plain"])
        return super().process_message(msg, cell, cell_index)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Any]], Kernel]:
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "net.py").write_text(MODEL)
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    kernel = Kernel(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    kernel.execute()
    cells = zip(CELLS, notebook.cells, strict=True)
    return {name: cell.outputs for name, cell in cells}, kernel


def html_of(outputs: list[Any]) -> list[str]:
    """The HTML of a cell's outputs, each of which has some; warnings of libraries are left out."""
    return [each["data"]["text/html"] for each in outputs if each["output_type"] != "stream"]


def test_planning_shows_bars_that_end_in_one_line(
    ran: tuple[dict[str, list[Any]], Kernel],
) -> None:
    outputs, kernel = ran
    (line,) = html_of(outputs["plan"])
    assert line.startswith("<span")
    assert "autoparallel: cluster" in line
    assert "search" in line
    assert line.count("\n") == 0
    assert kernel.counts[0]["display_data"] == 1
    assert 3 <= kernel.counts[0]["update_display_data"] < 300
    assert any("capture" in bar and "1/1" in bar for bar in kernel.bars)


@pytest.mark.parametrize(("name", "phase"), [("compared", "capture"), ("estimated", "search")])
def test_comparisons_and_estimates_show_progress_and_a_table(
    ran: tuple[dict[str, list[Any]], Kernel], name: str, phase: str
) -> None:
    line, table = html_of(ran[0][name])
    assert f"autoparallel: {phase}" in line
    assert "<table>" in table
    assert len(table.splitlines()) < 100


def test_a_plan_is_html_and_as_text_its_short_report(
    ran: tuple[dict[str, list[Any]], Kernel],
) -> None:
    (shown,) = [each for each in ran[0]["shown"] if each["output_type"] != "stream"]
    assert '<div class="autoparallel-plan"' in shown["data"]["text/html"]
    text = shown["data"]["text/plain"]
    assert text.startswith("net.py")
    assert len(text.splitlines()) < 50


def test_no_progress_is_shown_where_none_is_wanted(
    ran: tuple[dict[str, list[Any]], Kernel],
) -> None:
    outputs, kernel = ran
    assert [each["output_type"] for each in outputs["silent"]] == ["execute_result"]
    assert kernel.counts[list(CELLS).index("silent")]["update_display_data"] == 0


def test_frames_and_the_text_of_a_report_are_as_in_a_script(
    ran: tuple[dict[str, list[Any]], Kernel],
) -> None:
    outputs, _ = ran
    assert "dataframe" in html_of(outputs["frame"])[0]
    (printed,) = outputs["described"]
    assert printed["output_type"] == "stream"
    assert "How sure" in printed["text"]
