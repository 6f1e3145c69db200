"""File of the cache: bytes by key in SQLite, for several processes at once.

In: a path, the versions that make the values, a size limit. Out: a store for ``plan_cache.Cache``.
New values stay in memory until ``write`` or ``close`` writes them in one transaction, so a reader
sees all or none of them, and an interrupted run leaves the file unchanged. Every row has a
checksum; a file of another format is renamed. If the file would exceed its limit, the least
recently used values are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

FORMAT = 1
LOCK_SECONDS = 10.0
"""Seconds to wait for another process's transaction."""

KEPT_SHARE = 0.8
"""Share of the size limit that values may fill after a removal, so that removals are rare."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS entry (
    key TEXT PRIMARY KEY, value BLOB NOT NULL, checksum TEXT NOT NULL, origin TEXT NOT NULL,
    bytes INTEGER NOT NULL, used REAL NOT NULL
) WITHOUT ROWID;
"""


@dataclass
class SqliteStore:
    """Store of bytes by key in the SQLite file ``path``, limited to ``most_bytes``.

    ``origin`` names the versions of this process's code; ``faults`` counts errors by reason.
    """

    path: Path
    origin: str
    most_bytes: int
    faults: Counter[str] = field(default_factory=Counter)
    _new: dict[str, bytes] = field(default_factory=dict, repr=False)
    _read: set[str] = field(default_factory=set, repr=False)
    _reader: sqlite3.Connection | None = field(default=None, repr=False)
    _inherited: list[sqlite3.Connection] = field(default_factory=list, repr=False)
    _process: int = field(default_factory=os.getpid, repr=False)
    _is_closed: bool = False

    def get(self, key: str) -> bytes | None:
        """Return the bytes stored under a key; None if missing or damaged."""
        if key in self._new:
            return self._new[key]
        row = None
        with self._count_faults():
            reader = self._open_reader()
            query = "SELECT value, checksum FROM entry WHERE key = ?"
            row = reader.execute(query, (key,)).fetchone() if reader is not None else None
        if row is None:
            return None
        value, checksum = row
        if not isinstance(value, bytes) or checksum != _checksum(value):
            self.faults["damaged values"] += 1
            return None
        self._read.add(key)
        return value

    def put(self, key: str, value: bytes) -> None:
        self._new[key] = value

    def origins(self) -> Mapping[str, int]:
        """Count the values by the code versions that made them, the most recently used first."""
        found: dict[str, int] = {}
        with self._count_faults():
            reader = self._open_reader()
            query = "SELECT origin, COUNT(*) FROM entry GROUP BY origin ORDER BY MAX(used) DESC"
            found = dict(reader.execute(query).fetchall()) if reader is not None else {}
        return found

    def num_bytes(self) -> int:
        """Return the total bytes of all values."""
        total = 0
        with self._count_faults():
            reader = self._open_reader()
            if reader is not None:
                total = reader.execute("SELECT COALESCE(SUM(bytes), 0) FROM entry").fetchone()[0]
        return total

    def close(self) -> None:
        """Do as ``write``, then close the file's connection."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self.write()

    def write(self) -> None:
        """Write new values to the file, mark read values as used, and enforce the size limit."""
        if not self._new and not self._read:
            return
        with self._count_faults(), contextlib.closing(_writer(self.path)) as writer:
            now = time.time()
            rows = [
                (key, value, _checksum(value), self.origin, len(value), now)
                for key, value in self._new.items()
            ]
            with writer:
                writer.execute("BEGIN IMMEDIATE")
                writer.executemany("INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?, ?)", rows)
                writer.executemany(
                    "UPDATE entry SET used = ? WHERE key = ?", [(now, key) for key in self._read]
                )
                _shrink(writer, self.most_bytes)
        self._new, self._read = {}, set()

    def _open_reader(self) -> sqlite3.Connection | None:
        """Return a connection for reading; None if there is no file.

        A connection must be neither used nor closed in a fork of the process that opened it.
        """
        if self._process != os.getpid():
            self._inherited += [self._reader] if self._reader is not None else []
            self._reader, self._process = None, os.getpid()
        if self._reader is None and self.path.exists():
            self._reader = _connect(self.path)
        return self._reader

    @contextmanager
    def _count_faults(self) -> Iterator[None]:
        """Count an error that makes the file unusable as a fault inside the context, and continue.

        A file that is no SQLite database is renamed, not deleted, as it may not be the cache's.
        """
        try:
            yield
        except sqlite3.OperationalError as error:
            self.faults[f"the file cannot be used ({error})"] += 1
        except sqlite3.DatabaseError:
            self.faults["a damaged file, put aside"] += 1
            if self._reader is not None:
                self._reader.close()
                self._reader = None
            with contextlib.suppress(OSError):
                os.replace(self.path, self.path.with_suffix(".damaged"))
        except OSError as error:
            self.faults[f"the folder cannot be used ({error.strerror})"] += 1


def _checksum(value: bytes) -> str:
    return hashlib.blake2b(value, digest_size=8).hexdigest()


def _connect(path: Path) -> sqlite3.Connection:
    """Open a connection to a cache file. Raises ``sqlite3.DatabaseError`` for other files."""
    connection = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, FORMAT):
            raise sqlite3.OperationalError(f"its format is {version}, not {FORMAT}")
        if version == 0:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(SCHEMA)
            connection.execute(f"PRAGMA user_version = {FORMAT}")
            connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _writer(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    return _connect(path)


def _shrink(writer: sqlite3.Connection, most_bytes: int) -> None:
    """Remove the least recently used values if all values exceed ``most_bytes``."""
    total = writer.execute("SELECT COALESCE(SUM(bytes), 0) FROM entry").fetchone()[0]
    if total <= most_bytes:
        return
    goal, gone = total - KEPT_SHARE * most_bytes, []
    for key, size in writer.execute("SELECT key, bytes FROM entry ORDER BY used, key"):
        if goal <= 0:
            break
        gone.append((key,))
        goal -= size
    writer.executemany("DELETE FROM entry WHERE key = ?", gone)


def clear(path: Path) -> int:
    """Remove the cache file and return its size in bytes. Raises ``OSError``."""
    size = path.stat().st_size if path.exists() else 0
    path.unlink(missing_ok=True)
    return size
