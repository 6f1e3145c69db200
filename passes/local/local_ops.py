"""Ops on local tensors: the call of a node whose tensors are parts.

In: a node, the layout chosen for it, and a rank. Out: the function to call, and its arguments. Most
ops run unchanged on their parts, except that

- arguments that depend on shapes (sizes, groups) are those of ``OpSpec.local``, which also makes
  them right after the graph was rescaled to another batch;
- means over split dimensions become shares that add up to the mean;
- a split vocabulary needs an offset, a split loss needs its reductions;
- a linear layer may compute with 8-bit factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...planner.errors import PlanError
from ...planner.graph.graph import Node, Ref, TensorSpec, map_refs
from ...planner.graph.layout import NodeLayout, balanced_axes, is_halved, local_region
from ...planner.ops.attention import ring_axes
from ...planner.ops.catalog import spec_of
from ...planner.ops.experts import column_order
from ..ops.batch_norm import BATCH_NORM_WITH_BUFFERS, batch_norm, batch_norm_with_buffers
from ..ops.collectives import Rank
from ..ops.eight_bits import eight_bit_linear
from ..ops.experts import (
    Sending,
    Slices,
    finish_experts,
    send_tokens,
    sent_experts,
    split_experts,
)
from ..ops.halo import halo_attention
from ..ops.local_loss import MEAN, cross_entropy, nll_loss
from ..ops.nf4 import nf4_linear
from ..ops.random_ops import DROPOUT, dropout_part, uniform_part
from ..ops.ring import ring_attention
from ..ops.torch_ops import resolve
from .local_functions import (
    balanced_causal_attention,
    exchanged_split,
    grouped_attention,
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
    has_others_beside: bool = False,
) -> Call:
    """Return the call that computes one rank's part of ``node``'s outputs. ``values`` are the
    rank's shards of the inputs, in the layouts ``layout.inputs``; ``specs`` are the inputs' global
    shapes and dtypes; ``batch_dim`` is the first output's batch dimension, ``count`` the divisor of
    a classification loss, ``has_others_beside``: see ``LocalOp``."""
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
        has_others_beside,
    )
    spec = spec_of(node)
    if spec.is_counted:
        return _counted(op)
    if spec.form == "reshape" and spec.is_sized and spec.name != "unflatten":
        return _view(op)
    if spec.loss is not None and not spec.loss.has_classes:
        return _mean(op)
    return FUNCTIONS.get(spec.name, _unchanged)(op)


def _positions(node: Node, schema: Any) -> dict[str, int]:
    """Return for each argument of an op that is a single tensor its position in ``node.inputs``."""
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
    """Return the op's call at local shapes, on its tensors' device (or the default device)."""
    local = spec_of(op.node).local
    changes = () if local is None else local(op.node, *op.local_specs())
    changed: dict[str, Any] = {name: value for _, name, value in changes}
    if "device" in op.arguments:
        changed["device"] = None
    return op.call(**changed)


def _to(op: LocalOp) -> Call:
    if op.node.op == "aten.to.device":
        return op.call(torch.ops.aten.to.dtype)
    return _unchanged(op)


def _view(op: LocalOp) -> Call:
    """Return one rank's call of a reshape, by ``reshape`` instead of ``view``, as a shard may have
    other strides than the whole tensor. A ``squeeze`` also becomes a ``reshape``: it must not
    remove a sharded dimension that has size 1 on this rank."""
    if op.node.op == "aten.view.dtype":
        return op.call()
    return Call(torch.ops.aten.reshape.default, (op["self"], list(op.output_shape())), {})


def _split(op: LocalOp) -> Call:
    dim = op.dim()
    made = op.layout.outputs[0]
    if any(held.is_shard and held.dim == dim for held in made):
        wanted = tuple(held.dim if held.is_shard else None for held in made)
        options = {"sizes": list(op["split_sizes"]), "dim": dim, "wanted": wanted}
        return Call(op.rank.bound(exchanged_split), (op["self"],), options)
    return _unchanged(op)


def _mean(op: LocalOp) -> Call:
    """Return one rank's call of a mean, scaled so that the results of all ranks add up to the
    mean."""
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
    """Return one rank's call of a linear layer, with 8-bit factors if the plan says so, and with
    the weight dequantized if it is held quantized."""
    if op.specs[op.positions["weight"]].stored:
        shape = op.global_shape("weight")
        if any(each.is_shard for each in op.input_layout("weight")):
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
    dim, ring = len(op.global_shape("query")) - 2, ring_axes(op.layout)
    axes = op.axes("query", dim) if op["is_causal"] and not ring else ()
    is_grouped = op["enable_gqa"] and op["attn_mask"] is None
    limits = {name: op[name] for name in ("window", "documents") if name in op.node.kwargs}
    if not (axes or ring or is_grouped or limits):
        return op.call()
    options = {name: op[name] for name in (("scale",) if limits else ("dropout_p", "scale"))}
    options |= {"axes": axes, **limits} if axes or limits else {"is_causal": op["is_causal"]}
    function: Callable[..., Tensor] = split_causal_attention
    if ring:
        function, options["ring"] = halo_attention if limits else ring_attention, ring
        del options["axes" if limits else "dropout_p"]
    if axes and "documents" not in limits and (balanced := balanced_axes(op.layout)):
        function, options["balanced"] = balanced_causal_attention, balanced
    if is_grouped:
        function = grouped_attention
        options["heads"] = op.axes("query", dim - 1), op.axes("key", dim - 1)
    return op.by_rank(function, op["query"], op["key"], op["value"], **options)


def _experts(op: LocalOp) -> Call:
    names = ("x", "ids", "scores", "up", "down", "up_bias", "down_bias")
    options = {"activation": op["activation"], "transposed": op["transposed"]}
    options["axes"] = axes = op.axes("up", 0)
    tokens, weight = op.input_layout("x"), op.input_layout("up")
    sliced = tuple(axis for axis, held in enumerate(weight) if held.is_shard and axis not in axes)
    sent, gathered = (
        tuple(axis for axis in every if tokens[axis].is_shard) for every in (axes, sliced)
    )
    counted = _counted_layer(op)
    if sliced:
        halves = column_order(op["activation"]) == "halves"
        options["slices"] = Slices(sliced, gathered, halves)
    if not (sent or gathered):
        arguments = (op[name] for name in names)
        return op.by_rank(split_experts, *arguments, **options, counted=counted)
    is_placed = sent == axes and not sliced
    placed = op.rank.placements.get(op.node.name, ()) if is_placed else ()
    sending = Sending(axes, sent, gathered, 1 + is_halved(op.layout), counted, placed)
    if not op.has_others_beside:
        return op.by_rank(sent_experts, *(op[name] for name in names), **options, sending=sending)
    held = op.local_specs()[0][op.positions["up"]].shape[0]
    start = op.by_rank(send_tokens, op["x"], op["ids"], held=held, sending=sending)
    rest = op.by_rank(finish_experts, *(op[name] for name in names[2:]), **options)
    return replace(rest, start=start)


def _counted_layer(op: LocalOp) -> tuple[str, int] | None:
    """Return the name and the number of experts of a layer of experts if this rank counts its
    tokens: of the ranks with the same tokens the first does."""
    pairs = zip(op.input_layout("ids"), op.rank.coordinates, strict=True)
    is_first = all(held.is_shard or place == 0 for held, place in pairs)
    return (op.node.name, op["num_experts"]) if is_first else None


def _batch_norm(op: LocalOp) -> Call:
    """Return one rank's call of a batch norm: in training, with statistics of the whole batch over
    all ranks."""
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


def _counted(op: LocalOp) -> Call:
    """Return one rank's call of a counter-based random op, which draws the numbers that belong to
    the rank's part of the global tensor. If the graph computes a slice of the sequences, the op's
    argument ``start`` has the offset of the slice in the whole sequence."""
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


FUNCTIONS: Mapping[str, Rule] = {
    "to": _to,
    "mean": _mean,
    "split": _split,
    "split_with_sizes": _split,
    "linear": _linear,
    "embedding": _embedding,
    "cross_entropy_loss": _cross_entropy,
    "nll_loss": _nll_loss,
    "nll_loss_nd": _nll_loss,
    "scaled_dot_product_attention": _attention,
    "batch_norm": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm,
    "experts": _experts,
    "index": index,
    "index_select": index_select,
    "gather": gather,
}
"""Functions of torch for ops that run as another op on parts: records of ops know no torch."""
