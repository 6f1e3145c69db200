"""Bytes and rates as people write them: ``80GB`` is 80e9 bytes, ``79.6GiB`` is that × 2**30."""

from __future__ import annotations

import re

_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)(b|bit)\s*(/s)?\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Bytes from a text such as ``"70GB"`` or ``"70 GiB"``. Raises ValueError.

    >>> parse_bytes("1.5 KiB")
    1536
    """
    number, per_second = _parse(text)
    if per_second:
        raise ValueError(f"{text!r} is a rate: expected bytes, such as 70GB or 64GiB")
    return round(number)


def parse_rate(text: str) -> float:
    """Bytes per second from ``"50GB/s"``, or from bits: ``"400Gbit/s"``. Raises ValueError.

    >>> parse_rate("400Gbit/s")
    50000000000.0
    """
    number, per_second = _parse(text)
    if not per_second:
        raise ValueError(f"{text!r} is not a rate: expected one such as 50GB/s or 400Gbit/s")
    return number


def _parse(text: str) -> tuple[float, bool]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity: expected a number and a unit, such as 70GB")
    number, prefix, unit, per_second = match.groups()
    in_bytes = float(number) * _UNITS[prefix.lower() + "b"]
    return (in_bytes / 8 if unit.lower() == "bit" else in_bytes), per_second is not None
