"""What each process of a training run does: rebuild the model, make a trainer, train.

Runs inside a process group. Rank 0 prints (see ``step_log``).
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel.data import TrainingData
from autoparallel.passes.counter_random import batch_dims
from autoparallel.passes.deferred_init import plain_build
from autoparallel.passes.export import call_model, find_loss
from autoparallel.passes.inputs import random_batch
from autoparallel.passes.modes import promote_to_float64
from autoparallel.plan_io import load_plan
from autoparallel.planner.arranged.asynchronous import described
from autoparallel.planner.plan import Plan, Precision
from autoparallel.planning import capture_program, record_target
from autoparallel.runtime.compare import Quantity
from autoparallel.runtime.optimizer import default_optimizer
from autoparallel.runtime.process import Worker
from autoparallel.runtime.reference import Reference, run_reference
from autoparallel.runtime.replay import run_replay
from autoparallel.runtime.trainer import Trainer, join
from autoparallel.runtime.verify import verify as run_verification
from autoparallel.step_log import MemoryMeter, StepLog, outcome, summary
from autoparallel.targets import Batch, Target, load_target

VERIFIED_STEPS = 2
QUANTITIES: tuple[Quantity, ...] = ("loss", "gradient", "weight", "buffer")


def train(
    worker: Worker,
    *,
    plan_path: str,
    steps: int,
    seed: int,
    save: str | None = None,
    save_every: int | None = None,
    resume: str | None = None,
) -> dict[str, Any]:
    """Trains by the plan; rank 0 prints each step and a summary.

    ``save`` is the folder of checkpoints, written every ``save_every`` steps and at the end;
    ``resume`` a checkpoint, or such a folder, whose newest is taken. Data goes on where the
    checkpoint stopped. Returns the measured and predicted seconds and bytes, and the losses.
    """
    plan, target = load_job(plan_path)
    device = join(plan.cluster.device(worker.rank).kind, worker.local_rank)
    trainer, memory = make_trainer(plan, target, worker, device=device, seed=seed)
    log = StepLog(plan, memory, is_printing=worker.rank == 0)
    if worker.rank == 0 and (meaning := described(plan)):
        print(f"{plan.schedule}: {meaning}", flush=True)
    done = 0 if resume is None else trainer.load(newest_checkpoint(resume))
    data = TrainingData(
        trainer, target, seed=seed, progress=worker.watchdog.progress,
        tell=partial(print, flush=True) if worker.rank == 0 else lambda line: None,
    )  # fmt: skip
    data.load_state_dict({"batches": done})
    for step in range(done + 1, done + steps + 1):
        inputs = log.timed_data(data)
        log.add(step, trainer.step(inputs))
        is_due = step == done + steps or (save_every is not None and step % save_every == 0)
        if save is not None and is_due:
            log.finish()
            worker.watchdog.progress(f"writing the checkpoint of step {step}")
            trainer.save(checkpoint_path(save, step), step=step)
            log.restart()
    log.finish()
    if worker.rank == 0:
        print(summary(log.records, plan), flush=True)
    return outcome(log.records, plan)


def checkpoint_path(folder: str, step: int) -> Path:
    """Where the checkpoint of a step goes; names sort by step."""
    return Path(folder) / f"step-{step:08d}"


def newest_checkpoint(path: str) -> Path:
    """``path`` itself, or the newest of the checkpoints in it."""
    found = sorted(Path(path).glob("step-*/.metadata"))
    return found[-1].parent if found else Path(path)


def verify(worker: Worker, *, plan_path: str, dtype: str, seed: int) -> dict[str, Any]:
    """Compares the plan's run with one device; the result as plain data."""
    plan, target = load_job(plan_path)
    precision: Precision = "fp64" if dtype == "fp64" else "fp32"
    plan = replace(plan, model=replace(plan.model, precision=precision))
    device = join(plan.cluster.device(worker.rank).kind, worker.local_rank)
    trainer, _ = make_trainer(plan, target, worker, device=device, seed=seed)
    graph = trainer.program.graph.with_batch_size(plan.model.global_batch)
    batches = [random_batch(graph, seed=seed + step) for step in range(VERIFIED_STEPS)]

    def reference() -> Reference:
        return one_device(trainer, target, batches, seed)

    found = run_verification(trainer, batches, reference)
    return {
        "passed": found.passed,
        "dtype": found.dtype,
        "tolerance": found.tolerance,
        "num_compared": len(found.differences),
        "worst": {name: found.worst(name) for name in QUANTITIES},
        "failures": [asdict(failure) for failure in found.failures],
    }


def one_device(
    trainer: Trainer, target: Target, batches: Sequence[Mapping[str, Tensor]], seed: int
) -> Reference:
    """The same steps by the plain model in this process, in the same dtype.

    For an asynchronous schedule with the updates that it makes.
    """
    keys = trainer.program.inputs
    is_double = trainer.program.dtype == "float64"
    model = plain_build(target.build_model, seed).to(getattr(torch, trainer.program.dtype))

    def loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        parts = {key: inputs[name] for name, key in keys.items()}
        is_dict = any(isinstance(key, str) for key in parts)
        batch: Batch = parts if is_dict else tuple(parts[key] for key in sorted(parts, key=str))
        return find_loss(call_model(model, batch), batch, target.loss_fn)

    named = partial(default_optimizer, name=trainer.plan.model.optimizer)
    build = target.build_optimizer or named
    rule = trainer.update_rule()
    train = run_reference if rule is None else partial(run_replay, rule=rule)
    with promote_to_float64() if is_double else nullcontext():
        return train(
            model, batches, loss=loss, build_optimizer=build, seed=seed,
            split=trainer.reference_split,
            random_dims=batch_dims(trainer.program.graph),
        )  # fmt: skip


def load_job(plan_path: str) -> tuple[Plan, Target]:
    """The plan and the target that it was made for."""
    plan = load_plan(plan_path)
    return plan, load_plan_target(plan, plan_path)


def load_plan_target(plan: Plan, plan_path: str) -> Target:
    """The target that ``plan`` was made for; a file is also looked for beside the plan."""
    name = plan.model.target
    beside = Path(plan_path).parent / Path(name.partition(":")[0]).name
    if name.partition(":")[0].endswith(".py") and not Path(name.partition(":")[0]).exists():
        name = name.replace(name.partition(":")[0], str(beside)) if beside.exists() else name
    return load_target(name, plan.model.settings)


def make_trainer(
    plan: Plan, target: Target, worker: Worker, *, device: torch.device, seed: int
) -> tuple[Trainer, MemoryMeter]:
    """The trainer of this rank, and what it needs of memory from here. Collective."""
    tell = worker.watchdog.progress
    tell("capturing the model")
    deferred = record_target(target, seed)
    program = capture_program(
        target,
        deferred,
        global_batch=plan.model.global_batch,
        seq=batch_seq(plan, target),
        precision=plan.model.precision,
    )
    tell("making the stage")
    gc.collect()
    memory = MemoryMeter(device)
    trainer = Trainer(
        program, plan, deferred, device=device, build=target.build_optimizer, progress=tell,
        seed=seed,
    )  # fmt: skip
    return trainer, memory


def batch_seq(plan: Plan, target: Target) -> int | None:
    """The length to ask ``example_batch`` for: the plan's, unless the batch takes none."""
    return plan.model.seq if target.takes_seq else None
