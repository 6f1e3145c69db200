"""A block's program as a Python function that a person can read.

In: a ``BlockProgram`` and its stage. Out: a ``BlockFunction``: the text of a function, and the
names of its weights, without the path of the block, so that the repeated layers of a model have
the same function. Values are named after the modules that make them; views are written in a row.
"""

from __future__ import annotations

import builtins
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import torch
from torch import fx

from autoparallel.passes.local.localize import MADE_BY, parse_key
from autoparallel.passes.local.stage_program import BlockProgram, StageProgram
from autoparallel.passes.ops.collectives import apply_steps, local_tensor, parse_steps
from autoparallel.passes.ops.local_loss import MEAN, cross_entropy, nll_loss
from autoparallel.passes.ops.random_ops import dropout_part, uniform_part
from autoparallel.planner.errors import PlanError
from autoparallel.planner.graph import Graph, Node, TensorSpec
from autoparallel.planner.layout import Layout, Step, local_shape
from autoparallel.script.expressions import (
    INDENT,
    METHODS,
    Expression,
    called,
    literal,
    loss_call,
    op_call,
)
from autoparallel.script.parts import can_copy

MOVES = {
    ("S", "R"): "all_gather", ("S", "I"): "all_gather_same", ("S", "P"): "pad",
    ("R", "S"): "take_part", ("I", "S"): "take_part_same",
    ("R", "P"): "as_term", ("I", "P"): "as_term_same", ("R", "I"): "divide_gradient",
    ("I", "R"): "sum_gradient", ("P", "I"): "all_reduce", ("P", "R"): "all_reduce_both",
    ("P", "S"): "reduce_scatter",
}  # fmt: skip
"""The function of a script that changes a placement (``passes.ops.collectives.MOVES``)."""

STATE = r"_(part|whole|term)(_\d+)?$"
STATES = {"S": "part", "R": "whole", "I": "whole", "P": "term"}
SHORT = 48
"""Longer expressions are not written into others."""

NAMES = {
    "scaled_dot_product_attention": "attended", "cross_entropy_loss": "loss", "nll_loss": "loss",
    "nll_loss_nd": "loss", "layer_norm": "norm", "convolution": "conv",
    "_native_batch_norm_legit_functional": "normalized", "counter_dropout": "dropped",
    "counter_uniform": "uniform", "slice": "part", "pow": "power", "sum": "total", "neg": "negated",
    "_to_copy": "cast", "to": "cast", "mul": "product", "div": "quotient", "pad": "padded",
    "where": "chosen", "cat": "joined", "add": "sum_", "sub": "difference", "max": "largest",
    "min": "least", "abs": "size", "all": "all_", "any": "any_",
}  # fmt: skip
LIGHT = frozenset({
    "neg", "rsqrt", "sqrt", "pow", "exp", "sin", "cos", "tanh", "sigmoid", "mean", "add", "mul",
    "div", "sub", "to", "_to_copy", "slice",
})  # fmt: skip
"""Ops of one tensor that read well inside of another expression."""

WEIGHTED = frozenset({
    "linear", "layer_norm", "rms_norm", "embedding", "convolution", "conv1d", "conv2d", "conv3d",
    "group_norm", "batch_norm", "addmm", "split_embedding",
})  # fmt: skip
"""Ops whose result is called after their module, which holds their weight."""

TAKEN = frozenset({*MOVES.values(), "all_to_all", "dropout", "uniform", "checkpoint"})
"""What functions of a script are called."""

