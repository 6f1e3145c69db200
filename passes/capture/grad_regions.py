"""Regions of a forward that compute without gradients, written as ops that cut them.

In: an exported program, in which the code under ``torch.no_grad`` and the like is a region, a graph
of its own. Out: the program with the ops of its regions in their places. Where such an op reads a
value that has a gradient, it reads ``without_gradient`` of the value. This is done before
decompositions, which drop the regions but keep their ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export import ExportedProgram

from ...planner.errors import CaptureError
from ..ops.torch_ops import is_view, mutated_argument, path_of
from .locate import user_source

SWITCH = "wrap_with_set_grad_enabled"
AUTOCAST = "wrap_with_autocast"


@torch.library.custom_op("autoparallel::without_gradient", mutates_args=())
def without_gradient(x: Tensor) -> Tensor:
    """A copy of ``x`` without a gradient."""
    return x.clone()


@without_gradient.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


WITHOUT_GRADIENT: OpOverload = torch.ops.autoparallel.without_gradient.default


def inline_regions(exported: ExportedProgram) -> None:
    """Replace the regions of a program by their ops. Changes ``exported``.

    Regions of other kinds stay (autocast that is on, conditions); ``lower`` refuses them.

    Raises CaptureError AP212 for a write to a value that has a gradient where gradients are off.
    """
    state = _Inlining(exported)
    for node in list(exported.graph.nodes):
        if is_region(node):
            state.inline(node, exported.graph_module, is_enabled=True)
        else:
            state.see(node, is_enabled=True)
    exported.graph_module.recompile()


def is_region(node: fx.Node) -> bool:
    """Return whether a node is a region of ops that are to be inlined."""
    name = str(node.target)
    return name == SWITCH or (name == AUTOCAST and node.args[2] is False)


class _Inlining:
    """Inlines the regions of a program, and tracks which of its values have a gradient.

    ``_base`` maps a view to the value whose memory it shows. A view that is made where gradients
    are off has no gradient, though its base may have one: its readers read it cut.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        self._graph = exported.graph
        self._base: dict[fx.Node, fx.Node] = {}
        self._cut_views: set[fx.Node] = set()
        self._has_gradient = {
            node
            for node in self._graph.nodes
            if node.op == "placeholder" and node.meta["val"].requires_grad
        }

    def inline(self, region: fx.Node, owner: fx.GraphModule, *, is_enabled: bool) -> None:
        """Put a region's ops in its place."""
        with self._graph.inserting_before(region):
            results = self._copied(region, list(region.args), owner, is_enabled=is_enabled)
        for user in list(region.users):
            user.replace_all_uses_with(results[int(user.args[1])])  # type: ignore[arg-type]
            self._graph.erase_node(user)
        self._graph.erase_node(region)

    def _copied(
        self, region: fx.Node, args: list[Any], owner: fx.GraphModule, *, is_enabled: bool
    ) -> Sequence[Any]:
        """A region's results, its ops copied to where the graph inserts."""
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
        """Note whether a value has a gradient; where gradients are off, cut its inputs."""
        if node.op != "call_function":
            return
        path = path_of(node.target) if isinstance(node.target, OpOverload) else ""
        written = node.args[0] if path and mutated_argument(path) else None
        if path and is_view(path) and node.all_input_nodes:
            source = node.all_input_nodes[0]
            self._base[node] = self._base_of(source)
            if not is_enabled or source in self._cut_views:
                self._cut_views.add(node)
            return
        for value in node.all_input_nodes if not _returns_argument(node, path) else ():
            if not self.has_gradient(value) or (is_enabled and value not in self._cut_views):
                continue
            if value is not written:
                node.replace_input_with(value, self._without(value, node))
            elif not is_enabled:
                self._check_written(value)
        read = [value for value in node.all_input_nodes if self.has_gradient(value)]
        if not (read and (is_enabled or _returns_argument(node, path))) or "detach" in path:
            return
        self._has_gradient.add(self._base_of(node))
        if isinstance(written, fx.Node):
            self._base[node] = self._base_of(written)
            self._has_gradient.add(self._base_of(written))

    def has_gradient(self, node: fx.Node) -> bool:
        """Return whether a value, or the base of a view, has a gradient."""
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
        """Raise for a write to a value with a gradient, unless it is a parameter (AP213)."""
        if self._base_of(value).op != "placeholder":
            raise CaptureError(
                "AP212",
                "the model writes to a trained value where gradients are off",
                why="the value would keep its gradient, but not its number",
                where=user_source(value.meta.get("stack_trace")),
                fix="make a new value, outside of torch.no_grad(): x = x + (changed - x).detach()",
            )


def _returns_argument(node: fx.Node, path: str) -> bool:
    """Return whether an op gives back its argument itself, which then keeps its gradient."""
    source = node.args[0] if node.args else None
    if path not in ("aten.contiguous.default", "aten._to_copy.default") or not isinstance(
        source, fx.Node
    ):
        return False
    before, after = source.meta["val"], node.meta["val"]
    return bool(before.dtype == after.dtype and before.stride() == after.stride())
