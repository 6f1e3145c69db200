"""User's cache of captured models, plans, and the memory of plans.

In: the inputs of a value, and the value or a function that computes it. Out: the value, from the
file if it is there. The file is in the user's cache folder, or in ``AUTOPARALLEL_CACHE``. A key is
a SHA-256 of the text of all inputs, so changed inputs are never found, and nothing has to be
invalidated.

Values are stored as bytes by ``codec``: JSON and arrays of numbers. Pickle would be simpler but
runs code from the file, and caches are shared in folders and images.

Every key covers the version of the code: a hash of the package's files, torch, solver libraries,
Python. Values of other versions are thus never found; commands report their number, and they are
removed when the file reaches its size limit.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache as once
from importlib import metadata
from pathlib import Path
from typing import Any

import autoparallel
from autoparallel import cost_model, passes, planner, runtime
from autoparallel.cache.codec import Codec, CodecError, TextCodec
from autoparallel.cache.store import SqliteStore, clear
from autoparallel.planner.errors import MachineError
from autoparallel.planner.graph.graph import Blocks, Graph, Node, TensorSpec

VARIABLE = "AUTOPARALLEL_CACHE"
FILE = "planner.sqlite"

MOST_BYTES = 512 * 2**20
"""Size limit of the cache file in bytes; it holds some hundred models."""

LIBRARIES = ("numpy", "highspy")
"""Libraries that results depend on, besides this package and torch."""

ORDER = ("capture", "plan", "memory")
"""Kinds of cached values, in the order in which a command uses them."""

MISSING: Any = object()
"""Result of ``Cache.get`` for a missing value, since None may be a value."""


class UnkeyedError(Exception):
    """Error of a cache key with a part that has no text form (a function); not shown to users."""


def digest(*parts: object) -> str:
    """Return a hash of ``repr`` of all parts. Raises ``UnkeyedError`` for a function.

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
    """Return a hash of the parts of a graph that prices depend on, and of its blocks.

    Source lines of nodes are left out. Raises ``UnkeyedError`` if a user's function computes the
    work of an op.
    """
    specs: dict[tuple[TensorSpec, ...], str] = {}

    def text(node: Node) -> str:
        known = specs.get(node.outputs)
        if known is None:
            known = specs[node.outputs] = repr(node.outputs)
        own = (node.name, node.kind, node.op, node.args, node.kwargs, node.module, node.rule)
        return f"{own!r}{known}{node.fused or ''}"

    rest = (
        graph.loss,
        graph.batch_size,
        graph.batch_dims,
        graph.tied,
        graph.updates,
        graph.accumulation,
        blocks.blocks,
    )
    return _hash((*map(text, graph.nodes), *map(repr, rest)))


@dataclass(frozen=True)
class Cache:
    """Cache of captured programs, plans and simulated memory by key, in the database ``shelf``.

    ``base`` is a part of every key: the version of the code. ``reused``, ``made`` and ``faults``
    count values that were found, not found, and unusable. A cache without ``shelf`` stores nothing.
    """

    shelf: SqliteStore | None = None
    base: str = ""
    reused: Counter[str] = field(default_factory=Counter, compare=False)
    made: Counter[str] = field(default_factory=Counter, compare=False)
    faults: Counter[str] = field(default_factory=Counter, compare=False)

    def get(self, what: str, codec: Codec | TextCodec, *parts: object) -> Any:
        """Return the cached value of kind ``what`` (a capture, plan or memory) with the key
        ``parts``, decoded by ``codec``; ``MISSING`` if there is none."""
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

    def put(self, value: Any, what: str, codec: Codec | TextCodec, *parts: object) -> None:
        """Cache a value of kind ``what`` under the key ``parts``, if ``codec`` can encode it."""
        if self.shelf is None:
            return
        try:
            self.shelf.put(digest(self.base, what, *parts), codec.encode(value))
        except CodecError:
            self.faults["unwritable"] += 1

    def get_or_make(
        self, make: Callable[[], Any], what: str, codec: Codec | TextCodec, *parts: object
    ) -> Any:
        """Return the cached value with the key ``parts``; without one, call and cache ``make``."""
        found = self.get(what, codec, *parts)
        if found is MISSING:
            found = make()
            self.put(found, what, codec, *parts)
        return found


NO_CACHE = Cache()
"""Cache that stores nothing."""


def default_folder(environment: Mapping[str, str] = os.environ, system: str = sys.platform) -> Path:
    """Return the folder ``AUTOPARALLEL_CACHE``, or the system's folder for user caches.

    >>> str(default_folder({"XDG_CACHE_HOME": "/tmp/cache"}, "linux"))
    '/tmp/cache/autoparallel'
    """
    if environment.get(VARIABLE):
        return Path(environment[VARIABLE])
    if system == "win32" and "LOCALAPPDATA" in environment:
        return Path(environment["LOCALAPPDATA"]) / "autoparallel" / "cache"
    if system == "darwin":
        return Path.home() / "Library" / "Caches" / "autoparallel"
    if environment.get("XDG_CACHE_HOME"):
        return Path(environment["XDG_CACHE_HOME"]) / "autoparallel"
    return Path.home() / ".cache" / "autoparallel"


