"""Measurements as values, and as lines of JSON in a file.

The first line identifies the file, every other is one record: environment, op or transfer,
seconds, repeats, and time (seconds since 1970). Such a file takes a cluster's
profile to a laptop, can be read and compared, and is how profiles come with the package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from .case import OpCase, ProfileError, case_from_json, case_to_json
from .environment import Environment

FORMAT = "autoparallel profile"
FORMAT_VERSION = 1


class DatabaseError(ProfileError):
    """Error of a file of measurements that cannot be used: damaged, made by a newer version, locked
    or not writable."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Median seconds of an op's forward and backward over ``repeats`` runs. ``spread``: half-width
    of the medians' 95 % confidence interval, relative to the median (the larger of the two)."""

    forward_seconds: float
    backward_seconds: float
    repeats: int
    spread: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """Measured seconds of a collective, or of a message between two ranks (kind ``"p2p"``).
    ``level`` is the kind of link (see ``transfers.level_of``). ``num_bytes`` is the size of the
    message, or of the full tensor as in ``collectives.collective_seconds``. Messages between hosts
    have the ranks of all pairs that sent at once as ``num_ranks``."""

    level: str
    library: str
    kind: str
    num_ranks: int
    num_hosts: int
    num_bytes: int
    seconds: float
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Record:
    """Row of the profile database: an op (``item``) with its ``measurement``, or a collective or
    message (``item``) that contains its own seconds."""

    environment: Environment
    item: OpCase | Transfer
    measurement: Measurement | None
    measured_at: float

    @property
    def repeats(self) -> int:
        return self.item.repeats if isinstance(self.item, Transfer) else _of(self).repeats


@dataclass(frozen=True, slots=True)
class ImportCounts:
    """Numbers of database rows that an import added, replaced, and left as they were."""

    added: int
    replaced: int
    kept: int


def _of(record: Record) -> Measurement:
    assert record.measurement is not None
    return record.measurement


def write_records(path: Path, records: Iterable[Record]) -> int:
    """Write all records to the file ``path``, in one step; return their number."""
    count = 0
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"format": FORMAT, "version": FORMAT_VERSION}) + "\n")
            for record in records:
                file.write(json.dumps(_to_json(record), separators=(",", ":")) + "\n")
                count += 1
        os.replace(unfinished, path)
    except OSError as error:
        raise DatabaseError(f"the profile cannot be written: {error}", str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of an exported file. Raises ``DatabaseError`` with the invalid line."""
    try:
        with path.open(encoding="utf-8") as file:
            _check_header(file.readline(), path)
            for number, line in enumerate(file, start=2):
                yield _read_line(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise DatabaseError(f"the profile cannot be read: {error}", str(path)) from error


def _check_header(line: str, path: Path) -> None:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DatabaseError(
            "the file is not an exported profile",
            str(path),
            "use a file that profile --export wrote",
        )
    if header.get("version") != FORMAT_VERSION:
        raise DatabaseError(
            f"the exported profile has version {header.get('version')}, this version reads "
            f"{FORMAT_VERSION}",
            str(path),
            "upgrade autoparallel",
        )


def _read_line(line: str, where: str) -> Record:
    try:
        return _from_json(json.loads(line))
    except (KeyError, TypeError, ValueError) as error:
        raise DatabaseError(f"the line is not a record of a profile: {error}", where) from error


def case_of(values: Mapping[str, Any], environment: Environment) -> OpCase:
    """Return the op that JSON ``values`` describe; ``environment`` is where it was measured."""
    return case_from_json(values, on_gpu=environment.kind == "cuda")


def _to_json(record: Record) -> dict[str, Any]:
    values: dict[str, Any] = {"environment": astuple(record.environment)}
    if isinstance(record.item, Transfer):
        values["transfer"] = asdict(record.item)
    else:
        values["op"] = case_to_json(record.item)
        values["measurement"] = astuple(_of(record))
    values["measured_at"] = record.measured_at
    return values


def _from_json(values: dict[str, Any]) -> Record:
    device, driver, torch, threads = values["environment"]
    environment = Environment(str(device), str(driver), str(torch), int(threads))
    measured_at = float(values["measured_at"])
    if "transfer" in values:
        transfer = Transfer(**values["transfer"])
        return Record(environment, transfer, None, measured_at)
    forward, backward, repeats, spread = values["measurement"]
    measurement = Measurement(float(forward), float(backward), int(repeats), float(spread))
    return Record(environment, case_of(values["op"], environment), measurement, measured_at)
