"""Figures of devices and links, read from tables and checked field by field.

In: a table of TOML or JSON and the place where it stands, for errors. Out: a ``Device`` or a
``Link``. Sizes and rates may be texts as people write them: ``80GB`` is 80e9 bytes, ``79.6GiB``
that many times 2**30 bytes. Cluster files and the files of presets are both read here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from math import isfinite
from typing import Any

from .cluster import OVERLAPPED_COLLECTIVES, ClusterError, Device, Link
from .given_text import shortened
from .tf32 import FAMILIES

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b|bit)\s*(/s)?\s*", re.IGNORECASE)

LARGEST = 1e30
"""Largest number that is accepted for any figure; realistic rates are at most 1e18."""

Convert = Callable[[Any, str], Any]
"""Function that converts a table's value to a field's value; its second argument is the value's
location, for errors."""


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as ``"70GB"`` or ``"70 GiB"`` states. Raises ValueError.

    >>> parse_bytes("1.5 KiB")
    1536
    """
    number, per_second = _parse_quantity(text)
    if per_second:
        raise ValueError(f"{text!r} is a rate: expected bytes, such as 70GB or 64GiB")
    return round(number)


def parse_rate(text: str) -> float:
    """Return the bytes per second that a text states, in bytes (``"50GB/s"``) or in bits
    (``"400Gbit/s"``). Raises ValueError.

    >>> parse_rate("400Gbit/s")
    50000000000.0
    """
    number, per_second = _parse_quantity(text)
    if not per_second:
        raise ValueError(f"{text!r} is not a rate: expected one such as 50GB/s or 400Gbit/s")
    return number


def _parse_quantity(text: str) -> tuple[float, bool]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity: expected a number and a unit, such as 70GB")
    number, prefix, is_binary, unit, per_second = match.groups()
    thousand = 1024 if is_binary else 1000
    in_bytes = float(number) * thousand ** " kmgt".index(prefix.lower() or " ")
    return (in_bytes / 8 if unit.lower() == "bit" else in_bytes), per_second is not None


def read_device(table: Mapping[str, Any], at: str) -> Device:
    """Return the device whose figures a table (of a TOML file) gives in full. ``at``: the table's
    location, for errors. Raises ``ClusterError``."""
    values = read_fields(table, DEVICE_FIELDS, at)
    values.setdefault("usable_memory_bytes", values.get("memory_bytes"))
    _check_required(values, Device, at)
    if not values["peak_flops"]:
        raise ClusterError("no peak rate is given", f"{at}.peak_flops", "add { float32 = 19.5e12 }")
    return Device(**values)


def read_link(table: Mapping[str, Any], at: str) -> Link:
    """Return the link whose figures a table (of a TOML file) gives in full. ``at``: the table's
    location, for errors. Raises ``ClusterError``."""
    values = read_fields(table, LINK_FIELDS, at)
    _check_required(values, Link, at)
    return Link(**values)


def read_fields(table: Mapping[str, Any], known: Mapping[str, Convert], at: str) -> dict[str, Any]:
    """Return the values of a table by key, each converted by the function that ``known`` has for
    its key. ``at``: the table's location, for errors. Raises ``ClusterError``."""
    check_keys(table, tuple(known), at)
    return {key: known[key](value, f"{at}.{key}") for key, value in table.items()}


def check_keys(table: Mapping[str, Any], known: tuple[str, ...], at: str) -> None:
    """Raise ``ClusterError``, naming location ``at``, for a key of a table that is not in
    ``known``."""
    for key in table:
        if key not in known:
            raise ClusterError(f"unknown key {key!r}", at, f"known: {', '.join(known)}")


def _check_required(values: Mapping[str, Any], kind: type[Device] | type[Link], at: str) -> None:
    for entry in fields(kind):
        needed = entry.default is MISSING and entry.default_factory is MISSING
        if needed and values.get(entry.name) is None:
            raise ClusterError(
                f"{entry.name} is missing", at, f"add {entry.name}, or name a preset"
            )


