"""An ``ExportedProgram`` to the planner's ``Graph``.

Names become the user's (parameters by FQN, inputs by their place in the batch), assertions and
no-ops are dropped, tuple items become ``Ref`` indices, tied parameters become one node, and the
graph no longer depends on the device or on torch's default dtype: sizes are written out, every
factory says its dtype, and an op that takes integers and makes floats (``arange(n) / n``) takes
them as floats of its result's dtype. Every buffer that the forward writes is also read by an op.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ...planner.graph.graph import Graph, Node, OpRule, Ref, TensorSpec, map_refs
from ...planner.ops.annotation import FLOATS
from ..ops.batch_norm import BATCH_NORM_WITH_BUFFERS, BATCH_NORMS, batch_norm_call
from ..ops.names import Names, base_name
from ..ops.torch_ops import draws_by_itself, has_argument, mutated_argument, path_of
from ..programs.interpret import LITERAL
from ..tracing.locate import uncounted_error, user_source
from .functionalize import functional_path
from .refusals import (
    refuse_region,
    unknown_size_error,
    unknown_value_error,
    written_parameter_error,
)

LITERAL_ELEMENTS = 4096
"""Most elements of a tensor of numbers in the model's code whose values the graph contains."""

_DROPPED = frozenset({"aten._assert_tensor_metadata", "aten._assert_async", "aten.sym_constrain"})
_ALIASES = frozenset({"aten.alias.default", "aten.lift_fresh_copy.default", "aten.lift.default"})
_BROADCAST = "aten.broadcast_tensors.default"
_DETACHES = frozenset(
    {"aten.detach.default", "aten.detach_.default", "autoparallel.without_gradient.default"}
)
_COPY = "aten.copy.default"
_SCATTERS = ("aten.slice_scatter.default", "aten.select_scatter.default")
_SPARSE_GRADIENTS = {
    "aten.embedding.default": 4,
    "aten.embedding_bag.padding_idx": 5,
    "aten.embedding_bag.default": 5,
}
"""Position of an op's argument for sparse gradients; set to False, as ranks sum dense gradients."""
_SIZED = {
    "aten.view.default": 1,
    "aten._unsafe_view.default": 1,
    "aten.reshape.default": 1,
    "aten.expand.default": 1,
}
_LIKE = {
    "aten.empty_like.default": 0,
    "aten.new_empty.default": 0,
    "aten.zeros_like.default": 0,
    "aten.ones_like.default": 1,
    "aten.full_like.default": None,
    "aten.new_zeros.default": 0,
    "aten.new_ones.default": 1,
    "aten.new_full.default": None,
}


@dataclass
class _Lowering:
    """State of the translation (lowering) of one exported program to the planner's graph."""

    exported: ExportedProgram
    prefix: str
    inputs: list[str]
    tied: Mapping[str, str]
    rules: Mapping[str, OpRule] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    literals: dict[str, Tensor] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    updates: dict[str, Ref] = field(default_factory=dict)
    names: Names = field(default_factory=Names)
    bases: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lowered:
    """Result of lowering a program: the ``graph``; ``literals``, tensors that the model's code
    makes of Python numbers, by name; ``bases``, which maps the name of each op node to the name
    without its number."""

    graph: Graph
    literals: dict[str, Tensor]
    bases: Mapping[str, str]


def lower(
    exported: ExportedProgram,
    *,
    prefix: str,
    inputs: list[str],
    tied: Mapping[str, str],
    batch_size: int,
    rules: Mapping[str, OpRule] | None = None,
) -> Lowered:
    """Translate (lower) an exported program to the planner's graph. ``prefix`` is the attribute
    under which the wrapper module holds the model. ``inputs`` are the names of the user inputs in
    order. ``tied`` maps each further name of a tied parameter to its first name. ``rules`` maps the
    paths of the user's ops to their sharding rules."""
    state = _Lowering(exported, prefix, inputs, tied, rules or {})
    remaining = list(inputs)
    kinds = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    loss: Ref | None = None
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            state.values[node] = _placeholder(state, node, kinds[node.name], remaining)
        elif node.op == "output":
            loss = state.values[node.args[0][_loss_position(exported)]]
            _take_updates(state, node.args[0])
        else:
            _lower_node(state, node)
    assert isinstance(loss, Ref)
    _read_written(state)
    used_ties = {name: first for name, first in tied.items() if first in state.nodes}
    nodes = tuple(state.nodes.values())
    updates = in_order(state.updates, nodes)
    graph = Graph(nodes, loss, batch_size, tied=used_ties, updates=updates)
    return Lowered(graph, state.literals, state.bases)


