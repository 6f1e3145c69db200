"""The parts that random models are made of: tables of Python text in ``parts/``.

A part keeps the shape of ``x``: ``seq`` is (rows, L, D), ``vec`` (rows, D), ``img`` (rows, C, S,
S). It begins with ``== NAME | DOMAINS | WEIGHT``; before ``--`` are lines of the constructor, after
it those of the forward. ``@`` after a name is a number of the part, ``{a|b}`` one of the texts
between the bars, and a line ``FIRST`` or ``SECOND`` the place of further parts. Losses are one a
line: ``o`` are the outputs, ``y`` classes, ``t`` numbers, ``WEIGHTS`` weights of classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent / "parts"


@dataclass(frozen=True, slots=True)
class Snippet:
    """A part of a model: lines of its constructor and of its forward."""

    name: str
    domains: tuple[str, ...]
    init: str
    forward: str
    weight: float


def read_snippets(name: str) -> tuple[Snippet, ...]:
    """Return the parts of a table."""
    found = []
    for text in (HERE / f"{name}.txt").read_text().split("\n== ")[1:]:
        head, _, body = text.strip("\n").partition("\n")
        title, domains, *weight = (word.strip() for word in head.split("|"))
        init, has_init, forward = body.partition("\n--\n")
        init, forward = (init, forward) if has_init else ("", body)
        found.append(Snippet(title, tuple(domains.split()), init, forward, float((*weight, 1)[0])))
    return tuple(found)


def read_losses(name: str) -> tuple[str, ...]:
    """Return the losses of a table."""
    lines = (HERE / f"losses_{name}.txt").read_text().splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


NORMS = read_snippets("norms")
LAYERS = read_snippets("layers")
SEQUENCE = read_snippets("sequences")
IMAGES = read_snippets("images")
GLUE = (*read_snippets("numbers"), *read_snippets("writes"), *read_snippets("buffers"))
REGIONS = read_snippets("regions")

POSITIONS, ROWS, PIXELS = read_losses("positions"), read_losses("rows"), read_losses("pixels")
