"""``check_op``: test by execution that an annotation correctly describes its op.

In: a registered op and example arguments. Out: the layouts that were tested. Every layout that the
annotation offers is run by simulated ranks, one thread each, on shards of the arguments, and
compared with the op on whole arguments: outputs and every gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from autoparallel.passes.local.prove import OP, describe, node_layouts, prove
from autoparallel.passes.ops.torch_ops import resolve
from autoparallel.planner.errors import UsageError, VerificationError
from autoparallel.planner.graph.graph import Graph, Node, OpRule, Ref, TensorSpec
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.ops import has_rule
from autoparallel.planner.ops.annotation import bind
from autoparallel.target.register_op import existing_op, registered_rules

MESHES = (Mesh(("x",), (2,)), Mesh(("x",), (3,)), Mesh(("x", "y"), (2, 2)))
"""Meshes of simulated ranks for tests; dimensions that no mesh divides are not sharded."""

LAYOUTS_ON_TWO_AXES = 16


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of ``check_op``: the tested layouts, and all dimensions that they shard."""

    op: str
    layouts: tuple[str, ...]
    split: tuple[str, ...]


def check_op(function: Any, *args: Any, **kwargs: Any) -> Proof:
    """Test the annotation of a registered op (or the rule of a torch op) by running it.

    ``args`` are example arguments, on the device that the op runs on; use float64 if the op
    supports it. Dimensions divisible by 2 or 3 are sharded. If no tensor requires a gradient, all
    floating-point tensors do.

    Raises VerificationError AP602 with the layout that failed, UsageError AP161 if the annotation
    does not match the arguments, AP165 if the op is not registered, and AP166 if a dimension in the
    annotation was never sharded.
    """
    path, rule = _rule_of(function)
    args, kwargs = _differentiable((args, kwargs))
    case = _Case(path, rule, args, kwargs)
    graph = case.graph()
    proven: dict[str, None] = {}
    split: dict[str, None] = {}
    for mesh in MESHES:
        layouts = node_layouts(graph, mesh)
        if len(mesh.shape) > 1:
            layouts = layouts[:LAYOUTS_ON_TWO_AXES]
        for layout in layouts:
            text = f"{'x'.join(map(str, mesh.shape))} ranks, {describe(layout)}"
            _prove(case, graph, mesh, layout, text)
            proven[text] = None
            split |= dict.fromkeys(label for label in layout.labels if label not in "RIP")
    _all_split(case, split)
    return Proof(path, tuple(proven), tuple(split))


def _rule_of(function: Any) -> tuple[str, OpRule | None]:
    path = existing_op(function)
    rule = registered_rules().get(path or "")
    if path is None or (rule is None and not has_rule(path)):
        raise UsageError(
            "AP165",
            f"{getattr(function, '__name__', function)} is not registered",
            fix='decorate it: @autoparallel.register_op("b s h, h o -> b s o")',
        )
    return path, rule


def _differentiable(arguments: Any) -> Any:
    """Return the arguments; all floating-point tensors require gradients if none did before."""
    tensors = list(_tensors(arguments))
    if any(tensor.requires_grad for tensor in tensors):
        return arguments

    def asking(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().clone().requires_grad_()
        return value

    return tree_map(asking, arguments)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


@dataclass(frozen=True, slots=True)
class _Case:
    """Op to test, with its sharding rule and example arguments."""

    path: str
    rule: OpRule | None
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(_tensors((self.args, self.kwargs)))

    def call(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        feed = iter(tensors)
        args, kwargs = _replaced((self.args, dict(self.kwargs)), lambda _: next(feed))
        result: Any = resolve(self.path)(*args, **kwargs)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    def graph(self) -> Graph:
        """Return a graph of the op. Its inputs are outputs of copies, which may have any layout."""
        nodes: list[Node] = []
        for index, tensor in enumerate(self.tensors):
            kind: Any = "parameter" if tensor.requires_grad else "input"
            spec = _spec(tensor)
            nodes.append(Node(f"leaf{index}", kind, outputs=(spec,)))
            made = Node(
                f"x{index}", "op", "aten.clone.default", (Ref(f"leaf{index}"),), {}, (spec,)
            )
            nodes.append(made)
        feed = iter(range(len(self.tensors)))
        args, kwargs = _replaced((self.args, dict(self.kwargs)), lambda _: Ref(f"x{next(feed)}"))
        outputs = tuple(_spec(output) for output in self.call(self.tensors))
        self.check_fit(outputs)
        nodes.append(Node(OP, "op", self.path, tuple(args), kwargs, outputs, rule=self.rule))
        return Graph(tuple(nodes), Ref(OP), 0)

    def check_fit(self, outputs: Sequence[TensorSpec]) -> None:
        """Raise UsageError AP161 if the annotation does not match the inputs and ``outputs``."""
        if self.rule is None:
            return
        shapes = [tuple(tensor.shape) for tensor in self.tensors]
        made = [spec.shape for spec in outputs]
        found = bind(self.rule.annotation, shapes, made)
        why = f"inputs of shapes {shapes} and outputs of {made} have other ranks than it says"
        if found is not None:
            why = ""
            sizes: dict[str, int] = {}
            for letters, shape in zip(found.inputs + found.outputs, shapes + made, strict=True):
                for letter, size in zip(letters, shape, strict=True):
                    if letter and sizes.setdefault(letter, size) != size:
                        why = f"its {letter} is {sizes[letter]} in one tensor and {size} in another"
        if why:
            raise UsageError(
                "AP161",
                f"the annotation {self.rule.annotation!r} does not fit {self.path}",
                why=why,
                fix="give each tensor, in call order, one group of as many names as it has "
                "dimensions",
            )


def _replaced(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(_replaced(item, function) for item in value)
    if isinstance(value, dict):
        return {key: _replaced(item, function) for key, item in value.items()}
    return value


def _spec(tensor: Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(tuple(tensor.shape), dtype, tensor.requires_grad)


def _prove(case: _Case, graph: Graph, mesh: Mesh, layout: Any, text: str) -> None:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            prove(graph, case.call, case.tensors, mesh=mesh, layout=layout)
    except UsageError:
        raise
    except Exception as error:
        rule = f" as {case.rule.annotation!r} says" if case.rule else ""
        raise VerificationError(
            "AP602",
            f"{case.path} cannot be sharded{rule}",
            why=f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
            where=text,
            fix="write _ for a dimension that is never sharded, and => for a function that is "
            "not linear",
        ) from error


def _all_split(case: _Case, split: Mapping[str, None]) -> None:
    if case.rule is None:
        return
    shapes = [tuple(tensor.shape) for tensor in case.tensors]
    bound = bind(case.rule.annotation, shapes, ())
    letters = {letter for names in (bound.inputs if bound else ()) for letter in names if letter}
    missing = sorted(letters - set(split))
    if missing:
        raise UsageError(
            "AP166",
            f"the dimensions {', '.join(missing)} of {case.rule.annotation!r} were never sharded",
            why="neither 2 nor 3 divides their sizes, or no layout can shard them",
            fix="pass arguments of even sizes, or write _ for a dimension that is never sharded",
        )
