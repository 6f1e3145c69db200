"""Attempts of a run: where an attempt starts, and the record for a restart after a failure.

In: the folder of checkpoints, if any, the checkpoint that the user named, and the number of
restarts. Out: the checkpoint to start from, and the last step. The first attempt writes
``restart.json`` into the folder: the last step, and the checkpoints already there, which belong to
other runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autoparallel.runtime.checkpoint.folder import STATE, complete_checkpoints
from autoparallel.runtime.launch.process import Worker
from autoparallel.runtime.messages.shared_objects import share_value

RECORD = "restart.json"


@dataclass(frozen=True, slots=True)
class Attempt:
    """Start or restart of a run, equal on all ranks. ``resume`` is a checkpoint or folder to load.

    ``last`` is the number of the run's last step, if an earlier attempt stored it in ``folder``;
    ``older`` are checkpoints of other runs there.
    """

    is_restart: bool
    folder: str | None
    resume: str | None
    last: int | None = None
    older: Mapping[str, int] | None = None

    def begin_after(self, done: int, steps: int, *, rank: int) -> int:
        """Return the number of the run's last step, of which ``done`` are done and ``steps`` were
        asked for. Rank 0 stores the number in the folder, and reports a restart."""
        last = done + steps if self.last is None else self.last
        if rank != 0:
            return last
        if self.folder is not None and self.last is None:
            _write(Path(self.folder), last, self.older or {})
        if self.is_restart:
            place = f"after step {done}, from {self.resume}" if self.resume else "at its first step"
            why = "" if done or self.folder else ": without --save there is no checkpoint"
            sys.stderr.write(f"autoparallel: the run goes on {place}{why}\n")
            if done >= last:
                sys.stderr.write("autoparallel: all of its steps are done\n")
            sys.stderr.flush()
        return last

    def last_kept(self, done: int) -> int | None:
        """Return the last step whose logged figures a restart keeps, ``done``; None for a first
        attempt, which keeps all figures."""
        return done if self.is_restart else None


def begin_attempt(worker: Worker, folder: str | None, resume: str | None) -> Attempt:
    """Return the start of this attempt. Collective over all ranks; rank 0 reads the folder.

    A restart resumes from the newest complete checkpoint of this run, or else starts as the first
    attempt did.
    """
    is_restart = worker.restarts > 0
    if folder is None:
        return Attempt(is_restart, None, resume)
    begun = _begin(Path(folder), resume, is_restart) if worker.rank == 0 else None
    begun = share_value(begun)
    assert begun is not None
    return begun


def _begin(folder: Path, resume: str | None, is_restart: bool) -> Attempt:
    found = _checkpoint_times(folder)
    record = _read(folder) if is_restart else None
    if record is None:
        (folder / RECORD).unlink(missing_ok=True)  # from an earlier run
        return Attempt(is_restart, str(folder), resume, older=found)
    last, older = record
    own = [name for name, identity in found.items() if older.get(name) != identity]
    return Attempt(True, str(folder), own[-1] if own else resume, last, older)


def _checkpoint_times(folder: Path) -> dict[str, int]:
    """Return the complete checkpoints by ascending step, with their modification times in ns."""
    return {str(path): (path / STATE).stat().st_mtime_ns for path in complete_checkpoints(folder)}


def _read(folder: Path) -> tuple[int, dict[str, int]] | None:
    try:
        record = json.loads((folder / RECORD).read_text())
    except FileNotFoundError:
        return None
    return record["last_step"], record["older"]


def _write(folder: Path, last: int, older: Mapping[str, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{RECORD}.partial"
    partial.write_text(json.dumps({"last_step": last, "older": dict(older)}))
    partial.rename(folder / RECORD)
