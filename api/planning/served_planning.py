"""Targets and options that parameter servers cannot run: they are planned without, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.options.run_options import RunOptions
from autoparallel.passes.programs.program import Program
from autoparallel.planner.errors import AutoparallelError, UsageError
from autoparallel.planner.plan import Plan
from autoparallel.runtime.servers.server import served_optimizer
from autoparallel.target.target import Target


def can_be_served(program: Program, target: Target, cluster: Cluster) -> bool:
    """Return whether parameter servers can run the target: it has no scheduler, and an optimizer
    that steps each element by itself.

    Its ``build_optimizer`` is called with parameters that have no memory.
    """
    if target.build_scheduler is not None or any(h.device.kind != "cpu" for h in cluster.hosts):
        return False
    if target.build_optimizer is None:
        return True

    trained = [node for node in program.graph.parameters if node.spec.requires_grad]
    shapes = {node.name: torch.Size(node.spec.shape) for node in trained}
    slices = {name: [torch.nn.Parameter(torch.zeros(0))] for name in shapes}
    try:
        served_optimizer(slices, shapes, target.build_optimizer, name="")
    except AutoparallelError:
        return False
    return True


def what_servers_lack(options: RunOptions, asked: Mapping[str, Any]) -> list[str]:
    """List in words the options of a run that parameter servers cannot do."""
    wrong = {
        "clipping by norm or value": options.clip_norm or options.clip_value,
        "accumulation": options.accumulate > 1,
        "a loss scale": options.loss_scale is not None,
        "--on-nan": options.on_nan != "ignore",
        "--save": asked.get("saving") is not None,
        "--resume": asked.get("resume") is not None,
        "hosts that come and go": options.elastic is not None,
    }
    return [name for name, is_asked in wrong.items() if is_asked]


def check_served_run(
    plan: Plan, options: RunOptions, asked: Mapping[str, Any], target: Target
) -> None:
    """Raise UsageError AP959 for the first option that a plan's parameter servers cannot run."""
    if plan.servers is None:
        return
    wrong = what_servers_lack(options, asked)
    wrong += ["build_scheduler"] if target.build_scheduler is not None else []
    if wrong:
        raise UsageError(
            "AP959",
            f"a run with parameter servers cannot have {wrong[0]}",
            why="updates are made by the servers, each of its own part of the weights",
            fix="remove it, or plan without servers",
        )
