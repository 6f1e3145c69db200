"""Inlining of regions without gradients in a forward, as ops that cut gradients.

In: an exported program, in which the code under ``torch.no_grad`` and the like is a region, a graph
of its own. Out: the program with the ops of its regions in their places. An op in a region reads a
value with a gradient through ``without_gradient``. This is done before decompositions, which drop
the regions but keep their ops.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from ...planner.errors import CaptureError
from ..ops.torch_ops import mutated_argument, path_of
from .locate import user_source

_DETACH = torch.ops.aten.detach.default
_CAST = torch.ops.aten._to_copy.default
"""Op that captures record for ``x.to(dtype)``, even if the result is ``x`` itself."""
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
SWITCH = "wrap_with_set_grad_enabled"
AUTOCAST = "wrap_with_autocast"


@torch.library.custom_op("autoparallel::without_gradient", mutates_args=())
def without_gradient(x: Tensor) -> Tensor:
    """Return a copy of ``x`` through which no gradient flows."""
    return x.clone()


@without_gradient.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


WITHOUT_GRADIENT: OpOverload = torch.ops.autoparallel.without_gradient.default


def inline_regions(exported: ExportedProgram) -> None:
    """Replace, in place, nested graph regions that turn gradients on or off (``no_grad``), or turn
    autocast off, by the ops inside. Other regions stay (autocast that is on, conditions); ``lower``
    refuses them. Raises CaptureError AP212 for a write to a value with a gradient while gradients
    are off, or through ``detach()``."""
    if not any(is_region(node) or node.target is _DETACH for node in exported.graph.nodes):
        return
    state = _Inlining(exported)
    for node in exported.graph.nodes:
        if is_region(node):
            state.inline(node, exported.graph_module, is_enabled=True)
        else:
            state.see(node, is_enabled=True)
    exported.graph_module.recompile()


def is_region(node: fx.Node) -> bool:
    """Return whether a node is a nested graph region that turns gradients on or off, or turns
    autocast off, and so is replaced by its ops."""
    name = str(node.target)
    return name == SWITCH or (name == AUTOCAST and node.args[2] is False)


class _Inlining:
    """Inliner of a program's nested regions, which tracks values that have a gradient. ``_base``
    maps a view to its base tensor, and an element of a list of new tensors to the list. A view made
    while gradients are off has no gradient even if its base has one: ops read it through
    ``without_gradient``. If an op returns its argument itself, as ``x.float()`` may, the result
    keeps the gradient. ``_shown`` has the base tensors of the elements of lists."""

    def __init__(self, exported: ExportedProgram) -> None:
        self._graph = exported.graph
        self._base: dict[fx.Node, fx.Node] = {}
        self._cut_views: set[fx.Node] = set()
        self._detached: set[fx.Node] = set()
        self._shown: dict[fx.Node, list[SharedArg]] = {}
        self._has_gradient = {
            node
            for node in self._graph.nodes
            if node.op == "placeholder" and node.meta["val"].requires_grad
        }

    def inline(self, region: fx.Node, owner: fx.GraphModule, *, is_enabled: bool) -> None:
        """Replace the nested region ``region`` by its ops; ``owner`` is the module that holds its
        body. ``is_enabled``: gradients are on around the region."""
        with self._graph.inserting_before(region):
            results = self._copied(region, list(region.args), owner, is_enabled=is_enabled)
        for user in list(region.users):
            user.replace_all_uses_with(results[int(user.args[1])])  # type: ignore[arg-type]
            self._graph.erase_node(user)
        self._graph.erase_node(region)

    def _copied(
        self, region: fx.Node, args: list[Any], owner: fx.GraphModule, *, is_enabled: bool
    ) -> Sequence[Any]:
        """Copy the ops of a nested region to the graph's insertion point; return the region's
        results. ``is_enabled``: gradients are on around the region."""
        if str(region.target) == SWITCH:
            is_enabled, body, given = bool(args[0]), args[1], args[2:]
        else:
            body, given = args[4], args[5:]
        module = owner.get_submodule(str(body.target))
        assert isinstance(module, fx.GraphModule)
        values: dict[fx.Node, Any] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = given.pop(0)
            elif node.op == "get_attr":
                values[node] = node
            elif node.op == "output":
                results: Sequence[Any] = fx.map_arg(node.args[0], values.__getitem__)
                return results
            elif is_region(node):
                inner = [fx.map_arg(arg, values.__getitem__) for arg in node.args]
                values[node] = self._copied(node, inner, module, is_enabled=is_enabled)
            elif isinstance(values.get(node.args[0]), list | tuple):
                values[node] = values[node.args[0]][node.args[1]]
            else:
                values[node] = self._graph.node_copy(node, values.__getitem__)
                self.see(values[node], is_enabled=is_enabled)
        raise AssertionError("a region without an output")

    def see(self, node: fx.Node, *, is_enabled: bool) -> None:
        """Record whether a node's value has a gradient. If gradients are off (``is_enabled``
        false), make the node read its inputs through ``without_gradient``."""
        if node.op != "call_function":
            return
        path = path_of(node.target) if isinstance(node.target, OpOverload) else ""
        if node.target is operator.getitem:
            made, index = node.args
            assert isinstance(made, fx.Node)
            shown = self._shown.get(made)
            self._base[node] = made
            if shown is not None:
                self._note_shown(node, shown[index], is_enabled=is_enabled)  # type: ignore[index]
            return
        written = node.args[0] if path and mutated_argument(path) else None
        shown = shown_arguments(node) if path and written is None else None
        if shown is not None and isinstance(node.meta["val"], Tensor):
            self._note_shown(node, shown[0], is_enabled=is_enabled)
            return
        if shown is not None:
            self._shown[node] = shown
            return
        for value in node.all_input_nodes:
            is_cut = not is_enabled or value in self._cut_views
            if not self.has_gradient(value):
                continue
            if value is written and (is_cut or value in self._detached):
                self._check_written(value)
            elif value is not written and is_cut:
                node.replace_input_with(value, self._without(value, node))
        if not is_enabled or not any(map(self.has_gradient, node.all_input_nodes)):
            return
        self._has_gradient.add(self._base_of(node))
        if isinstance(written, fx.Node):
            self._base[node] = self._base_of(written)
            self._has_gradient.add(self._base_of(written))

    def _note_shown(self, node: fx.Node, shown: SharedArg, *, is_enabled: bool) -> None:
        """Record that ``node`` is a view of the argument ``shown``; if that is read through
        ``without_gradient``, so is the view."""
        self._base[node] = self._base_of(shown.argument)
        if node.target is _DETACH or shown.argument in self._detached:
            self._detached.add(node)
        if shown.argument in self._cut_views or not (shown.is_itself or is_enabled):
            self._cut_views.add(node)

    def has_gradient(self, node: fx.Node) -> bool:
        """Return whether a node's value, or the base tensor of which it is a view, has a
        gradient."""
        value = node.meta.get("val")
        is_float = not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()
        return is_float and self._base_of(node) in self._has_gradient

    def _base_of(self, node: fx.Node) -> fx.Node:
        return self._base.get(node, node)

    def _without(self, value: fx.Node, reader: fx.Node) -> fx.Node:
        with self._graph.inserting_before(reader):
            cut: fx.Node = self._graph.call_function(WITHOUT_GRADIENT, (value,))
        cut.meta = {**reader.meta, "val": value.meta["val"]}
        return cut

    def _check_written(self, value: fx.Node) -> None:
        """Raise AP212 for a write to a value with a gradient; parameters are left to AP213."""
        if self._base_of(value).op != "placeholder":
            raise CaptureError(
                "AP212",
                "the model writes to a trained value beside its gradient",
                why="the value would keep its gradient, but not its number",
                where=user_source(value.meta.get("stack_trace")),
                fix="write to a copy: x.detach().clone(); or make a new value, outside of "
                "torch.no_grad(): x = x + (changed - x).detach()",
            )


@dataclass(frozen=True, slots=True)
class SharedArg:
    """Argument of an op whose memory an output shares; ``is_itself``: the output is the
    argument."""

    argument: fx.Node
    is_itself: bool


def shown_arguments(node: fx.Node) -> list[SharedArg] | None:
    """Return for each output of an op the argument whose memory it shares; None if some output has
    its own memory. The op is executed on fake tensors, as strides and dtypes decide whether
    ``x.reshape(...)`` copies or ``x.contiguous()`` is ``x``, not the op's schema."""
    if not _may_show(node.target):
        return None
    values = {value: value.meta.get("val") for value in node.all_input_nodes}
    fakes = {value: fake for value, fake in values.items() if isinstance(fake, FakeTensor)}
    if not fakes or any(isinstance(value, Tensor) for value in values.keys() - fakes.keys()):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    with next(iter(fakes.values())).fake_mode, torch.no_grad():
        made = node.target(*args, **kwargs)  # type: ignore[operator]
    outputs = made if isinstance(made, list | tuple) else [made]
    if node.target is _CAST and isinstance(made, Tensor):
        source = node.all_input_nodes[0]
        is_itself = (made.dtype, made.stride()) == (fakes[source].dtype, fakes[source].stride())
        return [SharedArg(source, is_itself=True)] if is_itself else None
    found = [_shown_by(output, fakes) for output in outputs]
    return None if None in found else found  # type: ignore[return-value]


@cache
def _may_show(op: OpOverload) -> bool:
    """Return whether an op's output may share memory with an argument: its schema says so, or it is
    composed of other ops."""
    is_said = any(made.alias_info is not None for made in op._schema.returns)
    return is_said or op is _CAST or op.has_kernel_for_dispatch_key(_COMPOSITE)


def _shown_by(output: Any, fakes: Mapping[fx.Node, Tensor]) -> SharedArg | None:
    if not isinstance(output, Tensor):
        return None
    for node, fake in fakes.items():
        if output is fake:
            return SharedArg(node, is_itself=True)
    storage = output.untyped_storage()._cdata
    for node, fake in fakes.items():
        if fake.untyped_storage()._cdata == storage:
            return SharedArg(node, is_itself=False)
    return None
