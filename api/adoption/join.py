"""Start of training a script's model under torchrun: planned on rank 0, trained on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel.adoption.job import PlanJob
from autoparallel.cache.database import database_path
from autoparallel.calls.following import LiveCaptures, follow_model
from autoparallel.calls.form import CallForm
from autoparallel.calls.modes import as_at_start, say_if_rows_are_apart
from autoparallel.cost_model.cluster.cluster import Cluster, ClusterError
from autoparallel.cost_model.cluster.detect import (
    joined_cluster,
    own_process_device,
    threads_per_device,
)
from autoparallel.options.plan_options import PlanOptions, without_servers
from autoparallel.passes.capture.capture_model import NO_LOSS
from autoparallel.passes.capture.export import held_tensors, with_held
from autoparallel.passes.initialization.deferred_init import Deferred, named_tensors
from autoparallel.passes.programs.outputs import mean_inputs, mean_of_outputs
from autoparallel.passes.programs.program import Program
from autoparallel.passes.tracing.python_state import PythonState
from autoparallel.planner.errors import AutoparallelError, CaptureError, UsageError
from autoparallel.planner.graph.layout import ROW_AXES
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.requests.request import Forced
from autoparallel.planner.summary import HOST_STATES
from autoparallel.planner.variants.parameter_servers import check_not_served
from autoparallel.planning.capture import capture_rows, captured_seq
from autoparallel.planning.plan import find_cluster, plan_program
from autoparallel.planning.tf32 import tell_difference, with_choice
from autoparallel.profiling.progress import shown_progress
from autoparallel.profiling.work_list import (
    PlanWork,
    is_wanted,
    measure_together,
    under_torchrun_here,
)
from autoparallel.runtime.data.variants import Buckets
from autoparallel.runtime.launch.membership import check_none_idle, join
from autoparallel.runtime.launch.process import meeting_at_agent
from autoparallel.runtime.messages.shared_objects import (
    gather_values,
    on_first,
    share_in_place,
    share_tensor,
    share_text,
)
from autoparallel.runtime.parameters.initial_values import Weights, whole_tensors
from autoparallel.runtime.parameters.pretrained import Pretrained, open_pretrained
from autoparallel.runtime.profile.links import agree
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.target.target import Change, Target, changed_target, keep_batch
from autoparallel.training.run_setup import with_compile_choice


def join_training(
    model: nn.Module,
    forward: Callable[..., Any],
    job: PlanJob,
    plan: Plan | None,
    progress: Callable[..., None] | None = None,
    buckets: Buckets = (),
    timeout_seconds: float | None = None,
) -> tuple[Trainer, LiveCaptures]:
    """Return the trainer of this rank for a model, and the captured programs of the model's code.

    Collective over all ranks. Without ``plan`` rank 0 plans for the processes that torchrun
    started, and all ranks use its plan. Initial weights are rank 0's: of its model, or drawn from
    the state of its generator. Random numbers in the forward follow rank 0's ``torch.manual_seed``.
    Tensors that no stage holds (parameters that the loss does not depend on, buffers that training
    does not change) have their values in ``model`` afterwards. ``progress`` is called with each
    action of a step; ``buckets`` are sequence lengths to which shorter batches are padded.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        torch.set_num_threads(threads_per_device(world_size))
    meet = partial(meeting_at_agent, os.environ)
    device = join(kind, int(os.environ.get("LOCAL_RANK", rank)), timeout_seconds, meet)
    weights = _initial_weights(model, job)
    target, options = job.target, job.options
    if plan is not None:
        options = replace(
            options,
            precision=plan.model.precision,
            float32_ops=plan.model.float32_ops,
            global_batch=plan.model.global_batch,
        )
    call = CallForm(forward)
    target = replace(target, example_batch=call.examples(target.example_batch))
    held = held_tensors(model)
    again = partial(_capture_again, model, target, options, held)
    state = PythonState(model, target.loss_fn)
    with state.repeated():
        program = _capture_outputs(model, target, options)
    program = replace(program, recapture=again)
    if program.returned:
        _check_is_whole(options.forced if plan is None else plan)
        forced = replace(options.forced, num_microbatches=1, pp=1)
        options = replace(options, forced=forced)
    if plan is None:
        plan = _plan_together(program, target, _cluster(job.cluster, device), options, device)
    check_not_served(plan)
    if not job.allow_idle:
        check_none_idle(plan)
    _check_length(plan, captured_seq(program))
    plan = with_compile_choice(plan, options.compiled, rank=rank)
    tell_difference(plan, rank)
    say_if_rows_are_apart(program, plan, rank)
    seed = int(share_tensor(torch.tensor(torch.initial_seed() % 2**63)))
    if plan.offload != "none":
        raise UsageError(
            "AP192",
            f"the plan offloads {HOST_STATES[plan.offload]}, which scripts cannot run",
            why="a script and its evaluation read parameters on the device",
            fix='parallelize(..., deny="offload"), or train by autoparallel run',
        )
    trainer = Trainer(
        program, plan, weights, device=device, progress=progress, seed=seed, buckets=buckets
    )
    trainer.runner.publish_later(False)
    traced = replace(target, loss_fn=mean_of_outputs) if program.returned else target
    following = follow_model(
        trainer,
        state,
        traced,
        options.seq,
        again,
        partial(with_held, model, held),
        partial(_plan_again, target, options, plan, device),
        call,
    )
    if not isinstance(weights, Mapping):
        _fill_the_rest(model, weights, program, device)
    return trainer, following


