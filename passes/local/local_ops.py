"""Ops on local tensors: the call of a node whose tensors are parts.

In: a node, the layout chosen for it, and a rank. Out: the function to call, and its arguments. Most
ops run unchanged on their parts. ``RULES`` lists those that do not:

- size arguments (``view``, ``expand``, ``new_zeros``) are taken from the local output, which
  also makes them right after the graph was rescaled to another batch;
- means over split dimensions become shares that add up to the mean;
- a split vocabulary needs an offset, a split loss needs its reductions;
- a linear layer may compute with 8-bit factors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch

from ...planner.errors import PlanError
from ...planner.graph.graph import Node, Ref, TensorSpec, map_refs
from ...planner.graph.layout import NodeLayout, balanced_axes, local_region
from ..ops.batch_norm import BATCH_NORM_WITH_BUFFERS, batch_norm, batch_norm_with_buffers
from ..ops.collectives import Rank
from ..ops.eight_bits import eight_bit_linear
from ..ops.experts import split_experts
from ..ops.local_loss import MEAN, cross_entropy, nll_loss
from ..ops.nf4 import nf4_linear
from ..ops.random_ops import DROPOUT, UNIFORM, dropout_part, uniform_part
from ..ops.torch_ops import FILLED, RESHAPED, SPLIT, resolve
from .local_functions import (
    balanced_causal_attention,
    exchanged_split,
    split_causal_attention,
    split_embedding,
)
from .local_indexing import gather, index, index_select
from .local_op import Call, LocalOp

Rule = Callable[[LocalOp], Call]


def local_call(
    node: Node,
    layout: NodeLayout,
    specs: tuple[TensorSpec, ...],
    *,
    rank: Rank,
    values: Any,
    batch_dim: int | None = None,
    count: Any = None,
) -> Call:
    """Return the call that computes a rank's part of ``node``'s outputs. ``values`` are the local
    tensors of ``node.inputs``, in their order and in the layouts of ``layout.inputs``; ``specs``
    are the inputs' global specs; ``batch_dim`` is the first output's dimension that counts the
    batch, ``count`` the divisor of a class loss."""
    overload = resolve(node.op)
    feed = iter(values)
    args, kwargs = map_refs((node.args, dict(node.kwargs)), lambda _: next(feed))
    schema = overload._schema
    arguments = {argument.name: argument.default_value for argument in schema.arguments} | dict(
        zip((argument.name for argument in schema.arguments), args, strict=False)
    )
    op = LocalOp(
        node,
        layout,
        rank,
        specs,
        overload,
        arguments | kwargs,
        _positions(node, schema),
        batch_dim,
        count,
    )
    rule = RULES.get(node.op.rpartition(".")[0], _unchanged)
    return rule(op)


def _positions(node: Node, schema: Any) -> dict[str, int]:
    """Map each argument that is a single tensor to its position in ``node.inputs``."""
    positions: dict[str, int] = {}
    count = 0
    named = list(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    for name, value in named + list(node.kwargs.items()):
        if isinstance(value, Ref):
            positions[name] = count
        refs: list[Ref] = []
        map_refs(value, refs.append)
        count += len(refs)
    return positions


def _unchanged(op: LocalOp) -> Call:
    """Return the op's call unchanged, on the device of its tensors (or the default device)."""
    return op.call(device=None) if "device" in op.arguments else op.call()


def _to(op: LocalOp) -> Call:
    if op.node.op == "aten.to.device":
        return op.call(torch.ops.aten.to.dtype)
    return _unchanged(op)


def _size_of_output(op: LocalOp) -> Call:
    device: dict[str, Any] = {"device": None} if "device" in op.arguments else {}
    return op.call(size=list(op.output_shape()), **device)


def _view(op: LocalOp) -> Call:
    """Return the local call of a reshape, with ``reshape`` in place of ``view``: a part may have
    other strides than the whole tensor. A ``squeeze`` must not remove a split dimension that
    happens to have size 1 on this rank."""
    if op.node.op == "aten.view.dtype":
        return op.call()
    return Call(torch.ops.aten.reshape.default, (op["self"], list(op.output_shape())), {})


def _unflatten(op: LocalOp) -> Call:
    dim = op.dim()
    sizes = op.output_shape()[dim : dim + len(op["sizes"])]
    return op.call(sizes=list(sizes))


