"""Which checkpoint to load: the newest that is whole.

In: a checkpoint, or a folder of them. Out: the checkpoint itself, or the newest in the folder whose
index can be read and whose files are as long as the index says: a disk that was full, a copy that
was cut off or a failing disk leave shorter ones. What is not whole is named on stderr. Every rank
looks at the files that its host has, and all come to the same answer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...planner.errors import AutoparallelError, UsageError
from ..messages.shared_objects import gather_values, share_value
from .folder import STATE, complete_checkpoints, is_complete, newest_checkpoint
from .metadata import SafeFileSystemReader, damaged


def choose_checkpoint(path: str | Path) -> Path:
    """The checkpoint ``path``, or the newest whole one in the folder. Collective over all ranks.

    Rank 0 says which there are. Raises UsageError: AP132 where there is none, AP880 where
    ``path`` is a checkpoint that is damaged, or all in the folder are.
    """
    found = _on_rank_0(path)
    for position, checkpoint in enumerate(found):
        damages = [each for each in gather_values(damage(checkpoint)) if each is not None]
        if not damages:
            return checkpoint
        if position == len(found) - 1:
            raise damages[0]
        if not dist.is_initialized() or dist.get_rank() == 0:
            sys.stderr.write(
                f"{damages[0]}\nautoparallel: {checkpoint.name} is damaged, "
                f"{found[position + 1].name} is taken instead\n"
            )
            sys.stderr.flush()
    raise AssertionError(path)


def damage(checkpoint: Path) -> UsageError | None:
    """What is wrong with a checkpoint's files on this host, by their length; their content is
    checked where it is read."""
    try:
        metadata = SafeFileSystemReader(checkpoint).read_metadata()
        json.loads((checkpoint / STATE).read_text())
    except FileNotFoundError:
        return None  # on another host, which is said where it is read
    except ValueError as error:
        return damaged(checkpoint / STATE, f"{type(error).__name__}: {error}")
    except UsageError as error:
        return None if error.code == "AP132" else error
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
    for name, length in sorted(needed.items()):
        file = checkpoint / name
        if file.exists() and (size := file.stat().st_size) < length:
            return damaged(file, f"it has {size} bytes of the {length} that were written")
    return None


def _on_rank_0(path: str | Path) -> list[Path]:
    """The checkpoints to try by rank 0, newest first, or its error, on every rank."""
    found: Any = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            newest = newest_checkpoint(path)
            is_named = is_complete(Path(path)) or newest not in complete_checkpoints(path)
            found = [newest] if is_named else complete_checkpoints(path)[::-1]
        except AutoparallelError as error:
            found = error
    found = share_value(found)
    if isinstance(found, AutoparallelError):
        raise found
    return [Path(each) for each in found]