def in_order(updates: Mapping[str, Ref], nodes: Sequence[Node]) -> dict[str, Ref]:
    """Return ``updates`` (new values of buffers) in the order in which ``nodes`` compute them."""
    if not updates:
        return {}
    place = {node.name: position for position, node in enumerate(nodes)}
    return dict(sorted(updates.items(), key=lambda item: (place[item[1].name], item[1].index)))


def _placeholder(state: _Lowering, node: fx.Node, spec: Any, remaining: list[str]) -> Ref:
    value = node.meta["val"]
    if spec.kind == InputKind.USER_INPUT:
        held = _spec(value, bool(value.requires_grad))
        return _add(state, Node(remaining.pop(0), "input", outputs=(held,)))
    target = str(spec.target).removeprefix(state.prefix + ".")
    name = state.tied.get(target, target)
    if spec.kind == InputKind.CONSTANT_TENSOR:
        tensor = state.exported.constants[spec.target]
        if tensor.numel() <= LITERAL_ELEMENTS:
            return _add(state, _literal(name, tensor))
        state.literals[name] = tensor
    elif name in state.nodes:
        return Ref(name)
    is_parameter = spec.kind == InputKind.PARAMETER
    output = _spec(value, is_parameter and bool(value.requires_grad))
    return _add(state, Node(name, "parameter" if is_parameter else "buffer", outputs=(output,)))


def _literal(name: str, tensor: Tensor) -> Node:
    return Node(
        name,
        "constant",
        LITERAL,
        (tensor.tolist(),),
        {"dtype": tensor.dtype},
        (_spec(tensor, False),),
    )


def _lower_node(state: _Lowering, node: fx.Node) -> None:
    if node.op == "get_attr":
        return  # the body of a region, which is inlined by now or refused below
    if node.target is operator.getitem:
        held = _arguments(state, node.args[0])
        index = int(node.args[1])  # type: ignore[arg-type]
        state.values[node] = Ref(held.name, index) if isinstance(held, Ref) else held[index]
    elif isinstance(node.target, OpOverload):
        _lower_op(state, node)
    else:
        refuse_region(node)


def _lower_op(state: _Lowering, node: fx.Node) -> None:
    path = path_of(node.target)  # type: ignore[arg-type]
    if path.rsplit(".", 1)[0] in _DROPPED or path.startswith("aten.sym_"):
        return
    args = tuple(_arguments(state, arg) for arg in node.args)
    if path in _ALIASES or (path == _BROADCAST and _are_equal(state, args[0])):
        state.values[node] = args[0]
        return
    kwargs = {key: _arguments(state, arg) for key, arg in node.kwargs.items()}
    source = user_source(node.meta.get("stack_trace"))
    if draws_by_itself(path, args, kwargs):
        raise uncounted_error(path.split(".")[1], source)
    if path in _DETACHES:
        if not _spec_of(state, args[0]).requires_grad:
            state.values[node] = args[0]
            return
        path = "aten.detach.default"
    requires_grad = path != "aten.detach.default" and _any_grad(state, (args, kwargs))
    value = node.meta["val"]
    tensors = [
        item
        for item in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(item, Tensor)
    ]
    if any(not isinstance(size, int) for tensor in tensors for size in tensor.shape):
        raise unknown_size_error(path, source)
    outputs = tuple(_spec(item, requires_grad) for item in tensors)
    if not outputs:
        return
    path, args, kwargs = _canonical(path, args, kwargs, outputs[0])
    if path == _COPY and (requires_grad or state.nodes[args[0].name].kind != "buffer"):
        state.values[node] = _copied(state, node, args[1], outputs[0])
        return
    if path in _SCATTERS and outputs[0].is_complex:
        state.values[node] = _scattered_complex(state, node, path, args, outputs[0])
        return
    if path in BATCH_NORMS:
        path, args, outputs = batch_norm_call(path, args, outputs, partial(_spec_of, state))
    made = Node(
        "",
        "op",
        path,
        args,
        kwargs,
        outputs,
        module=_module(node, state.prefix),
        source=source,
        rule=state.rules.get(path),
    )
    if _makes_default_dtype(state, made):
        made = _in_floats(state, made)
    written = mutated_argument(path) and functional_path(path)
    name = _op_name(state, node.name)
    state.values[node] = _add(state, replace(made, name=name, op=written or made.op))
    if written:
        _write(state, args[0], state.values[node])
    elif path == BATCH_NORM_WITH_BUFFERS:
        for index, held in ((3, args[3]), (4, args[4])):
            _write(state, held, Ref(state.values[node].name, index))


