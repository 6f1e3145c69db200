"""Folder of a run's checkpoints: atomic publication, and the search for an undamaged checkpoint.

A checkpoint is written into ``step-00000010.tmp-<id>`` and renamed when every rank is done. An
existing checkpoint of the same step is first renamed to ``step-00000010.old-<id>`` and still counts
until the new checkpoint has its name, so that at every moment the last good checkpoint can be
loaded.

A checkpoint is whole if its index can be read and its files are as long as the index says: a full
disk, an interrupted copy or a failing disk leave shorter files. Damaged checkpoints are named on
stderr. Every rank checks the files that its host has, and all choose the same checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ...planner.errors import UsageError
from ..messages.shared_objects import gather_values, on_first, share_value
from .metadata import SafeFileSystemReader, damaged_file

INDEX, STATE = ".metadata", "checkpoint.json"
"""Files that a complete checkpoint has: torch's index, and this package's JSON."""
NAME = re.compile(r"step-(\d{8,})")
OLD = re.compile(r"(step-\d{8,})\.old-\w+")
TEMPORARY = re.compile(r"step-\d{8,}\.tmp-\w+")


def checkpoint_path(folder: str | Path, step: int) -> Path:
    """Return the path of a step's checkpoint; names sort by step.

    >>> str(checkpoint_path("run", 12))
    'run/step-00000012'
    """
    return Path(folder) / f"step-{step:08d}"


def temporary_path(path: Path, identifier: str) -> Path:
    """Return the path at which the checkpoint ``path`` is written until it is complete."""
    return path.with_name(f"{path.name}.tmp-{identifier}")


def is_complete(path: Path) -> bool:
    """Tell whether a folder has the files of a complete checkpoint."""
    return (path / INDEX).is_file() and (path / STATE).is_file()


def complete_checkpoints(folder: str | Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, one for each step, in the order of writing.
    They are ordered by time, not by step: the folder may also hold checkpoints of an earlier run
    that went to higher steps."""
    found: dict[str, Path] = {}
    for path in sorted(Path(folder).glob("step-*")):
        replaced = OLD.fullmatch(path.name)
        if not is_complete(path):
            continue
        if NAME.fullmatch(path.name):
            found[path.name] = path
        elif replaced is not None:
            found.setdefault(replaced[1], path)
    return [found[name] for name in sorted(found, key=lambda n: (_saved_at(found[n]), int(n[5:])))]


def _saved_at(checkpoint: Path) -> float:
    """Return the time in seconds at which a checkpoint was written, by its JSON file or, if that
    has no time, by the file's modification time."""
    state = checkpoint / STATE
    try:
        return float(json.loads(state.read_text())["saved_at"])
    except (OSError, ValueError, TypeError, KeyError):
        return state.stat().st_mtime if state.exists() else 0.0


def newest_checkpoint(path: str | Path) -> Path:
    """Return ``path`` if it is a checkpoint, or else the newest complete checkpoint in it.

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
        "AP132",
        f"{path} contains no checkpoint",
        why=why,
        fix="use the folder of --save (or autoparallel.save), or a step-N folder in it",
    )


def publish(temporary: Path, path: Path) -> None:
    """Rename the complete checkpoint ``temporary`` to ``path``, replacing a checkpoint there."""
    flush_folder(temporary)
    replaced = temporary.with_name(temporary.name.replace(".tmp-", ".old-"))
    if path.exists():
        path.rename(replaced)
        flush_folder(path.parent)
    temporary.rename(path)
    flush_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def clean_up(folder: Path) -> None:
    """Remove the remains of interrupted saves in ``folder``. If a save was interrupted while it
    replaced a checkpoint, restore the old checkpoint's name. Call it only while no save is under
    way there."""
    for path in sorted(folder.glob("step-*")):
        replaced = OLD.fullmatch(path.name)
        if replaced is not None and not (folder / replaced[1]).exists() and is_complete(path):
            path.rename(folder / replaced[1])
        elif replaced is not None or TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def keep_newest(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest complete checkpoints; at least one stays.

    A removal that is cut off leaves a temporary folder, which ``clean_up`` removes.
    """
    for path in complete_checkpoints(folder)[: -max(keep, 1)]:
        leaving = temporary_path(path.with_name(path.name.partition(".")[0]), "removed")
        shutil.rmtree(leaving, ignore_errors=True)
        path.rename(leaving)
        shutil.rmtree(leaving, ignore_errors=True)


def flush_folder(folder: Path) -> None:
    """Flush the directory entries of ``folder`` (new and renamed files) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def choose_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint ``path``, or the newest undamaged checkpoint in that folder.

    Collective over all ranks: rank 0 lists the checkpoints. Raises UsageError: AP132 where there is
    none, AP880 where ``path`` is a damaged checkpoint, or all in the folder are damaged.
    """
    found = share_value(on_first(partial(_candidates, path)))
    assert found is not None
    for position, checkpoint in enumerate(found):
        damages = [each for each in gather_values(damage(checkpoint)) if each is not None]
        if not damages:
            return checkpoint
        if position == len(found) - 1:
            raise damages[0]
        if not dist.is_initialized() or dist.get_rank() == 0:
            instead = f"{checkpoint.name} is damaged, {found[position + 1].name} is taken instead"
            print(f"{damages[0]}\nautoparallel: {instead}", file=sys.stderr, flush=True)
    raise AssertionError(path)


def damage(checkpoint: Path) -> UsageError | None:
    """Check a checkpoint on this host. Return an error if its index or JSON is damaged or a file is
    shorter than the index says, else None. The tensors' content is checked when they are read."""
    try:
        metadata = SafeFileSystemReader(checkpoint).read_metadata()
        json.loads((checkpoint / STATE).read_text())
    except FileNotFoundError:
        return None  # on another host; the read reports it
    except ValueError as error:
        return damaged_file(checkpoint / STATE, f"{type(error).__name__}: {error}")
    except UsageError as error:
        return None if error.code == "AP132" else error
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
    for name, length in sorted(needed.items()):
        file = checkpoint / name
        if file.exists() and (size := file.stat().st_size) < length:
            return damaged_file(file, f"it has {size} bytes of the {length} that were written")
    return None


def _candidates(path: str | Path) -> list[Path]:
    """Return the checkpoints to try to load: ``path`` itself, or all complete checkpoints in that
    folder, newest first. Raises UsageError (AP132) where there is none."""
    newest, found = newest_checkpoint(path), complete_checkpoints(path)
    if is_complete(Path(path)) or newest not in found:
        return [newest]
    highest = max(found, key=lambda each: each.name)
    if highest.name > newest.name:
        print(
            f"autoparallel: {newest.name} is taken, which was written last; {highest.name} is older"
            f" (--resume {highest} takes it)",
            file=sys.stderr,
            flush=True,
        )
    return found[::-1]
