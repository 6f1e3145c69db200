"""Types of Python as JSON Schema (draft 2020-12).

In: a type of numbers, texts, sequences, mappings, literals, unions, dataclasses and NamedTuples.
Out: its schema, in which classes are ``$defs`` by their names, described by their docstrings. A
field of a class that may be null, or that plan files omit, may be missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from autoparallel.planner.plan_file import omitted_fields

Schema = dict[str, Any]

PLAIN: Mapping[Any, Schema] = {
    str: {"type": "string"},
    Path: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    NoneType: {"type": "null"},
    Any: {},
}


def json_schema(kind: Any, known: Mapping[Any, Schema] = PLAIN) -> Schema:
    """Return the JSON Schema of a Python type. Schemas of types in ``known`` are taken from there.

    >>> json_schema(tuple[int, ...] | None)
    {'anyOf': [{'type': 'array', 'items': {'type': 'integer'}}, {'type': 'null'}]}
    """
    classes: dict[str, Schema] = {}

    def schema_of(kind: Any) -> Schema:
        origin, inner = get_origin(kind), get_args(kind)
        if kind in known:
            return known[kind]
        if origin is Literal:
            return {"enum": list(inner)}
        if origin in (Union, UnionType):
            return {"anyOf": [schema_of(each) for each in inner]}
        if origin is None:
            hints = get_type_hints(kind)
            is_class = isinstance(kind, type) and is_dataclass(kind)
            rare = omitted_fields(kind) if is_class else frozenset[str]()
            always = [
                name
                for name, hint in hints.items()
                if NoneType not in get_args(hint) and name not in rare
            ]
            classes[kind.__name__] = {
                "description": inspect.cleandoc(kind.__doc__ or "").replace("``", "`"),
                "type": "object",
                "properties": {name: schema_of(hint) for name, hint in hints.items()},
                "required": always,
            }
            return {"$ref": f"#/$defs/{kind.__name__}"}
        if issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": schema_of(inner[1])}
        if origin is tuple and inner[-1] is not ...:
            items = [schema_of(each) for each in inner]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
        return {"type": "array", "items": schema_of(inner[0])}

    found = schema_of(kind)
    return found | {"$defs": classes} if classes else found