RESERVED = frozenset({
    *TAKEN, *dir(builtins),
    "w", "mesh", "draw", "torch", "F", "x", "in", "is", "not", "and", "or", "if", "for", "def",
    "lambda", "class", "pass", "return", "from", "import", "as", "with", "global",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockFunction:
    """A function: ``text`` without its ``def`` line, which callers name.

    ``weights`` are the names of its parameters and buffers as its text has them. ``uses`` are the
    definitions of ours that it calls.
    """

    arguments: tuple[str, ...]
    text: str
    weights: tuple[str, ...]
    uses: frozenset[str]
    takes_mesh: bool
    takes_draw: bool
    num_results: int
    first_number: int
    """Of its random ops, whose numbers in the text are counted from it."""


@dataclass(slots=True)
class _Writer:
    """One function in the making; ``values`` are what nodes are written as."""

    program: BlockProgram
    stage: StageProgram
    graph: Graph
    layout_of: Callable[[str], Layout | None]
    path: str
    first_number: int
    values: dict[fx.Node, Expression] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    uses: set[str] = field(default_factory=set)
    weights: list[str] = field(default_factory=list)
    part: str = ""

    def unique(self, name: str) -> str:
        """``name``, numbered where it is taken."""
        name = re.sub(r"\W", "_", name).strip("_") or "value"
        if name[0].isdigit():
            name = f"part_{name}"
        count = self.names.get(name, 1 if name in RESERVED else 0)
        self.names[name] = count + 1
        return f"{name}_{count + 1}" if count else name


def block_function(
    program: BlockProgram,
    stage: StageProgram,
    graph: Graph,
    layout_of: Callable[[str], Layout | None],
) -> BlockFunction:
    """The function of a block; ``layout_of`` gives the layout of a node's first output.

    Raises PlanError AP367 where an op cannot be written.
    """
    numbers = [
        node.kwargs["number"]
        for node in program.module.graph.nodes
        if getattr(node.target, "func", None) in (dropout_part, uniform_part)
    ]
    first = min(numbers, default=0)
    writer = _Writer(program, stage, graph, layout_of, module_path(program), first)
    arguments = _arguments(writer)
    result: tuple[fx.Node, ...] = ()
    for node in program.module.graph.nodes:
        if node.op == "get_attr":
            continue
        if node.op == "output":
            result = node.args[0]
        elif node.op == "call_function":
            _write(writer, node)
        elif node.op != "placeholder":
            raise _unwritable(writer, node, "it runs a module of the model's as it is")
    returned = ", ".join(writer.values[node].text for node in result)
    writer.lines.append(f"{INDENT}return {returned or 'None'}")
    text = "\n".join(writer.lines)
    return BlockFunction(
        arguments, text, tuple(dict.fromkeys(writer.weights)), frozenset(writer.uses),
        takes_mesh=bool(re.search(r"\bmesh\b", text)),
        takes_draw=bool(re.search(r"\bdraw\b", text)), num_results=len(result),
        first_number=first,
    )  # fmt: skip


def module_path(program: BlockProgram) -> str:
    """The path of the module that a block is: its name, where its parameters are below that."""
    names = [*program.parameters, *program.buffers]
    is_module = all(name.startswith(f"{program.name}.") for name in names)
    return program.name if names and is_module else ""


def _arguments(writer: _Writer) -> tuple[str, ...]:
    """The names of the values that the function takes; weights among the inputs are not."""
    placeholders = [n for n in writer.program.module.graph.nodes if n.op == "placeholder"]
    held = {**writer.stage.parameters, **writer.stage.buffers}
    pairs = list(zip(placeholders, writer.program.inputs, strict=True))
    free = [(node, key) for node, key in pairs if key not in held]
    known = writer.graph.by_name
    made = [
        key for key in dict.fromkeys(key for _, key in free)
        if parse_key(key).name in known and known[parse_key(key).name].kind == "op"
    ]  # fmt: skip
    arguments: dict[str, str] = {}
    for node, key in pairs:
        if key in held:
            writer.values[node] = _weight(writer, key)
            continue
        if key not in arguments:
            arguments[key] = "x" if made == [key] else writer.unique(_argument_name(writer, key))
        writer.values[node] = Expression(arguments[key])
    return tuple(arguments.values())


def _argument_name(writer: _Writer, key: str) -> str:
    """What a value is called that comes from outside; a constant after what computes it."""
    if key.startswith("count of "):
        return "count"
    node = writer.graph.by_name.get(parse_key(key).name)
    while node is not None and node.kind == "constant":
        family = node.op.split(".")[1] if node.op.count(".") == 2 else ""
        if family not in (*METHODS, "_to_copy", "to", "mul", "add") or not node.inputs:
            return family or key
        node = writer.graph[node.inputs[0].name]
    return key


def _weight(writer: _Writer, name: str) -> Expression:
    """A parameter or buffer, by its name from the block's module on."""
    short = name.removeprefix(f"{writer.path}.") if writer.path else name
    writer.weights.append(short)
    return Expression(f'w["{short}"]')


def _write(writer: _Writer, node: fx.Node) -> None:
    """One call: a line, or a part of what uses it."""
    made = _expression(writer, node)
    if node.target is operator.getitem and node in writer.values:
        return
    users = [user for user in node.users if user.op != "output"]
    is_last = any(user.op == "output" for user in node.users)
    if node.target is local_tensor:
        if len(node.users) == 1:
            writer.values[node] = made
            return
        _assign(writer, node, made, _base_name(made.text))
        return
    if made.text in {each.text for each in writer.values.values()} and not made.is_compound:
        writer.values[node] = made  # the same value under another name
        return
    items = [user for user in node.users if user.target is operator.getitem]
    if items and len(items) == len(node.users):
        _unpack(writer, node, made, items)
        return
    is_view = _family(node) in METHODS or node.target is operator.getitem
    is_light = is_view or (_family(node) in LIGHT and _tensors(node) == 1)
    if is_light and len(users) == 1 and not is_last and len(made.text) <= SHORT:
        writer.values[node] = made
        return
    _assign(writer, node, made, _name(writer, node))


def _tensors(node: fx.Node) -> int:
    return len(node.all_input_nodes)


def _assign(writer: _Writer, node: fx.Node, made: Expression, name: str) -> None:
    _heading(writer, node)
    name = "x" if _continues_x(writer, node) else writer.unique(name)
    writer.lines += made.lines(f"{name} = ", INDENT, _shape_comment(writer, node))
    writer.values[node] = Expression(name)


def _continues_x(writer: _Writer, node: fx.Node) -> bool:
    """Whether a sum adds to ``x``, which nothing reads afterwards."""
    if _family(node) != "add" or not any(
        isinstance(each, fx.Node) and writer.values[each].text == "x" for each in node.args
    ):
        return False
    order = {each: at for at, each in enumerate(node.graph.nodes)}
    return not any(
        re.search(r"\bx\b", made.text) and any(order[user] > order[node] for user in each.users)
        for each, made in writer.values.items()
    )


def _unpack(writer: _Writer, node: fx.Node, made: Expression, items: Sequence[fx.Node]) -> None:
    """``first, second = …``; what nobody uses is called ``_``."""
    _heading(writer, node)
    count = _count_of(node)
    if count is None:
        name = writer.unique(_name(writer, node))
        writer.lines += made.lines(f"{name} = ", INDENT)
        for item in items:
            writer.values[item] = Expression(f"{name}[{item.args[1]}]")
        return
    names = ["_"] * count
    for item in sorted(items, key=lambda each: int(str(each.args[1]))):
        index = int(str(item.args[1]))
        if names[index] == "_":
            names[index] = writer.unique(f"{_name(writer, node)}_{index}")
        writer.values[item] = Expression(names[index])
    writer.lines += made.lines(f"{', '.join(names)}{',' * (count == 1)} = ", INDENT)


def _count_of(node: fx.Node) -> int | None:
    source = node.meta.get(MADE_BY)
    return len(source.outputs) if isinstance(source, Node) else None


def _heading(writer: _Writer, node: fx.Node) -> None:
    """A comment where the ops of another submodule begin."""
    source = node.meta.get(MADE_BY)
    if not isinstance(source, Node):
        return
    inner = source.module.removeprefix(writer.path).strip(".")
    part = inner.partition(".")[0] if inner.count(".") or writer.path else inner
    if part == writer.part:
        return
    writer.part = part
    if part:
        place, _, line = source.source.rpartition(":")
        where = f"  ({PurePath(place).name}:{line})" if place else ""
        writer.lines.append(f"{INDENT}# {part}{where}")


def _shape_comment(writer: _Writer, node: fx.Node) -> str:
    """The local shape of what a node makes."""
    spec, layout = _made(writer, node)
    if spec is None or layout is None:
        return ""
    try:
        shape = local_shape(spec.shape, layout, writer.stage.mesh.shape)
    except ValueError:
        return ""
    return f"  # {tuple(shape)}" if shape else ""


def _made(writer: _Writer, node: fx.Node) -> tuple[TensorSpec | None, Layout | None]:
    source = node.meta.get(MADE_BY)
    if not isinstance(source, Node) or len(source.outputs) != 1:
        return None, None
    return source.spec, writer.layout_of(source.name)


def _family(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).partition("::")[2]
    return str(getattr(target, "__name__", target))


def _name(writer: _Writer, node: fx.Node) -> str:
    """What a value is called: after the module whose result it is, else after the op."""
    if getattr(node.target, "__name__", "") == apply_steps.__name__:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        base = _base_name(writer.values[source].text)
        step = parse_steps(str(node.args[1]), writer.stage.mesh.axes)[-1]
        base = re.sub(STATE, "", base)
        return f"{base}_{STATES[step.target.kind]}"
    source_node = node.meta.get(MADE_BY)
    family = _family(node).strip("_")
    if not isinstance(source_node, Node):
        return family
    module = source_node.module.removeprefix(writer.path).strip(".")
    last = module.rpartition(".")[2]
    if module and family in WEIGHTED:
        return f"{last}_embedding" if family == "embedding" else last
    if "split" in family and node.args and isinstance(node.args[0], fx.Node):
        return re.sub(STATE, "", _base_name(writer.values[node.args[0]].text))
    op = source_node.op.split(".")[1] if source_node.op.count(".") == 2 else family
    return NAMES.get(op, op.strip("_"))


def _base_name(text: str) -> str:
    """The name in an expression; of a weight, with that of its module.

    >>> _base_name('w["attention.qkv.bias"]'), _base_name("qkv.reshape(4, 32)")
    ('qkv_bias', 'qkv')
    """
    weight = re.match(r'w\["(.*)"\]', text)
    if weight:
        return "_".join(weight[1].split(".")[-2:])
    found = re.match(r"\(*([A-Za-z_]\w*)", text)
    return found[1] if found else "value"


def _expression(writer: _Writer, node: fx.Node) -> Expression:
    """What a call is written as."""
    target = node.target
    if target is local_tensor:
        attribute = node.args[0]
        assert isinstance(attribute, fx.Node)
        return _weight(writer, str(attribute.target))
    if target is operator.getitem:
        if node in writer.values:
            return writer.values[node]
        return Expression(f"{_operand(writer, node.args[0])}[{node.args[1]}]")
    args = [_argument(writer, each) for each in node.args]
    kwargs = {name: _argument(writer, each) for name, each in node.kwargs.items()}
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, path = str(target).partition(".")
        if namespace == "aten":
            if path.startswith("to.") and _keeps_dtype(writer, node):
                return args[0]  # type: ignore[no-any-return]
            return op_call(path, args, kwargs)
        if namespace == "autoparallel":
            raise _unwritable(writer, node, f"{target} has no equal in plain PyTorch")
        return called(f"torch.ops.{target}", args, kwargs)
    return _own_call(writer, node, args, kwargs)


def _keeps_dtype(writer: _Writer, node: fx.Node) -> bool:
    """Whether a cast is to the dtype that its tensor has."""
    source = node.meta.get(MADE_BY)
    if not isinstance(source, Node):
        return False
    return writer.graph.spec(source.inputs[0]).dtype == source.spec.dtype


def _own_call(
    writer: _Writer, node: fx.Node, args: list[Any], kwargs: dict[str, Any]
) -> Expression:
    """The call of a function of ours that takes the rank first."""
    function = getattr(node.target, "func", node.target)
    assert callable(function)
    axes = writer.stage.mesh.axes
    if function is apply_steps:
        made: Expression = args[0]
        for step in parse_steps(str(node.args[1]), axes):
            made = _moved(writer, made, step)
        return made
    if function in (cross_entropy, nll_loss):
        return _class_loss(writer, node, args, kwargs, is_logits=function is cross_entropy)
    if function in (dropout_part, uniform_part):
        return _random(writer, node, args, kwargs)
    if not can_copy(function):
        raise _unwritable(writer, node, f"{function.__name__} has no equal in plain PyTorch")
    writer.uses.add(function.__name__)
    if "activation" in kwargs:
        kwargs = {**kwargs, "activation": _activation(writer, str(kwargs["activation"]))}
    named = {
        name: _axis_names(value, axes) if name in ("axes", "balanced", "row_axes") else value
        for name, value in kwargs.items()
    }
    return called(function.__name__, [Expression("mesh"), *args], named)


def _activation(writer: _Writer, text: str) -> Expression:
    """A function of rows (``passes.ops.activation``), which is defined before it is used."""
    name = writer.unique("activation")
    writer.lines.append(f"{INDENT}def {name}(rows: Tensor) -> Tensor:")
    made = ["rows"]
    for number, (target, args, kwargs) in enumerate(json.loads(text), 1):
        parts = [_of_activation(each, made) for each in args]
        options = [f"{key}={_of_activation(value, made)}" for key, value in kwargs.items()]
        home, _, call = target.partition(".")
        if home == "method":
            value = f"{parts[0]}.{call}({', '.join([*parts[1:], *options])})"
        elif call in SIGNS:
            value = f"{parts[0]} {SIGNS[call]} {parts[1]}"
        elif call == "getitem":
            value = f"{parts[0]}[{parts[1]}]"
        else:
            place = {"functional": "F", "torch": "torch"}.get(home, home)
            value = f"{place}.{call}({', '.join([*parts, *options])})"
        made.append(f"part_{number}")
        writer.lines.append(f"{INDENT * 2}{made[-1]} = {value}")
    writer.lines += [f"{INDENT * 2}return {made[-1]}", ""]
    return Expression(name)


SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "matmul": "@", "pow": "**"}


def _of_activation(value: Any, made: Sequence[str]) -> str:
    """An argument of a call of an activation."""
    if isinstance(value, dict) and "at" in value:
        return made[value["at"]]
    if isinstance(value, dict) and "dtype" in value:
        return f"torch.{value['dtype']}"
    if isinstance(value, dict) and "tuple" in value:
        return "(" + "".join(f"{_of_activation(each, made)}, " for each in value["tuple"]) + ")"
    if isinstance(value, dict) and "slice" in value:
        return f"slice({', '.join(_of_activation(each, made) for each in value['slice'])})"
    if isinstance(value, dict):
        return "..."
    if isinstance(value, list):
        return f"[{', '.join(_of_activation(each, made) for each in value)}]"
    return literal(value)


def _moved(writer: _Writer, value: Expression, step: Step) -> Expression:
    axis = writer.stage.mesh.axes[step.axis]
    source, target = step.source, step.target
    first = [value, Expression("mesh"), axis]
    if source.is_shard and target.is_shard:
        writer.uses.add("all_to_all")
        return called("all_to_all", first, {"split_dim": target.dim, "concat_dim": source.dim})
    name = MOVES[source.kind, target.kind]
    writer.uses.add(name)
    split = source if source.is_shard else target
    return called(name, first, {"dim": split.dim} if split.is_shard else {})


def _class_loss(
    writer: _Writer, node: fx.Node, args: list[Any], kwargs: dict[str, Any], *, is_logits: bool
) -> Expression:
    """A mean over rows that are counted beforehand; the classes may be split."""
    axes, count = writer.stage.mesh.axes, kwargs.get("count")
    rows, classes = kwargs["axes"] if is_logits else (kwargs["row_axes"], ())
    is_mean = not is_logits or kwargs["reduction"] == MEAN
    if is_mean and count is None and rows:
        raise _unwritable(writer, node, "its targets are probabilities, split over ranks")
    options: dict[str, Any] = {
        name: kwargs[name] for name in ("ignore_index", "label_smoothing") if name in kwargs
    }
    if classes:
        if not is_mean and kwargs["reduction"] != 2:
            raise _unwritable(writer, node, "its classes are split and its rows are not summed")
        if is_mean and count is None:
            rows_counted = f"({literal(args[1])} != {kwargs['ignore_index']}).sum()"
            count = Expression(rows_counted)
        writer.uses.add("split_cross_entropy")
        named = {k: v for k, v in options.items() if (k, v) != ("ignore_index", -100) and v}
        given = [Expression("mesh"), args[0], args[1], count if is_mean else 1.0]
        return called("split_cross_entropy", given, {"axes": _axis_names(classes, axes), **named})
    named = {"input": args[0], "target": args[1], "weight": args[2], "reduction": 2, **options}
    total = loss_call("F.cross_entropy" if is_logits else "F.nll_loss", named)
    if not is_mean or count is None:
        return total
    source = node.meta[MADE_BY]
    divided = f"{total.text} / {literal(count)}"
    if source.spec.dtype not in ("float32", "float64"):
        return Expression(f"({divided}).to(torch.{source.spec.dtype})")
    return Expression(divided, is_compound=True)


def _random(writer: _Writer, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Expression:
    """A counted random op: where its part lies follows from the rank's place on the mesh."""
    name = "dropout" if node.target.__name__ == dropout_part.__name__ else "uniform"  # type: ignore[union-attr]
    writer.uses.add(name)
    layout = writer.layout_of(node.meta[MADE_BY].name) or ()
    split = {
        axis: placement.dim
        for axis, placement in zip(writer.stage.mesh.axes, layout, strict=True)
        if placement.is_shard
    }
    named: dict[str, Any] = {
        "number": int(kwargs["number"]) - writer.first_number,
        "split": Expression(dictionary(split)),
    }
    if kwargs["batch"] is not None:
        named["rows"] = tuple(kwargs["batch"])
    return called(name, [*args, Expression("mesh"), Expression("draw")], named)


def dictionary(split: Mapping[str, int]) -> str:
    return "{" + ", ".join(f'"{axis}": {dim}' for axis, dim in split.items()) + "}"


def _axis_names(value: Any, axes: Sequence[str]) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_axis_names(each, axes) for each in value)
    return axes[value]


def _operand(writer: _Writer, node: Any) -> str:
    made = writer.values[node]
    return made.operand


def _argument(writer: _Writer, value: Any) -> Any:
    """A call's argument with nodes as they are written."""
    if isinstance(value, fx.Node):
        return writer.values[value]
    if isinstance(value, list):  # fx has its own immutable lists
        return [_argument(writer, each) for each in value]
    if isinstance(value, tuple):
        return tuple(_argument(writer, each) for each in value)
    return value


def _unwritable(writer: _Writer, node: fx.Node, why: str) -> PlanError:
    source = node.meta.get(MADE_BY)
    where = source.source or source.module if isinstance(source, Node) else ""
    return PlanError(
        "AP367", f"{node.name} of block {writer.program.name} cannot be written as plain PyTorch",
        why=why, where=where, fix="train with autoparallel run, or plan without this op",
    )  # fmt: skip
