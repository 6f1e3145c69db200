"""Worker processes of a training run: they rebuild the model, make a trainer, and train.

They run inside a process group. Rank 0 prints (see ``step_log``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel.cache.verified import verification_text
from autoparallel.calls.first_step import compare_first_step
from autoparallel.calls.following import LiveCaptures, follow_model
from autoparallel.calls.form import CallForm
from autoparallel.calls.modes import say_if_drawn_apart, say_if_rows_are_apart
from autoparallel.cost_model.cluster.tf32 import set_torch
from autoparallel.options.run_options import RunOptions
from autoparallel.passes.capture.export import call_model, find_loss
from autoparallel.passes.initialization.deferred_init import Deferred, Init, plain_build
from autoparallel.passes.ops.nf4 import round_nf4
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.tracing.counter_random import batch_dims
from autoparallel.passes.tracing.modes import promote_to_float64
from autoparallel.passes.tracing.python_state import PythonState
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan, Precision
from autoparallel.planner.variants.asynchronous import describe_updates
from autoparallel.planner.variants.parameter_servers import describe_servers
from autoparallel.planning.capture import capture_program, record_target
from autoparallel.planning.plan import check_served_run
from autoparallel.planning.plan_files import PLAN, batch_seq, load_job, save_plan
from autoparallel.planning.routing import begin_counting, check_has_experts, write_routing
from autoparallel.planning.tf32 import set_as_planned
from autoparallel.runtime.checkpoint.writer_claim import claim_folder
from autoparallel.runtime.launch.membership import join_as
from autoparallel.runtime.launch.process import Worker
from autoparallel.runtime.messages.shared_objects import Pulse, on_first
from autoparallel.runtime.parameters.pretrained import Pretrained, open_pretrained
from autoparallel.runtime.servers.server_trainer import ServerTrainer
from autoparallel.runtime.step.trainer import RankTrainer, Trainer
from autoparallel.runtime.update.optimizer import default_optimizer
from autoparallel.runtime.verify.reference import (
    Reference,
    UpdateRule,
    reference_split,
    run_reference,
    run_replay,
    streaming,
    update_rule,
)
from autoparallel.runtime.verify.verify import Quantity
from autoparallel.runtime.verify.verify import verify as run_verification
from autoparallel.target.target import Target
from autoparallel.training.data import TrainingData
from autoparallel.training.elastic_plan import plan_for_ranks
from autoparallel.training.memory_error import explained_memory_errors, held_by
from autoparallel.training.restart import Attempt, begin_attempt
from autoparallel.training.run_setup import open_callbacks, update_options, with_compile_choice
from autoparallel.training.start import report_verification
from autoparallel.training.step_log import (
    MemoryMeter,
    StepLog,
    keep_measurement,
    next_step,
    outcome,
    outlook,
    samples_or_tokens,
    summary,
)
from autoparallel.training.steps import RunSaves, Saving, take_steps
from autoparallel.training.text_data import with_text
from autoparallel.training.trace import RunTrace

VERIFIED_STEPS = 2
MIXED_DEVICES = "Expected all tensors to be on the same device"
"""Part of torch's error message for an op whose tensors are on several devices."""
QUANTITIES: tuple[Quantity, ...] = ("loss", "gradient", "weight", "buffer")


