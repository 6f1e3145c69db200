"""What watching a run costs: the median ratio of a step's time with it to the next one's without.

``python -m benchmarks.runtime.watching``. Two ranks train the GPT of examples/gpt.py by data
parallelism. Every second step is taken without what is told to the watchdog, the mark at which a
block's backward begins, the samples of work and the vote on SIGTERM.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from autoparallel.options.parse import parse_parallel, parse_settings
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planning.plan_files import save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.runtime.launch.launch import launch
from autoparallel.runtime.launch.process import Worker
from autoparallel.target.load import load_target

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
SIZES = ("n_layer=4", "d_model=128", "n_head=4", "seq=64")
WARM_STEPS, PAIRS = 10, 300


def compare(worker: Worker, plan_path: str) -> dict[str, float]:
    """The seconds of a step without watching, and the ratios of time and of processor time."""
    from autoparallel.runtime.launch.membership import Stop
    from autoparallel.runtime.parameters.stage import StageBlock
    from autoparallel.runtime.profile.stragglers import WorkSampler
    from autoparallel.training import worker as entries

    is_watched = True
    seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    tell, mark = worker.watchdog.progress, StageBlock._begin_backward

    def progress(what: str, waits_for: tuple[int, ...] = ()) -> None:
        if is_watched:
            tell(what, waits_for)

    def begin(self: StageBlock, gradient: Any) -> None:
        if is_watched:
            mark(self, gradient)

    def take(trainer: Any, data: Any, worker: Worker, *_: Any, **__: Any) -> None:
        nonlocal is_watched
        stop = Stop(worker.watchdog, is_behind=False)
        for step in range(WARM_STEPS + 2 * PAIRS):
            batch = next(data)
            is_watched = step % 2 == 0
            sampler = WorkSampler().__enter__() if is_watched else None
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            trainer.step(batch)
            if is_watched:
                stop.is_agreed()
            dist.barrier()
            if step >= WARM_STEPS:
                took = time.perf_counter() - began, time.process_time() - worked
                seconds[is_watched].append(took)
            if sampler is not None:
                sampler.__exit__()
        is_watched = True
        trainer.steps.finish()

    worker.watchdog.progress = progress  # type: ignore[method-assign]
    StageBlock._begin_backward = begin  # type: ignore[method-assign]
    entries.take_steps = take  # type: ignore[assignment]
    entries.train(worker, plan_path=plan_path, steps=1, seed=0)
    pairs = [(*on, *off) for on, off in zip(seconds[True], seconds[False], strict=True)]
    return {
        "seconds": median(each[2] for each in pairs),
        "wall": median(each[0] / each[2] for each in pairs),
        "processor": median(each[1] / each[3] for each in pairs),
    }


def main() -> None:
    forced = parse_parallel("dp=2,zero=0")
    options = PlanOptions(global_batch=8, seq=64, profile="analytic", forced=forced)
    target = load_target(str(GPT), parse_settings(SIZES))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        save_plan(make_plan(target, "cpu:2", options), path)
        found = launch(
            "benchmarks.runtime.watching:compare",
            {"plan_path": str(path)},
            num_processes=2,
            environment=os.environ,
        )
    wall, processor = found["wall"], found["processor"]
    print(f"a step without takes {1e3 * found['seconds']:.1f} ms")
    print(f"with: {wall:.4f} times as long, {processor:.4f} times the processor time")


if __name__ == "__main__":
    main()
