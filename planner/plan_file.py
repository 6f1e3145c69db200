"""The plan as a file: JSON with sorted keys, layouts as text, a checksum per section.

``loads(dumps(plan)) == plan``. A file that was cut, edited or written by a later version is
refused, naming the wrong key; a file of an earlier schema is upgraded. Values are read by the types
of the plan's fields.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..cost_model.cluster.cluster import Cluster
from ..cost_model.cluster.cluster_file import from_dict, to_dict
from .errors import PlanError
from .layout import Layout, Placement, format_layout, parse_layout
from .plan import SCHEMA, Plan

CHECKSUMS = "checksums"


def dumps(plan: Plan) -> str:
    """Format a plan as text."""
    table = _encode(plan)
    table[CHECKSUMS] = _checksums(table)
    return json.dumps(table, indent=1, sort_keys=True) + "\n"


def loads(text: str, where: str = "plan") -> Plan:
    """Parse the text of a plan; ``where`` is the file's name for errors.

    Raises ``PlanError``: AP501 no JSON, AP502 another schema, AP503 a key is missing or unknown,
    AP504 a bad value, AP505 a section was changed.
    """
    table = _parse(text, where)
    schema = table.get("schema")
    if schema not in range(1, SCHEMA + 1):
        raise PlanError(
            "AP502",
            f"the plan has schema {schema!r}, but this version reads 1 to {SCHEMA}",
            where=where,
            fix="plan again",
        )
    written = table.pop(CHECKSUMS, None)
    try:
        plan: Plan = _decode(_upgraded(table), Plan, "")
    except _Damage as damage:
        raise PlanError(
            damage.code, f"the plan is damaged at {damage.key!r}", why=damage.why, where=where,
            fix="plan again",
        ) from damage  # fmt: skip
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


def _upgraded(table: dict[str, Any]) -> dict[str, Any]:
    """Upgrade a plan of an older schema to this schema.

    1 had no profiles, 2 no bound and no goals, 3 no unequal shares of the batch, 4 called
    ``unsharded_ops`` ``undivided``, 5 left the sums of gradients to the runtime, and had no
    gradients in half precision, nothing in host memory and no parameter servers.
    """
    table = {"unsharded_ops" if key == "undivided" else key: table[key] for key in table}
    table = {
        "goal": None, "slices": [], "compiled": False, "gradient_order": "backward",
        "offload": "none", "servers": None, **table,
    }  # fmt: skip
    if isinstance(table.get("model"), dict):
        table["model"] = {"float32_ops": "none", "gradient_dtype": "master", **table["model"]}
    schema, prediction, solver = (table.get(key) for key in ("schema", "prediction", "solver"))
    if isinstance(solver, dict):
        solver = {
            "stopped": "", "layouts_gap": None, "simplest": None, "solver": "highs",
            "is_reused": False, **solver,
        }  # fmt: skip
        table = {**table, "solver": solver}
    if schema == SCHEMA or not isinstance(prediction, dict) or not isinstance(solver, dict):
        return table
    new: dict[str, Any] = {"sources_of": {}, "profile": None} if schema == 1 else {}
    stages = table.get("stages")
    if isinstance(stages, list):
        new_of_stage: dict[str, Any] = {"shares": [], "gradient_sums": []}
        each = [{**new_of_stage, **own} if isinstance(own, dict) else own for own in stages]
        table = {**table, "stages": each}
    return {
        **table, "schema": SCHEMA, "prediction": {**new, **prediction},
        "solver": {"bound_seconds": 0.0, **solver},
    }  # fmt: skip


class _Damage(Exception):  # noqa: N818 — a signal inside this file, not an error of its own
    def __init__(self, code: str, key: str, why: str) -> None:
        super().__init__(code, key, why)
        self.code, self.key, self.why = code, key, why


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(
            "AP501", "the plan is not JSON", why=str(error), where=where, fix="plan again"
        ) from error
    if not isinstance(table, dict):
        raise PlanError("AP501", "the plan is not a JSON object", where=where, fix="plan again")
    return table


def _checksums(table: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
        for key, value in table.items()
        if key != CHECKSUMS
    }


def _encode(value: Any) -> Any:
    if isinstance(value, Cluster):
        return to_dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        if value and all(isinstance(item, Placement) for item in value):
            return format_layout(tuple(value))
        return [_encode(item) for item in value]
    return value


def _decode(value: Any, kind: Any, key: str) -> Any:
    """Decode a value of type ``kind``; ``key`` is its place in the file, for errors."""
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
        return _decode(value, next(each for each in arguments if each is not type(None)), key)
    if origin is Literal:
        _require(value in arguments, key, f"{value!r} is not one of {arguments}")
        return value
    if origin is tuple:
        _require(isinstance(value, list), key, f"{value!r} is not a list")
        return tuple(
            _decode(item, arguments[0], f"{key}[{index}]") for index, item in enumerate(value)
        )
    if origin is not None:
        _require(isinstance(value, dict), key, f"{value!r} is not an object")
        return {name: _decode(item, arguments[1], f"{key}.{name}") for name, item in value.items()}
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
def _types_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode_dataclass(value: Any, kind: Any, key: str) -> Any:
    _require(isinstance(value, dict), key, f"{value!r} is not an object")
    hints = _types_of(kind)
    prefix = f"{key}." if key else ""
    for name in hints:
        if name not in value:
            raise _Damage("AP503", prefix + name, "this key is missing")
    for name in value:
        if name not in hints:
            raise _Damage("AP503", prefix + name, "this key is unknown")
    arguments = {name: _decode(value[name], hint, prefix + name) for name, hint in hints.items()}
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
