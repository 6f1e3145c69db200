"""Text of a block's program as readable Python.

In: a ``BlockProgram`` and its stage. Out: a ``BlockFunction``: the text of a function, and the
names of its weights without the path of the block, so that repeated layers of a model have equal
functions. Values are named after the modules that compute them; views become chained method calls.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from torch import fx

from autoparallel.passes.local.localize import MADE_BY, parse_key
from autoparallel.passes.local.stage_program import BlockProgram, StageProgram
from autoparallel.passes.ops.collectives import apply_steps, local_tensor, parse_steps
from autoparallel.passes.ops.random_ops import dropout_part, uniform_part
from autoparallel.planner.graph.graph import Graph, Node
from autoparallel.planner.graph.layout import Layout, local_shape
from autoparallel.planner.ops.catalog import spec_named
from autoparallel.script.calls import own_call
from autoparallel.script.expressions import (
    LINE,
    Expression,
    assignment,
    call_of,
    is_method,
    op_call,
)
from autoparallel.script.writer import Writer, unwritable

STATE = r"_(part|whole|term)(_\d+)?$"
STATES = {"S": "part", "R": "whole", "I": "whole", "P": "term"}
SHORT = 48
"""Largest number of characters of an expression that is written inside another."""


@dataclass(frozen=True, slots=True)
class BlockFunction:
    """Function that computes a block in a generated script. ``text`` is its body, without ``def``.

    ``weights`` are the block's parameters and buffers by their names in ``text``. ``uses`` are the
    names of this package's definitions that the text calls.
    """

    arguments: tuple[str, ...]
    text: str
    weights: tuple[str, ...]
    uses: frozenset[str]
    takes_mesh: bool
    takes_draw: bool
    results: tuple[str, ...]
    first_number: int
    """Number of the block's first random op; random ops in ``text`` are numbered from it."""


def block_function(
    program: BlockProgram,
    stage: StageProgram,
    graph: Graph,
    layout_of: Callable[[str], Layout | None],
) -> BlockFunction:
    """Write the function that computes a block (``program``) of a stage in a generated script.
    ``layout_of`` returns the layout of a graph node's first output.

    Raises PlanError AP367 if an op cannot be written.
    """
    numbers = [
        node.kwargs["number"]
        for node in program.module.graph.nodes
        if getattr(node.target, "func", None) in (dropout_part, uniform_part)
    ]
    first = min(numbers, default=0)
    writer = Writer(program, stage, graph, layout_of, module_path(program), first)
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
            raise unwritable(writer, node, "it runs a module of the model's as it is")
    returned = [writer.values[node].text for node in result]
    value = ", ".join(returned) or "None"
    value = f"({value})" if len(value) > LINE // 2 else value
    writer.lines.append(f"return {value}")
    text = "\n".join(writer.lines)
    return BlockFunction(
        arguments,
        text,
        tuple(dict.fromkeys(writer.weights)),
        frozenset(writer.uses),
        takes_mesh=bool(re.search(r"\bmesh\b", text)),
        takes_draw=bool(re.search(r"\bdraw\b", text)),
        results=tuple(returned),
        first_number=first,
    )


def module_path(program: BlockProgram) -> str:
    """Return the path of a block's module: its name if all its parameters are below it, else ""."""
    names = [*program.parameters, *program.buffers]
    is_module = all(name.startswith(f"{program.name}.") for name in names)
    return program.name if names and is_module else ""


def _arguments(writer: Writer) -> tuple[str, ...]:
    """Return the argument names of a block's function, without weights; store the expression of
    each input in the writer."""
    placeholders = [n for n in writer.program.module.graph.nodes if n.op == "placeholder"]
    held = {**writer.stage.parameters, **writer.stage.buffers}
    pairs = list(zip(placeholders, writer.program.inputs, strict=True))
    free = [(node, key) for node, key in pairs if key not in held]
    known = writer.graph.by_name
    made = [
        key
        for key in dict.fromkeys(key for _, key in free)
        if parse_key(key).name in known and known[parse_key(key).name].kind == "op"
    ]
    arguments: dict[str, str] = {}
    for node, key in pairs:
        if key in held:
            writer.values[node] = _weight(writer, key)
            continue
        if key not in arguments:
            arguments[key] = "x" if made == [key] else writer.unique(_argument_name(writer, key))
        writer.values[node] = Expression(arguments[key])
    return tuple(arguments.values())


def _argument_name(writer: Writer, key: str) -> str:
    """Return an argument name for the input ``key`` of a block; a constant, maybe cast or reshaped,
    is named after the op that makes it."""
    if key.startswith("count of "):
        return "count"
    node = writer.graph.by_name.get(parse_key(key).name)
    while node is not None and node.kind == "constant":
        family = node.op.split(".")[1] if node.op.count(".") == 2 else ""
        is_passed = is_method(family) or spec_named(family).result in ("cast", "product", "sum_")
        if not is_passed or not node.inputs:
            return family or key
        node = writer.graph[node.inputs[0].name]
    return key


def _weight(writer: Writer, name: str) -> Expression:
    """Return a parameter or buffer as ``w["..."]``, named relative to the block's module."""
    short = name.removeprefix(f"{writer.path}.") if writer.path else name
    writer.weights.append(short)
    return Expression(f'w["{short}"]')


def _write(writer: Writer, node: fx.Node) -> None:
    """Write a node's call as a line, or store its expression for the line where it is read."""
    if node.target is operator.getitem and not node.users:
        return
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
    spec = spec_named(_family(node))
    is_view = is_method(spec.name) or node.target is operator.getitem
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    is_alone = len(node.all_input_nodes) == 1
    is_light = is_view or (is_alone and (is_pointwise or spec.is_inline))
    if is_light and len(users) == 1 and not is_last and len(made.text) <= SHORT:
        writer.values[node] = made
        return
    _assign(writer, node, made, _name(writer, node))


