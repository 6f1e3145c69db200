"""Plan files: JSON with sorted keys, layouts as text, and a checksum per section.

``loads(dumps(plan)) == plan``. A file that was cut, edited or written with another schema is
refused; the error names the wrong key. Values are decoded by the types of the plan's fields.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..cost_model.cluster.cluster import Cluster
from ..cost_model.cluster.cluster_file import from_dict, to_dict
from ..cost_model.cluster.given_text import check_texts, parse_json
from .errors import PlanError
from .graph.layout import Layout, Placement, format_layout, parse_layout
from .graph.state_sharding import joint_groups
from .plan import OMITTED, SCHEMA, Plan

CHECKSUMS = "checksums"


def dumps(plan: Plan) -> str:
    """Return a plan as the text of a plan file."""
    return json.dumps(to_table(plan), indent=1, sort_keys=True) + "\n"


def to_table(plan: Plan) -> dict[str, Any]:
    """Return the contents of a plan's file as JSON values."""
    table: dict[str, Any] = encode(plan)
    return table | {CHECKSUMS: _checksums(table)}


def loads(text: str, where: str = "plan") -> Plan:
    """Parse the text of a plan file; errors name ``where`` as the file.

    Raises ``PlanError``: AP501 no JSON, AP502 another schema, AP503 a key is missing or unknown,
    AP504 a bad value, AP505 a section was changed.
    """
    table = _parse(text, where)
    schema = table.get("schema")
    if schema != SCHEMA:
        raise PlanError(
            "AP502",
            f"the plan has schema {schema!r}, but this version reads {SCHEMA}",
            where=where,
            fix="plan again",
        )
    written = table.pop(CHECKSUMS, None)
    try:
        plan: Plan = decode(table, Plan, "")
        _check_layouts(plan)
    except _Damage as damage:
        raise PlanError(
            damage.code,
            f"the plan is damaged at {damage.key!r}",
            why=damage.why,
            where=where,
            fix="plan again",
        ) from damage
    for key, checksum in _checksums(table).items():
        found = written.get(key) if isinstance(written, dict) else None
        if found != checksum:
            raise PlanError(
                "AP505",
                f"the plan was changed by hand at {key!r}",
                why=f"its checksum is {checksum}, the file says {found}",
                where=where,
                fix="plan again; --parallel fixes choices",
            )
    return plan


def _check_layouts(plan: Plan) -> None:
    """Raise ``_Damage`` if a layout does not have one placement per axis of its stage's mesh, or if
    its ranks do not form groups of ``shard_degree`` neighbours."""
    for at, stage in enumerate(plan.stages):
        _require(
            not stage.shard_degree or joint_groups(stage.mesh, stage.shard_degree) is not None,
            f"stages[{at}].shard_degree",
            f"{stage.shard_degree} ranks are no part of the mesh {stage.mesh.shape}",
        )
        for name, node in stage.layouts.items():
            for layout in (*node.inputs, *node.outputs):
                _require(
                    len(layout) == len(stage.mesh.axes),
                    f"stages[{at}].layouts.{name}",
                    f"{format_layout(layout)!r} is not a layout on {len(stage.mesh.axes)} axes",
                )


class _Damage(Exception):  # noqa: N818 — a signal inside this file, not an error of its own
    def __init__(self, code: str, key: str, why: str) -> None:
        super().__init__(code, key, why)
        self.code, self.key, self.why = code, key, why


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        table = parse_json(text)
        check_texts(table)
    except ValueError as error:
        raise PlanError(
            "AP501", "the plan is not JSON", why=str(error), where=where, fix="plan again"
        ) from error
    if isinstance(table, dict) and table.keys() == {"schema", "result"}:
        table = table["result"]  # of a command's --json
    if not isinstance(table, dict) or "schema" not in table:
        raise PlanError(
            "AP501",
            f"{where} is not a plan",
            why="it has no key named schema",
            where=where,
            fix="autoparallel plan TARGET -o plan.json makes one",
        )
    return table


def _checksums(table: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
        for key, value in table.items()
        if key != CHECKSUMS
    }


def encode(value: Any) -> Any:
    """Convert dataclasses, sequences and mappings to JSON values."""
    if isinstance(value, Cluster):
        return to_dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        items = ((field, getattr(value, field.name)) for field in fields(value))
        return {
            field.name: encode(item)
            for field, item in items
            if field.name not in omitted_fields(type(value)) or item != field.default
        }
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        if value and all(isinstance(item, Placement) for item in value):
            return format_layout(tuple(value))
        return [encode(item) for item in value]
    return value


def decode(value: Any, kind: Any, key: str = "") -> Any:
    """Decode a JSON value to type ``kind``; ``key`` is its path in the file, for errors."""
    if kind is Any:
        return value
    if kind is Cluster:
        return _cluster(value, key)
    if kind == Layout:
        return _layout(value, key)
    if is_dataclass(kind):
        return _decode_dataclass(value, kind, key)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        *others, last = (each for each in arguments if each is not type(None))
        for other in others:
            with suppress(_Damage):
                return decode(value, other, key)
        return decode(value, last, key)
    if origin is Literal:
        _require(value in arguments, key, f"{value!r} is not one of {arguments}")
        return value
    if origin is tuple:
        _require(isinstance(value, list), key, f"{value!r} is not a list")
        return tuple(
            decode(item, arguments[0], f"{key}[{index}]") for index, item in enumerate(value)
        )
    if origin is not None:
        _require(isinstance(value, dict), key, f"{value!r} is not an object")
        return {name: decode(item, arguments[1], f"{key}.{name}") for name, item in value.items()}
    return _scalar(value, kind, key)


def _scalar(value: Any, kind: type, key: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float:
        _require(is_number, key, f"{value!r} is not a number")
        return float(value)
    right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    _require(right, key, f"{value!r} is not of type {kind.__name__}")
    return value


@cache
def omitted_fields(kind: Any) -> frozenset[str]:
    """Return the names of the fields that a file omits where they have their defaults."""
    return frozenset(
        field.name for field in fields(kind) if OMITTED.items() <= field.metadata.items()
    )


@cache
def _types_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode_dataclass(value: Any, kind: Any, key: str) -> Any:
    _require(isinstance(value, dict), key, f"{value!r} is not an object")
    hints = _types_of(kind)
    prefix = f"{key}." if key else ""
    for name in hints:
        if name not in value and name not in omitted_fields(kind):
            raise _Damage("AP503", prefix + name, "this key is missing")
    for name in value:
        if name not in hints:
            raise _Damage("AP503", prefix + name, "this key is unknown")
    arguments = {
        name: decode(value[name], hint, prefix + name)
        for name, hint in hints.items()
        if name in value
    }
    try:
        return kind(**arguments)
    except ValueError as error:
        raise _Damage("AP504", key, str(error)) from error


def _layout(value: Any, key: str) -> Layout:
    _require(isinstance(value, str), key, f"{value!r} is not a layout")
    try:
        return parse_layout(value)
    except ValueError as error:
        raise _Damage("AP504", key, str(error)) from error


def _cluster(value: Any, key: str) -> Cluster:
    _require(isinstance(value, dict), key, f"{value!r} is not an object")
    try:
        return from_dict(value, key)
    except (ValueError, KeyError, TypeError) as error:
        raise _Damage("AP504", key, str(error)) from error


def _require(holds: bool, key: str, why: str) -> None:
    if not holds:
        raise _Damage("AP504", key, why)
