"""autoparallel: finds the fastest way to train a PyTorch model on a cluster, and runs it.

::

    import autoparallel

    plan = autoparallel.plan(build_model, example_batch, cluster="8xH100", global_batch=256)
    print(autoparallel.describe(plan))
    autoparallel.save_plan(plan, "plan.json")

Names are loaded at their first use: importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoparallel.callbacks import Callback
    from autoparallel.checkpoints import load, save
    from autoparallel.comparing import compare
    from autoparallel.distributed_loader import distribute
    from autoparallel.environment import one_process, own_folder
    from autoparallel.estimating import estimate
    from autoparallel.exporting import export
    from autoparallel.metrics import JsonLines, TensorBoard, WeightsAndBiases
    from autoparallel.module import ParallelModule
    from autoparallel.plan_io import load_plan, save_plan
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
    from autoparallel.profiling import profile
    from autoparallel.python import parallelize, plan
    from autoparallel.register import register_op
    from autoparallel.report import describe
    from autoparallel.runtime.parameters.global_values import whole
    from autoparallel.step import Step

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
    "save",
    "save_plan",
    "whole",
]

_HOMES = {
    "Callback": "autoparallel.callbacks",
    "JsonLines": "autoparallel.metrics",
    "ParallelModule": "autoparallel.module",
    "Plan": "autoparallel.planner.plan",
    "Step": "autoparallel.step",
    "TensorBoard": "autoparallel.metrics",
    "WeightsAndBiases": "autoparallel.metrics",
    "compare": "autoparallel.comparing",
    "describe": "autoparallel.report",
    "load": "autoparallel.checkpoints",
    "estimate": "autoparallel.estimating",
    "export": "autoparallel.exporting",
    "distribute": "autoparallel.distributed_loader",
    "load_plan": "autoparallel.plan_io",
    "one_process": "autoparallel.environment",
    "own_folder": "autoparallel.environment",
    "parallelize": "autoparallel.python",
    "plan": "autoparallel.python",
    "profile": "autoparallel.profiling",
    "register_op": "autoparallel.register",
    "save": "autoparallel.checkpoints",
    "save_plan": "autoparallel.plan_io",
    "whole": "autoparallel.runtime.parameters.global_values",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'autoparallel' has no attribute {name!r}")
    home = _HOMES.get(name, "autoparallel.planner.errors")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