def _cluster(name: str, device: torch.device) -> Cluster | None:
    """Return the cluster to plan for on rank 0, None elsewhere. "local" is the cluster of the
    launched processes. Collective."""
    is_joined = name == "local"
    devices = gather_values(own_process_device(device.index)) if is_joined else []

    def found() -> Cluster:
        if not is_joined:
            return find_cluster(name)
        try:
            return joined_cluster(devices)
        except ClusterError as error:
            raise UsageError("AP115", error.what, where=error.where, fix=error.fix) from error

    return on_first(found)


def _initial_weights(model: nn.Module, job: PlanJob) -> Weights:
    """Return rank 0's initial weights on every rank. Weights that ``model`` already has are
    overwritten in place by rank 0's; other weights are drawn or read from files later."""
    if job.deferred is not None:
        assert isinstance(job.deferred.seed, Tensor)
        drawn = replace(job.deferred, seed=share_tensor(job.deferred.seed))
        if job.weights is None:
            return drawn
        return open_pretrained(job.weights, model, drawn, partial=job.weights_partial)
    weights: dict[str, Tensor] = {}
    for name, tensor in named_tensors(model):
        weights[name] = tensor.detach()
        share_in_place(weights[name])
    return weights


def _capture_again(
    model: nn.Module,
    target: Target,
    options: PlanOptions,
    held: Mapping[str, Tensor],
    rows: int,
    change: Change = keep_batch,
) -> Program:
    """Capture a model's graph in training mode again, for a global batch of ``rows`` samples.

    ``held`` are the tensors to put into the model meanwhile; ``change`` alters the example batch.
    """
    with as_at_start(), with_held(model, held):
        asked = replace(options, global_batch=rows)
        return _capture_outputs(model, changed_target(target, change), asked)


def _capture_outputs(model: nn.Module, target: Target, options: PlanOptions) -> Program:
    """Capture the model's graph up to its loss, or up to its outputs if it has no loss.

    In the second case the script computes the loss from the outputs.
    """
    if target.returns_loss or target.loss_fn is not None:
        try:
            return _capture(model, target, options)
        except CaptureError as error:
            if error.code not in NO_LOSS or target.loss_fn is not None:
                raise
    program = _capture(model, replace(target, loss_fn=mean_of_outputs), options)
    assert program.outputs is not None
    count = sum(leaf.is_differentiable for leaf in program.outputs.leaves)
    return replace(program, returned=mean_inputs(program.graph, count))


def _capture(model: nn.Module, target: Target, options: PlanOptions) -> Program:
    return capture_rows(
        target,
        model,
        global_batch=options.global_batch,
        seq=options.seq,
        precision=options.precision,
        autocast=options.autocasts,
    )