def _step(
    state: _Lowering,
    node: fx.Node,
    base: str,
    args: tuple[Any, ...],
    spec: TensorSpec,
    overload: str = "default",
) -> Ref:
    """Add an aten op ``base`` in place of the traced op ``node``; return its value."""
    return _add(
        state,
        Node(
            _op_name(state, base),
            "op",
            f"aten.{base}.{overload}",
            args,
            {},
            (spec,),
            module=_module(node, state.prefix),
            source=user_source(node.meta.get("stack_trace")),
        ),
    )


def _copied(state: _Lowering, node: fx.Node, value: Ref, wanted: TensorSpec) -> Ref:
    """Return ``value`` cast and expanded to ``wanted``; ``aten.copy`` has no derivative."""
    found = _spec_of(state, value)
    if found.dtype != wanted.dtype:
        cast = replace(wanted, shape=found.shape)
        value = _step(state, node, "to", (value, getattr(torch, wanted.dtype)), cast, "dtype")
    if found.shape != wanted.shape:
        value = _step(state, node, "expand", (value, list(wanted.shape)), wanted)
    return value


def _scattered_complex(
    state: _Lowering, node: fx.Node, path: str, args: tuple[Any, ...], wanted: TensorSpec
) -> Ref:
    """Lower a scatter into a complex tensor to ops on its real view, as torch has no derivative of
    complex scatters. ``path``: the op; ``wanted``: shape and dtype of the result."""
    dtype = str(getattr(torch, wanted.dtype).to_real()).removeprefix("torch.")

    def real(ref: Ref) -> Ref:
        spec = _spec_of(state, ref)
        spec = replace(spec, shape=(*spec.shape, 2), dtype=dtype)
        return _step(state, node, "view_as_real", (ref,), spec)

    dim = args[2] if len(args) > 2 else 0
    spec = replace(wanted, shape=(*wanted.shape, 2), dtype=dtype)
    parts = (real(args[0]), real(args[1]), dim % len(wanted.shape), *args[3:])
    made = _step(state, node, path.split(".")[1], parts, spec, path.split(".")[2])
    return _step(state, node, "view_as_complex", (made,), wanted)


def _write(state: _Lowering, old: Any, new: Ref) -> None:
    """Make later ops read ``new`` for ``old``; if ``old`` is a buffer, record its update."""
    if not isinstance(old, Ref):
        return
    for holder, value in state.values.items():
        if value == old:
            state.values[holder] = new
    for name, latest in state.updates.items():
        if latest == old:
            state.updates[name] = new
    kind = state.nodes[old.name].kind
    if kind == "parameter":
        raise written_parameter_error(old.name, state.nodes[new.name].source)
    if kind == "buffer":
        state.updates[old.name] = new


def _take_updates(state: _Lowering, results: Any) -> None:
    """Record the new values of buffers, which ``torch.export`` adds to the ``results``."""
    for spec, result in zip(state.exported.graph_signature.output_specs, results, strict=True):
        target = str(spec.target).removeprefix(state.prefix + ".")
        if spec.kind == OutputKind.PARAMETER_MUTATION:
            made = _arguments(state, result)
            raise written_parameter_error(target, state.nodes[made.name].source)
        if spec.kind == OutputKind.BUFFER_MUTATION:
            state.updates[state.tied.get(target, target)] = _arguments(state, result)


def _read_written(state: _Lowering) -> None:
    """Add a read of each buffer that the forward only writes, so that a stage holds the buffer."""
    read = {ref.name for node in state.nodes.values() for ref in node.inputs}
    for name, made in state.updates.items():
        if name in read:
            continue
        maker, spec = state.nodes[made.name], _spec_of(state, Ref(name))
        copy = Node(
            _op_name(state, "copy"),
            "op",
            _COPY,
            (Ref(name), made),
            {},
            (spec,),
            module=maker.module,
            source=maker.source,
        )
        state.updates[name] = _add(state, copy)


def _are_equal(state: _Lowering, refs: list[Ref]) -> bool:
    """Return whether all values have the same shape, so that broadcasting changes none of them."""
    return len({_spec_of(state, ref).shape for ref in refs}) == 1


