"""The claim of a run to be the only writer of a folder of checkpoints.

In: the folder of a run. Out: the file ``writer.json`` in it, which names the host and process that
write there, and whose modification time is renewed while the process lives. File locks are not
used, because network disks may lack them. A claim ends with its process: on the same host at once,
on another host when it has not been renewed for ``STOPPED_SECONDS`` by the clock of the disk.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ...cost_model.cluster.given_text import parse_json, read_text
from ...planner.errors import UsageError

CLAIM = "writer.json"
RENEW_SECONDS = 10.0
STOPPED_SECONDS = 60.0


def claim_folder(folder: str | Path, *, takes_over: bool = False) -> Callable[[], None]:
    """Claim a folder, so that no other run writes checkpoints into it; return the function that
    ends the claim.

    The folder is made if missing. ``takes_over`` replaces the claim of another process: an earlier
    attempt of the same run. If this process has claimed the folder already, nothing is done.

    Raises UsageError AP892 if another process writes there, OSError if the folder cannot be written
    to.
    """
    key = Path(folder).resolve()
    if key in _CLAIMED:
        return lambda: None
    claim = FolderClaim(key, takes_over=takes_over)
    _CLAIMED.add(key)

    def release() -> None:
        _CLAIMED.discard(key)
        claim.release()

    return release


_CLAIMED: set[Path] = set()
"""Folders that this process has claimed."""


class FolderClaim:
    """This process's exclusive right to write checkpoints into a folder, until ``release``."""

    def __init__(self, folder: Path, *, takes_over: bool) -> None:
        """Claim ``folder``. With ``takes_over``, replace the claim of another living process;
        without it, raise UsageError AP892 in that case."""
        self.path = folder / CLAIM
        self._text = json.dumps({**_this_process(), "claim": uuid.uuid4().hex})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not takes_over:
            self._check_free()
        self._write()
        if not takes_over and self._holder() != self._text:  # of two at once, the last wins
            self._check_free()
        self._ends = threading.Event()
        threading.Thread(target=self._renew, name="claim of a folder", daemon=True).start()

    def release(self) -> None:
        """End the claim, if this process still holds it."""
        self._ends.set()
        if self._holder() == self._text:
            for left in self.path.parent.glob(f"{CLAIM}.*"):  # by interrupted claims
                left.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        own = self.path.with_name(f"{CLAIM}.{uuid.uuid4().hex}")
        try:
            own.write_text(self._text, encoding="utf-8")
            own.replace(self.path)
        finally:
            own.unlink(missing_ok=True)

    def _holder(self) -> str:
        try:
            return read_text(self.path)
        except (OSError, ValueError):
            return ""

    def _check_free(self) -> None:
        """Raise UsageError AP892 if the process that has claimed the folder is alive."""
        try:
            holder = parse_json(self._holder() or "null")
        except ValueError:
            return
        if not isinstance(holder, dict) or not _is_alive(holder, self.path):
            return
        place = f"process {holder.get('process')} on {holder.get('host')}"
        raise UsageError(
            "AP892",
            f"another run writes checkpoints into {self.path.parent}",
            why=f"{place} has claimed it: two runs would remove each other's files",
            where=str(self.path.resolve()),
            fix="give this run a folder of its own by --save, or end the other run first; the "
            f"claim of a process that was killed ends after {STOPPED_SECONDS:.0f} s",
        )

    def _renew(self) -> None:
        while not self._ends.wait(RENEW_SECONDS):
            try:
                os.utime(self.path)
            except OSError:
                continue  # a disk in trouble, which saves report


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "started": psutil.Process().create_time(),
    }


def _is_alive(holder: dict[str, Any], path: Path) -> bool:
    """Return whether the process that claimed a folder is alive. ``holder`` is the JSON of the
    claim, ``path`` its file. A process on another host counts as alive if it has renewed the file
    within ``STOPPED_SECONDS``."""
    if holder.get("host") == socket.gethostname():
        try:
            process = psutil.Process(int(holder["process"]))
            is_same = abs(process.create_time() - float(holder["started"])) < 1
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, KeyError, TypeError, ValueError):
            return False
    clock = path.with_name(f"{CLAIM}.clock.{uuid.uuid4().hex}")
    try:
        clock.touch()
        return clock.stat().st_mtime - path.stat().st_mtime < STOPPED_SECONDS
    except OSError:
        return False
    finally:
        clock.unlink(missing_ok=True)