def read_table(value: Any, at: str) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping, else raise ``ClusterError`` with location ``at``."""
    if not isinstance(value, Mapping):
        raise ClusterError(f"expected a table, found {value!r}", at)
    return value


def read_text(value: Any, at: str) -> str:
    """Return ``value`` if it is a string, else raise ``ClusterError`` with its location ``at``."""
    if not isinstance(value, str):
        raise ClusterError(f"expected a string, found {value!r}", at)
    return value


def read_count(value: Any, at: str) -> int:
    """Return ``value`` if it is a whole number ≥ 1, else raise ``ClusterError`` with location
    ``at``."""
    return _read_whole(value, at, 1, "a whole number of at least 1")


def read_num_links(value: Any, at: str) -> int:
    """Return ``value`` if it is a whole number ≥ 0, else raise ``ClusterError`` with location
    ``at``."""
    return _read_whole(value, at, 0, "a number of links")


def _read_whole(value: Any, at: str, least: int, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < LARGEST:
        raise ClusterError(f"expected {expected}, found {shortened(repr(value))}", at)
    return value


def _read_number(value: Any, at: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value < LARGEST or not isfinite(value):
        raise ClusterError(f"expected a number, found {shortened(repr(value))}", at)
    if value < 0:
        raise ClusterError(f"expected at least 0, found {value!r}", at)
    return float(value)


def _read_positive(value: Any, at: str) -> float:
    number = _read_number(value, at)
    if number <= 0:
        raise ClusterError(f"expected more than 0, found {value!r}", at)
    return number


def _read_slowdowns(value: Any, at: str) -> dict[str, float]:
    slowdowns = {}
    for key, item in read_table(value, at).items():
        if key not in OVERLAPPED_COLLECTIVES:
            known = ", ".join(OVERLAPPED_COLLECTIVES)
            raise ClusterError(f"unknown collective {key!r}", at, f"known: {known}")
        slowdowns[key] = _read_number(item, f"{at}.{key}")
        if slowdowns[key] < 1:
            raise ClusterError(f"expected at least 1, found {item!r}", f"{at}.{key}")
    return slowdowns


def _parsed(parse: Callable[[str], Any], value: Any, at: str) -> Any:
    """Return ``parse(value)`` if ``value`` is a string, else ``value`` itself. Raises
    ``ClusterError`` with location ``at`` if ``parse`` fails."""
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise ClusterError(str(error), at) from error


def _read_bytes(value: Any, at: str) -> int:
    value = _parsed(parse_bytes, value, at)
    return read_count(int(value) if isinstance(value, float) and value.is_integer() else value, at)


def _read_rate(value: Any, at: str) -> float:
    return _read_positive(_parsed(parse_rate, value, at), at)


def _read_rate_or_zero(value: Any, at: str) -> float:
    return _read_number(_parsed(parse_rate, value, at), at)


def _or_zero(convert: Convert) -> Convert:
    return lambda value, at: 0 if value == 0 else convert(value, at)


def _read_kind(value: Any, at: str) -> str:
    if value not in ("cuda", "cpu"):
        raise ClusterError(f"expected cuda or cpu, found {value!r}", at)
    return str(value)


def _read_families(value: Any, at: str) -> tuple[str, ...]:
    known = FAMILIES["all"]
    if not isinstance(value, list | tuple) or any(each not in known for each in value):
        raise ClusterError(f"expected a list of {' and '.join(known)}, found {value!r}", at)
    return tuple(sorted(set(value)))


def _map_of(convert: Convert) -> Convert:
    def convert_all(value: Any, at: str) -> dict[str, Any]:
        return {key: convert(item, f"{at}.{key}") for key, item in read_table(value, at).items()}

    return convert_all


DEVICE_FIELDS: Mapping[str, Convert] = {
    "name": read_text,
    "kind": _read_kind,
    "memory_bytes": _read_bytes,
    "usable_memory_bytes": _read_bytes,
    "memory_bytes_per_second": _read_rate,
    "peak_flops": _map_of(_read_positive),
    "efficiency": _map_of(_read_positive),
    "launch_seconds": _read_number,
    "issue_seconds": _read_number,
    "message_seconds": _read_number,
    "host_link_bytes_per_second": _read_rate_or_zero,
    "host_bytes_per_second": _read_rate_or_zero,
    "host_memory_bytes": _or_zero(_read_bytes),
    "num_units": _or_zero(read_count),
    "dollars_per_hour": _read_number,
    "tf32": _read_families,
    "slowdown": _read_slowdowns,
    "sources": _map_of(read_text),
}
LINK_FIELDS: Mapping[str, Convert] = {
    "name": read_text,
    "alpha_seconds": _read_number,
    "bytes_per_second": _read_rate,
    "source": read_text,
    "base_seconds": _read_number,
    "reduction_bytes_per_second": _read_rate_or_zero,
    "num_links": read_num_links,
    "of_links": read_num_links,
}
