"""Whether a plan may have parameter servers: what they cannot run is planned without."""

from __future__ import annotations

import torch

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.passes.programs.program import Program
from autoparallel.planner.errors import AutoparallelError
from autoparallel.runtime.servers.served_piece import served_optimizer
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
