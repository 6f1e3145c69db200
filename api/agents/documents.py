"""The JSON documents of commands: the fields of each command's result, and its JSON Schema.

``autoparallel COMMAND --json`` prints ``{"schema": "autoparallel.COMMAND/1", "result": …}``.
``results.txt`` states the type of each command's result, then its records: name and meaning, and
fields by type. ``[type]`` is a list, ``{type}`` an object with any keys, ``type?`` may be null, and
``name?`` may be missing. Other types are ``CLASSES``. Within a version fields are only added.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from autoparallel.analysis.plan_model import Explanation
from autoparallel.cache.plan_cache import CacheContents
from autoparallel.cost_model.cluster.cluster import Cluster, Device, Link
from autoparallel.cost_model.cluster.presets import Preset
from autoparallel.cost_model.simulator.timeline import Exposed
from autoparallel.doctor.checks import Finding
from autoparallel.options.json_schema import PLAIN, Schema, json_schema
from autoparallel.options.results import schema_name
from autoparallel.planner.graph.layout import Layout
from autoparallel.planner.ops.catalog import RuleText
from autoparallel.planner.plan import Plan
from autoparallel.runtime.verify.verify import Difference
from autoparallel.systems.system import Deviation
from autoparallel.target.check import CheckedTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile(Plan):
    """Plan as it is stored in a file, with a checksum of each section by the section's name."""

    checksums: Mapping[str, str]


CLASSES: tuple[Any, ...] = (Explanation, CacheContents, Preset, Finding, RuleText, PlanFile)
CLASSES += (CheckedTarget, Device, Link, Exposed, Difference, Deviation)

TEXT = files("autoparallel.agents").joinpath("results.txt").read_text(encoding="utf-8")
_OF_COMMANDS, _OF_RECORDS = (part.splitlines() for part in TEXT.split("\n\n"))
RESULTS: Mapping[str, str] = dict(line.split(": ") for line in _OF_COMMANDS)
"""Type of each command's ``--json`` result, by command, in the notation of ``results.txt``."""

WRITTEN_AS = {**PLAIN, Layout: PLAIN[str], Cluster: {"$ref": "#/$defs/ClusterTable"}}
"""JSON Schemas of the types that plan files do not write as their dataclass fields."""


def document_schema(command: str) -> Schema:
    """Return the JSON Schema of the document that ``command`` prints with ``--json``."""
    result, classes = _schema(RESULTS[command]), dict[str, Schema]()
    named, records = {each.__name__: each for each in CLASSES}, _records()
    while missing := set(re.findall(r"#/\$defs/(\w+)", f"{result}{classes}")) - {*classes}:
        for name in sorted(missing):
            kind = named.get(name)
            classes |= json_schema(kind, WRITTEN_AS)["$defs"] if kind else {name: records[name]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"schema": {"const": schema_name(command)}, "result": result},
        "required": ["schema", "result"],
        "$defs": classes,
    }


def _records() -> dict[str, Schema]:
    """Return the JSON Schema of each record type, by name, that the package's ``results.txt`` (a
    description of the JSON results of commands) defines."""
    found: dict[str, Schema] = {}
    for line in _OF_RECORDS:
        if not line.startswith(" "):
            name, about = line.split(": ", 1)
            own: Schema = {"description": about, "type": "object", "properties": {}, "required": []}
            found[name] = own
            continue
        for names, kind in (each.split(": ") for each in line.strip().split("; ")):
            for field in names.split(", "):
                own["properties"][field.rstrip("?")] = _schema(kind)
                own["required"] += [] if field.endswith("?") else [field]
    return found


def _schema(text: str) -> Schema:
    """Return the JSON Schema of a type written as in ``results.txt``, such as ``[int]`` (list) or
    ``str?`` (a text or null)."""
    if "|" in text:
        return {"anyOf": [_schema(each) for each in text.split("|")]}
    if text.endswith("?"):
        return {"anyOf": [_schema(text[:-1]), {"type": "null"}]}
    if text.startswith("["):
        return {"type": "array", "items": _schema(text[1:-1])}
    if text.startswith("{"):
        return {"type": "object", "additionalProperties": _schema(text[1:-1])}
    plain = {"str": str, "int": int, "float": float, "bool": bool}.get(text)
    return PLAIN[plain] if plain else {"$ref": f"#/$defs/{text}"}
