"""The folder of a run's checkpoints: which are complete, and how one appears at once.

A checkpoint is written into ``step-00000010.tmp-<id>`` and renamed when every rank is done. One
of the same step that is there already is first renamed to ``step-00000010.old-<id>`` and counts
as that step's until the new one has its name, so that at every moment the last good checkpoint
can be loaded.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ...planner.errors import UsageError

INDEX, STATE = ".metadata", "checkpoint.json"
"""The files that a complete checkpoint has: of torch's, and of ours."""
NAME = re.compile(r"step-(\d{8,})")
OLD = re.compile(r"(step-\d{8,})\.old-\w+")
TEMPORARY = re.compile(r"step-\d{8,}\.tmp-\w+")


def checkpoint_path(folder: str | Path, step: int) -> Path:
    """Where the checkpoint of a step goes; names sort by step.

    >>> str(checkpoint_path("run", 12))
    'run/step-00000012'
    """
    return Path(folder) / f"step-{step:08d}"


def temporary_path(path: Path, identifier: str) -> Path:
    """Where the checkpoint ``path`` is written until it is complete."""
    return path.with_name(f"{path.name}.tmp-{identifier}")


def is_complete(path: Path) -> bool:
    """Whether a folder has what every checkpoint has."""
    return (path / INDEX).is_file() and (path / STATE).is_file()


def complete_checkpoints(folder: str | Path) -> list[Path]:
    """The complete checkpoints in ``folder``, by ascending step; one for each step."""
    found: dict[str, Path] = {}
    for path in sorted(Path(folder).glob("step-*")):
        replaced = OLD.fullmatch(path.name)
        if not is_complete(path):
            continue
        if NAME.fullmatch(path.name):
            found[path.name] = path
        elif replaced is not None:
            found.setdefault(replaced[1], path)
    return [found[name] for name in sorted(found, key=lambda name: int(name[5:]))]


def newest_checkpoint(path: str | Path) -> Path:
    """``path`` itself if it is a checkpoint, or the newest of the complete ones in it.

    Raises UsageError (AP132) where there is none.
    """
    path = Path(path)
    if TEMPORARY.fullmatch(path.name):
        raise _none(path, "the save of this checkpoint was cut off")
    if is_complete(path):
        return path
    replaced = [each for each in path.parent.glob(f"{path.name}.old-*") if is_complete(each)]
    found = complete_checkpoints(path) or replaced
    if found:
        return found[-1]
    pieces = sorted(piece.name for piece in path.glob("__*.distcp"))
    why = "" if not path.exists() else "nothing complete is in this folder"
    if pieces:
        why = f"it has shards of ranks ({pieces[0]}), but no {INDEX}, which rank 0 writes: "
        why += "the hosts that wrote it share no folder"
    elif (path / INDEX).exists():
        why = f"it has no {STATE}: autoparallel did not write it"
    raise _none(path, why)


def _none(path: Path, why: str) -> UsageError:
    return UsageError(
        "AP132", f"{path} contains no checkpoint", why=why,
        fix="use the folder of --save (or autoparallel.save), or a step-N folder in it",
    )  # fmt: skip


def publish(temporary: Path, path: Path) -> None:
    """Give a complete checkpoint its name. A checkpoint of that name is replaced by it."""
    flush_folder(temporary)
    replaced = temporary.with_name(temporary.name.replace(".tmp-", ".old-"))
    if path.exists():
        path.rename(replaced)
        flush_folder(path.parent)
    temporary.rename(path)
    flush_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def clean_up(folder: Path) -> None:
    """Remove what saves left that were cut off; a replaced checkpoint gets its name back.

    Only while no save is under way in ``folder``.
    """
    for path in sorted(folder.glob("step-*")):
        replaced = OLD.fullmatch(path.name)
        if replaced is not None and not (folder / replaced[1]).exists() and is_complete(path):
            path.rename(folder / replaced[1])
        elif replaced is not None or TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def keep_newest(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest complete checkpoints; at least one stays.

    A removal that is cut off leaves a temporary folder.
    """
    for path in complete_checkpoints(folder)[: -max(keep, 1)]:
        leaving = temporary_path(path.with_name(path.name.partition(".")[0]), "removed")
        shutil.rmtree(leaving, ignore_errors=True)
        path.rename(leaving)
        shutil.rmtree(leaving, ignore_errors=True)


def flush_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
