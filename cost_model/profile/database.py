"""Measurements on disk: one SQLite file, safe with several writers.

In: measurements of ops and of transfers, each with the environment it was taken in. Out:
the same, by environment. The key of an op is environment (device, driver, torch, threads)
and ``OpCase.key()`` (op, shapes, dtypes, arguments); that of a transfer is environment,
level, library, kind, ranks, hosts and bytes. Every ``put`` is a transaction of its own, so an
interrupted run keeps its measurements. ``export_file`` writes lines of JSON, which any
other database can merge.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

from .case import OpCase, case_to_json
from .environment import Environment as Environment
from .environment import environment_of as environment_of
from .records import DatabaseError as DatabaseError
from .records import ImportCounts as ImportCounts
from .records import Measurement as Measurement
from .records import Record, case_of, read_records, write_records
from .records import Transfer as Transfer

SCHEMA_VERSION = 1

_BUSY_SECONDS = 30.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS environments (
    id INTEGER PRIMARY KEY,
    device TEXT NOT NULL, driver TEXT NOT NULL, torch TEXT NOT NULL, threads INTEGER NOT NULL,
    UNIQUE (device, driver, torch, threads));
CREATE TABLE IF NOT EXISTS ops (
    environment INTEGER NOT NULL REFERENCES environments (id),
    key TEXT NOT NULL,
    body TEXT NOT NULL,
    forward_seconds REAL NOT NULL, backward_seconds REAL NOT NULL,
    repeats INTEGER NOT NULL, spread REAL NOT NULL, measured_at REAL NOT NULL,
    PRIMARY KEY (environment, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS transfers (
    environment INTEGER NOT NULL REFERENCES environments (id),
    level TEXT NOT NULL, library TEXT NOT NULL, kind TEXT NOT NULL,
    num_ranks INTEGER NOT NULL, num_hosts INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
    seconds REAL NOT NULL, repeats INTEGER NOT NULL, measured_at REAL NOT NULL,
    PRIMARY KEY (environment, level, library, kind, num_ranks, num_hosts, num_bytes)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS failures (
    environment INTEGER NOT NULL REFERENCES environments (id),
    key TEXT NOT NULL, reason TEXT NOT NULL, measured_at REAL NOT NULL,
    PRIMARY KEY (environment, key)) WITHOUT ROWID;
"""
_FIND_ENVIRONMENT = (
    "SELECT id FROM environments WHERE device=? AND driver=? AND torch=? AND threads=?"
)
_OP_KEY = "environment=? AND key=?"
_TRANSFER_ORDER = "level, library, kind, num_ranks, num_hosts, num_bytes"
_TRANSFER_KEY = (
    "environment=? AND level=? AND library=? AND kind=? AND num_ranks=? AND num_hosts=?"
    " AND num_bytes=?"
)


