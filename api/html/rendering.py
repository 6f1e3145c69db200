"""Rendering of HTML templates: one environment for all pages, with filters that format figures.

In: the name of a template and its values. Out: self-contained HTML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from autoparallel.analysis.facts import MEMORY_MEANINGS
from autoparallel.options.words import (
    bytes_text,
    count_text,
    names_text,
    percent_text,
    ranks_text,
    rate_text,
    seconds_text,
)
from autoparallel.planner.summary import mesh_text
from autoparallel.report.comparison import change_text
from autoparallel.report.tables import stages_text

TEMPLATES = Path(__file__).parent / "templates"

MEMORY_LOOKS = {
    "parameters": "fill-c1",
    "master weights": "fill-c2",
    "versions": "fill-c8",
    "gradients": "fill-c3",
    "optimizer": "fill-c4",
    "gathered": "fill-c6",
    "activations": "fill-c5",
    "other": "fill-c8",
}
"""CSS class of each memory category; other categories have ``OTHER_MEMORY``."""

OTHER_MEMORY = "fill-c7"

TIME_LOOKS = {
    "compute": "fill-c1",
    "communication within the stage": "fill-exposed",
    "sends to the next stage": "fill-c6",
    "gradient synchronization": "fill-c3",
    "optimizer": "fill-c4",
    "waiting for other stages": "fill-wait",
    "other": "fill-wait",
}
"""CSS class of each purpose of a step's seconds, in the order of drawing."""


def render(name: str, values: Mapping[str, Any]) -> str:
    """Render the HTML template ``name`` with ``values``."""
    return _environment().get_template(name).render(**values)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        seconds=seconds_text,
        bytes=bytes_text,
        count=count_text,
        percent=percent_text,
        rate=rate_text,
        ranks=ranks_text,
        names=names_text,
        json=_json,
        mesh=mesh_text,
        stages=stages_text,
        change=change_text,
        wide=lambda share: f"{100 * share:.2f}%",
    )
    made.globals.update(
        memory_looks=MEMORY_LOOKS, memory_meanings=MEMORY_MEANINGS, time_looks=TIME_LOOKS
    )
    made.globals["include_text"] = lambda name: Markup((TEMPLATES / name).read_text("utf-8"))
    return made


def _json(value: Any) -> Markup:
    """Return JSON for a script element, escaped so that no text can close the element."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))
