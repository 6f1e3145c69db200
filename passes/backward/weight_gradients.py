"""Split backwards: gradients of inputs first, gradients of weights later.

In: a block's graph. Out: the same graph, in which the ops whose weight gradients cost a matrix
product or more (linear, addmm, mm, matmul, conv, embedding) defer these: their backward computes
the gradient of their input and keeps the op's input and the gradient of its result.
``WeightGradients.run`` computes the gradients of weights from these, one block at a time, and frees
them. Other gradients, also of small parameters (norms, scales), are computed once, in the first
half, and their memory is freed there.

Both halves together compute the same as one backward, nothing twice. Recomputed blocks are
recomputed in the first half only.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...planner.ops.case import packet
from ...planner.ops.catalog import spec_named
from ..ops.eight_bits import eight_bit_linear, of_data, of_weights
from .compiled_runs import OF_WEIGHTS

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class SplitOp:
    """Op with weights whose backward is split in two functions: for the gradient of the data and
    for the gradients of the weights. ``data`` and ``weights`` are the positions of data and weights
    among the op's arguments. ``of_data(gradient, weight, data, rest)`` returns the gradient of the
    data; ``of_weights(gradient, data, shapes, rest)`` returns one gradient per weight, in order.
    ``shapes`` has the weights' shapes, None for an absent weight; ``rest`` has all arguments, with
    None in place of data and weights."""

    data: int
    weights: tuple[int, ...]
    of_data: Callable[[Tensor, Tensor, Tensor, Sequence[Any]], Tensor] | None
    of_weights: Callable[..., tuple[Tensor | None, ...]]


def _rows(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as a matrix, with all dimensions but the last flattened into rows."""
    return tensor.reshape(-1, tensor.shape[-1])