class Database:
    """Profile database (measured times of ops and collectives) in an SQLite file, open until
    ``close`` or the end of a ``with`` block. ``path`` is a file, which is made if missing, or
    ``":memory:"``; with ``read_only`` the file must exist. Raises ``DatabaseError`` if unusable."""

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = str(path)
        self._read_only = read_only
        self._ids: dict[Environment, int] = {}
        with self._explained():
            self._connection = self._connect()
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def _connect(self) -> sqlite3.Connection:
        if self._read_only:
            if not Path(self.path).is_file():
                raise DatabaseError(
                    "there is no profile database", self.path, "run autoparallel profile"
                )
            name, is_uri = f"{Path(self.path).absolute().as_uri()}?mode=ro", True
        else:
            name, is_uri = self.path, False
            if self.path != ":memory:":
                Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        return sqlite3.connect(name, timeout=_BUSY_SECONDS, isolation_level=None, uri=is_uri)

    def _prepare(self) -> None:
        """Create the tables of a new file; raise ``DatabaseError`` for another kind of database or
        a newer schema."""
        tables = {row[0] for row in self._rows("SELECT name FROM sqlite_master")}
        if "schema_version" not in tables and (tables or self._read_only):
            raise DatabaseError("the file is another database, not a profile database", self.path)
        if not self._read_only:
            self._use_write_ahead_log()
            with self._transaction():
                for statement in _SCHEMA.split(";"):
                    self._connection.execute(statement)
                if self._version() is None:
                    self._connection.execute(
                        "INSERT INTO schema_version VALUES (?)", (SCHEMA_VERSION,)
                    )
        version = self._version()
        if version is not None and version > SCHEMA_VERSION:
            raise DatabaseError(
                f"the profile database has schema {version}, this version reads {SCHEMA_VERSION}",
                self.path,
                "upgrade autoparallel, or export the profile with the version that wrote it",
            )

    def _use_write_ahead_log(self) -> None:
        """Turn on SQLite's write-ahead log, so that readers never wait for the writer. If the file
        is locked, retry for up to ``_BUSY_SECONDS``, as SQLite does not wait in this case."""
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _version(self) -> int | None:
        row = self._connection.execute("SELECT max(version) FROM schema_version").fetchone()
        return None if row[0] is None else int(row[0])

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of SQLite and of files in a ``with`` block into ``DatabaseError``."""
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            fix = "another process holds it; try again" if "locked" in str(error) else ""
            raise DatabaseError(
                f"the profile database cannot be used: {error}", self.path, fix
            ) from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # also in SQLite's messages
            fix = "move the file away; a new one is made"
            raise DatabaseError(
                f"the file is not a profile database: {error}", self.path, fix
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write all rows of a ``with`` block, or none if it raises. The write lock is taken at the
        start of the block, so that writers wait for each other."""
        with self._explained():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                self._ids.clear()  # an environment made in here is gone
                raise
            self._connection.execute("COMMIT")

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._explained():
            return self._connection.execute(query, values).fetchall()

    def _find(self, environment: Environment) -> int | None:
        """Return the id of an environment's row; None if nothing was measured there."""
        if environment not in self._ids:
            rows = self._rows(_FIND_ENVIRONMENT, astuple(environment))
            if not rows:
                return None
            self._ids[environment] = int(rows[0][0])
        return self._ids[environment]

    def environments(self) -> tuple[Environment, ...]:
        """Return every environment in which measurements were taken, oldest first."""
        rows = self._rows("SELECT device, driver, torch, threads FROM environments ORDER BY id")
        return tuple(Environment(*row) for row in rows)

    def put(self, environment: Environment, case: OpCase, measurement: Measurement) -> None:
        """Store the measured time of an op; replace an earlier time of the same op and shapes."""
        with self._transaction():
            self._write(Record(environment, case, measurement, time.time()))

    def put_transfer(self, environment: Environment, transfer: Transfer) -> None:
        """Store a measured collective or message; it replaces an earlier measurement of the same
        kind, bytes and group of ranks."""
        with self._transaction():
            self._write(Record(environment, transfer, None, time.time()))

    def put_failure(self, environment: Environment, case: OpCase, reason: str) -> None:
        """Store the reason why an op could not be measured, so that it is not tried again."""
        with self._transaction():
            number = self._numbered(environment)
            row = (number, case.key(), reason, time.time())
            self._connection.execute("INSERT OR REPLACE INTO failures VALUES (?,?,?,?)", row)

    def failures(self, environment: Environment) -> Mapping[str, str]:
        """Return the reasons why ops could not be measured, by ``OpCase.key`` of each op."""
        query = "SELECT key, reason FROM failures WHERE environment=?"
        return dict(self._rows(query, (self._find(environment),)))

    def get(self, environment: Environment, case: OpCase) -> Measurement | None:
        """Return the measured time of an op at its exact shapes; None if it was not measured."""
        rows = self._rows(
            "SELECT body, forward_seconds, backward_seconds, repeats, spread FROM ops"
            " WHERE environment=? AND key=?",
            (self._find(environment), case.key()),
        )
        # A convolution that an earlier version measured in TF32 has the key of one that is not.
        is_it = bool(rows) and case_of(json.loads(rows[0][0]), environment) == case
        return Measurement(*rows[0][1:]) if is_it else None

    def all(self, environment: Environment) -> Mapping[OpCase, Measurement]:
        """Return all ops measured in an environment, with their measured times."""
        return {case: measurement for case, measurement, _ in self._op_rows(environment)}

    def all_transfers(self, environment: Environment) -> tuple[Transfer, ...]:
        """Return all collectives and messages measured in an environment."""
        return tuple(transfer for transfer, _ in self._transfer_rows(environment))

    def export_file(self, path: str | Path) -> int:
        """Write all measurements to ``path``, one line of JSON each; return their number."""
        return write_records(Path(path), self._records())

    def import_file(self, path: str | Path) -> ImportCounts:
        """Merge an exported file into the database: all of it or, if a line is invalid, nothing. If
        both have a measurement of the same op or transfer, the measurement with more repeats is
        kept (the newer if equal). Return the numbers of rows added, replaced and kept."""
        counts: Counter[str] = Counter()
        with self._transaction():
            for record in read_records(Path(path)):
                counts[self._merge(record)] += 1
        return ImportCounts(counts["added"], counts["replaced"], counts["kept"])

    def _merge(self, record: Record) -> str:
        held = self._held(record)
        if held is not None and held >= (record.repeats, record.measured_at):
            return "kept"
        self._write(record)
        return "added" if held is None else "replaced"

    def _held(self, record: Record) -> tuple[int, float] | None:
        """Return (repeats, time of measurement) of the row that ``record`` would replace; None if
        there is no such row."""
        number = self._find(record.environment)
        if isinstance(record.item, Transfer):
            table, key = "transfers", _TRANSFER_KEY
            values: tuple[Any, ...] = (number, *astuple(record.item)[:6])
        elif self.get(record.environment, record.item) is None:
            return None
        else:
            table, key, values = "ops", _OP_KEY, (number, record.item.key())
        rows = self._rows(f"SELECT repeats, measured_at FROM {table} WHERE {key}", values)
        return (int(rows[0][0]), float(rows[0][1])) if rows else None

    def _write(self, record: Record) -> None:
        """Insert ``record`` as a row, or replace its earlier row; requires an open transaction."""
        number = self._numbered(record.environment)
        values: tuple[Any, ...]
        if isinstance(record.item, Transfer):
            table, values = "transfers", astuple(record.item)
        else:
            assert record.measurement is not None
            table = "ops"
            values = (record.item.key(), _body(record.item), *astuple(record.measurement))
        places = ",".join("?" * (len(values) + 2))
        self._connection.execute(
            f"INSERT OR REPLACE INTO {table} VALUES ({places})",
            (number, *values, record.measured_at),
        )

    def _numbered(self, environment: Environment) -> int:
        """Return the id of an environment's row, added if missing (in a transaction)."""
        values = astuple(environment)
        self._connection.execute(
            "INSERT OR IGNORE INTO environments (device, driver, torch, threads) VALUES (?,?,?,?)",
            values,
        )
        return int(self._connection.execute(_FIND_ENVIRONMENT, values).fetchone()[0])

    def _records(self) -> Iterator[Record]:
        for environment in self.environments():
            for case, measurement, measured_at in self._op_rows(environment):
                yield Record(environment, case, measurement, measured_at)
            for transfer, measured_at in self._transfer_rows(environment):
                yield Record(environment, transfer, None, measured_at)

    def _op_rows(self, environment: Environment) -> Iterator[tuple[OpCase, Measurement, float]]:
        rows = self._rows(
            "SELECT body, forward_seconds, backward_seconds, repeats, spread, measured_at"
            " FROM ops WHERE environment=? ORDER BY key",
            (self._find(environment),),
        )
        for body, *values, measured_at in rows:
            yield case_of(json.loads(body), environment), Measurement(*values), measured_at

    def _transfer_rows(self, environment: Environment) -> Iterator[tuple[Transfer, float]]:
        rows = self._rows(
            "SELECT level, library, kind, num_ranks, num_hosts, num_bytes, seconds, repeats,"
            f" measured_at FROM transfers WHERE environment=? ORDER BY {_TRANSFER_ORDER}",
            (self._find(environment),),
        )
        for *values, measured_at in rows:
            yield Transfer(*values), measured_at


def _body(case: OpCase) -> str:
    return json.dumps(case_to_json(case), separators=(",", ":"))
