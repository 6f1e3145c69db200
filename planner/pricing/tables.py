"""The tables of a kind of block as a few arrays, and back.

In: a ``KindModel``. Out: a ``Packed`` of it, which the codec writes; and again a ``KindModel``,
equal in every figure. A choice is a row of each array; its members' layouts are numbers into a
list of the distinct ones, which is most of what there is to save: ten thousands of choices share
a few hundred layouts. What a choice keeps is found again when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..cache.codec import Codec
from ..integer_programs.program import Ints
from ..layout import Layout, format_layout, parse_layout
from ..strategy import NodeLayout
from .decisions import Choice, Decision, Floats
from .stage_model import Held, KindModel
from .structure import Edge, Use

Text = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""A ``NodeLayout``: the layouts of inputs and outputs as text, and the labels."""


@dataclass(frozen=True)
class PackedDecision:
    """``layouts`` are numbers by choice: ``[member, choice]``."""

    name: str
    members: tuple[str, ...]
    layouts: Ints
    seconds: Floats
    states: Floats
    spared_seconds: Floats


@dataclass(frozen=True)
class Packed:
    """``texts`` are the distinct layouts of nodes."""

    kind: str
    decisions: tuple[PackedDecision, ...]
    edges: tuple[Edge, ...]
    has_parameters: bool
    texts: tuple[Text, ...]


CODEC = Codec((Packed, PackedDecision, Edge, Use))


def pack(model: KindModel) -> Packed:
    """``unpack`` gives the model back."""
    texts: dict[NodeLayout, int] = {}
    decisions = tuple(
        PackedDecision(
            decision.name, decision.members, _layout_numbers(decision, texts),
            decision.seconds, decision.states, decision.skipped_seconds,
        )
        for decision in model.decisions
    )  # fmt: skip
    written = tuple(map(_text, texts))
    return Packed(model.kind, decisions, model.edges, model.has_parameters, written)


def _layout_numbers(decision: Decision, texts: dict[NodeLayout, int]) -> Ints:
    known: dict[int, int] = {}  # by identity first: hashing a layout takes longer

    def number(layout: NodeLayout) -> int:
        found = known.get(id(layout))
        if found is None:
            found = known[id(layout)] = texts.setdefault(layout, len(texts))
        return found

    rows = [[number(c.layouts[name]) for c in decision.choices] for name in decision.members]
    return np.array(rows, dtype=np.int64)


def _text(layout: NodeLayout) -> Text:
    inputs, outputs = map(format_layout, layout.inputs), map(format_layout, layout.outputs)
    return tuple(inputs), tuple(outputs), layout.labels


@lru_cache(maxsize=4096)
def _layout(text: str) -> Layout:
    return parse_layout(text)


def unpack(
    packed: Packed, holder: Callable[[Sequence[Decision]], Callable[[int, int], Held]]
) -> KindModel:
    """The model again; ``holder`` makes its ``held``."""
    layouts = [
        NodeLayout(tuple(map(_layout, inputs)), tuple(map(_layout, outputs)), labels)
        for inputs, outputs, labels in packed.texts
    ]
    decisions = tuple(
        Decision(
            own.name, own.members, _choices(own, layouts),
            own.seconds, own.states, own.spared_seconds,
        )
        for own in packed.decisions
    )  # fmt: skip
    return KindModel(
        packed.kind,
        decisions,
        {name: at for at, decision in enumerate(decisions) for name in decision.members},
        packed.edges,
        packed.has_parameters,
        holder(decisions),
    )


def _choices(own: PackedDecision, layouts: Sequence[NodeLayout]) -> tuple[Choice, ...]:
    columns = [[layouts[number] for number in row] for row in own.layouts.tolist()]
    return tuple(
        Choice(dict(zip(own.members, row, strict=True))) for row in zip(*columns, strict=True)
    )
