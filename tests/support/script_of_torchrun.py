"""A user's script under torchrun: ``script_of_torchrun.py PIDS RANK AT WHAT [LOOP]``.

In its second step rank RANK does WHAT (the name of a signal that it sends itself, ``sleep`` or
``raise``) when it is about to do AT. With LOOP the plan has no pipeline and the script calls
``loss.backward()`` itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import autoparallel
from autoparallel.runtime.launch.watched_script import watch_script
from autoparallel.target.load import load_target

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
START_SECONDS, TIMEOUT_SECONDS = 90.0, 5.0


def misbehave(what: str) -> None:
    if what == "sleep":
        time.sleep(1000)
    if what == "raise":
        raise ValueError("no data left")
    time.sleep(1.0)  # a thread of gloo sends what was given to it before
    os.kill(os.getpid(), getattr(signal, what))


def main(pids: str, rank: str, at: str, what: str, loop: str = "") -> None:
    (Path(pids) / os.environ["RANK"]).write_text(str(os.getpid()))
    watchdog = watch_script(os.environ).watchdog
    tell, seen = watchdog.progress, []

    def progress(doing: str, waits_for: tuple[int, ...] = ()) -> None:
        tell(doing, waits_for)
        if os.environ["RANK"] == rank and doing.startswith(at):
            seen.append(doing)
            if len(seen) == 2:
                misbehave(what)

    watchdog.progress = progress  # type: ignore[method-assign]
    target = load_target(str(GPT), {"n_layer": 4, "d_model": 32, "n_head": 2, "seq": 16})
    torch.manual_seed(0)
    batch = {name: torch.randint(0, 64, (4, 16)) for name in ("tokens", "targets")}
    model = autoparallel.parallelize(
        target.build_model(),
        example_batch=batch,
        profile="analytic",
        parallel="dp=4" if loop else "pp=4,schedule=1f1b,microbatches=4",
    )
    if not loop:
        step = autoparallel.Step(model, timeout_seconds=START_SECONDS)
        step(batch)
        watch_script(os.environ, TIMEOUT_SECONDS)
        while True:
            step(batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(**batch).backward()
        optimizer.step()
        watch_script(os.environ, TIMEOUT_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
