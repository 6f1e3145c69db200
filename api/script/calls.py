"""Calls of this package's functions: layout changes, sharded losses, random ops, experts.

In: a call in a rank's program. Out: the call of the copy of the same function in the script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from autoparallel.passes.local.localize import MADE_BY
from autoparallel.passes.ops.collectives import apply_steps, parse_steps
from autoparallel.passes.ops.experts import Sending, Slices
from autoparallel.passes.ops.local_loss import MEAN, cross_entropy, nll_loss
from autoparallel.passes.ops.random_ops import dropout_part, uniform_part
from autoparallel.planner.graph.layout import Step
from autoparallel.script.expressions import (
    INDENT,
    OPERATORS,
    Expression,
    call_of,
    dictionary,
    literal,
    op_call,
)
from autoparallel.script.parts import can_copy
from autoparallel.script.writer import MOVES, Writer, unwritable

NAMED_AXES = ("axes", "balanced", "gathered", "ring", "row_axes", "sent")
"""Arguments of this package's functions that are mesh axes."""

FORMS: Mapping[str, Any] = {"slices": Slices, "sending": Sending}
"""Options that are named tuples."""

ONLY_HERE = ("counted", "placed")
"""Options that change no result, and that scripts lack: counts of the tokens of experts, and copies
of experts on other ranks."""


