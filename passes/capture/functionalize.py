"""Replacement of in-place ops by ops that return a new tensor.

If the written tensor is fresh and has no views, ``relu_`` simply becomes ``relu`` and later uses
take its result. If it has views (``x[:, 0] = 1``), ``torch.export``'s own functionalization of the
whole program is used, which also lowers a few composite ops.
"""

from __future__ import annotations

import operator

from networkx.utils import UnionFind
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export import ExportedProgram

from ..ops.torch_ops import is_view, mutated_argument, path_of, resolve
from ..tracing.grad_regions import SharedArg, inline_regions, shown_arguments

_HARMLESS = frozenset({"aten.detach_.default"})


def functionalize(exported: ExportedProgram) -> ExportedProgram:
    """Return the exported program without nested graph regions, and without in-place writes except
    to model buffers."""
    inline_regions(exported)
    _join_same(exported)
    for node in list(exported.graph.nodes):
        if _writes(node) and not _replace(node):
            decomposed: ExportedProgram = exported.run_decompositions({})
            return decomposed
    return exported


def _join_same(exported: ExportedProgram) -> None:
    """Replace the result of an op such as ``x.float()`` by ``x`` itself if eager code would return
    ``x``, but only if ``x`` or a view of it is written to. Otherwise the op stays, so that captures
    in different dtypes have the same nodes."""
    nodes = exported.graph.nodes
    written = [node.args[0] for node in nodes if _writes(node)]
    if not written:
        return
    memories = UnionFind(nodes)
    same: dict[fx.Node, fx.Node] = {}
    of_lists: dict[fx.Node, list[SharedArg]] = {}
    for node in nodes:
        path = path_of(node.target) if isinstance(node.target, OpOverload) else ""
        if node.target is operator.getitem:
            made, index = node.args
            shown = of_lists[made][index] if made in of_lists else SharedArg(made, is_itself=False)
        elif path and node.all_input_nodes and (is_view(path) or mutated_argument(path)):
            shown = SharedArg(node.all_input_nodes[0], is_itself=False)
        elif path and (found := shown_arguments(node)) is not None:
            if not isinstance(node.meta["val"], Tensor):
                of_lists[node] = found
                continue
            shown = found[0]
        else:
            continue
        memories.union(node, shown.argument)
        if shown.is_itself:
            same[node] = same.get(shown.argument, shown.argument)
    changed = {memories[each] for each in written}
    for node, argument in same.items():
        if memories[node] in changed:
            node.replace_all_uses_with(argument)
            exported.graph_signature.replace_all_uses(node.name, argument.name)
            exported.graph.erase_node(node)


def _writes(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    path = path_of(node.target)
    if path in _HARMLESS or mutated_argument(path) is None:
        return False
    target = node.args[0] if node.args else None
    return not (isinstance(target, fx.Node) and _written(target).op == "placeholder")


def _written(node: fx.Node) -> fx.Node:
    """Return the node of the tensor that a chain of in-place ops returns: ``x`` for ``x.mul_(a)``.
    Other nodes are returned themselves."""
    while (
        isinstance(node.target, OpOverload)
        and mutated_argument(path_of(node.target)) is not None
        and node.args
        and isinstance(node.args[0], fx.Node)
    ):
        node = node.args[0]
    return node


def _replace(node: fx.Node) -> bool:
    """Replace an in-place op by its functional form, if the written tensor has no views and is no
    view itself; return whether the op was replaced."""
    target = node.args[0]
    assert isinstance(target, fx.Node)
    aliases = [target, *target.users]
    if any(_is_view_op(alias) for alias in aliases if alias is not node):
        return False
    functional = functional_path(path_of(node.target))  # type: ignore[arg-type]
    if functional is None:
        return False
    node.target = resolve(functional)
    later = False
    for user in list(node.graph.nodes):
        if user is node:
            later = True
        elif later and target in user.all_input_nodes:
            user.replace_input_with(target, node)
    return True


def _is_view_op(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return isinstance(node.target, OpOverload) and is_view(path_of(node.target))


def functional_path(path: str) -> str | None:
    """Return the path of the out-of-place form of an in-place op; None if there is none.

    >>> functional_path("aten.add_.Tensor"), functional_path("aten.add.Tensor")
    ('aten.add.Tensor', None)
    """
    namespace, name, overload = path.split(".")
    candidate = f"{namespace}.{name.removesuffix('_')}.{overload}"
    try:
        resolve(candidate)
    except AttributeError:
        return None
    return candidate if name.endswith("_") else None
