"""Whether a plan may have parameter servers: what they cannot run is planned without."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.passes.programs.program import Program
from autoparallel.planner.errors import AutoparallelError
from autoparallel.target.load import Target

if TYPE_CHECKING:
    from autoparallel.planning.plan import PlanOptions


def can_be_served(program: Program, target: Target, cluster: Cluster) -> bool:
    """Whether parameter servers run the target: no scheduler, and an optimizer that steps each
    element by itself. Its ``build_optimizer`` is called with parameters that have no memory."""
    if target.build_scheduler is not None or any(h.device.kind != "cpu" for h in cluster.hosts):
        return False
    if target.build_optimizer is None:
        return True
    import torch

    from autoparallel.runtime.servers.server import served_optimizer

    trained = [node for node in program.graph.parameters if node.spec.requires_grad]
    shapes = {node.name: torch.Size(node.spec.shape) for node in trained}
    slices = {name: [torch.nn.Parameter(torch.zeros(0))] for name in shapes}
    try:
        served_optimizer(slices, shapes, target.build_optimizer, name="")
    except AutoparallelError:
        return False
    return True


def without_servers(options: PlanOptions) -> PlanOptions:
    """The options without parameter servers, where nobody forces them: for what they cannot do."""
    if options.forced.servers is not None:
        return options
    denied = options.features.denied | {"servers"}
    return replace(options, features=replace(options.features, denied=denied))
