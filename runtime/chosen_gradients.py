"""Gradients of chosen parameters: ``torch.autograd.grad`` and ``backward(inputs=...)``.

In: losses of planned models, and tensors among which there are their parameters. Out: what plain
PyTorch gives. A planned model's parameters are no part of the graph that autograd sees, so torch
would find no way to them. Instead a whole backward runs, all gradients of leaves are those of
before it again, and only those that were asked for are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..planner.errors import UsageError

_MASTERS: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""The parameters of planned models by their ``id``."""


def differentiate_chosen(masters: Iterable[Tensor]) -> None:
    """Have ``torch.autograd`` find the gradients of these parameters where a script names them."""
    if not _MASTERS:
        for name, function in (("backward", _backward), ("grad", _grad)):
            plain = getattr(torch.autograd, name)
            if not hasattr(plain, "finds_planned"):
                setattr(torch.autograd, name, _where_planned(plain, function))
    _MASTERS.update((id(master), master) for master in masters)


def second_gradient() -> UsageError:
    """Return the error of a gradient of a gradient of a planned model."""
    return UsageError(
        "AP947",
        "a gradient of a gradient goes through a model that trains by a plan",
        why="create_graph=True differentiates the backward, which holds messages between ranks",
        fix="leave this model plain (no parallelize); others of the script may be parallel",
    )


def _where_planned(plain: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of ``torch.autograd``: where ``inputs`` has planned parameters, another."""

    @wraps(plain)
    def called(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = args[0] if args and function is _grad else kwargs.get("inputs")
        chosen = [inputs] if isinstance(inputs, Tensor) else list(inputs or ())
        if not any(id(tensor) in _MASTERS for tensor in chosen):
            return plain(outputs, *args, **kwargs)
        return function(outputs, *args, **kwargs)

    called.finds_planned = True  # type: ignore[attr-defined]
    called.plain = plain  # type: ignore[attr-defined]
    return called


def _backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None,
    create_graph: bool = False, grad_variables: Any = None, inputs: Any = None,
) -> None:  # fmt: skip
    """Add the gradients of ``inputs`` to their ``grad``."""
    if create_graph:
        raise second_gradient()
    scales = grad_variables if grad_tensors is None else grad_tensors
    chosen = _listed(inputs)
    found = _found(_listed(tensors), scales, chosen, retain_graph)
    for tensor in chosen:
        gradient = found.get(id(tensor))
        if gradient is not None:
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient


def _grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None,
    create_graph: bool = False, only_inputs: bool = True, allow_unused: bool | None = None,
    *more: Any, materialize_grads: bool = False, **others: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of ``inputs``; ``others`` may have ``is_grads_batched``."""
    if create_graph or any(more) or any(others.values()):
        raise second_gradient()
    chosen = _listed(inputs)
    found = _found(_listed(outputs), grad_outputs, chosen, retain_graph)
    if not (allow_unused or materialize_grads) and any(id(each) not in found for each in chosen):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )
    empty = torch.zeros_like if materialize_grads else lambda tensor: None
    return tuple(found[id(each)] if id(each) in found else empty(each) for each in chosen)


def _found(
    outputs: Sequence[Tensor], scales: Any, chosen: Sequence[Tensor], retain_graph: bool | None
) -> Mapping[int, Tensor]:
    """Return the gradients of the chosen tensors by their ``id``, of one whole backward."""
    leaves = {id(leaf): leaf for leaf in (*_MASTERS.values(), *_leaves(outputs))}
    before = [(leaf, leaf.grad) for leaf in leaves.values()]
    seen: dict[int, Tensor] = {}
    inner = [each for each in chosen if not each.is_leaf]
    hooks = [each.register_hook(partial(seen.__setitem__, id(each))) for each in inner]  # type: ignore[no-untyped-call]
    try:
        for leaf in leaves.values():
            leaf.grad = None
        torch.autograd.backward.plain(outputs, scales, retain_graph)  # type: ignore[attr-defined]
        for each in chosen:
            if id(each) in leaves and each.grad is not None:
                seen[id(each)] = each.grad
        return seen
    finally:
        for hook in hooks:
            hook.remove()
        for leaf, gradient in before:
            leaf.grad = gradient


def _leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves of a graph, to whose ``grad`` a backward adds."""
    found, waiting, seen = [], [each.grad_fn for each in outputs], set[Any]()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