def _canonical(
    path: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: TensorSpec
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return a call (path, args, kwargs) with all sizes and dtypes explicit, and a device only in
    ops that create tensors. ``output``: shape and dtype of the result."""
    dtype = getattr(torch, output.dtype)
    if path in (
        "aten._to_copy.default",
        "aten.to.dtype_layout",
        "aten.to.device",
        "aten.to.dtype",
        "aten.to.other",
    ):
        return "aten.to.dtype", (args[0], dtype), {}
    if path in _SPARSE_GRADIENTS:
        at = _SPARSE_GRADIENTS[path]
        return path, tuple(each if i != at else False for i, each in enumerate(args)), kwargs
    if path in _SIZED:
        return path, (args[0], list(output.shape), *args[2:]), kwargs
    if path in _LIKE:
        fill = _LIKE[path]
        if fill is None:
            fill = args[-1] if len(args) > 1 else kwargs["fill_value"]
        return "aten.full.default", (list(output.shape), fill), _factory(dtype)
    dropped = ("device", "layout", "pin_memory")
    is_factory = not _has_refs(args) and has_argument(path, "device")
    kept = {key: value for key, value in kwargs.items() if key not in dropped}
    if is_factory:
        kept |= _factory(dtype) if has_argument(path, "dtype") else {"device": _META}
    return path, args, kept


def _makes_default_dtype(state: _Lowering, node: Node) -> bool:
    """Return whether an op makes floats of integers, so that torch's default dtype applies."""
    if not node.op.startswith("aten.") or has_argument(node.op, "dtype") or not node.inputs:
        return False
    read = (_spec_of(state, ref) for ref in node.inputs)
    return node.spec.dtype in FLOATS and all(spec.dtype not in FLOATS for spec in read)


def _in_floats(state: _Lowering, node: Node) -> Node:
    """Return the op with inputs (but no boolean condition) cast to its result's floating dtype."""
    dtype = getattr(torch, node.spec.dtype).to_real()
    is_where = node.op.startswith("aten.where.")

    def step(base: str, op: str, args: tuple[Any, ...], shape: tuple[int, ...]) -> Ref:
        spec = TensorSpec(shape, str(dtype).removeprefix("torch."), False)
        return _add(
            state,
            replace(
                node,
                name=_op_name(state, base),
                op=op,
                args=args,
                kwargs={} if _has_refs(args) else _factory(dtype),
                outputs=(spec,),
            ),
        )

    def cast(ref: Ref) -> Ref:
        return step("to", "aten.to.dtype", (ref, dtype), _spec_of(state, ref).shape)

    condition, rest = node.args[: int(is_where)], node.args[int(is_where) :]
    if node.op == "aten.where.Scalar":
        filled = (step("full", "aten.full.default", ([], value), ()) for value in rest)
        return replace(node, op="aten.where.self", args=(*condition, *filled))
    args, kwargs = map_refs((rest, dict(node.kwargs)), cast)
    return replace(node, args=(*condition, *args), kwargs=kwargs)


_META = torch.device("meta")


def _factory(dtype: torch.dtype) -> dict[str, Any]:
    """Return dtype and device (replaced later) as arguments of an op that creates a tensor."""
    return {"dtype": dtype, "device": _META}


def _add(state: _Lowering, node: Node) -> Ref:
    if node.name not in state.bases:
        node = replace(node, name=state.names.take(node.name))
    state.nodes[node.name] = node
    return Ref(node.name)


def _op_name(state: _Lowering, traced: str) -> str:
    """Return a new name for an op node: its traced name with the next number."""
    base = base_name(traced)
    name = state.names.next(base)
    state.bases[name] = base
    return name


def _arguments(state: _Lowering, value: Any) -> Any:
    """Return an argument of an fx node with fx nodes replaced by the graph's values for them."""
    if isinstance(value, fx.Node):
        if value not in state.values:
            raise unknown_value_error(value)
        return state.values[value]
    if isinstance(value, tuple):
        return tuple(_arguments(state, item) for item in value)
    if isinstance(value, list):
        return [_arguments(state, item) for item in value]
    if isinstance(value, torch.SymInt):
        return int(value)
    return value


def _spec_of(state: _Lowering, ref: Ref) -> TensorSpec:
    return state.nodes[ref.name].outputs[ref.index]


def _any_grad(state: _Lowering, value: Any) -> bool:
    found: list[bool] = []
    map_refs(value, lambda ref: found.append(_spec_of(state, ref).requires_grad))
    return any(found)


def _has_refs(value: Any) -> bool:
    found: list[Ref] = []
    map_refs(value, found.append)
    return bool(found)


def _spec(value: Tensor, requires_grad: bool) -> TensorSpec:
    differentiable = value.is_floating_point() or value.is_complex()
    return TensorSpec(
        tuple(int(size) for size in value.shape),
        str(value.dtype).removeprefix("torch."),
        requires_grad and differentiable,
    )


def _module(node: fx.Node, prefix: str) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return path.removeprefix(prefix).removeprefix(".")


def _loss_position(exported: ExportedProgram) -> int:
    kinds = [spec.kind for spec in exported.graph_signature.output_specs]
    return kinds.index(OutputKind.USER_OUTPUT)
