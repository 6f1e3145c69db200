"""A rank that does not come, where hosts are ahead of their devices: as on GPUs, emulated.

``step`` returns, as no host waits for a message; who then reads the loss is blocked. What each rank
says is what its device is at.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_failures import messages
from test_torchrun_failures import torchrun_words

SCRIPT = Path(__file__).parents[1] / "support" / "lagging_script.py"


def run_until_failure(folder: Path, culprit: int, parallel: str) -> dict[int, str]:
    """What each rank said at its end; the others have returned from the step and not read it."""
    err = torchrun_words(folder, SCRIPT, str(folder), str(culprit), parallel)
    for rank in range(4):
        assert f"rank {rank} has read " in err
        assert (f"rank {rank} has returned from step 2" in err) == (rank != culprit), err
        assert not re.search(rf"rank {rank} has read \S+ of step 2", err)
    found = messages(err.partition("torch.distributed.elastic.multiprocessing.errors")[0])
    assert sorted(found) == [0, 1, 2, 3]
    assert all(
        f"rank {culprit} failed to come: it was at between steps" in found[rank]
        for rank in range(4)
    )
    assert all(text.count("failed to come") == 1 for text in found.values())
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_stage_says_which_message_its_device_waits_for(tmp_path: Path) -> None:
    found = run_until_failure(tmp_path / "pids", 1, "pp=4,schedule=1f1b,microbatches=4")
    assert "0RECV_B0: stage 0 waits in micro-batch 0 for 1SEND_B0 of rank 1" in found[0]
    assert "2RECV_F0: stage 2 waits in micro-batch 0 for 1SEND_F0 of rank 1" in found[2]
    assert "3RECV_F0: stage 3 waits in micro-batch 0 for 2SEND_F0 of rank 2" in found[3]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_that_share_a_stage_say_at_which_action_their_devices_are(tmp_path: Path) -> None:
    found = run_until_failure(tmp_path / "pids", 2, "dp=4,zero=0")
    for rank in (0, 1, 3):
        assert "0REDUCE: completing the gradients of stage 0" in found[rank]