def own_call(writer: Writer, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Expression:
    """Return the call of an op of this package as Python text; the script's ``mesh`` takes the
    place of the op's rank arguments. Raises PlanError AP367 for an op without a form in scripts."""
    function = getattr(node.target, "func", node.target)
    assert callable(function)
    axes = writer.stage.mesh.axes
    if function is apply_steps:
        made: Expression = args[0]
        for step in parse_steps(str(node.args[1]), axes):
            made = _write_move(writer, made, step)
        return made
    if function in (cross_entropy, nll_loss):
        return _class_loss(writer, node, args, kwargs, is_logits=function is cross_entropy)
    if function in (dropout_part, uniform_part):
        return _random(writer, node, args, kwargs)
    if not can_copy(function):
        raise unwritable(writer, node, f"{function.__name__} has no equal in plain PyTorch")
    if "documents" in kwargs:
        raise unwritable(writer, node, "attention within packed documents is not written")
    writer.uses.add(function.__name__)
    kwargs = {name: each for name, each in kwargs.items() if name not in ONLY_HERE}
    if "activation" in kwargs:
        kwargs = {**kwargs, "activation": _activation(writer, str(kwargs["activation"]))}
    for form, kind in FORMS.items():
        if form in kwargs:
            writer.uses.add(kind.__name__)
            fields = kind(*kwargs[form])._asdict()
            own = {name: _named(name, value, axes) for name, value in fields.items()}
            own = {name: value for name, value in own.items() if name not in ONLY_HERE}
            kwargs = {**kwargs, form: call_of(kind.__name__, [], own)}
    named = {name: _named(name, value, axes) for name, value in kwargs.items()}
    return call_of(function.__name__, [Expression("mesh"), *args], named)


def _named(name: str, value: Any, axes: Sequence[str]) -> Any:
    """Return an argument with the names of mesh axes in place of their numbers."""
    return _axis_names(value, axes) if name in NAMED_AXES else value


def _activation(writer: Writer, text: str) -> Expression:
    """Write lines that define an activation, given as JSON (``passes.ops.activation``), as a
    function; return the function's name."""
    name = writer.unique("activation")
    writer.lines.append(f"def {name}(rows: Tensor) -> Tensor:")
    made = ["rows"]
    for number, (target, args, kwargs) in enumerate(json.loads(text), 1):
        parts = [_of_activation(each, made) for each in args]
        options = {key: _of_activation(each, made) for key, each in kwargs.items()}
        home, _, call = target.partition(".")
        texts = [literal(each) for each in parts]
        if home == "method":
            value = call_of(f"{texts[0]}.{call}", parts[1:], options).text
        elif home == "operator" and call in SIGNS:
            value = f"{texts[0]} {SIGNS[call]} {texts[1]}"
        elif call == "getitem":
            value = f"{texts[0]}[{texts[1]}]"
        else:
            place = {"functional": "F"}.get(home, home)
            value = call_of(f"{place}.{call}", parts, options).text
        made.append(f"part_{number}")
        writer.lines.append(f"{INDENT}{made[-1]} = {value}")
    writer.lines += [f"{INDENT}return {made[-1]}", ""]
    return Expression(name)


SIGNS = {**OPERATORS, "truediv": OPERATORS["div"]}


def _of_activation(value: Any, made: Sequence[str]) -> Any:
    """Return an argument in an activation's JSON text as a Python value or expression. ``made`` are
    the variables of the steps before."""
    if isinstance(value, list):
        return [_of_activation(each, made) for each in value]
    if not isinstance(value, dict):
        return value
    if "at" in value:
        return Expression(made[value["at"]])
    if "dtype" in value:
        return Expression(f"torch.{value['dtype']}")
    if "tuple" in value:
        return tuple(_of_activation(value["tuple"], made))
    if "slice" in value:
        return call_of("slice", _of_activation(value["slice"], made))
    return Expression("...")


def _write_move(writer: Writer, value: Expression, step: Step) -> Expression:
    mesh, source, target = writer.stage.mesh, step.source, step.target
    if mesh.shape[step.axis] == 1:
        return value
    first = [value, Expression("mesh"), mesh.axes[step.axis]]
    if source.is_shard and target.is_shard:
        writer.uses.add("all_to_all")
        return call_of("all_to_all", first, {"split_dim": target.dim, "concat_dim": source.dim})
    name = MOVES[source.kind, target.kind]
    writer.uses.add(name)
    split = source if source.is_shard else target
    return call_of(name, first, {"dim": split.dim} if split.is_shard else {})


def _class_loss(
    writer: Writer, node: fx.Node, args: list[Any], kwargs: dict[str, Any], *, is_logits: bool
) -> Expression:
    """Return the call of a cross-entropy (``is_logits``) or NLL loss, divided by its count of
    targets where it is a mean; its classes may be sharded."""
    axes, count = writer.stage.mesh.axes, kwargs.get("count")
    rows, classes = kwargs["axes"] if is_logits else (kwargs["row_axes"], ())
    is_mean = not is_logits or kwargs["reduction"] == MEAN
    if is_mean and count is None and rows:
        raise unwritable(writer, node, "its targets are probabilities, split over ranks")
    options: dict[str, Any] = {
        name: kwargs[name] for name in ("ignore_index", "label_smoothing") if name in kwargs
    }
    if classes:
        if not is_mean and kwargs["reduction"] != 2:
            raise unwritable(writer, node, "its classes are split and its rows are not summed")
        if is_mean and count is None:
            rows_counted = f"({literal(args[1])} != {kwargs['ignore_index']}).sum()"
            count = Expression(rows_counted)
        writer.uses.add("split_cross_entropy")
        named = {k: v for k, v in options.items() if (k, v) != ("ignore_index", -100) and v}
        given = [Expression("mesh"), args[0], args[1], count if is_mean else 1.0]
        return call_of("split_cross_entropy", given, {"axes": _axis_names(classes, axes), **named})
    path = "cross_entropy_loss.default" if is_logits else "nll_loss_nd.default"
    total = op_call(path, args[:3], {"reduction": 2, **options})
    if not is_mean or count is None:
        return total
    source = node.meta[MADE_BY]
    if source.spec.dtype not in ("float32", "float64"):
        return Expression(f"({total.text} / {literal(count)}).to(torch.{source.spec.dtype})")
    return Expression(f"{total.text} / {literal(count)}", is_compound=True)


def _random(writer: Writer, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Expression:
    """Return the call of a random op with its number (a seed) and the mesh axes that shard it."""
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
    return call_of(name, [*args, Expression("mesh"), Expression("draw")], named)


def _axis_names(value: Any, axes: Sequence[str]) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_axis_names(each, axes) for each in value)
    return axes[value]
