"""A damaged checkpoint is named; of a folder the newest whole one is loaded instead."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from processes import run_processes
from test_checkpoint_writer import plain, sharded

from autoparallel.planner.errors import UsageError
from autoparallel.runtime.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from autoparallel.runtime.checkpoint.writer import CheckpointWriter


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, plain(float(step)), CheckpointWriter(), step=step)
    return tmp_path


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def shard(checkpoint: Path) -> Path:
    return next(checkpoint.glob("__*.distcp"))


FILES = {
    "shard": lambda checkpoint: shard(checkpoint),
    "index": lambda checkpoint: checkpoint / ".metadata",
    "json": lambda checkpoint: checkpoint / "checkpoint.json",
}


@pytest.mark.parametrize("kind", FILES)
def test_a_shortened_file_is_named_and_the_one_before_is_taken(
    run: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = FILES[kind](run / "step-00000003")
    shorten(file)
    with pytest.raises(UsageError, match="AP880") as caught:
        load_checkpoint(run / "step-00000003", plain(0.0))
    assert caught.value.where == str(file)
    held = plain(0.0)
    assert load_checkpoint(run, held).step == 2
    assert torch.equal(held.slots[0].parameters["weight"], torch.full((4096,), 2.0))
    err = capsys.readouterr().err
    assert "step-00000003 is damaged, step-00000002 is taken instead" in err
    assert file.name in err


def test_where_all_are_damaged_the_oldest_is_the_error(run: Path) -> None:
    for step in (1, 2, 3):
        shorten(shard(run / f"step-{step:08d}"))
    with pytest.raises(UsageError, match="AP880") as caught:
        load_checkpoint(run, plain(0.0))
    assert "step-00000001" in caught.value.where


def test_content_that_is_not_as_it_was_written_names_its_file(run: Path) -> None:
    file = shard(run / "step-00000003")
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(UsageError, match=rf"AP880[\s\S]*{file.name}"):
        load_checkpoint(run, plain(0.0))


def saved_and_damaged(folder: str) -> tuple[int, list[float]]:
    """Rank 1's shard of step 2 is cut off; what two ranks load then."""
    import torch.distributed as dist

    for step in (1, 2):
        save_checkpoint(folder, sharded(float(step)), CheckpointWriter(), step=step)
    if dist.get_rank() == 0:
        shorten(Path(folder, "step-00000002", "__1_0.distcp"))
    dist.barrier()
    held = sharded(0.0)
    step = load_checkpoint(folder, held).step
    weight: Any = held.slots[0].parameters["weight"]
    return step, sorted(set(weight.full_tensor().flatten().tolist()))


def test_no_flipped_bit_gives_other_values(run: Path) -> None:
    """Of 60 bits of a shard: each is refused, or lies in padding and changes nothing."""
    checkpoint = run / "step-00000003"
    file, num_refused = shard(checkpoint), 0
    written = file.read_bytes()
    random = Random(0)
    for _ in range(60):
        changed = bytearray(written)
        changed[random.randrange(len(written))] ^= 1 << random.randrange(8)
        file.write_bytes(changed)
        held = plain(0.0)
        try:
            load_checkpoint(checkpoint, held)
        except UsageError:
            num_refused += 1
        else:
            assert torch.equal(held.slots[0].parameters["weight"], torch.full((4096,), 3.0))
    assert num_refused > 30


def test_all_ranks_take_the_same_whole_one(tmp_path: Path) -> None:
    assert run_processes(2, saved_and_damaged, str(tmp_path)) == [(1, [1.0]), (1, [1.0])]
