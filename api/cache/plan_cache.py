"""The cache of this user: captured models, plans, and the memory of plans.

In: what a value follows from, and the value or how to make it. Out: the value, from the file where
it is there. The file is in the user's folder for caches, or in ``AUTOPARALLEL_CACHE``. A key is
SHA-256 of the text of everything that the value follows from, so nothing has to be invalidated: a
value that was kept for something else is not found.

Values are bytes that ``codec`` writes: JSON and arrays of numbers. Pickle would be shorter
here but runs whatever a file says, and caches lie in shared folders and travel in images.

Every key holds the version of what made the value: a hash of the package's own files, torch, the
libraries that solve, Python. Values of another version are therefore never found; the command
reports how many there are, and they are removed as the file reaches its limit.
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
from autoparallel.cache.codec import Codec, CodecError
from autoparallel.cache.store import FileShelf, clear
from autoparallel.planner.errors import MachineError
from autoparallel.planner.graph import Blocks, Graph, Node, TensorSpec

VARIABLE = "AUTOPARALLEL_CACHE"
FILE = "planner.sqlite"

MOST_BYTES = 512 * 2**20
"""The file's limit: some hundreds of models."""

LIBRARIES = ("numpy", "highspy")
"""What computes and solves besides this package and torch."""

ORDER = ("capture", "plan", "memory")
"""What is kept, in the order in which a command needs it."""

MISSING: Any = object()
"""What ``Cache.get`` returns where nothing is kept; None is a value."""


class UnkeyedError(Exception):
    """A key would hold what has no text of its own (a function); no user sees this error."""


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
    """Values by key in a file.

    ``base`` is what all of them depend on. Values are counted by their names (``ORDER``).
    """

    shelf: FileShelf | None = None
    base: str = ""
    reused: Counter[str] = field(default_factory=Counter, compare=False)
    made: Counter[str] = field(default_factory=Counter, compare=False)
    faults: Counter[str] = field(default_factory=Counter, compare=False)

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


def default_folder(environment: Mapping[str, str] = os.environ, system: str = sys.platform) -> Path:
    """``AUTOPARALLEL_CACHE``, or the folder where the system keeps users' caches.

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
    """A hash of the package's own files: code, and the data that prices come from."""

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


def version() -> str:
    """What makes values here, in words; equal for equal code."""
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
    """The cache of one command. ``values`` is what ``make_plan`` takes."""

    values: Cache = NO_CACHE
    shelf: FileShelf | None = None

    def report(self) -> str:
        """What was reused, ignored and faulty, in a line; empty where nothing is to be said."""
        if self.shelf is None:
            return ""
        parts = [self._reused(), self._ignored()]
        faults = self.shelf.faults + self.values.faults
        parts += [text for text in map(_fault, faults.items()) if text]
        return "; ".join(part for part in parts if part)

    def _reused(self) -> str:
        reused, made = self.values.reused, self.values.made
        named = [name for name in ORDER if reused[name]]
        counts = [f"{reused[name]:,} of {reused[name] + made[name]:,} {name}" for name in named]
        return f"reused {', '.join(counts)}" if counts else ""

    def _ignored(self) -> str:
        """How many values other versions left, where this one has none yet."""
        assert self.shelf is not None
        others = self.shelf.origins()
        if not others or self.shelf.origin in others:
            return ""
        (latest, *_), number = others, sum(others.values())
        return f"a cache of another version ignored ({number:,} values; {_change(latest)})"


def _change(other: str) -> str:
    """What differs from another version, by name.

    >>> _change("none")
    'unlike autoparallel, torch, numpy, highspy, python'
    """
    theirs = dict(part.rpartition(" ")[::2] for part in other.split(", "))
    own = dict(part.rpartition(" ")[::2] for part in version().split(", "))
    return "unlike " + ", ".join(name for name in own if theirs.get(name) != own[name])


def _fault(item: tuple[str, int]) -> str:
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
    """The user's cache for one command; what is found is written when the block ends.

    It is written too where the block ends in an error or is interrupted: all of it is right.
    """
    if not wanted:
        yield PlanCache()
        return
    shelf = FileShelf(cache_file(), version(), most_bytes)
    made = PlanCache(Cache(shelf, digest(shelf.origin)), shelf)
    try:
        yield made
    finally:
        shelf.close()


@dataclass(frozen=True, slots=True)
class Contents:
    """What a cache's file holds. ``values`` are by version, this one's name is ``own``."""

    path: Path
    num_bytes: int
    values: Mapping[str, int]
    own: str
    faults: Counter[str]


def contents() -> Contents:
    """What the user's cache holds."""
    shelf = FileShelf(cache_file(), version(), MOST_BYTES)
    values = shelf.origins()
    size = shelf.num_bytes()
    shelf.close()
    return Contents(shelf.path, size, values, shelf.origin, shelf.faults)


def clear_cache() -> int:
    """Removes the user's cache; the bytes that it had. Raises MachineError AP710."""

    try:
        return clear(cache_file())
    except OSError as error:
        raise MachineError(
            "AP710", "the cache cannot be removed", why=str(error.strerror),
            where=str(cache_file()),
        ) from error  # fmt: skip
