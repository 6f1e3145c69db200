"""Gradients of chosen parameters: ``torch.autograd.grad`` and ``backward(inputs=...)``.

In: a loss of a planned model, and the tensors to differentiate it by, some of them the model's
parameters. Out: the gradients that plain PyTorch gives. The parameters are no part of the graph
that autograd sees, so torch would find no path to them. Instead a whole backward runs; then every
leaf gets its earlier gradient back, and the requested gradients are returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...planner.errors import UsageError

_MASTERS: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""The parameters of planned models, by ``id(parameter)``."""

_autograd: Any = torch.autograd
_run_plainly = _autograd._engine_run_backward


def differentiate_chosen(masters: Iterable[Tensor]) -> None:
    """Patch autograd so that ``torch.autograd.grad`` and ``backward(inputs=…)`` work for
    ``masters``, the parameters of a planned model."""
    _autograd._engine_run_backward = (
        _run  # of grad and backward, by whatever name a script has them
    )
    _MASTERS.update((id(master), master) for master in masters)


def second_gradient() -> UsageError:
    """Return the error (AP947) for a gradient of a gradient through a model that trains by a
    plan."""
    return UsageError(
        "AP947",
        "a gradient of a gradient goes through a model that trains by a plan",
        why="create_graph=True differentiates the backward, which holds messages between ranks",
        fix="leave this model plain (no parallelize); others of the script may be parallel",
    )


def _run(
    outputs: Sequence[Tensor | GradientEdge],
    scales: Sequence[Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor],
    allow_unreachable: bool,
    *,
    accumulate_grad: bool,
) -> Any:
    """Run a backward in place of autograd's own function, with its arguments. If parameters of
    planned models are among ``inputs``, run a backward to all leaves and keep only the gradients of
    ``inputs``."""
    if not any(id(tensor) in _MASTERS for tensor in inputs):
        return _run_plainly(
            outputs,
            scales,
            retain_graph,
            create_graph,
            inputs,
            allow_unreachable,
            accumulate_grad=accumulate_grad,
        )
    batched = torch._C._functorch.is_legacy_batchedtensor
    if create_graph or any(isinstance(scale, Tensor) and batched(scale) for scale in scales):
        raise second_gradient()
    found = _found(outputs, scales, inputs, retain_graph)
    if not accumulate_grad:
        if not allow_unreachable and any(id(each) not in found for each in inputs):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. "
                "Set allow_unused=True if this is the desired behavior."
            )
        return tuple(found.get(id(each)) for each in inputs)
    for tensor in inputs:
        gradient = found.get(id(tensor))
        if gradient is not None:
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
    return None


def _found(
    outputs: Sequence[Tensor | GradientEdge],
    scales: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    retain_graph: bool,
) -> Mapping[int, Tensor]:
    """Run a backward to all leaves; return the gradients of ``inputs`` by ``id(tensor)``."""
    leaves = {id(leaf): leaf for leaf in (*_MASTERS.values(), *_leaves(outputs))}
    before = [(leaf, leaf.grad) for leaf in leaves.values()]
    found: dict[int, Tensor] = {}
    inner = [each for each in inputs if not each.is_leaf]
    hooks = [each.register_hook(partial(found.__setitem__, id(each))) for each in inner]  # type: ignore[no-untyped-call]
    try:
        for leaf in leaves.values():
            leaf.grad = None
        _run_plainly(outputs, scales, retain_graph, False, (), True, accumulate_grad=True)
        for each in inputs:
            if id(each) in leaves and each.grad is not None:
                found[id(each)] = each.grad
        return found
    finally:
        for hook in hooks:
            hook.remove()
        for leaf, gradient in before:
            leaf.grad = gradient


def _leaves(outputs: Sequence[Tensor | GradientEdge]) -> list[Tensor]:
    """Return the leaf tensors of the autograd graph of ``outputs``."""
    waiting = [each.node if isinstance(each, GradientEdge) else each.grad_fn for each in outputs]
    found, seen = [], set[Any]()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found
