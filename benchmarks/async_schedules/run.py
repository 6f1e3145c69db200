"""Asynchronous schedules beside synchronous training on a real task: losses by rows seen.

    python benchmarks/async_schedules/run.py [--steps 40] [--seeds 0,1,2] [NAME ...]

A small GPT learns the bytes of Python's standard library on four pipeline ranks. A seed decides
the initial weights and which rows come in which order; every schedule runs with each seed. An
asynchronous schedule makes several updates of each batch; beside it runs 1F1B with batches of
just these rows, which makes the same number of updates, all of them at the newest weights.
Writes ``losses.json`` and ``losses.svg`` beside this file.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plot import Curve, draw

from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planning.plan_files import save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.runtime.launch.launch import launch
from autoparallel.runtime.launch.process import Worker
from autoparallel.target.load import load_target

HERE = Path(__file__).parent
MODEL = HERE.parent.parent / "examples" / "gpt.py"
SETTINGS = {"n_layer": 4, "d_model": 64, "n_head": 4, "seq": 64}
SEQ, RANKS, ROWS, MICROBATCH = 64, 4, 32, 2
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Case:
    """``rows`` are those of a step, ``update_rows`` those of an update."""

    name: str
    schedule: str
    rows: int
    update_rows: int


CASES = (
    Case("pipedream", "pipedream", ROWS, 2),
    Case("ampnet", "ampnet", ROWS, 2),
    Case("1f1b, 2 rows", "1f1b", 2, 2),
    Case("pipedream-2bw", "pipedream-2bw", ROWS, 8),
    Case("1f1b, 8 rows", "1f1b", 8, 8),
    Case("1f1b, 32 rows", "1f1b", ROWS, ROWS),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="batches of 32 rows")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("names", nargs="*", help="cases to run, the others kept; all if none")
    asked = parser.parse_args()
    file = HERE / "losses.json"
    runs: dict[str, Any] = json.loads(file.read_text())["runs"] if asked.names else {}
    for case in CASES:
        if not asked.names or case.name in asked.names:
            runs[case.name] = run_case(case, asked.steps, asked.seeds.split(","))
            write(runs)


def run_case(case: Case, steps: int, seeds: Sequence[str]) -> dict[str, Any]:
    """The losses of a case, by seed."""
    losses: dict[str, list[float]] = {}
    for seed in seeds:
        started = time.perf_counter()
        losses[seed] = [round(loss, 5) for loss in train_case(case, steps, int(seed))]
        seconds = time.perf_counter() - started
        last = sum(losses[seed][-10:]) / len(losses[seed][-10:])
        print(f"{case.name:16} seed {seed} {seconds:5.0f} s  last ten {last:.4f}", flush=True)
    return {
        "schedule": case.schedule,
        "rows_per_update": case.update_rows,
        "updates": steps * ROWS // case.update_rows,
        "losses": losses,
    }


def write(runs: dict[str, Any]) -> None:
    """The losses as JSON and as a picture."""
    setting = {
        "model": SETTINGS,
        "rows_per_point": ROWS,
        "seq": SEQ,
        "ranks": RANKS,
        "microbatch": MICROBATCH,
        "optimizer": "AdamW",
        "learning_rate": LEARNING_RATE,
    }
    (HERE / "losses.json").write_text(json.dumps({"setting": setting, "runs": runs}) + "\n")
    curves = [
        Curve(case.name, list(runs[case.name]["losses"].values()), "1f1b" in case.name)
        for case in CASES
        if case.name in runs
    ]
    (HERE / "losses.svg").write_text(draw(curves, rows=ROWS))


def train_case(case: Case, steps: int, seed: int) -> list[float]:
    """The mean loss of each 32 rows."""
    count = case.rows // MICROBATCH
    forced = parse_parallel(f"pp={RANKS},dp=1,tp=1,schedule={case.schedule},microbatches={count}")
    options = PlanOptions(global_batch=case.rows, seq=SEQ, forced=forced, profile="analytic")
    plan = make_plan(load_target(str(MODEL), SETTINGS), f"cpu:{RANKS}", options)
    assert len(plan.stages) == RANKS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        save_plan(plan, path)
        each: list[float] = launch(
            "run:train",
            {"plan_path": str(path), "steps": steps, "seed": seed},
            num_processes=RANKS,
        )
    parts = ROWS // case.rows
    return [sum(each[i : i + parts]) / parts for i in range(0, len(each), parts)]


def train(worker: Worker, *, plan_path: str, steps: int, seed: int) -> list[float]:
    """The loss of each of the plan's steps, on a rank."""
    import torch

    from autoparallel.planning.plan_files import load_job
    from autoparallel.runtime.launch.membership import join_as
    from autoparallel.training.worker import make_trainer

    plan, target = load_job(plan_path)
    device = join_as(worker, plan.cluster)
    trainer, _ = make_trainer(plan, target, worker, device=device, seed=seed)
    trainer.use_optimizer(lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE))
    assert target.build_data is not None
    data = iter(target.build_data(0, 1, global_batch=ROWS, seq=SEQ, seed=seed))
    losses: list[float] = []
    for _ in range(steps):
        batch: Any = next(data)
        for first in range(0, ROWS, plan.model.global_batch):
            part = {k: v[first : first + plan.model.global_batch] for k, v in batch.items()}
            losses.append(float(trainer.step(trainer.batches.named(part)).loss))
            assert math.isfinite(losses[-1])
    return losses


if __name__ == "__main__":
    main()
