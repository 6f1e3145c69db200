"""List of the rules for readers: each op's annotation, and its possible splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..graph.graph import OpRule
from .annotation import Pattern, parse
from .table import ALONG, ANNOTATED, LOSSES, REDUCTIONS, RULES


@dataclass(frozen=True, slots=True)
class RuleText:
    """Texts about an op's rule. ``annotation`` is empty if it depends on arguments: see
    ``splits``."""

    op: str
    annotation: str
    splits: str


def list_rules(registered: Mapping[str, OpRule] | None = None) -> tuple[RuleText, ...]:
    """Return the rules of all ops, by name; ``registered`` has the user's rules by op path."""
    found = [_described(name, text) for name, text in RULES]
    for path, rule in (registered or {}).items():
        found.append(RuleText(path, rule.annotation, describe_splits(rule.annotation)))
    return tuple(sorted(found, key=lambda each: each.op))


def _described(name: str, text: str) -> RuleText:
    text = text.strip()
    if name in ANNOTATED:
        return RuleText(name, text, describe_splits(text))
    if name in ALONG:
        partial = "; passes partial sums" if ALONG[name][2] else ""
        return RuleText(name, text, f"any dim but the one it works along{partial}")
    if name in REDUCTIONS:
        is_sum = REDUCTIONS[name][1]
        reduced = "any dim; a reduced one gives partial sums" if is_sum else "any dim that stays"
        return RuleText(name, text, reduced)
    if name in LOSSES:
        return RuleText(name, text, "any dim; the loss is then a partial sum")
    return RuleText(name, "", text.replace("``", "").rstrip("."))


def describe_splits(annotation: str) -> str:
    """Describe the splits that an annotation offers on one mesh axis.

    >>> describe_splits("*b i, o i + o -> *b o")
    '*b, o; i gives partial sums; passes partial sums'
    """
    pattern = parse(annotation)
    kept, summed = _letters(pattern)
    parts = ["any dim" if kept == ["*"] else ", ".join(kept) if kept else ""]
    if summed and (pattern.terms or pattern.sums):
        parts.append(f"{', '.join(summed)} gives partial sums")
    if pattern.terms:
        parts.append("passes partial sums")
    return "; ".join(part for part in parts if part) or "nothing"


def _letters(pattern: Pattern) -> tuple[list[str], list[str]]:
    """Return the letters that every output has, and the letters missing in some output."""
    listed = dict.fromkeys(token for operand in pattern.inputs for token in operand if token != "_")
    kept = [token for token in listed if all(token in output for output in pattern.outputs)]
    return kept, [token for token in listed if token not in kept]
