"""Which checkpoints of a folder are complete, and what saves that were cut off leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoparallel.planner.errors import UsageError
from autoparallel.runtime.checkpoint.folder import (
    choose_checkpoint,
    clean_up,
    complete_checkpoints,
    keep_newest,
    newest_checkpoint,
    publish,
)


def make(folder: Path, name: str, text: str = "{}") -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"index")
    (path / "checkpoint.json").write_text(text)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_the_newest_complete_one(tmp_path: Path) -> None:
    make(tmp_path, "step-00000002")
    newest = make(tmp_path, "step-00000010")
    make(tmp_path, "step-00000011.tmp-abc")
    (tmp_path / "step-00000012").mkdir()
    assert newest_checkpoint(tmp_path) == newest
    assert newest_checkpoint(newest) == newest
    assert make(tmp_path, "step-100000000") == newest_checkpoint(tmp_path)


def test_a_cut_off_save_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cut off"):
        newest_checkpoint(make(tmp_path, "step-00000011.tmp-abc"))


def test_shards_without_an_index_are_said_to_come_from_hosts_without_a_shared_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "__2_0.distcp").touch()
    with pytest.raises(UsageError, match="share no folder"):
        newest_checkpoint(tmp_path)


def test_a_replaced_checkpoint_counts_until_the_new_one_has_its_name(tmp_path: Path) -> None:
    old = make(tmp_path, "step-00000003.old-abc")
    make(tmp_path, "step-00000003.tmp-abc")
    assert newest_checkpoint(tmp_path) == old
    assert newest_checkpoint(tmp_path / "step-00000003") == old
    clean_up(tmp_path)
    assert names(tmp_path) == ["step-00000003"]


def test_a_new_checkpoint_takes_the_place_of_one_of_the_same_step(tmp_path: Path) -> None:
    make(tmp_path, "step-00000003", "old")
    publish(make(tmp_path, "step-00000003.tmp-abc", "new"), tmp_path / "step-00000003")
    assert names(tmp_path) == ["step-00000003"]
    assert (tmp_path / "step-00000003" / "checkpoint.json").read_text() == "new"


def test_only_the_newest_are_kept_and_never_none(tmp_path: Path) -> None:
    for step in (8, 9, 10):
        make(tmp_path, f"step-{step:08d}")
    (tmp_path / "step-00000011").mkdir()
    (tmp_path / "notes").mkdir()
    keep_newest(tmp_path, 2)
    assert names(tmp_path) == ["notes", "step-00000009", "step-00000010", "step-00000011"]
    keep_newest(tmp_path, 0)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000010"]


def test_the_checkpoint_that_was_written_last_is_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that begins again in the folder of another has lower steps at first."""
    earlier = [
        make(tmp_path, f"step-0000000{step}", f'{{"saved_at": {step}}}') for step in (7, 8, 9)
    ]
    later = make(tmp_path, "step-00000002", '{"saved_at": 20.5}')
    assert newest_checkpoint(tmp_path) == later
    assert newest_checkpoint(earlier[1]) == earlier[1]
    keep_newest(tmp_path, 2)
    assert complete_checkpoints(tmp_path) == [earlier[2], later]
    with pytest.raises(UsageError):  # its index is damaged, and so is that of the one before
        choose_checkpoint(tmp_path)
    assert "step-00000009 is older" in capsys.readouterr().err
