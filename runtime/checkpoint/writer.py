"""Atomic writing of checkpoints: a kill at any moment leaves the last good checkpoint.

In: this rank's tensors and rank 0's JSON. Out: the folder ``step-N``, which appears by a rename
when all ranks have written and flushed their files. Asynchronous writing copies the tensors to
CPU memory first and uses a process group of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from ...planner.errors import AutoparallelError, MachineError, UsageError
from ..messages.groups import new_group
from ..messages.shared_objects import control_group, share_value
from .folder import STATE, checkpoint_path, clean_up, keep_newest, publish, temporary_path
from .writer_claim import claim_folder


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Data that one rank writes into the checkpoint of ``step`` in ``folder``: its tensors by key
    and, on rank 0, the content of the JSON file (else None). ``keep`` is the number of newest
    checkpoints to keep there (None: all)."""

    folder: Path
    step: int
    tensors: Mapping[str, Tensor]
    document: Mapping[str, Any] | None
    keep: int | None = None


class PendingSave:
    """Handle of a save that is running or done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Run ``write`` in a background thread; ``wait`` raises its error."""

        def run() -> None:
            try:
                write()
            except BaseException as error:  # noqa: BLE001 - raised again by ``wait``
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Tell whether the save has ended: ``wait`` would return, or raise its error, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises the error of the save, once: MachineError (AP886).
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


class CheckpointWriter:
    """Writer of the checkpoints of one training run; at most one save runs at a time."""

    def __init__(self) -> None:
        self._pending: PendingSave | None = None
        self._group: dist.ProcessGroup | None = None

    def write(self, snapshot: Snapshot, *, asynchronous: bool = False) -> PendingSave:
        """Write ``snapshot`` and return a handle of the save. If ``asynchronous``, return once the
        tensors are copied; a thread writes the files.

        First waits for an earlier save that still runs, and raises its error. Collective over all
        ranks.
        """
        self.wait()
        pending = PendingSave(checkpoint_path(snapshot.folder, snapshot.step))
        group = self._gloo_group(asynchronous=asynchronous)
        if not asynchronous:
            write_snapshot(snapshot, group)
            return pending
        copy = Snapshot(
            snapshot.folder,
            snapshot.step,
            {key: copy_to_cpu(tensor) for key, tensor in snapshot.tensors.items()},
            snapshot.document,
            snapshot.keep,
        )
        pending.start(lambda: write_snapshot(copy, group))
        if self._pending is None:
            atexit.register(self._end)
        self._pending = pending
        return pending

    def check(self) -> None:
        """Raise the error of a finished background save; do not wait for a running save."""
        if self._pending is not None and self._pending.is_done():
            self._pending.wait()

    def wait(self) -> None:
        """Wait until the background save has ended, if there is one; raise its error."""
        if self._pending is not None:
            self._pending.wait()

    def _gloo_group(self, *, asynchronous: bool) -> dist.ProcessGroup | None:
        """Return the gloo process group for a save's messages. An ``asynchronous`` save has a group
        of its own; else it is the group for Python objects that all ranks exchange."""
        if not asynchronous or not dist.is_initialized():
            return control_group()
        if self._group is None:
            self._group = new_group(backend="gloo")
        return self._group

    def _end(self) -> None:
        """Wait for a running save at process exit; if it failed, exit with its error's code, since
        ``atexit`` ignores exceptions."""
        try:
            self.wait()
        except AutoparallelError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(error.exit_code)


def copy_to_cpu(tensor: Tensor) -> Tensor:
    """Copy a tensor, or this rank's shard of a DTensor, to CPU memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    with torch.no_grad():
        local = tensor.to_local().detach().to("cpu", copy=True)
    # Not ``from_local``, which would move the copy to the mesh's device.
    made: DTensor = DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def write_snapshot(snapshot: Snapshot, group: dist.ProcessGroup | None) -> None:
    """Write a checkpoint into a temporary folder, and rename it when all ranks have written their
    tensors. Collective over all ranks; messages go through ``group``.

    Raises, on every rank, MachineError (AP886) where the checkpoint cannot be written, and
    UsageError (AP892) where another run writes into the folder; the folder is then as before.
    """
    path = checkpoint_path(snapshot.folder, snapshot.step)
    temporary = temporary_path(path, share_value(uuid.uuid4().hex[:12], group))
    ends = ExitStack()

    def prepare() -> None:
        ends.callback(claim_folder(snapshot.folder))
        clean_up(snapshot.folder)
        temporary.mkdir()

    def finish() -> None:
        with (temporary / STATE).open("w") as file:
            json.dump(snapshot.document, file)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
        if snapshot.keep is not None:
            keep_newest(snapshot.folder, snapshot.keep)
        ends.close()  # before the other ranks go on

    try:
        _on_rank_0(prepare, group)
        _write_tensors(snapshot.tensors, temporary, group)
        _on_rank_0(finish, group)
        if temporary.exists():
            _publish_here(temporary, path)
    except (OSError, RuntimeError, ValueError, CheckpointException) as error:
        raise _not_written(path, error) from error
    finally:
        ends.close()


def _write_tensors(
    tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None
) -> None:
    writer = FileSystemWriter(folder, sync_files=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(
            dict(tensors),
            storage_writer=writer,
            process_group=group,
            no_dist=not dist.is_initialized(),
        )


def _publish_here(temporary: Path, path: Path) -> None:
    """Rename the finished checkpoint on a host that does not share rank 0's disk. All ranks of the
    host call it; the first one's rename succeeds, the others' are ignored."""
    try:
        publish(temporary, path)
    except FileNotFoundError:
        return


def _on_rank_0(act: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Run ``act`` on rank 0, and raise its error on every rank."""
    failure: OSError | UsageError | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            act()
        except (OSError, UsageError) as error:
            failure = error
    failure = share_value(failure, group)
    if failure is not None:
        raise failure


def _not_written(path: Path, error: BaseException) -> MachineError:
    cause = error
    if isinstance(error, CheckpointException):
        cause = next(iter(error.failures.values()))[0]
    return MachineError(
        "AP886",
        f"the checkpoint {path.name} could not be written",
        why=f"{type(cause).__name__}: {cause}",
        where=str(path.parent),
        fix="free disk space, or use a writable folder; earlier complete checkpoints are kept",
    )