def _linear_weights(
    gradient: Tensor, data: Tensor, shapes: Sequence[Any], rest: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    rows = _rows(gradient)
    bias = rows.sum(0).reshape(shapes[1]) if len(shapes) > 1 and shapes[1] is not None else None
    return (rows.t() @ _rows(data), bias)[: len(shapes)]


def _embedding_weights(
    gradient: Tensor, data: Tensor, shapes: Sequence[Any], rest: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    padding = rest[2] if len(rest) > 2 else -1
    scale = rest[3] if len(rest) > 3 else False
    return (aten.embedding_dense_backward(gradient, data, shapes[0][0], padding, scale),)


_CONVOLUTION_DEFAULTS = (None, None, None, 1, 0, 1, 1)


def _convolution(
    gradient: Tensor,
    data: Tensor,
    weight: Tensor,
    rest: Sequence[Any],
    *,
    bias_shape: Any,
    mask: tuple[bool, bool, bool],
) -> tuple[Tensor, ...]:
    given = tuple(rest)
    stride, padding, dilation, groups = (given + _CONVOLUTION_DEFAULTS[len(given) :])[3:]
    num_dims = data.dim() - 2
    each = [
        list(v) if isinstance(v, list | tuple) else [v] * num_dims
        for v in (stride, padding, dilation)
    ]
    sizes = None if bias_shape is None else list(bias_shape)
    found: tuple[Tensor, ...] = aten.convolution_backward(
        gradient, data, weight, sizes, *each, False, [0] * num_dims, groups, list(mask)
    )
    return found


def _convolution_weights(
    gradient: Tensor, data: Tensor, shapes: Sequence[Any], rest: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    weight = data.new_empty(shapes[0])
    bias_shape = shapes[1] if len(shapes) > 1 else None
    mask = (False, True, bias_shape is not None)
    _, of_weight, of_bias = _convolution(
        gradient, data, weight, rest, bias_shape=bias_shape, mask=mask
    )
    return (of_weight, of_bias if bias_shape is not None else None)[: len(shapes)]


def _convolution_data(
    gradient: Tensor, weight: Tensor, data: Tensor, rest: Sequence[Any]
) -> Tensor:
    mask = (True, False, False)
    return _convolution(gradient, data, weight, rest, bias_shape=None, mask=mask)[0]


_CONVOLUTION = (_convolution_data, _convolution_weights)
_FUNCTIONS: dict[Any, tuple[Any, Any]] = {
    aten.linear.default: (lambda g, w, x, rest: g @ w, _linear_weights),
    eight_bit_linear: (of_data, of_weights),
    aten.mm.default: (
        lambda g, w, x, rest: g @ w.t(),
        lambda g, x, shapes, rest: (x.t() @ g,),
    ),
    aten.bmm.default: (
        lambda g, w, x, rest: g @ w.transpose(1, 2),
        lambda g, x, shapes, rest: (x.transpose(1, 2) @ g,),
    ),
    aten.addmm.default: (
        lambda g, w, x, rest: g @ w.t(),
        lambda g, x, shapes, rest: (x.t() @ g, shapes[1] and g.sum_to_size(shapes[1])),
    ),
    aten.embedding.default: (None, _embedding_weights),
    aten.conv1d.default: _CONVOLUTION,
    aten.conv2d.default: _CONVOLUTION,
    aten.conv3d.default: _CONVOLUTION,
}


def _split_op(op: Any, of_data: Any, of_weights: Any) -> SplitOp:
    late = spec_named("linear" if op is eight_bit_linear else packet(str(op))).weight_gradient
    assert late is not None, op
    return SplitOp(late.data, late.weights, of_data, of_weights)


HALVES = {op: _split_op(op, *functions) for op, functions in _FUNCTIONS.items()}
"""Ops whose weight gradients can be deferred, each with the two functions of its split backward."""


@dataclass(frozen=True, slots=True)
class _Deferred:
    """Tensors of one executed op from which its weight gradients are computed later."""

    block: int
    halves: SplitOp
    gradient: Tensor
    data: Tensor
    edges: tuple[GradientEdge | None, ...]
    shapes: tuple[Any, ...]
    rest: tuple[Any, ...]


class WeightGradients:
    """Weight gradients of a pipeline stage that its backwards have deferred: by micro-batch, the
    tensors from which they are computed later."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[_Deferred]] = {}
        self._collected: list[_Deferred] = []

    def add(self, deferred: _Deferred) -> None:
        """Store the tensors that an op's backward defers, for the micro-batch set by
        ``collecting``."""
        self._collected.append(deferred)

    @contextmanager
    def collecting(self, microbatch: int) -> Iterator[None]:
        """Assign the weight gradients that backwards defer in the ``with`` block to
        ``microbatch``."""
        self._collected = self._waiting.setdefault(microbatch, [])
        try:
            yield
        finally:
            self._collected = []

    def run(
        self, microbatch: int, after_block: Callable[[set[int]], None] = lambda remaining: None
    ) -> None:
        """Compute the deferred weight gradients of a micro-batch and free the tensors kept for
        them. ``after_block`` is called after each block (layer) with the positions of the blocks
        that remain."""
        waiting = self._waiting.pop(microbatch, [])
        waiting.reverse()
        while waiting:
            block = waiting[-1].block
            edges: list[GradientEdge] = []
            gradients: list[Tensor] = []
            while waiting and waiting[-1].block == block:
                found = _weight_gradients(waiting.pop())
                edges += [edge for edge, _ in found]
                gradients += [gradient for _, gradient in found]
            torch.autograd.backward(edges, gradients)
            after_block({deferred.block for deferred in waiting})

    def clear(self) -> None:
        """Discard all deferred gradients; called at the start of a training step."""
        self._waiting.clear()


def _weight_gradients(deferred: _Deferred) -> list[tuple[GradientEdge, Tensor]]:
    shapes = [
        shape if edge is not None or index == 0 else None
        for index, (shape, edge) in enumerate(zip(deferred.shapes, deferred.edges, strict=True))
    ]
    found = deferred.halves.of_weights(deferred.gradient, deferred.data, shapes, deferred.rest)
    return [
        (edge, gradient)
        for edge, gradient in zip(deferred.edges, found, strict=True)
        if edge is not None and gradient is not None
    ]


class _Putting(torch.autograd.Function):
    """Autograd function of a ``SplitOp`` whose backward computes the gradient of the data and
    defers the gradients of the weights. The input ``anchor`` requires a gradient, so that the
    backward runs even if the data needs none."""

    @staticmethod
    def forward(
        ctx: Any, op: _DeferredOp, edges: Any, anchor: Tensor, data: Tensor, *arguments: Any
    ) -> Tensor:
        halves = op.halves
        weights = [arguments[position] for position in halves.weights]
        ctx.op, ctx.edges = op, edges
        ctx.shapes = tuple(None if w is None else tuple(w.shape) for w in weights)
        skipped = {halves.data, *halves.weights}
        ctx.rest = tuple(None if i in skipped else a for i, a in enumerate(arguments))
        ctx.save_for_backward(data, *(weights[:1] if halves.of_data is not None else ()))
        whole = list(arguments)
        whole[halves.data] = data
        result: Tensor = op.target(*whole)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,), saved = gradients, ctx.saved_tensors
        op, data = ctx.op, saved[0]
        of_data = None
        if ctx.needs_input_grad[3]:
            of_data = op.halves.of_data(gradient, saved[1], data, ctx.rest)
        if any(edge is not None for edge in ctx.edges):
            op.store.add(
                _Deferred(op.block, op.halves, gradient, data, ctx.edges, ctx.shapes, ctx.rest)
            )
        return (None, None, None, of_data, *(None,) * len(ctx.rest))


class _DeferredOp(nn.Module):
    """Module that computes an op of a block's graph and defers its weight gradients."""

    def __init__(self, target: Any, halves: SplitOp, store: WeightGradients, block: int) -> None:
        super().__init__()
        self.target, self.halves, self.store, self.block = target, halves, store, block
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, *arguments: Any) -> Tensor:
        if not torch.is_grad_enabled():
            result: Tensor = self.target(*arguments)
            return result
        padded = list(arguments) + [None] * (max(self.halves.weights) + 1 - len(arguments))
        edges = tuple(_edge(padded[position]) for position in self.halves.weights)
        data = padded[self.halves.data]
        for position in self.halves.weights:
            padded[position] = None if padded[position] is None else padded[position].detach()
        padded[self.halves.data] = None
        applied: Tensor = _Putting.apply(  # type: ignore[no-untyped-call]
            self, edges, self._anchor, data, *padded
        )
        return applied


def _edge(weight: Tensor | None) -> GradientEdge | None:
    return None if weight is None or not weight.requires_grad else get_gradient_edge(weight)


def defer(
    module: fx.GraphModule, store: WeightGradients, block: int, shared: frozenset[str]
) -> frozenset[str]:
    """Make the ops of a block's graph defer their weight gradients to ``store``, in place.
    ``block`` is the block's position, ``shared`` the placeholders that take parameters as inputs.
    Returns the names (of attributes or placeholders) of the parameters whose gradients are
    deferred."""
    made_of: dict[fx.Node, frozenset[str]] = {}
    late: set[str] = set()
    parameters = dict(module.named_parameters())
    for node in module.graph.nodes:
        sources = _sources(node, made_of, parameters.keys(), shared)
        if sources:
            made_of[node] = sources
            node.meta[OF_WEIGHTS] = True
        halves = HALVES.get(node.target) if node.op == "call_function" else None
        if halves is not None and _fits(node, halves, made_of):
            late.update(*(made_of[node.args[p]] for p in halves.weights if _given(node, p)))
            name = f"deferred_{node.name}"
            module.add_module(name, _DeferredOp(node.target, halves, store, block))
            node.op, node.target = "call_module", name
    module.recompile()
    return frozenset(late)


def _sources(
    node: fx.Node,
    made_of: dict[fx.Node, frozenset[str]],
    parameters: Any,
    shared: frozenset[str],
) -> frozenset[str]:
    """Return the names of the parameters from which alone a node is computed; empty if it also
    depends on other values. ``made_of`` has the result for earlier nodes."""
    if node.op == "get_attr":
        return frozenset({str(node.target)} & set(parameters))
    if node.op == "placeholder":
        return frozenset({str(node.target)} & shared)
    inputs = node.all_input_nodes
    if node.op != "call_function" or any(each not in made_of for each in inputs):
        return frozenset()
    return frozenset().union(*(made_of[each] for each in inputs))


def _given(node: fx.Node, position: int) -> bool:
    return position < len(node.args) and node.args[position] is not None


def _fits(node: fx.Node, halves: SplitOp, made_of: dict[fx.Node, frozenset[str]]) -> bool:
    """Return whether the op's weight gradients can be deferred: its weights are computed from
    parameters alone (the nodes in ``made_of``), and its data is not."""
    weights = [node.args[p] for p in halves.weights if _given(node, p)]
    data = node.args[halves.data]
    return (
        not node.kwargs
        and _given(node, halves.weights[0])
        and all(isinstance(each, fx.Node) and each in made_of for each in weights)
        and isinstance(data, fx.Node)
        and data not in made_of
    )