def _assign(writer: Writer, node: fx.Node, made: Expression, name: str) -> None:
    _write_heading(writer, node)
    name = "x" if _continues_x(writer, node) else writer.unique(name)
    writer.lines.append(f"{name} = {made.text}{_shape_comment(writer, node)}")
    writer.values[node] = Expression(name)


def _continues_x(writer: Writer, node: fx.Node) -> bool:
    """Return whether ``node`` adds to the variable ``x`` (a residual), and no later op reads it."""
    if _family(node) != "add" or not any(
        isinstance(each, fx.Node) and writer.values[each].text == "x" for each in node.args
    ):
        return False
    order = {each: at for at, each in enumerate(node.graph.nodes)}
    return not any(
        re.search(r"\bx\b", made.text) and any(order[user] > order[node] for user in each.users)
        for each, made in writer.values.items()
    )


def _unpack(writer: Writer, node: fx.Node, made: Expression, items: Sequence[fx.Node]) -> None:
    """Write a call with several results as ``first, second = …``; results not in use are called
    ``_``. ``items`` are the nodes that read a result."""
    _write_heading(writer, node)
    source = node.meta.get(MADE_BY)
    if not isinstance(source, Node):
        name = writer.unique(_name(writer, node))
        writer.lines.append(f"{name} = {made.text}")
        for item in items:
            writer.values[item] = Expression(f"{name}[{item.args[1]}]")
        return
    names = ["_"] * len(source.outputs)
    read = [item for item in items if item.users]
    for item in sorted(read, key=lambda each: int(str(each.args[1]))):
        index = int(str(item.args[1]))
        if names[index] == "_":
            names[index] = writer.unique(f"{_name(writer, node)}_{index}")
        writer.values[item] = Expression(names[index])
    line = f"{names[0]}, = {made.text}" if len(names) == 1 else assignment(names, made)
    writer.lines.append(line)


def _write_heading(writer: Writer, node: fx.Node) -> None:
    """Write a comment with the name of the submodule if ``node`` is the submodule's first op."""
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
        writer.lines.append(f"# {part}{where}")


def _shape_comment(writer: Writer, node: fx.Node) -> str:
    """Return a comment with the local shape of a node's result."""
    source = node.meta.get(MADE_BY)
    if not isinstance(source, Node) or len(source.outputs) != 1:
        return ""
    layout = writer.layout_of(source.name)
    try:
        shape = layout and local_shape(source.spec.shape, layout, writer.stage.mesh.shape)
    except ValueError:
        return ""
    return f"  # {tuple(shape)}" if shape else ""


def _family(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).partition("::")[2]
    return str(getattr(target, "__name__", target))


def _name(writer: Writer, node: fx.Node) -> str:
    """Return a name for the variable of a node's value, after the module or op that makes it."""
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
        return str(node.name) if family in writer.uses else family
    module = source_node.module.removeprefix(writer.path).strip(".")
    last = module.rpartition(".")[2]
    if module and (family == "split_embedding" or spec_named(family).is_weighted):
        return f"{last}_embedding" if family == "embedding" else last
    if "split" in family and node.args and isinstance(node.args[0], fx.Node):
        return re.sub(STATE, "", _base_name(writer.values[node.args[0]].text))
    op = source_node.op.split(".")[1] if source_node.op.count(".") == 2 else family
    return spec_named(op).result or op.strip("_")


def _base_name(text: str) -> str:
    """Return the variable that an expression begins with; for a weight, module and weight name.

    >>> _base_name('w["attention.qkv.bias"]'), _base_name("qkv.reshape(4, 32)")
    ('qkv_bias', 'qkv')
    """
    weight = re.match(r'w\["(.*)"\]', text)
    if weight:
        return "_".join(weight[1].split(".")[-2:])
    found = re.match(r"\(*([A-Za-z_]\w*)", text)
    return found[1] if found else "value"


def _expression(writer: Writer, node: fx.Node) -> Expression:
    """Return the Python expression that calls a node's op with its arguments."""
    target = node.target
    if target is local_tensor:
        attribute = node.args[0]
        assert isinstance(attribute, fx.Node)
        return _weight(writer, str(attribute.target))
    if target is operator.getitem:
        if node in writer.values:
            return writer.values[node]
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return Expression(f"{writer.values[source].operand}[{node.args[1]}]")
    args = [_argument(writer, each) for each in node.args]
    kwargs = {name: _argument(writer, each) for name, each in node.kwargs.items()}
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, path = str(target).partition(".")
        if namespace == "aten":
            if path.startswith("to.") and _keeps_dtype(writer, node):
                return args[0]  # type: ignore[no-any-return]
            return op_call(path, args, kwargs)
        if namespace == "autoparallel":
            raise unwritable(writer, node, f"{target} has no equal in plain PyTorch")
        return call_of(f"torch.ops.{target}", args, kwargs)
    return own_call(writer, node, args, kwargs)


def _keeps_dtype(writer: Writer, node: fx.Node) -> bool:
    """Return whether the cast ``node`` keeps its tensor's dtype, so that it can be left out."""
    source = node.meta.get(MADE_BY)
    if not isinstance(source, Node):
        return False
    return writer.graph.spec(source.inputs[0]).dtype == source.spec.dtype


def _argument(writer: Writer, value: Any) -> Any:
    """Return an argument of a call, with nodes replaced by their expressions."""
    if isinstance(value, fx.Node):
        return writer.values[value]
    if isinstance(value, list):  # fx has its own immutable lists
        return [_argument(writer, each) for each in value]
    if isinstance(value, tuple):
        return tuple(_argument(writer, each) for each in value)
    return value