def cache_file() -> Path:
    return default_folder() / FILE


@once
def code_digest() -> str:
    """Return a hash of the package's own files, code and price data."""
    made = hashlib.sha256()
    roots = [Path(place) for place in autoparallel.__path__]
    roots += [Path(place) for room in _rooms() for place in room]
    files = {file.resolve() for root in roots for file in root.rglob("*") if _is_code(file)}
    for file in sorted(files):
        made.update(f"{file.name}\0".encode())
        made.update(file.read_bytes())
    return made.hexdigest()[:16]


def _rooms() -> list[list[str]]:

    return [list(each.__path__) for each in (cost_model, planner, passes, runtime)]


def _is_code(file: Path) -> bool:
    return file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc"


def code_version() -> str:
    """Return the versions of all code that cached values depend on, as text."""
    own = [f"autoparallel {code_digest()}", f"torch {metadata.version('torch')}"]
    own += [f"{name} {_version(name)}" for name in LIBRARIES]
    return ", ".join([*own, f"python {platform.python_version()}"])


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


@dataclass
class PlanCache:
    """Cache that a command has opened: ``values`` reads and writes the database ``shelf``."""

    values: Cache = NO_CACHE
    shelf: SqliteStore | None = None

    def report(self) -> str:
        """Count reused, ignored and damaged cached values in one line, "" if there are none."""
        if self.shelf is None:
            return ""
        parts = [self._describe_reused(), self._describe_ignored()]
        faults = self.shelf.faults + self.values.faults
        parts += [text for text in map(_describe_fault, faults.items()) if text]
        return "; ".join(part for part in parts if part)

    def _describe_reused(self) -> str:
        reused, made = self.values.reused, self.values.made
        named = [name for name in ORDER if reused[name]]
        counts = [f"{reused[name]:,} of {reused[name] + made[name]:,} {name}" for name in named]
        return f"reused {', '.join(counts)}" if counts else ""

    def _describe_ignored(self) -> str:
        """Describe the cached values that other code versions made, which are not used; "" if there
        are none, or if this version has made values too."""
        assert self.shelf is not None
        others = self.shelf.origins()
        if not others or self.shelf.origin in others:
            return ""
        (latest, *_), number = others, sum(others.values())
        return f"a cache of another version ignored ({number:,} values; {_describe_change(latest)})"


def _describe_change(other: str) -> str:
    """Name the packages whose versions differ between this process and the text ``other``.

    >>> _describe_change("none")
    'unlike autoparallel, torch, numpy, highspy, python'
    """
    theirs = dict(part.rpartition(" ")[::2] for part in other.split(", "))
    own = dict(part.rpartition(" ")[::2] for part in code_version().split(", "))
    return "unlike " + ", ".join(name for name in own if theirs.get(name) != own[name])


def _describe_fault(item: tuple[str, int]) -> str:
    reason, count = item
    known = {
        "damaged": f"{count} damaged values ignored",
        "damaged values": f"{count} damaged values ignored",
        "functions": "not used: the work of some ops is given by functions",
        "unwritable": f"{count} values that cannot be kept",
    }
    return known.get(reason, reason)


@contextmanager
def plan_cache(wanted: bool = True, most_bytes: int = MOST_BYTES) -> Iterator[PlanCache]:
    """Open the user's cache inside the context, and write new values to its file at the end.

    They are also written after an error or interrupt, since each value is complete. ``wanted``
    False gives an empty cache that stores nothing; ``most_bytes`` limits the file.
    """
    if not wanted:
        yield PlanCache()
        return
    shelf = SqliteStore(cache_file(), code_version(), most_bytes)
    made = PlanCache(Cache(shelf, digest(shelf.origin)), shelf)
    try:
        yield made
    finally:
        shelf.close()


@dataclass(frozen=True, slots=True)
class CacheContents:
    """Summary of the cache's file: ``values`` has the number of values that each code version made;
    ``own`` is this process's version."""

    path: Path
    num_bytes: int
    values: Mapping[str, int]
    own: str
    faults: Mapping[str, int]


def read_contents() -> CacheContents:
    """Return a summary of the user's cache: path, size, and number of values by code version."""
    shelf = SqliteStore(cache_file(), code_version(), MOST_BYTES)
    values = shelf.origins()
    size = shelf.num_bytes()
    shelf.close()
    return CacheContents(shelf.path, size, values, shelf.origin, shelf.faults)


def clear_cache() -> int:
    """Remove the user's cache; return its size in bytes. Raises MachineError AP710 on failure."""
    try:
        return clear(cache_file())
    except OSError as error:
        raise MachineError(
            "AP710",
            "the cache cannot be removed",
            why=str(error.strerror),
            where=str(cache_file()),
        ) from error
