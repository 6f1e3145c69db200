"""Cases to measure: an op on one rank as a call on tensors of local shapes.

In: a node, the local specs of its inputs and outputs, its work. Out: an ``OpCase`` whose key is
equal for equal calls, so that equal layers, and equal ops of a layer, are measured once; None for
an op that takes no time by itself.

The call is the call that ``passes.local.local_ops`` makes of the node: size arguments are taken
from the local outputs; sizes of parts and numbers of groups are divided. A causal attention over a
part of the positions is measured as the last part, the slowest. If that pass replaces the op by a
function of this package (a split vocabulary), the original op is measured at the same local shapes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...cost_model.profile.case import OpCase, ProfileError, TensorCase, canonical
from ..graph.graph import Node, TensorSpec, map_refs
from ..ops.case import argument
from ..ops.table import packet
from ..ops.work import Work, is_lower_right

Specs = Sequence[TensorSpec]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Localize = Callable[[Node, Specs, Specs], Arguments]


def op_case(
    node: Node, inputs: Specs, outputs: Specs, work: Work, *, in_tf32: bool = False
) -> OpCase | None:
    """Return the case (op, shapes, arguments) by which a profile stores a node at local shapes;
    None if there is nothing to measure.

    There is nothing for an op without forward and backward work, or with an argument that a profile
    cannot express. ``work`` is the op's work at the same shapes. ``in_tf32``: its products run in
    TF32.
    """
    if not (work.flops_forward or work.bytes_forward or work.flops_backward or work.bytes_backward):
        return None
    op, localize = _renamed(node.op), _LOCALIZE.get(packet(node.op), _as_it_is)
    if inputs and is_lower_right(node, inputs[0]):
        op, localize = _LOWER_RIGHT, _lower_right
    try:
        arguments = _canonical(localize(node, inputs, outputs))
    except ProfileError:
        return None
    return OpCase(
        op=op,
        tensors=tuple(TensorCase(each.shape, each.dtype, each.requires_grad) for each in inputs),
        arguments=arguments,
        family=work.family,
        flops=(work.flops_forward, work.flops_backward),
        num_bytes=(work.bytes_forward, work.bytes_backward),
        products=tuple(getattr(work, "products_forward", ())),
        tf32=(work.family,) if in_tf32 else (),
    )


def _renamed(op: str) -> str:
    return "aten.to.dtype" if op == "aten.to.device" else op


def _lower_right(node: Node, inputs: Specs, outputs: Specs) -> Arguments:
    names = (("dropout_p", 4), ("scale", 6), ("enable_gqa", 7))
    given = {name: argument(node, position, name, None) for name, position in names}
    return node.args[:3], {name: value for name, value in given.items() if value is not None}


_LOWER_RIGHT = "autoparallel.lower_right_attention.default"


def _canonical(arguments: Arguments) -> str:
    """Format ``[args, kwargs]`` as text, with tensors numbered in call order."""
    numbers = itertools.count()
    args, kwargs = map_refs(arguments, lambda _: {"tensor": next(numbers)})
    return canonical(args, kwargs)


def _as_it_is(node: Node, inputs: Specs, outputs: Specs) -> Arguments:
    return node.args, dict(node.kwargs)


def _argument(node: Node, position: int, name: str, value: Any) -> Arguments:
    """Return the node's arguments with the positional or named argument replaced by ``value``."""
    if position < len(node.args):
        args = (*node.args[:position], value, *node.args[position + 1 :])
        return args, dict(node.kwargs)
    return node.args, {**node.kwargs, name: value}


def _size_at(position: int) -> Localize:
    """Return a function that sets the op's size argument to the shape of the local output."""

    def localize(node: Node, inputs: Specs, outputs: Specs) -> Arguments:
        return _argument(node, position, "size", list(outputs[0].shape))

    return localize


