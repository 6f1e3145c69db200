"""A user's script on devices that run behind their hosts: ``lagging_script.py PIDS RANK PARALLEL``.

In its third step rank RANK stays away. What the others say of that step they say while they read
its loss: ``step`` has returned.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import autoparallel
from autoparallel.runtime.launch.watched_script import watch_script
from autoparallel.target.load import load_target

sys.path.append(str(Path(__file__).parent))
from lagging_group import DEVICE, NAME, emulate

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
START_SECONDS, TIMEOUT_SECONDS = 240.0, 5.0


def main(pids: str, culprit: str, parallel: str) -> None:
    rank = os.environ["RANK"]
    (Path(pids) / rank).write_text(str(os.getpid()))
    emulate()
    dist.init_process_group(NAME)
    target = load_target(str(GPT), {"n_layer": 4, "d_model": 32, "n_head": 2, "seq": 16})
    torch.manual_seed(0)
    batch = {name: torch.randint(0, 64, (4, 16)) for name in ("tokens", "targets")}
    model = autoparallel.parallelize(
        target.build_model(), example_batch=batch, profile="analytic", parallel=parallel
    )
    step = autoparallel.Step(model, timeout_seconds=START_SECONDS)
    for index in range(4):
        if index == 2:
            watch_script(os.environ, TIMEOUT_SECONDS)
            DEVICE.grace_seconds = 1.0
            if rank == culprit:
                time.sleep(1000)
        loss = step(batch)
        sys.stderr.write(f"rank {rank} has returned from step {index}\n")
        sys.stderr.write(f"rank {rank} has read {float(loss):.4f} of step {index}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
