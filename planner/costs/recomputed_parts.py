"""Parts of a layer that selective recomputation reruns, with Megatron-LM's names and extents.

In: a block and the names of parts. Out: the ops of these parts, found by the modules that made
them. All other values are kept, unlike in this package's own selective recomputation
(``planner.kernels.recompute``), which keeps the results of products only.

Source: ``--recompute-modules`` of Megatron-LM (megatron/core/transformer/transformer_config.py);
the core of attention: Korthikanti et al. 2022 (arXiv:2205.05198, section 5); the scan:
state-spaces/mamba, mamba_ssm/ops/triton/ssd_combined.py (MambaSplitConv1dScanCombinedFn).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..graph.expert_dims import is_expert_layer
from ..graph.graph import Block, Graph, Node, Ref
from ..kernels.recompute import RecomputedPart, Replay
from ..ops.attention import is_attention
from ..ops.case import packet
from .choices import dims_on
from .prices import Prices

SMALLEST_AXIS = 2
"""Axis size for which the dimensions of positions are determined."""

LATENT = "_b_proj"
"""Suffix of modules that project from a latent form, in transformers' DeepSeek models."""


def of_parts(
    found: Replay, block: Block, graph: Graph, prices: Prices, parts: Sequence[RecomputedPart]
) -> Replay:
    """Return the block's rerun ops ``found``, changed so that selective recomputation reruns
    exactly these parts of a layer."""
    nodes = [graph[name] for name in block.nodes]
    again: set[str] = set()
    for part in parts:
        again |= _core(nodes, graph, prices) if part == "core_attn" else _FINDERS[part](nodes)
    kept = frozenset(node.name for node in nodes if node.name not in again)
    skipped = kept | _scan(nodes)  # kernels over products count their recomputation in the backward
    uses = ((node.name, at) for node in nodes for at in range(len(node.inputs)))
    return Replay(
        {**found.kept, "selective": kept},
        {**found.skipped, "selective": skipped},
        {**found.unread, "selective": frozenset(uses)},
    )


def _core(nodes: Sequence[Node], graph: Graph, prices: Prices) -> set[str]:
    """Return the names of the attention ops and of the ops on attention scores (values with two
    dimensions of positions)."""
    dims = dims_on(graph, SMALLEST_AXIS, prices)

    def is_square(ref: Ref) -> bool:
        batch = graph.batch_dims[ref.name][ref.index] if graph.batch_dims else None
        return len(dims.get(ref, frozenset()) - {batch}) >= 2

    def is_core(node: Node) -> bool:
        made = (Ref(node.name, index) for index in range(len(node.outputs)))
        return is_attention(node) or any(map(is_square, (*node.inputs, *made)))

    return {node.name for node in nodes if is_core(node)}


def _layer(nodes: Sequence[Node]) -> str:
    """Return the module path of the layer: the shortest path among its ops."""
    return min((node.module for node in nodes if node.module), key=len, default="")


def _norms(nodes: Sequence[Node]) -> set[str]:
    layer = _layer(nodes)
    return {
        node.name
        for node in nodes
        if node.module.rpartition(".")[0] == layer and "norm" in node.module.rpartition(".")[2]
    }


def _up_projections(nodes: Sequence[Node]) -> set[str]:
    latent = {node.module for node in nodes if node.module.endswith(LATENT)}
    modules = latent | {module.rpartition(".")[0] for module in latent}
    found = set()
    for node in nodes:
        if is_attention(node):
            break
        if node.module in modules:
            found.add(node.name)
    return found


def _experts_module(nodes: Sequence[Node]) -> str:
    """Return the path of the module that holds router and experts; "" if there is none."""
    return next((n.module.rpartition(".")[0] for n in nodes if is_expert_layer(n)), "")


def _experts(nodes: Sequence[Node]) -> set[str]:
    module = _experts_module(nodes)
    return {node.name for node in nodes if module and _is_inside(node, module)}


def _feed_forward(nodes: Sequence[Node]) -> set[str]:
    if _experts_module(nodes):
        return set()
    module = f"{_layer(nodes)}.mlp"
    return {node.name for node in nodes if _is_inside(node, module)}


def _shared_experts(nodes: Sequence[Node]) -> set[str]:
    return {node.name for node in nodes if ".shared_expert" in node.module}


def _scan(nodes: Sequence[Node]) -> set[str]:
    """Return the names of a state-space layer's ops from convolution to gated norm, except linear
    layers; empty in other layers."""
    names = {packet(node.op) for node in nodes}
    module = next((node.module for node in nodes if packet(node.op) == "conv1d"), "")
    if not module or "cumsum" not in names:
        return set()
    module = module.removesuffix(".conv1d")
    inside = (node for node in nodes if _is_inside(node, module))
    return {node.name for node in inside if packet(node.op) != "linear"}


def _nothing(_nodes: Sequence[Node]) -> set[str]:
    return set()


def _is_inside(node: Node, module: str) -> bool:
    return f"{node.module}.".startswith(f"{module}.")


_FINDERS: Mapping[RecomputedPart, Callable[[Sequence[Node]], set[str]]] = {
    "layernorm": _norms,
    "mla_up_proj": _up_projections,
    "mlp": _feed_forward,
    "moe": _experts,
    "moe_act": _nothing,
    "shared_experts": _shared_experts,
    "ssm": _scan,
}
