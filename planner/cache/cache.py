"""What earlier searches found, under hashes of everything that it depends on.

In: parts of a key, a value or how to make it. Out: the value, from the shelf where it lies
there. A key is SHA-256 of the text of all that the value follows from: the graph node by node,
the micro-batch, the mesh with its groups' and devices' figures, precision, optimizer, forced
choices, measurements, and the version of the code and of torch. So nothing ever has to be
invalidated: what was kept for something else is not found. Only what is a function of its key
is kept, so a search with a cache gives bit for bit the plan of one without.

Where values lie is the shelf's business (``api/cache.py`` has one of files); it holds bytes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..graph import Blocks, Graph, Node, TensorSpec
from .codec import Codec, CodecError

MISSING: Any = object()
"""What ``Cache.get`` returns where nothing is kept; None is a value."""

KINDS, SOLUTIONS, PROGRAMS = "tables", "solutions", "programs"
"""What is kept: the decision tables of kinds of blocks, solutions of runs, integer programs."""


class Shelf(Protocol):
    """Where bytes lie by key."""

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, value: bytes) -> None: ...

    def news(self) -> Mapping[str, bytes]:
        """What was put since this was asked last, in this process or the one it is a fork of."""
        ...


class UnkeyedError(Exception):
    """A key would hold what has no text of its own (a function); caught inside the planner."""


def digest(*parts: object) -> str:
    """A hash of the parts' texts. Raises ``UnkeyedError``.

    >>> digest(1, "a") == digest(1, "a"), digest(1, "a") == digest("1", "a")
    (True, False)
    """
    return _hash(repr(part) for part in parts)


def _hash(texts: Iterable[str]) -> str:
    made = hashlib.sha256()
    for text in texts:
        if " at 0x" in text:
            raise UnkeyedError(text[:80])
        made.update(text.encode())
        made.update(b"\x00")
    return made.hexdigest()[:32]


def graph_digest(graph: Graph, blocks: Blocks) -> str:
    """A hash of everything in a graph that a price can depend on, and of its blocks.

    Left out is where in the user's files a node was written. Raises ``UnkeyedError`` where an
    op's work is given by a function of the user's.
    """
    specs: dict[tuple[TensorSpec, ...], str] = {}

    def text(node: Node) -> str:
        known = specs.get(node.outputs)
        if known is None:
            known = specs[node.outputs] = repr(node.outputs)
        own = (node.name, node.kind, node.op, node.args, node.kwargs, node.module, node.rule)
        return f"{own!r}{known}{node.fused or ''}"

    rest = (
        graph.loss, graph.batch_size, graph.batch_dims, graph.tied, graph.updates,
        graph.accumulation, blocks.blocks,
    )  # fmt: skip
    return _hash((*map(text, graph.nodes), *map(repr, rest)))


@dataclass(frozen=True)
class Cache:
    """Values on a shelf. ``base`` is what all of them depend on; counts are by what is kept."""

    shelf: Shelf | None = None
    base: str = ""
    reused: Counter[str] = field(default_factory=Counter, compare=False)
    made: Counter[str] = field(default_factory=Counter, compare=False)
    faults: Counter[str] = field(default_factory=Counter, compare=False)

    def under(self, *parts: object) -> Cache:
        """The same shelf for values that depend on some more; none where that has no text."""
        if self.shelf is None:
            return self
        try:
            return replace(self, base=digest(self.base, *parts))
        except UnkeyedError:
            return replace(self, shelf=None)

    def get(self, what: str, codec: Codec, *parts: object) -> Any:
        """What is kept, or ``MISSING``. Bytes that are damaged count as not there."""
        if self.shelf is None:
            return MISSING
        blob = self.shelf.get(digest(self.base, what, *parts))
        if blob is not None:
            try:
                found = codec.decode(blob)
            except CodecError:
                self.faults["damaged"] += 1
            else:
                self.reused[what] += 1
                return found
        self.made[what] += 1
        return MISSING

    def put(self, value: Any, what: str, codec: Codec, *parts: object) -> None:
        """Keeps a value, unless it holds what cannot be written."""
        if self.shelf is None:
            return
        try:
            self.shelf.put(digest(self.base, what, *parts), codec.encode(value))
        except CodecError:
            self.faults["unwritable"] += 1

    def kept(self, make: Callable[[], Any], what: str, codec: Codec, *parts: object) -> Any:
        """What is kept; else what ``make`` makes, which then is."""
        found = self.get(what, codec, *parts)
        if found is MISSING:
            found = make()
            self.put(found, what, codec, *parts)
        return found


NO_CACHE = Cache()
"""Keeps nothing."""
