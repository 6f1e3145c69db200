"""``register_op``: ops of the user, captured as single nodes and sharded by an annotation.

In: an op of ``torch.library``, an ``autograd.Function`` or any function of tensors (such as a
Triton kernel's launcher), with its dimension annotation. Out: an op that ``torch.export`` keeps
whole, and its rule. The rules are stored here for the whole process, as ``torch.library`` stores
ops; a capture gets them as an argument and attaches each to its nodes, so that nothing below
``api`` holds state.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.utils._pytree import tree_flatten, tree_map

from autoparallel.passes.ops.torch_ops import forget, path_of
from autoparallel.passes.tracing.opaque import ANNOTATION
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.graph import OpRule
from autoparallel.planner.ops.annotation import Pattern, bind, output_shapes, parse

NAMESPACE = "autoparallel_user"

_RULES: dict[str, OpRule] = {}
_FILES: dict[str, str] = {}
_LITERALS = (bool, int, float, str)


def registered_rules() -> Mapping[str, OpRule]:
    """Return the rules of the ops registered in this process, by the path of the op."""
    return dict(_RULES)


def register_op(
    annotation: str,
    *,
    name: str | None = None,
    fake: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    flops: Callable[..., float] | None = None,
    saved_bytes: Callable[..., float] | None = None,
) -> Callable[[Any], Any]:
    """Declare how the dimensions of an op's tensors correspond, so that plans may shard it.

    ::

        @autoparallel.register_op("*b s h, h o -> *b s o")
        def project(x, weight): ...

    The annotation names the dimensions of each tensor, in call order. A letter is a dimension,
    ``*b`` any number of leading dimensions, ``_`` a dimension that is never sharded; ``[]``
    encloses an operand that only conditions the result. ``->`` means linear in each operand, with a
    sum over the letters that the output lacks; ``=>`` means any function. Test it with
    ``autoparallel.testing.check_op``.

    A class of ``nn.Module`` is captured as one node: the annotation is for the tensors of its
    forward, and its parameters are not sharded. A function becomes an op of ``torch.library``; its
    parameters without a type are tensors, or of the type of their default. ``fake`` (default: by
    the annotation) returns empty outputs of the right shape. ``backward`` and ``setup_context`` are
    as in ``torch.library.register_autograd``; by default the backward runs the function again and
    differentiates it. ``flops`` estimates the forward's FLOPs from the input shapes.
    ``saved_bytes`` estimates the bytes besides inputs (such as a mask) kept for a ``backward`` that
    reads no input; by default all inputs count as kept.

    Raises UsageError AP160 if the annotation is invalid, AP161 if it does not match the function,
    and AP163 if another function has the same name.
    """
    pattern = parse_annotation(annotation)

    def mark(thing: Any) -> Any:
        found = existing_op(thing)
        if found is not None:
            _RULES[found] = OpRule(annotation, flops, saved_bytes)
            return thing
        if isinstance(thing, type) and issubclass(thing, torch.nn.Module):
            setattr(thing, ANNOTATION, annotation)
            return thing
        is_class = isinstance(thing, type) and issubclass(thing, torch.autograd.Function)
        if not is_class and not callable(thing):
            raise _misfit(annotation, f"{thing!r} is no op, function or autograd.Function")
        maker = _Maker(thing, is_class, pattern, annotation, fake)
        op = maker.make(name, backward, setup_context)
        _RULES[op.path] = OpRule(annotation, flops, saved_bytes)
        if is_class:
            thing.apply = op
            return thing
        return op

    return mark


class RegisteredOp:
    """Registered function: a call runs its op, whose path in ``torch.ops`` is ``path``."""

    def __init__(self, function: Callable[..., Any], path: str) -> None:
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", path)
        self.__wrapped__ = function
        self.path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        namespace, name, overload = self.path.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)(*args, **kwargs)


def existing_op(thing: Any) -> str | None:
    """Return the path of ``thing`` if it is an op of torch or a registered op, else None."""
    if isinstance(thing, RegisteredOp):
        return thing.path
    if isinstance(thing, type) and isinstance(getattr(thing, "apply", None), RegisteredOp):
        return str(thing.apply.path)  # type: ignore[attr-defined]
    if isinstance(thing, torch._ops.OpOverload):
        return path_of(thing)
    if isinstance(thing, torch._ops.OpOverloadPacket):
        return path_of(getattr(thing, thing.overloads()[0]))  # type: ignore[no-untyped-call]
    if isinstance(thing, CustomOpDef):
        return f"{thing._qualname.replace('::', '.')}.default"
    return None


def parse_annotation(annotation: str) -> Pattern:
    """Parse an annotation. Raises UsageError AP160 if it is invalid."""
    arrows = [arrow for arrow in ("=>+", "=>", "->") if arrow in annotation]
    if len(arrows) == 0 or annotation.count(">") != 1:
        raise _unreadable(annotation, "it needs exactly one of ->, => and =>+")
    if annotation.count("[") != annotation.count("]"):
        raise _unreadable(annotation, "its brackets do not match")
    pattern = parse(annotation)
    known = {token for operand in pattern.inputs for token in operand}
    for operand in (*pattern.inputs, *pattern.outputs):
        for position, token in enumerate(operand):
            if not (token == "_" or token == "*" or token.removeprefix("*").isidentifier()):
                raise _unreadable(annotation, f"{token!r} names no dimension")
            if token.startswith("*") and position:
                raise _unreadable(annotation, f"{token!r} must come first in its tensor")
        repeated = [t for t in operand if t != "_" and operand.count(t) > 1]
        if repeated:
            raise _unreadable(annotation, f"{repeated[0]!r} stands twice in one tensor")
    for token in (token for output in pattern.outputs for token in output):
        if token != "_" and token not in known:
            raise _unreadable(
                annotation, f"the output's {token!r} is in no input: write _ for a new dimension"
            )
    return pattern


def _unreadable(annotation: str, why: str) -> UsageError:
    return UsageError(
        "AP160",
        f"the annotation {annotation!r} cannot be read",
        why=why,
        fix='write one group of dimension names per tensor: "b s h, h o -> b s o"',
    )


def _misfit(annotation: str, why: str, where: str = "") -> UsageError:
    return UsageError(
        "AP161",
        f"the annotation {annotation!r} does not fit the op",
        why=why,
        where=where,
        fix="give each tensor argument, in call order, one group of dimension names",
    )


class _Maker:
    """Factory that turns a function into an op of ``torch.library``."""

    def __init__(
        self, thing: Any, is_class: bool, pattern: Pattern, annotation: str, fake: Any
    ) -> None:
        self.function = thing.apply if is_class else thing
        self.named = thing.forward if is_class else inspect.unwrap(thing)
        self.title = getattr(thing, "__qualname__", type(thing).__name__)
        self.pattern, self.annotation, self.fake = pattern, annotation, fake
        has_context = is_class and thing.setup_context is torch.autograd.Function.setup_context
        self.signature = self._signature(skip=int(has_context))
        self.is_several = len(pattern.outputs) > 1

    @property
    def where(self) -> str:
        code = getattr(self.named, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else ""

    def make(self, name: str | None, backward: Any, setup_context: Any) -> RegisteredOp:
        """Register the op with its fake (function of shapes) and its backward, and return it."""
        name = name or self._default_name()
        qualified = f"{NAMESPACE}::{name}" if "::" not in name else name
        path = f"{qualified.replace('::', '.')}.default"
        file = self.where.rpartition(":")[0]
        if _FILES.setdefault(path, file) != file:
            raise UsageError(
                "AP163",
                f"two functions are registered as {name}",
                where=self.where,
                why=f"the other is in {_FILES[path]}",
                fix='register_op(..., name="another")',
            )
        op = torch.library.custom_op(qualified, self._forward(), mutates_args=())
        op.register_fake(self._fake)
        if backward is not None:
            op.register_autograd(backward, setup_context=setup_context)
        else:
            op.register_autograd(self._backward, setup_context=_keep_inputs)
        forget()
        return RegisteredOp(self.function, path)

    def _default_name(self) -> str:
        stem = Path(self.where.rpartition(":")[0]).stem
        plain = f"{stem}_{self.title}".replace("<locals>.", "")
        return "".join(c if c.isalnum() or c == "_" else "_" for c in plain)

    def _signature(self, skip: int) -> inspect.Signature:
        """Return the function's signature from parameter ``skip`` on, with a type per parameter."""
        try:
            hints = typing.get_type_hints(self.named)
        except (NameError, TypeError):
            hints = {}
        listed = list(inspect.signature(self.named).parameters.values())[skip:]
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in listed):
            raise _misfit(self.annotation, "a function with *args or **kwargs", self.where)
        parameters = [
            p.replace(
                annotation=hints.get(p.name, _type_of(p.default)), kind=p.POSITIONAL_OR_KEYWORD
            )
            for p in listed
        ]
        tensors = [p for p in parameters if _holds_tensor(p.annotation)]
        if len(tensors) < len(self.pattern.inputs):
            raise _misfit(
                self.annotation,
                f"it has {len(self.pattern.inputs)} inputs, {self.title} takes "
                f"{len(tensors)} tensors",
                self.where,
            )
        count = len(self.pattern.outputs)
        result: Any = tuple[(Tensor,) * count] if count > 1 else Tensor  # type: ignore[misc]
        return inspect.Signature(parameters, return_annotation=result)

    def _call(self, args: Sequence[Any]) -> Any:
        """Call the function with values given in the order of its parameters."""
        own = inspect.signature(self.named).parameters
        keyword = {p.name for p in own.values() if p.kind is p.KEYWORD_ONLY}
        named = list(zip(self.signature.parameters, args, strict=False))
        return self.function(
            *(value for key, value in named if key not in keyword),
            **{key: value for key, value in named if key in keyword},
        )

    def _forward(self) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            result = self._call(args)
            outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
            if len(outputs) != len(self.pattern.outputs):
                raise _misfit(
                    self.annotation,
                    f"it has {len(self.pattern.outputs)} outputs, {self.title} returns "
                    f"{len(outputs)}",
                    self.where,
                )
            fresh = tuple(_copy_output(output, args) for output in outputs)
            return fresh if self.is_several else fresh[0]

        forward.__signature__ = self.signature  # type: ignore[attr-defined]
        forward.__annotations__ = {
            p.name: p.annotation for p in self.signature.parameters.values()
        } | {"return": self.signature.return_annotation}
        return forward

    def _fake(self, *args: Any) -> Any:
        """Return outputs without values, by the user's ``fake``, annotation or function."""
        if self.fake is not None:
            return self.fake(*args)
        tensors = [value for value in tree_flatten(list(args))[0] if isinstance(value, Tensor)]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if bind(self.annotation, shapes, ()) is None:
            raise _misfit(self.annotation, f"its inputs have shapes {shapes}", self.where)
        found = output_shapes(self.annotation, shapes)
        if found is None:
            result = self._call(args)
            return tree_map(lambda output: _copy_output(output, args), result)
        floating = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        dtype = reduce(torch.promote_types, floating) if floating else tensors[0].dtype
        made = tuple(tensors[0].new_empty(shape, dtype=dtype) for shape in found)
        return made if self.is_several else made[0]

    def _backward(self, ctx: Any, *grads: Tensor | None) -> Any:
        """Run the function again on the saved inputs; return the gradients of these inputs."""
        flat, structure = tree_flatten(list(_kept_inputs(ctx)))
        flat = [
            value.detach().requires_grad_(wants) if isinstance(value, Tensor) else value
            for value, wants in zip(flat, ctx.wants, strict=True)
        ]
        with torch.enable_grad():
            result = self._call(structure.unflatten(flat))
        outputs = result if isinstance(result, tuple | list) else (result,)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
        pairs = [(o, g) for o, g in pairs if o.requires_grad]
        if not pairs:
            raise UsageError(
                "AP164",
                f"{self.title} has no gradient",
                where=self.where,
                why="its outputs do not depend on its inputs by differentiable operations",
                fix="register_op(..., backward=..., setup_context=...)",
            )
        wanted = [value for value, wants in zip(flat, ctx.wants, strict=True) if wants]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
            )
        )
        gradients = [next(found) if wants else None for wants in ctx.wants]
        listed = structure.unflatten(gradients)
        return tuple(listed)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    flat, structure = tree_flatten(list(inputs))
    ctx.structure = structure
    ctx.wants = [isinstance(value, Tensor) and value.requires_grad for value in flat]
    ctx.others = [None if isinstance(value, Tensor) else value for value in flat]
    ctx.is_tensor = [isinstance(value, Tensor) for value in flat]
    ctx.save_for_backward(*(value for value in flat if isinstance(value, Tensor)))


def _kept_inputs(ctx: Any) -> Any:
    tensors = iter(ctx.saved_tensors)
    flat = [
        next(tensors) if is_tensor else other
        for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)
    ]
    return ctx.structure.unflatten(flat)


def _copy_output(output: Tensor, args: Sequence[Any]) -> Tensor:
    """Copy an output to new contiguous memory if needed: ops must not return inputs or views."""
    tensors = [value for value in tree_flatten(list(args))[0] if isinstance(value, Tensor)]
    is_view = output._is_view()
    if any(output is tensor or (is_view and output._base is tensor) for tensor in tensors):
        return output.clone(memory_format=torch.contiguous_format)
    return output.contiguous()


def _type_of(default: Any) -> Any:
    """Return the type of a parameter without annotation: its default's, else a tensor."""
    if default is None:
        return Tensor | None
    return type(default) if isinstance(default, _LITERALS) else Tensor


def _holds_tensor(kind: Any) -> bool:
    arguments = typing.get_args(kind) if not isinstance(kind, types.UnionType) else kind.__args__
    return kind is Tensor or any(_holds_tensor(each) for each in arguments)