def _repeat(op: LocalOp) -> Call:
    output, own = op.output_shape(), op.input_shape("self")
    own = (1,) * (len(output) - len(own)) + own
    repeats = [whole // part for whole, part in zip(output, own, strict=True)]
    return Call(torch.ops.aten.repeat.default, (op["self"], repeats), {})


def _repeat_interleave(op: LocalOp) -> Call:
    return op.call(output_size=None)


def _one_hot(op: LocalOp) -> Call:
    """Return the local call of ``one_hot`` with an explicit number of classes: a part of the
    indices may lack the highest class."""
    return op.call(num_classes=op.node.spec.shape[-1])


def _split(op: LocalOp) -> Call:
    dim = op.dim()
    made = op.layout.outputs[0]
    if any(held.is_shard and held.dim == dim for held in made):
        wanted = tuple(held.dim if held.is_shard else None for held in made)
        options = {"sizes": list(op["split_sizes"]), "dim": dim, "wanted": wanted}
        return Call(op.rank.bound(exchanged_split), (op["self"],), options)
    sizes = [op.output_shape(index)[dim] for index in range(len(op.node.outputs))]
    name = "split_sizes" if "split_sizes" in op.arguments else "split_size"
    changes: dict[str, Any] = {name: sizes[0] if isinstance(op[name], int) else sizes}
    return op.call(**changes)


def _slice(op: LocalOp) -> Call:
    """Return the local call of a slice. A slice of everything keeps the rank's part; any other
    slice is along a dimension that is not split."""
    dim = op.dim()
    if op.node.spec.shape[dim] == op.global_shape("self")[dim]:
        return op.call(start=0, end=sys.maxsize)
    return op.call()


def _narrow(op: LocalOp) -> Call:
    dim = op.dim()
    if op.node.spec.shape[dim] == op.global_shape("self")[dim]:
        return op.call(length=op.input_shape("self")[dim])
    return op.call()


def _mean(op: LocalOp) -> Call:
    """Return the local call of a mean, scaled so that the ranks' results add up to the mean."""
    if op.arguments.get("reduction", MEAN) != MEAN:
        return op.call()
    pairs = zip(op.layout.inputs[0], op.layout.outputs[0], strict=True)
    split = [held.is_shard and made.kind == "P" for held, made in pairs]
    parts = prod(size for size, cut in zip(op.rank.mesh.shape, split, strict=True) if cut)
    weight = op.rank.share.weight if op.rank.share is not None and split[0] else 1.0
    return op.call(scale=weight / parts)


def _embedding(op: LocalOp) -> Call:
    axes = op.axes("weight", 0)
    if not axes:
        return op.call()
    if op["scale_grad_by_freq"]:
        raise _refused(op, "gradients scaled by frequency need the whole vocabulary")
    options = {"padding_idx": op["padding_idx"], "axes": axes}
    return Call(op.rank.bound(split_embedding), (op["weight"], op["indices"]), options)


def _linear(op: LocalOp) -> Call:
    """Return the local call of a linear layer, as an 8-bit product if the plan says so, with the
    weight dequantized where it is held quantized."""
    if op.specs[op.positions["weight"]].stored:
        shape = op.global_shape("weight")
        if op.input_shape("weight") != shape:
            raise _refused(op, "a quantized weight is held whole, as a split would cut its blocks")
        return Call(nf4_linear, (op["input"], op["weight"], op["bias"], shape), {})
    if not op.node.product_dtype:
        return op.call()
    return Call(eight_bit_linear, tuple(op[name] for name in ("input", "weight", "bias")), {})


def _cross_entropy(op: LocalOp) -> Call:
    classes = min(1, len(op.global_shape("self")) - 1)
    class_axes = op.axes("self", classes)
    row_axes = _row_axes(op, classes)
    is_plain = op.count is None and not (row_axes and op["reduction"] == MEAN)
    if not class_axes and is_plain:
        return op.call()
    of_probabilities = op.specs[op.positions["target"]].dtype.startswith(("float", "bfloat"))
    if class_axes and (op["weight"] is not None or of_probabilities):
        raise _refused(
            op, "a loss with class weights or class probabilities needs the whole class dimension"
        )
    options = {name: op[name] for name in ("reduction", "ignore_index", "label_smoothing")}
    args = (op["self"], op["target"], op["weight"])
    options |= {"axes": (row_axes, class_axes), "count": op.count}
    return Call(op.rank.bound(cross_entropy), args, options)


def _row_axes(op: LocalOp, classes: int) -> tuple[int, ...]:
    layout = op.input_layout("self")
    return tuple(a for a, held in enumerate(layout) if held.is_shard and held.dim != classes)


def _nll_loss(op: LocalOp) -> Call:
    row_axes = _row_axes(op, min(1, len(op.global_shape("self")) - 1))
    if op["reduction"] != MEAN or (not row_axes and op.count is None):
        return op.call()
    args = (op["self"], op["target"], op["weight"])
    options = {"ignore_index": op["ignore_index"], "row_axes": row_axes, "count": op.count}
    return Call(op.rank.bound(nll_loss), args, options)


def _attention(op: LocalOp) -> Call:
    axes = op.axes("query", len(op.global_shape("query")) - 2)
    if not axes or not op["is_causal"]:
        return op.call()
    options = {name: op[name] for name in ("dropout_p", "scale", "enable_gqa")}
    args = (op["query"], op["key"], op["value"])
    options["axes"] = axes
    if balanced := balanced_axes(op.layout):
        options["balanced"] = balanced
        return Call(op.rank.bound(balanced_causal_attention), args, options)
    return Call(op.rank.bound(split_causal_attention), args, options)


def _experts(op: LocalOp) -> Call:
    names = ("x", "ids", "scores", "up", "down", "up_bias", "down_bias")
    options = {"activation": op["activation"], "transposed": op["transposed"]}
    options["axes"] = op.axes("up", 0)
    return Call(op.rank.bound(split_experts), tuple(op[name] for name in names), options)


def _batch_norm(op: LocalOp) -> Call:
    """Return the local call of a batch norm: in training, with statistics of the whole split
    batch."""
    axes = op.axes("input", 0)
    tensors = (op["input"], op["weight"], op["bias"])
    options = {"eps": op["eps"], "axes": axes}
    if op.node.op == BATCH_NORM_WITH_BUFFERS:
        options["momentum"] = op["momentum"]
        buffers = (op["running_mean"], op["running_var"])
        return Call(op.rank.bound(batch_norm_with_buffers), (*tensors, *buffers), options)
    if not axes or not op["training"]:
        return op.call()
    return Call(op.rank.bound(batch_norm), tensors, options)


def _group_norm(op: LocalOp) -> Call:
    parts = op.global_shape("input")[1] // op.input_shape("input")[1]
    return op.call(num_groups=op["num_groups"] // parts)


def _convolution(op: LocalOp) -> Call:
    """Return the local call of a convolution, with the number of groups of this rank's channels."""
    if op["groups"] == 1:
        return op.call()
    channels = len(op.global_shape("input")) - len(op.global_shape("weight")) + 1
    parts = op.global_shape("input")[channels] // op.input_shape("input")[channels]
    return op.call(groups=op["groups"] // parts)


def _counted(op: LocalOp) -> Call:
    """Return the local call of a random op, which draws those numbers of the whole batch's tensor
    that belong to the rank's part. If the graph computes a slice of the sequences, ``start`` is the
    slice's offset in the whole sequence."""
    shape = op.node.spec.shape
    region = local_region(shape, op.layout.outputs[0], op.rank.mesh, op.rank.coordinates)
    rows = None if op.batch_dim is None else (op.batch_dim, shape[op.batch_dim])
    start = [first for first, _ in region]
    if rows is not None and op.rank.share is not None:
        (dim, size), own = rows, op.rank.share
        per_row = size // own.batch_size
        start[dim], rows = own.first * per_row, (dim, own.total * per_row)
    whole = op["start"] or [0] * len(start)
    start = [first + of_slice for first, of_slice in zip(start, whole, strict=True)]
    place = {"start": tuple(start), "batch": rows}
    options = {"number": op["number"], **place}
    if op.node.op == DROPOUT:
        return Call(op.rank.bound(dropout_part), (op["x"], op["p"]), options)
    return Call(op.rank.bound(uniform_part), (op["like"],), options)


def _refused(op: LocalOp, why: str) -> PlanError:
    return PlanError(
        "AP521",
        f"{op.node.name} cannot run in its layout of the plan",
        why=why,
        where=op.node.source or op.node.module,
        fix="plan again",
    )


_MEANS = (
    "mean",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "soft_margin_loss",
)
_CONVOLUTIONS = (
    "convolution",
    *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
)

RULES: Mapping[str, Rule] = {
    **{f"aten.{name}": _mean for name in _MEANS},
    **{f"aten.{name}": _size_of_output for name in FILLED},
    **{f"aten.{name}": _view for name in RESHAPED},
    **{f"aten.{name}": _split for name in SPLIT},
    **{f"aten.{name}": _nll_loss for name in ("nll_loss", "nll_loss_nd")},
    **{f"aten.{name}": _convolution for name in _CONVOLUTIONS},
    "aten.to": _to,
    "aten.unflatten": _unflatten,
    "aten.repeat": _repeat,
    "aten.tile": _repeat,
    "aten.one_hot": _one_hot,
    "aten.repeat_interleave": _repeat_interleave,
    "aten.slice": _slice,
    "aten.narrow": _narrow,
    "aten.embedding": _embedding,
    "aten.linear": _linear,
    "aten.cross_entropy_loss": _cross_entropy,
    "aten.scaled_dot_product_attention": _attention,
    "aten.group_norm": _group_norm,
    DROPOUT.rpartition(".")[0]: _counted,
    UNIFORM.rpartition(".")[0]: _counted,
    "aten.batch_norm": _batch_norm,
    "aten._native_batch_norm_legit_functional": _batch_norm,
    "autoparallel.experts": _experts,
    "aten.index": index,
    "aten.index_select": index_select,
    "aten.gather": gather,
}
