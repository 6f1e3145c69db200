"""A model's outputs besides its loss: their structure, and the differentiated outputs.

In: a model's outputs as an export sees them. Out: an ``OutputForm``, which rebuilds outputs of the
same structure from tensors; and, for a model that returns no loss, a scalar from which the graph is
captured instead (``mean_of_outputs``) and its operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_is_leaf, tree_unflatten

from ...planner.errors import CaptureError
from ...planner.graph.graph import Graph, Ref
from .batch import holds_tensors, register_dataclasses

LeafKind = Literal["loss", "tensor", "value"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """Leaf of a model's outputs. ``kind``: the loss, another tensor, or a plain value. ``value`` is
    the plain value itself (None for an object of the model's own class, such as a cache of keys),
    or the shape of the loss."""

    kind: LeafKind
    value: Any = None
    is_differentiable: bool = False


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Pytree structure of a model's outputs, with the kind of each leaf (loss, tensor, plain
    value)."""

    structure: TreeSpec
    leaves: tuple[Leaf, ...]

    @property
    def num_tensors(self) -> int:
        """Number of tensors among the outputs, without the loss."""
        return sum(leaf.kind == "tensor" for leaf in self.leaves)

    def build(self, loss: Tensor | None, tensor: Callable[[int], Tensor]) -> Any:
        """Return outputs of this structure, made of ``loss`` and of ``tensor(i)`` as the i-th other
        tensor."""
        made: list[Any] = []
        position = 0
        for leaf in self.leaves:
            if leaf.kind == "tensor":
                made.append(tensor(position))
                position += 1
            else:
                given = loss if leaf.kind == "loss" else None
                made.append(leaf.value if given is None else _shaped(given, leaf.value))
        return tree_unflatten(made, self.structure)


def _shaped(loss: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``loss`` reshaped to ``shape``, in which the model returns it."""
    return loss if loss.shape == shape else loss.reshape(shape)


def output_form(outputs: Any, loss: Tensor | None) -> OutputForm:
    """Return the structure of a model's ``outputs``; ``loss`` is the tensor among them that
    training minimizes, if any."""
    flat, structure = tree_flatten(with_dataclasses(outputs))
    return OutputForm(structure, tuple(_leaf(value, loss) for value in flat))


def with_dataclasses(outputs: Any) -> Any:
    """Register the dataclasses in ``outputs`` as containers of torch's pytrees; return ``outputs``.
    Raises CaptureError AP209 if tensors are in an object that cannot be rebuilt."""
    register_dataclasses(outputs)
    if tree_is_leaf(outputs) and not isinstance(outputs, Tensor) and holds_tensors(outputs):
        raise CaptureError(
            "AP209",
            f"the model returns its tensors in a {type(outputs).__name__}",
            why="outputs are rebuilt from the plan's results, which needs a known structure",
            fix="return a tuple, a dict, a named tuple or a dataclass",
        )
    return outputs


def _leaf(value: Any, loss: Tensor | None) -> Leaf:
    if isinstance(value, Tensor):
        if value is loss:
            return Leaf("loss", tuple(value.shape), _is_differentiable(value))
        return Leaf("tensor", None, _is_differentiable(value))
    plain = isinstance(value, bool | int | float | str | torch.dtype)
    return Leaf("value", value if plain else None)


def output_tensors(outputs: Any, form: OutputForm) -> list[Tensor]:
    """Return the tensors in ``outputs``, without the loss, in the order of ``form``."""
    flat, _ = tree_flatten(outputs)
    return [value for value, leaf in zip(flat, form.leaves, strict=True) if leaf.kind == "tensor"]


def scalar_losses(outputs: Any) -> list[Tensor]:
    """Return the differentiable scalars in a tuple or list of outputs, which are candidates for the
    loss. If gradients are off, return floating tensors without dimensions or, if there are none,
    floating tensors of one element."""
    scalars = [
        value
        for value in tree_flatten(outputs)[0]
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    ]
    if torch.is_grad_enabled():
        return [value for value in scalars if value.requires_grad]
    return [value for value in scalars if not value.dim()] or scalars


def _is_differentiable(value: Tensor) -> bool:
    return value.requires_grad and (value.is_floating_point() or value.is_complex())


def differentiable_outputs(outputs: Any) -> list[Tensor]:
    """Return the tensors in ``outputs`` that have a gradient, in their order."""
    flat = tree_flatten(with_dataclasses(outputs))[0]
    return [each for each in flat if isinstance(each, Tensor) and _is_differentiable(each)]


def mean_of_outputs(outputs: Any, batch: Any) -> Tensor:
    """Return a scalar that depends on every differentiable output: the sum of their means. Raises
    CaptureError AP203 if there are none. ``batch`` is unused."""
    found = differentiable_outputs(outputs)
    if not found:
        raise CaptureError(
            "AP203",
            "the model returns no loss",
            why="none of its outputs depends on its parameters",
            fix="return the loss or the logits, or define loss_fn(outputs, batch)",
        )
    total = found[0].mean()
    for value in found[1:]:
        total = total + value.mean()
    return total


def mean_inputs(graph: Graph, count: int) -> tuple[Ref, ...]:
    """Return the model's outputs, in order, from whose means a graph's loss is summed. The loss
    must be ``mean_of_outputs`` of ``count`` outputs."""
    found: list[Ref] = []
    ref = graph.loss
    for _ in range(count - 1):
        node = graph[ref.name]
        ref, mean = node.args[0], node.args[1]
        found.append(_averaged(graph, mean))
    found.append(_averaged(graph, ref))
    return tuple(reversed(found))


def _averaged(graph: Graph, mean: Ref) -> Ref:
    source = graph[mean.name].args[0]
    assert isinstance(source, Ref)
    if graph[source.name].kind == "parameter":
        raise CaptureError(
            "AP210",
            f"the model returns its parameter {source.name}",
            why="an output must be a value that the forward computes",
            fix="return a value computed from it, or read the parameter from the model",
        )
    return source