def _repeat(node: Node, inputs: Specs, outputs: Specs) -> Arguments:
    output, own = outputs[0].shape, inputs[0].shape
    own = (1,) * (len(output) - len(own)) + own
    repeats = [whole // part for whole, part in zip(output, own, strict=True)]
    name = "dims" if packet(node.op) == "tile" else "repeats"
    return _argument(node, 1, name, repeats)


def _repeat_interleave(node: Node, inputs: Specs, outputs: Specs) -> Arguments:
    return _argument(node, 3, "output_size", None)


def _one_hot(node: Node, inputs: Specs, outputs: Specs) -> Arguments:
    return _argument(node, 1, "num_classes", outputs[0].shape[-1])


def _dim(node: Node, position: int, rank: int, default: int = 0) -> int:
    found = node.args[position] if position < len(node.args) else node.kwargs.get("dim", default)
    return int(found) % max(rank, 1)


def _split(node: Node, inputs: Specs, outputs: Specs) -> Arguments:
    dim = _dim(node, 2, len(inputs[0].shape))
    sizes = [spec.shape[dim] for spec in outputs]
    if sum(sizes) != inputs[0].shape[dim]:
        # ranks exchange the parts they cut: cut the local part in proportion
        whole = sum(spec.shape[dim] for spec in node.outputs)
        sizes = [spec.shape[dim] * inputs[0].shape[dim] // whole for spec in node.outputs]
    is_number = len(node.args) > 1 and isinstance(node.args[1], int)
    return _argument(node, 1, "split_sizes", sizes[0] if is_number else sizes)


def _slice(node: Node, inputs: Specs, outputs: Specs) -> Arguments:
    """Return a slice's arguments at local shapes: if it keeps the whole dimension, it keeps the
    whole local part."""
    dim = _dim(node, 1, len(inputs[0].shape))
    if outputs[0].shape[dim] == inputs[0].shape[dim]:
        return (node.args[0], dim, 0, sys.maxsize), {}
    return node.args, dict(node.kwargs)


def _narrow(node: Node, inputs: Specs, outputs: Specs) -> Arguments:
    dim = _dim(node, 1, len(inputs[0].shape))
    if outputs[0].shape[dim] == inputs[0].shape[dim]:
        return (node.args[0], dim, 0, inputs[0].shape[dim]), {}
    return node.args, dict(node.kwargs)


def _parts(node: Node, outputs: Specs, dim: int) -> int:
    """Return the number of parts that dimension ``dim`` of the op's output is split into."""
    return max(1, node.spec.shape[dim] // max(outputs[0].shape[dim], 1))


def _group_norm(node: Node, inputs: Specs, outputs: Specs) -> Arguments:
    groups = node.args[1] if len(node.args) > 1 else node.kwargs["num_groups"]
    return _argument(node, 1, "num_groups", max(1, groups // _parts(node, outputs, 1)))


_GROUPS_AT = 6
"""Position of ``groups`` in ``conv2d(input, weight, bias, stride, padding, dilation, groups)``, and
in transposed convolutions, with ``output_padding`` before and ``dilation`` after."""


def _convolution(node: Node, inputs: Specs, outputs: Specs) -> Arguments:
    """Return a convolution's arguments at local shapes; ``groups`` counts this rank's groups."""
    position = 8 if packet(node.op) == "convolution" else _GROUPS_AT
    groups = node.args[position] if position < len(node.args) else node.kwargs.get("groups", 1)
    if groups == 1:
        return node.args, dict(node.kwargs)
    channels = len(inputs[0].shape) - len(inputs[1].shape) + 1
    parts = _parts(node, outputs, channels)
    return _argument(node, position, "groups", max(1, groups // parts))


def _counted(node: Node, inputs: Specs, outputs: Specs) -> Arguments:
    """Return a random op's arguments without its key, which does not affect the time."""
    kept = {name: value for name, value in node.kwargs.items() if name not in ("key", "start")}
    return node.args, {**kept, "number": 0}


_CONVOLUTIONS = (
    "convolution",
    *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
)

_LOCALIZE: Mapping[str, Localize] = {
    **{name: _size_at(1) for name in ("expand", "new_zeros", "new_ones", "new_full", "new_empty")},
    **{name: _size_at(1) for name in ("view", "reshape", "_unsafe_view", "view_copy")},
    **{name: _size_at(0) for name in ("zeros", "ones", "full", "empty")},
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split"), _split),
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    "repeat": _repeat,
    "tile": _repeat,
    "repeat_interleave": _repeat_interleave,
    "one_hot": _one_hot,
    "slice": _slice,
    "narrow": _narrow,
    "group_norm": _group_norm,
    "counter_dropout": _counted,
    "counter_uniform": _counted,
}
