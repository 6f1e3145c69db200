"""Cases to measure: an op on one rank as a call on tensors of local shapes.

In: a node, the local specs of its inputs and outputs, its work. Out: an ``OpCase`` whose key is
equal for equal calls, so that equal layers, and equal ops of a layer, are measured once; None for
an op that takes no time by itself.

The call is the call that ``passes.local.local_ops`` makes of the node, with the arguments of
``OpSpec.local``. A causal attention over a part of the positions is measured as the last part, the
slowest, and attention within packed documents as that of whole sequences. If that pass replaces the
op by a function of this package (a split vocabulary), the original op is measured at the same local
shapes.
"""

from __future__ import annotations

import itertools
from typing import Any

from ...cost_model.profile.case import OpCase, ProfileError, TensorCase, canonical
from ..graph.graph import Node, map_refs
from ..ops.attention import is_lower_right
from ..ops.attention_limits import unpacked
from ..ops.case import Specs, argument
from ..ops.catalog import spec_of
from ..ops.work import Work

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def op_case(
    node: Node, inputs: Specs, outputs: Specs, work: Work, *, in_tf32: bool = False
) -> OpCase | None:
    """Return the op, shapes and arguments by which a profile stores a node at local shapes; None if
    there is nothing to measure.

    There is nothing for an op without forward and backward work, or with an argument that a profile
    cannot express. ``work``: FLOPs and bytes at these shapes. ``in_tf32``: products run in TF32.
    """
    if not (work.flops_forward or work.bytes_forward or work.flops_backward or work.bytes_backward):
        return None
    node, inputs = unpacked(node, inputs)
    op, given = _renamed(node.op), _localized(node, inputs, outputs)
    if inputs and is_lower_right(node, inputs[0]):
        op, given = _LOWER_RIGHT, _lower_right(node)
    try:
        arguments = _canonical(given)
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


def _lower_right(node: Node) -> Arguments:
    names = (("dropout_p", 4), ("scale", 6), ("enable_gqa", 7))
    given = {name: argument(node, position, name, None) for name, position in names}
    return node.args[:3], {name: value for name, value in given.items() if value is not None}


_LOWER_RIGHT = "autoparallel.lower_right_attention.default"


def _canonical(arguments: Arguments) -> str:
    """Return the arguments as text, with tensors numbered in call order."""
    numbers = itertools.count()
    args, kwargs = map_refs(arguments, lambda _: {"tensor": next(numbers)})
    return canonical(args, kwargs)


def _localized(node: Node, inputs: Specs, outputs: Specs) -> Arguments:
    """Return the node's arguments at local shapes. A random op's key does not affect its time."""
    spec, args, kwargs = spec_of(node), list(node.args), dict(node.kwargs)
    if spec.is_counted:
        kept = {name: value for name, value in kwargs.items() if name not in ("key", "start")}
        return node.args, {**kept, "number": 0}
    for position, name, value in () if spec.local is None else spec.local(node, inputs, outputs):
        if position < len(args):
            args[position] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs
