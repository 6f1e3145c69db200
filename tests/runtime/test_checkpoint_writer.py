"""A checkpoint appears at once: a kill, a full disk or an error leaves the last good one."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import RankError, run_processes
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from autoparallel.planner.errors import MachineError
from autoparallel.runtime.checkpoint.checkpoint import (
    Slot,
    TrainingState,
    load_checkpoint,
    save_checkpoint,
)
from autoparallel.runtime.checkpoint.folder import complete_checkpoints
from autoparallel.runtime.checkpoint.writer import CheckpointWriter

STEP = 4
KILLS = [
    ("new", 1, 2),
    ("new", 0, 4),
    ("new", 0, 6),
    ("new", 0, 12),
    ("again", 1, 2),
    ("again", 0, 14),
    ("again", 0, 16),
    ("again", 0, 19),
    ("asynchronous", 1, 2),
    ("asynchronous", 0, 11),
    ("asynchronous", 0, 16),
]
"""Kinds of saves, the rank that is killed, and at which of the things it does with files.

Rank 0 claims the folder at 2 to 6, makes one at 7 and 8, and writes its shard at 9, the index at 10
and 11, and our JSON at 12. Of a step that is there already it renames the old checkpoint at 14 and
the new one at 16, and removes the old one from 18 on. Rank 1 writes its shard at 2.
"""
SAMPLE = [("new", 0, 4), ("new", 0, 12), ("again", 0, 16), ("asynchronous", 0, 11)]
WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def sharded(value: float) -> TrainingState:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    whole = torch.full((8, 64), value)
    weight = distribute_tensor(whole, mesh, [Shard(0)])
    return TrainingState({"weight": (8, 64)}, (Slot({"weight": weight}),), facts={"value": value})


def kill_at(count: int, folder: str) -> None:
    """SIGKILL this process at the ``count``-th thing it does with files in ``folder``."""
    seen = [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in WATCHED and folder in str(arguments[0]):
            seen[0] += 1
            if seen[0] == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def save_and_die(folder: str, kind: str, killed: int, count: int) -> None:
    writer = CheckpointWriter()
    save_checkpoint(folder, sharded(1.0), writer, step=STEP)
    if dist.get_rank() == killed:
        kill_at(count, folder)
    step = STEP if kind == "again" else STEP + 1
    is_asynchronous = kind == "asynchronous"
    save_checkpoint(folder, sharded(2.0), writer, step=step, asynchronous=is_asynchronous)
    writer.wait()


def loaded(folder: str) -> tuple[float, list[float], bool]:
    """The checkpoint's value, and the weight's; whether a save of the folder works again."""
    held = sharded(0.0)
    value = load_checkpoint(folder, held).facts["value"]
    weight: Any = held.slots[0].parameters["weight"]
    found = sorted(set(weight.full_tensor().flatten().tolist()))
    save_checkpoint(folder, sharded(3.0), CheckpointWriter(), step=STEP + 2, keep=1)
    return value, found, sorted(os.listdir(folder)) == [f"step-{STEP + 2:08d}"]


@pytest.mark.parametrize(
    ("kind", "killed", "count"),
    [kill if kill in SAMPLE else pytest.param(*kill, marks=pytest.mark.slow) for kill in KILLS],
)
def test_a_kill_at_any_point_of_a_save_leaves_one_whole_state(
    tmp_path: Path, kind: str, killed: int, count: int
) -> None:
    folder = str(tmp_path / "run")
    with pytest.raises(RankError):
        run_processes(2, save_and_die, folder, kind, killed, count)
    for value, found, is_clean in run_processes(2, loaded, folder):
        assert value == (2.0 if (kind, count) in (("again", 19), ("asynchronous", 16)) else 1.0)
        assert found == [value]
        assert is_clean


def plain(value: float) -> TrainingState:
    weight = torch.full((4096,), value)
    return TrainingState({"weight": (4096,)}, (Slot({"weight": weight}),))


def limited_to(num_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def save_to_a_full_disk(folder: str) -> list[str]:
    writer, found = CheckpointWriter(), []
    save_checkpoint(folder, plain(1.0), writer, step=1)
    for asynchronous in (False, True):
        limited_to(4096)
        try:
            save_checkpoint(folder, plain(2.0), writer, step=2, asynchronous=asynchronous)
            writer.wait()
        except MachineError as error:
            found.append(error.code)
        limited_to(resource.RLIM_INFINITY)
    found += [path.name for path in complete_checkpoints(folder)]
    return found


def test_a_disk_that_takes_no_more_is_an_error_and_leaves_the_last_good_one(
    tmp_path: Path,
) -> None:
    """Also in the background, where the error is raised by the next wait."""
    found = run_processes(2, save_to_a_full_disk, str(tmp_path))
    assert found == [["AP886", "AP886", "step-00000001"]] * 2


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="AP886"):
        save_checkpoint(tmp_path / "file" / "run", plain(1.0), CheckpointWriter(), step=1)


def test_what_changes_after_an_asynchronous_save_is_not_in_it(tmp_path: Path) -> None:
    writer, state = CheckpointWriter(), plain(1.0)
    pending = save_checkpoint(tmp_path, state, writer, step=1, asynchronous=True)
    state.slots[0].parameters["weight"].fill_(5.0)
    pending.wait()
    held = plain(0.0)
    load_checkpoint(tmp_path, held)
    assert torch.equal(held.slots[0].parameters["weight"], torch.full((4096,), 1.0))
