"""Errors of models whose graphs cannot be lowered."""

from __future__ import annotations

from typing import NoReturn

from torch import fx, nn

from ...cost_model.cluster.given_text import check_texts
from ...planner.errors import CaptureError
from ...planner.ops.case import packet
from ..programs.batch import Batch, leaves
from ..tracing.locate import user_source


def check_names(model: nn.Module, batch: Batch) -> None:
    """Raise CaptureError AP217 if a name in the model or its batch contains control characters."""
    named = (model.named_modules(), model.named_parameters(), model.named_buffers())
    try:
        check_texts([name for names in named for name, _ in names])
        check_texts([step for path, _ in leaves(batch) for step in path])
    except ValueError as error:
        raise CaptureError(
            "AP217",
            "a name of a module, parameter or input cannot be planned",
            why=f"{error}, which would reach terminals, plans and logs",
            where=type(model).__name__,
            fix="rename it: add_module, register_parameter, setattr and the keys of a batch give "
            "such names",
        ) from error


def unknown_size_error(path: str, source: str) -> CaptureError:
    """Return the error for an op (``path``) whose result has a shape that depends on tensors'
    values; ``source``: the user's line."""
    is_count = packet(path) == "bincount"
    return CaptureError(
        "AP202",
        f"the shape of a result of {path} depends on the values of tensors",
        why="ranks and micro-batches would have to agree on it in the middle of a step",
        where=source,
        fix="F.one_hot(index.flatten(), n).sum(0) is the same count, with a size that is known"
        if is_count
        else "keep every element and give those that do not count no weight: for x[mask].mean() "
        "write torch.where(mask, x, 0).sum() / mask.sum()",
    )


def unknown_value_error(node: fx.Node) -> CaptureError:
    """Return the error for a model that computes with a Python number read from a tensor."""
    return CaptureError(
        "AP202",
        "the model computes with a number that is read from a tensor",
        why="its value is not known where the plan is made, and may change between steps",
        where=user_source(node.meta.get("stack_trace")),
        fix="keep it a tensor: self.scale in place of self.scale.item(), and for x[:, at] with a "
        "tensor of no dimension x.index_select(1, at.view(1)).squeeze(1)",
    )


def refuse_region(node: fx.Node) -> NoReturn:
    """Raise the error for a nested graph region (autocast, cond, …) that cannot be planned."""
    reads = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
    bodies = [getattr(node.graph.owning_module, name) for name in reads]
    inner = [each for body in bodies for each in body.graph.nodes]
    traces = (each.meta.get("stack_trace") for each in (node, *inner))
    raise CaptureError(
        "AP205",
        f"the model uses {node.target}, which cannot be planned",
        where=next(filter(None, map(user_source, traces)), ""),
        fix="use `--precision` in place of autocast, and tensor operations in place of "
        "torch.cond and torch.while_loop",
    )


def written_parameter_error(name: str, source: str) -> CaptureError:
    """Return the error for a forward that writes to the parameter ``name``; ``source``: its
    line."""
    return CaptureError(
        "AP213",
        f"the forward writes to the parameter {name}",
        why="each rank has a part of it, and the optimizer alone may change it",
        where=source,
        fix="write to it after the optimizer's step, under torch.no_grad(), or compute with a "
        "changed copy: weight = self.weight.clamp(0, 1); a weight that is not trained can be a "
        "buffer",
    )
