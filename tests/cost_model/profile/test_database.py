"""The database: keys, versions, damage, several writers, export and import."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from profile_cases import attention, gelu, linear

from autoparallel.cost_model.profile.database import (
    Database,
    DatabaseError,
    Environment,
    ImportCounts,
    Measurement,
    Transfer,
)
from autoparallel.cost_model.profile.records import Record, write_records

HERE = Environment("cpu A", "", "2.13.0", 2)
GPU = Environment("NVIDIA H200", "550.1", "2.13.0", 0)
FAST = Measurement(1e-3, 2e-3, 20, 0.01)
RING = Transfer("intra:nvlink4", "nccl", "all_reduce", 8, 1, 1 << 20, 1e-4, 30)


def test_a_measurement_is_found_by_environment_and_case_alone(tmp_path: Path) -> None:
    with Database(tmp_path / "new" / "p.sqlite") as database:
        assert database.environments() == ()
        database.put(HERE, linear(4, 8, 16), FAST)
        database.put(GPU, linear(4, 8, 16), replace(FAST, forward_seconds=9.0))
        assert database.get(HERE, linear(4, 8, 16)) == FAST
        assert database.get(HERE, replace(linear(4, 8, 16), flops=(0.0, 0.0))) == FAST
        assert database.get(HERE, linear(4, 8, 17)) is None
        assert database.get(replace(HERE, threads=1), linear(4, 8, 16)) is None
        assert database.get(replace(HERE, torch="2.12.0"), linear(4, 8, 16)) is None
        assert database.environments() == (HERE, GPU)
        assert database.all(replace(GPU, driver="551")) == {}


def test_a_convolution_of_an_earlier_version_is_not_one_in_full_float32() -> None:
    full = replace(linear(4, 8, 16), family="conv")
    fast = replace(full, tf32=("conv",))
    with Database(":memory:") as database:
        database.put(GPU, full, FAST)
        old = "UPDATE ops SET body = json_remove(body, '$.tf32')"
        database._connection.execute(old)
        assert database.all(GPU) == {fast: FAST}
        assert database.get(GPU, full) is None
        slow = replace(FAST, forward_seconds=5e-3)
        database.put(GPU, full, slow)
        database.put(GPU, fast, FAST)
        assert database.all(GPU) == {full: slow, fast: FAST}


def test_what_is_put_is_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    with Database(path) as database:
        database.put(HERE, attention(2, 8, 4), FAST)
        database.put_transfer(GPU, RING)
    with Database(path, read_only=True) as database:
        (case,) = database.all(HERE)
        assert astuple(case) == astuple(attention(2, 8, 4))
        assert database.all_transfers(GPU) == (RING,)
        assert database.all_transfers(HERE) == ()
        with pytest.raises(DatabaseError, match="readonly"):
            database.put(HERE, gelu(2), FAST)


def test_a_later_measurement_replaces_an_earlier_one() -> None:
    with Database(":memory:") as database:
        database.put(HERE, gelu(2), FAST)
        database.put(HERE, gelu(2), replace(FAST, repeats=3))
        database.put_transfer(GPU, RING)
        database.put_transfer(GPU, replace(RING, seconds=5.0))
        assert database.all(HERE) == {gelu(2): replace(FAST, repeats=3)}
        assert database.all_transfers(GPU) == (replace(RING, seconds=5.0),)


def test_a_newer_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    Database(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE schema_version SET version = 99")
    for read_only in (False, True):
        with pytest.raises(DatabaseError, match=r"schema 99.*upgrade"):
            Database(path, read_only=read_only)


def test_a_damaged_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    junk = random.Random(0).randbytes(20_000)
    path.write_bytes(junk)
    with pytest.raises(DatabaseError, match="not a profile database"):
        Database(path)
    assert path.read_bytes() == junk


def test_a_folder_a_missing_file_and_one_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError):
        Database(tmp_path)
    with pytest.raises(DatabaseError, match="no profile database"):
        Database(tmp_path / "none.sqlite", read_only=True)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE ops (a)")
    with pytest.raises(DatabaseError, match="not a profile database"):
        Database(other, read_only=True)
    before = other.read_bytes()
    with pytest.raises(DatabaseError, match="not a profile database"):
        Database(other)
    assert other.read_bytes() == before


SUPPORT = Path(__file__).parents[2] / "support"
WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from autoparallel.cost_model.profile.database import Database, Environment, Measurement
from profile_cases import gelu
number = int(sys.argv[3])
with Database(sys.argv[1]) as database:
    for size in range(1, 41):
        own = Environment(f"cpu {number % 2}", "", "2.13.0", 1)
        database.put(own, gelu(number + 1, size), Measurement(number, size, 1, 0.0))
        assert database.get(own, gelu(number + 1, size)) is not None
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(SUPPORT), str(number)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(6)
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors
    with Database(path) as database:
        found = {
            case.tensors[0].shape: measurement.forward_seconds
            for environment in database.environments()
            for case, measurement in database.all(environment).items()
        }
        assert len(database.environments()) == 2
    assert found == {
        (number + 1, size): float(number) for number in range(6) for size in range(1, 41)
    }


def test_an_export_carries_everything_to_another_database(tmp_path: Path) -> None:
    with Database(":memory:") as source, Database(":memory:") as target:
        source.put(HERE, linear(4, 8, 16), FAST)
        source.put(GPU, attention(2, 8, 4), FAST)
        source.put_transfer(GPU, RING)
        assert source.export_file(tmp_path / "profile.jsonl") == 3
        assert target.import_file(tmp_path / "profile.jsonl") == ImportCounts(3, 0, 0)
        for environment in (HERE, GPU):
            assert target.all(environment) == source.all(environment)
            assert [astuple(case) for case in target.all(environment)] == [
                astuple(case) for case in source.all(environment)
            ]
        assert target.all_transfers(GPU) == (RING,)
        assert target.import_file(tmp_path / "profile.jsonl") == ImportCounts(0, 0, 3)
        target.export_file(tmp_path / "again.jsonl")
    texts = [(tmp_path / name).read_text() for name in ("profile.jsonl", "again.jsonl")]
    assert sorted(texts[0].split("\n")) == sorted(texts[1].split("\n"))


def test_merging_keeps_more_repeats_then_the_newer_in_any_order(tmp_path: Path) -> None:
    rows = [(5, 100.0, 1.0), (9, 50.0, 2.0), (9, 60.0, 3.0), (2, 900.0, 4.0)]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        with Database(":memory:") as database:
            for index in order:
                repeats, when, seconds = rows[index]
                record = Record(HERE, gelu(4), Measurement(seconds, 0.0, repeats, 0.0), when)
                write_records(tmp_path / "one.jsonl", [record])
                database.import_file(tmp_path / "one.jsonl")
            assert database.all(HERE) == {gelu(4): Measurement(3.0, 0.0, 9, 0.0)}


def test_a_file_with_a_wrong_line_is_named_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "profile.jsonl"
    with Database(":memory:") as database:
        database.put(HERE, gelu(4), FAST)
        database.export_file(path)
    path.write_text(path.read_text() + '{"environment": ["a"]}\n')
    with Database(":memory:") as database:
        with pytest.raises(DatabaseError, match="line 3"):
            database.import_file(path)
        assert database.environments() == ()
        database.put(HERE, gelu(4), FAST)
        assert database.get(HERE, gelu(4)) == FAST


def test_an_unknown_file_and_a_newer_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.jsonl"
    with Database(":memory:") as database:
        for text, message in (
            ("hello", "not an exported profile"),
            (json.dumps({"format": "autoparallel profile", "version": 7}), "version 7.*upgrade"),
        ):
            path.write_text(text)
            with pytest.raises(DatabaseError, match=message):
                database.import_file(path)
        with pytest.raises(DatabaseError, match="cannot be read"):
            database.import_file(tmp_path / "none.jsonl")
