"""autoparallel: finds the fastest way to train a PyTorch model on a cluster, and runs it.

Train a model by decorating its class, or by passing the model object::

    @autoparallel.parallelize(example_batch=(tokens, targets), global_batch=256)
    class Net(nn.Module): ...

    model = autoparallel.parallelize(model, example_batch=(tokens, targets))
    step = autoparallel.Step(model, loss_fn=loss_fn)       # one training step, for every plan

Plan without training, and look at the plan::

    plan = autoparallel.plan(build_model, example_batch, cluster="8xH100", global_batch=256)
    plan.step_seconds, plan.peak_memory_bytes, plan.to_frame("stages")
    autoparallel.save_plan(plan, "plan.json")

==========================================  ====================================================
parallelize, Step, distribute               train by a plan; give each rank its part of the data
plan, estimate, compare, describe, profile  plan, size a purchase, compare, report, measure
save_plan, load_plan                        plans as files
save, load, export, whole                   checkpoints, weights of other programs, whole tensors
Callback, JsonLines, TensorBoard, …         observe and log each step
register_op, register_schedule              your own ops, your own pipeline schedules
one_process, own_folder                     use trainers that distribute by themselves
AutoparallelError and its subclasses        errors, with a code, a cause and a fix
==========================================  ====================================================

Names are loaded at their first use: importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoparallel.adoption.checkpoints import load, save
    from autoparallel.adoption.data_loader import distribute
    from autoparallel.adoption.module import ParallelModule
    from autoparallel.adoption.parallelize import parallelize, plan
    from autoparallel.adoption.step import Step
    from autoparallel.exporting.weights import export
    from autoparallel.html.notebooks import compare, estimate, load_plan
    from autoparallel.options.environment import one_process, own_folder
    from autoparallel.planner.errors import (
        AutoparallelError,
        CaptureError,
        DeviceMemoryError,
        HangError,
        InfeasibleError,
        MachineError,
        PlanError,
        RunError,
        TimeLimitError,
        UsageError,
        VerificationError,
        WorkerError,
    )
    from autoparallel.planner.plan import Plan
    from autoparallel.planning.plan_files import save_plan
    from autoparallel.profiling.start import profile
    from autoparallel.report import describe
    from autoparallel.runtime.parameters.global_values import whole
    from autoparallel.target.register_op import register_op
    from autoparallel.target.register_schedule import register_schedule
    from autoparallel.training.callbacks import Callback
    from autoparallel.training.metrics import JsonLines, TensorBoard, WeightsAndBiases

__version__ = "0.1.0"

__all__ = [
    "AutoparallelError",
    "Callback",
    "CaptureError",
    "DeviceMemoryError",
    "HangError",
    "InfeasibleError",
    "JsonLines",
    "MachineError",
    "ParallelModule",
    "Plan",
    "PlanError",
    "RunError",
    "Step",
    "TensorBoard",
    "TimeLimitError",
    "UsageError",
    "VerificationError",
    "WeightsAndBiases",
    "WorkerError",
    "__version__",
    "compare",
    "describe",
    "distribute",
    "estimate",
    "export",
    "load",
    "load_plan",
    "one_process",
    "own_folder",
    "parallelize",
    "plan",
    "profile",
    "register_op",
    "register_schedule",
    "save",
    "save_plan",
    "whole",
]

_HOMES = {
    "Callback": "autoparallel.training.callbacks",
    "JsonLines": "autoparallel.training.metrics",
    "ParallelModule": "autoparallel.adoption.module",
    "Plan": "autoparallel.planner.plan",
    "Step": "autoparallel.adoption.step",
    "TensorBoard": "autoparallel.training.metrics",
    "WeightsAndBiases": "autoparallel.training.metrics",
    "compare": "autoparallel.html.notebooks",
    "describe": "autoparallel.report",
    "load": "autoparallel.adoption.checkpoints",
    "estimate": "autoparallel.html.notebooks",
    "export": "autoparallel.exporting.weights",
    "distribute": "autoparallel.adoption.data_loader",
    "load_plan": "autoparallel.html.notebooks",
    "one_process": "autoparallel.options.environment",
    "own_folder": "autoparallel.options.environment",
    "parallelize": "autoparallel.adoption.parallelize",
    "plan": "autoparallel.adoption.parallelize",
    "profile": "autoparallel.profiling.start",
    "register_op": "autoparallel.target.register_op",
    "register_schedule": "autoparallel.target.register_schedule",
    "save": "autoparallel.adoption.checkpoints",
    "save_plan": "autoparallel.planning.plan_files",
    "whole": "autoparallel.runtime.parameters.global_values",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'autoparallel' has no attribute {name!r}")
    home = _HOMES.get(name, "autoparallel.planner.errors")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