def train(
    worker: Worker,
    *,
    plan_path: str,
    steps: int,
    seed: int,
    saving: Mapping[str, Any] | None = None,
    resume: str | None = None,
    sources: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train by the plan at ``plan_path``; rank 0 prints each step and a summary.

    ``saving`` has the fields of ``Saving``. ``resume`` is a checkpoint, or a folder whose newest
    checkpoint is loaded; data then continues from its position and seed, and no initial weights are
    drawn. ``sources`` has the fields of ``Sources`` (initial weights, initialization, text data),
    ``options`` the fields of ``RunOptions``. Returns the measured and predicted seconds and bytes,
    and the losses.
    """
    asked = RunOptions(**(options or {}))
    how = Saving(**saving) if saving is not None else None
    ends, given = ExitStack(), sources or {}
    if asked.verified and worker.restarts == 0:
        _verify_first(worker, plan_path, steps, seed, asked)
    run = _prepare(
        worker, plan_path, asked, how, resume=resume, sources=given, seed=seed, ends=ends
    )
    plan, trainer = run.plan, run.trainer
    if not trainer.trains:
        trainer.finish(worker.watchdog.progress)
        return {}
    data = TrainingData(
        trainer,
        run.target,
        seed=seed,
        progress=worker.watchdog.progress,
        tell=partial(print, flush=True) if worker.rank == 0 else lambda line: None,
    )
    done = 0
    if isinstance(trainer, Trainer):
        done = begin_run(
            trainer,
            run.target,
            data,
            worker,
            asked,
            seed=seed,
            resume=run.attempt.resume,
            compared=lambda: log.skip(),
        )
    if asked.count_routing is not None:
        check_has_experts(trainer.program, "--count-routing")
        begin_counting(trainer.model)
    last = run.attempt.begin_after(done, steps, rank=worker.rank)
    if worker.rank == 0:
        if not asked.verified:
            print(outlook(plan, last - done, asked.accumulate), flush=True)
        if how is not None:
            keep_plan(plan, how.folder)
    watched = explained_memory_errors(
        plan, worker, partial(held_by, trainer), run.memory.peak_bytes
    )
    telling = open_callbacks(
        asked,
        plan,
        run.target,
        rank=worker.rank,
        num_steps=last - done,
        kept=run.attempt.last_kept(done),
    )
    num_traced = 0 if plan.servers is not None else asked.trace_steps
    trace = RunTrace(num_traced, asked.trace, first=done + 1, last=last)
    with telling as callback, watched:
        log = StepLog(
            samples_or_tokens(plan, asked.accumulate),
            run.memory,
            callback,
        )
        saves = None
        if how is not None and isinstance(trainer, Trainer):
            saves = RunSaves(how, trainer, worker, log, callback)
        take_steps(
            trainer,
            data,
            worker,
            log,
            saves,
            steps=range(done + 1, last + 1),
            num_batches=asked.accumulate,
            trace=trace,
        )
        trace.write(plan, trainer.model.planned.schedule, rank=worker.rank)
        if asked.count_routing is not None:
            write_routing(trainer.model, asked.count_routing)
        callback.on_end()
    ends.close()
    if trainer.reports and log.figures.seconds:
        print(summary(log.figures, plan, asked.accumulate), flush=True)
        print(next_step(None if how is None else how.folder), flush=True)
        saved = [Path(how.folder) / PLAN] if how is not None else []
        keep_measurement(plan, log.figures, asked.accumulate, [Path(plan_path), *saved])
    return outcome(log.figures, plan, asked.accumulate)


def _verify_first(worker: Worker, plan_path: str, steps: int, seed: int, asked: RunOptions) -> None:
    """Verify the plan in the processes that then train by it; rank 0 prints the result."""
    plan, _ = load_job(plan_path)
    if worker.rank == 0:
        print(f"verification, then {outlook(plan, steps, asked.accumulate)}", flush=True)
    found = verify(worker, plan_path=plan_path, dtype="fp64", seed=seed, compiled=asked.compiled)
    report_verification(plan, found, prints=worker.rank == 0)
    gc.collect()


@dataclass(frozen=True, slots=True)
class _Run:
    """Objects that a rank trains with: plan, target, attempt, trainer and memory meter."""

    plan: Plan
    target: Target
    attempt: Attempt
    trainer: RankTrainer
    memory: MemoryMeter


def _prepare(
    worker: Worker,
    plan_path: str,
    asked: RunOptions,
    saving: Saving | None,
    *,
    resume: str | None,
    sources: Mapping[str, Any],
    seed: int,
    ends: ExitStack,
) -> _Run:
    """Join the ranks, rebuild the model and make the trainer; rank 0 prints a description.

    ``ends`` collects callbacks for the end of the run.
    """
    plan, target = load_job(plan_path)
    check_served_run(plan, asked, {"saving": saving, "resume": resume}, target)
    if sources.get("data") is not None:
        target = with_text(target, sources["data"], worker)
    device = join_as(worker, plan.cluster)
    folder = None if saving is None else saving.folder
    if asked.elastic is not None:
        plan = plan_for_ranks(plan, target, worker, asked.elastic, folder)
    plan = with_compile_choice(plan, asked.compiled, rank=worker.rank)
    if folder is not None:
        claim = partial(claim_folder, folder, takes_over=worker.restarts > 0)
        ends.callback(on_first(claim) or (lambda: None))
    attempt = begin_attempt(worker, folder, resume)
    start = None
    if attempt.resume is None and sources.get("weights") is not None:
        start = partial(open_pretrained, sources["weights"], partial=sources["weights_partial"])
    trainer, memory = make_trainer(
        plan,
        target,
        worker,
        device=device,
        seed=seed,
        init=sources.get("init", "auto"),
        is_given=attempt.resume is not None,
        start=start,
    )
    set_as_planned(plan, worker.rank)
    if worker.rank == 0:
        print(verification_text(plan), flush=True)
        meaning = describe_updates(plan) or describe_servers(plan)
        if meaning and trainer.trains:
            name = plan.schedule if plan.servers is None else plan.servers.consistency
            print(f"{name}: {meaning}", flush=True)
    return _Run(plan, target, attempt, trainer, memory)


def begin_run(
    trainer: Trainer,
    target: Target,
    data: TrainingData,
    worker: Worker,
    asked: RunOptions,
    *,
    seed: int,
    resume: str | None,
    compared: Callable[[], None],
) -> int:
    """Set up updates and the check of the first step, and load the checkpoint ``resume`` if given.

    ``compared`` is called after the check. Return the number of steps already done.
    """
    trainer.overlaps_steps = True
    trainer.use_update(update_options(asked, trainer.device.type), target.build_scheduler)
    captures = trainer.runner.captures
    if isinstance(captures, LiveCaptures):
        compare_first_step(
            trainer,
            captures,
            lambda: plain_build(target.build_model, seed).to(trainer.device),
            asked=asked.check_first_step,
            done=compared,
        )
    trainer.parts.update(data=data, update=trainer.steps.update)
    if resume is None:
        return 0
    worker.watchdog.progress("reading the checkpoint")
    done = trainer.load(resume, optimizer=trainer.optimizer, optional=("data", "update"))
    data.go_on_from(done * asked.accumulate)
    return done


def keep_plan(plan: Plan, folder: str) -> None:
    """Write the plan beside its checkpoints, where ``export`` looks for it."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_plan(plan, Path(folder) / PLAN)


def verify(
    worker: Worker, *, plan_path: str, dtype: str, seed: int, compiled: bool | None = None
) -> dict[str, Any]:
    """Compare the plan's run with the reference on one device; return the result as plain data."""
    plan, target = load_job(plan_path)
    set_torch(())  # TF32 rounds float32 products further than verification tolerates.
    plan = with_compile_choice(plan, compiled, rank=worker.rank)
    precision: Precision = "fp64" if dtype == "fp64" else "fp32"
    plan = replace(plan, model=replace(plan.model, precision=precision))
    device = join_as(worker, plan.cluster)
    trainer, _ = make_trainer(plan, target, worker, device=device, seed=seed)
    graph = trainer.program.graph.with_batch_size(plan.model.global_batch)
    batches = [random_batch(graph, seed=seed + step) for step in range(VERIFIED_STEPS)]

    pulse = Pulse(worker.watchdog.progress)

    def reference() -> Reference:
        return one_device(trainer, target, batches, seed, tell=pulse.tell)

    if plan.servers is not None and plan.servers.consistency != "bsp":
        raise UsageError(
            "AP960",
            f"a plan with consistency={plan.servers.consistency} cannot be verified",
            why="it is not equal to one device: which gradients are taken at which weights "
            "depends on the speed of the workers",
            fix="verify the plan with consistency=bsp",
        )
    found = run_verification(trainer, batches, reference, pulse)
    trainer.finish()
    return {
        "passed": found.passed,
        "dtype": found.dtype,
        "tolerance": found.tolerance,
        "num_compared": len(found.differences),
        "worst": {name: found.worst(name) for name in QUANTITIES},
        "failures": [asdict(failure) for failure in found.failures],
    }


def one_device(
    trainer: RankTrainer,
    target: Target,
    batches: Sequence[Mapping[str, Tensor]],
    seed: int,
    *,
    tell: Callable[[str], None] = lambda what: None,
) -> Reference:
    """Run the same steps with the plain model on this rank's device, in the same dtype.

    On a GPU the weights of one op at a time are copied from the CPU (``streaming``); if that fails,
    the GPU holds the whole model, and a line is printed. The updates of an asynchronous schedule
    are made with the schedule's delays.
    """
    rule = update_rule(trainer.model.planned)
    device = trainer.device
    run = partial(_run_plain, trainer, target, batches, seed, rule=rule, tell=tell)
    if device.type == "cpu":
        return run(streams=False)
    why = "an asynchronous schedule changes weights between a forward and its backward"
    if rule is None:
        try:
            return run(streams=True)
        except RuntimeError as error:
            if MIXED_DEVICES not in str(error):
                raise
            why = str(error).split("\n")[0]
    print(f"reference: the whole model on {device}: {why}", flush=True)
    return run(streams=False)


def _run_plain(
    trainer: RankTrainer,
    target: Target,
    batches: Sequence[Mapping[str, Tensor]],
    seed: int,
    *,
    rule: UpdateRule | None,
    tell: Callable[[str], None],
    streams: bool,
) -> Reference:
    """Run steps of the plain model as ``one_device`` does. ``streams`` copies weights op by op;
    ``rule`` has the delays of an asynchronous schedule's updates, None for none."""
    program, device = trainer.program, trainer.device
    is_double = trainer.program.dtype == "float64"
    tell("the reference: building the model")
    model = plain_build(target.build_model, seed).to(getattr(torch, trainer.program.dtype))
    for node in program.graph.parameters:
        if node.spec.stored:
            weight = model.get_parameter(node.name)
            weight.data = round_nf4(weight.data)
    if not streams:
        model = model.to(device)

    def loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        tell("the reference: forward")
        batch = program.batch({name: each.to(device) for name, each in inputs.items()})
        with streaming(model, device, tell) if streams else torch.device(device):
            return find_loss(call_model(model, batch), batch, target.loss_fn)

    named = partial(default_optimizer, name=trainer.plan.model.optimizer)
    build = target.build_optimizer or named
    train = run_reference if rule is None else partial(run_replay, rule=rule)
    with promote_to_float64() if is_double else nullcontext():
        found = train(
            model,
            batches,
            loss=loss,
            build_optimizer=build,
            seed=seed,
            split=partial(reference_split, trainer.model.planned),
            random_dims=batch_dims(trainer.program.graph),
        )
    return found.on_cpu()


def make_trainer(
    plan: Plan,
    target: Target,
    worker: Worker,
    *,
    device: torch.device,
    seed: int,
    init: Init = "exact",
    is_given: bool = False,
    start: Callable[[nn.Module, Deferred], Pretrained] | None = None,
) -> tuple[RankTrainer, MemoryMeter]:
    """Make the trainer of this rank, and a meter of its memory from now on. Collective.

    ``start`` returns the model's initial weights; without it they are drawn as the model's build
    does. With ``is_given`` the parameters are left unset, for the caller to load.
    """
    tell = worker.watchdog.progress
    tell("capturing the model")
    deferred = record_target(target, seed, init)
    if not is_given and start is None:
        say_if_drawn_apart(deferred, init, worker.rank)
    state = PythonState(deferred.model, target.loss_fn)
    if is_given:
        deferred = deferred.without(name for name, _ in deferred.model.named_parameters())
    capture = partial(
        capture_program,
        target,
        deferred,
        seq=batch_seq(plan, target),
        precision=plan.model.precision,
        autocast=plan.model.float32_ops == "autocast",
    )
    with state.repeated():
        program = capture(global_batch=plan.model.global_batch)
    say_if_rows_are_apart(program, plan, worker.rank)
    weights = deferred if start is None else start(program.model, deferred)
    if isinstance(weights, Pretrained) and worker.rank == 0:
        print(weights.summary(), flush=True)
    tell("making the stage")
    gc.collect()
    memory = MemoryMeter(device)
    kind = Trainer if plan.servers is None else ServerTrainer
    trainer: RankTrainer = kind(
        program,
        plan,
        weights,
        device=device,
        build=target.build_optimizer,
        progress=tell,
        seed=seed,
    )
    if isinstance(trainer, Trainer):
        trainer.runner.captures = follow_model(
            trainer,
            state,
            target,
            batch_seq(plan, target),
            lambda rows: capture(global_batch=rows),
            nullcontext,
            lambda program: None,
            CallForm(deferred.model.forward),
        )
    return trainer, memory