def _fill_the_rest(
    model: nn.Module, weights: Deferred | Pretrained, program: Program, device: torch.device
) -> None:
    """Put all tensors that no stage holds into a model built without weights, on ``device``."""
    graph = program.graph
    spread = {node.name for node in graph.parameters} | {*graph.tied, *graph.updates}
    tensors = (*model.named_parameters(), *model.named_buffers())
    names = [name for name, tensor in tensors if name not in spread and tensor.is_meta]

    def put(name: str, value: Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        if attribute in module._parameters:
            old = module._parameters[attribute]
            is_trained = old is not None and old.requires_grad
            value = nn.Parameter(value, requires_grad=is_trained)
        setattr(module, attribute, value.to(device))

    for name, value in whole_tensors(names, weights).items():
        put(name, value)


def _plan_together(
    program: Program,
    target: Target,
    cluster: Cluster | None,
    options: PlanOptions,
    device: torch.device,
) -> Plan:
    """Plan for ``cluster`` on rank 0, the only rank that knows it, and share the plan. Collective.

    If the options want measured times, and torchrun started the cluster's processes on one machine,
    all ranks first measure the times that planning needs.
    """
    leader = None
    if cluster is not None:
        cluster = with_choice(cluster, options.tf32)
    with ExitStack() as shown:
        if cluster is not None and is_wanted(options, cluster) and under_torchrun_here(cluster):
            bar = shown.enter_context(shown_progress(options.measure_seconds))
            path = database_path(options.database)
            leader = PlanWork(program, target, cluster, options, path, bar.advance)
        if agree(leader is not None, device):
            measure_together(leader, device=device, build=target.build_optimizer)

    def planned() -> str:
        assert cluster is not None
        asked = options
        if asked.forced.gradients is None:  # a script's updates end with its steps
            asked = replace(asked, forced=replace(asked.forced, gradients="backward"))
        return dumps(plan_program(program, target, cluster, without_servers(asked)))

    return loads(share_text(on_first(planned)))


def _plan_again(
    target: Target, options: PlanOptions, plan: Plan, device: torch.device, program: Program
) -> Plan | None:
    """Plan for ``program``, another capture of the model, with the devices and degrees of ``plan``.

    Returns None if ``plan`` has several meshes, or if no such plan exists. Collective.
    """
    first, meshes = plan.stages[0], {stage.mesh for stage in plan.stages}
    degrees = dict(zip(first.mesh.axes, first.mesh.shape, strict=True))
    if len(meshes) > 1 or first.shares:
        return None
    splits_rows = not degrees.keys().isdisjoint(ROW_AXES)
    forced = replace(
        options.forced,
        dp=first.mesh.row_parts if splits_rows else None,
        tp=degrees.get("tp"),
        cp=degrees.get("cp"),
        ep=first.expert_degree if "ep" in degrees else None,
        etp=first.slice_degree if first.slice_degree > 1 else None,
        zero=first.zero,
        shard=first.shard_degree or None,
        schedule=plan.schedule or None,
        num_microbatches=plan.num_microbatches,
        pp=len(plan.stages),
    )
    asked = replace(options, forced=forced, measure_seconds=0.0)
    try:
        return _plan_together(program, target, plan.cluster, asked, device)
    except AutoparallelError:
        return None


def _check_is_whole(wanted: Plan | Forced) -> None:
    """Raise UsageError AP932 if a plan or forced degrees have several micro-batches or stages: a
    model without a loss needs one of each, as the script's loss takes the whole batch's outputs."""
    stages = len(wanted.stages) if isinstance(wanted, Plan) else wanted.pp or 1
    count = wanted.num_microbatches or 1
    if max(count, stages) > 1:
        what = f"{count} micro-batches" if count > 1 else f"{stages} pipeline stages"
        raise UsageError(
            "AP932",
            f"the plan has {what}, but the model returns no loss",
            why="the script computes the loss from the outputs of the whole batch",
            fix="pass loss_fn to parallelize and train with Step, or plan with microbatches=1 "
            "and pp=1",
        )


def _check_length(plan: Plan, seq: int | None) -> None:
    if plan.model.seq is not None and seq is not None and plan.model.seq != seq:
        raise UsageError(
            "AP143",
            f"the plan is for sequences of {plan.model.seq}, but the example batch has {seq}",
            fix="pass the plan's length as seq, or plan for this length",
        )
