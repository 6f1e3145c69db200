"""Damaged and hostile inputs, made from good ones by a seed.

In: the text of a plan, cluster or index, a file's bytes, options. Out: the same with one to three
changes: values of other types and sizes, deep nesting, cut texts, flipped bits, control characters.
"""

from __future__ import annotations

import copy
import hashlib
import json
from random import Random
from typing import Any

VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    7,
    10**17,
    10**30,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    3.5,
    "",
    "x",
    "\x1b[31mred",
    "../../etc/passwd",
    "S(0)",
    "R",
    "\ud800",
    "a" * 100_000,
    [],
    [[]],
    {},
    {"a": 1},
    [1] * 1000,
)

WORDS = (
    "",
    "0",
    "-1",
    "1.5",
    "inf",
    "nan",
    "1e400",
    "9" * 5000,
    "-" * 5000 + "1",
    "x" * 5000,
    "é",
    "\x1b[31m",
    "a=b=c",
    ",",
    "..",
    "/",
    "/dev/null",
    "/proc/self/x",
    "none",
    "bfloat16",
    "dp=" + "9" * 400,
    "tp=0",
    "'",
    "[" * 3000,
)


def mutated_json(value: Any, random: Random, *, checksums: str = "") -> str:
    """The text of a JSON value with changes; those under the key ``checksums`` are renewed."""
    changed = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        _change(changed, random)
    if checksums and isinstance(changed, dict):
        changed.pop(checksums, None)
        changed[checksums] = {
            key: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16]
            for key, part in changed.items()
        }
    text = json.dumps(changed)
    if random.random() < 0.05:
        place = random.randrange(len(text))
        extra = random.choice(("[" * 3000, "9" * 5000, "\x00", text[place : place + 50]))
        return text[:place] + extra + text[place:]
    return text


def _change(value: Any, random: Random) -> None:
    """Change one place in a JSON value."""
    places = list(_places(value))
    holder, key = random.choice(places)
    old = holder[key]
    kind = random.random()
    if kind < 0.15 and isinstance(holder, dict):
        del holder[key]
    elif kind < 0.3 and isinstance(old, list) and old:
        holder[key] = random.choice((old * 2, old[:-1], old[::-1], old * 100))
    elif kind < 0.5 and isinstance(old, int | float):
        holder[key] = random.choice((old + 1, -old, old * 10, old * 10**9, 0))
    else:
        holder[key] = random.choice(VALUES)


def _places(value: Any) -> Any:
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def mutated_text(text: str, random: Random) -> str:
    """A text with a piece of it lost, doubled, or replaced by a hostile word."""
    for _ in range(random.choice((1, 1, 2))):
        begin = random.randrange(len(text))
        end = min(len(text), begin + random.choice((1, 2, 8, 40)))
        piece = random.choice(("", text[begin:end] * 2, random.choice(WORDS), "=", "\n", "["))
        text = text[:begin] + piece + text[end:]
    return text


def mutated_bytes(data: bytes, random: Random) -> bytes:
    """A file with flipped bits, or cut."""
    if random.random() < 0.2:
        return data[: random.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(random.choice((1, 3, 30))):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)
