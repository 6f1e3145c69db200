"""The half of a backward that may wait: the gradients of weights.

In: a node in a layout. Out: the seconds of the gradients of its weights, which are part of its
backward, of the device and of the host, and what is kept for them once the other half is done.

Schedules that split backwards (ZB-H1, ZB-H2, ZB-V, DualPipeV) put off the weights' gradients of
matrix products, convolutions and embeddings whose weights are made of parameters alone, as
``passes.local.weight_gradients`` does. All else is in the first half: other ops' backwards, what is
run again, every collective. The product for the weights has as many operations as that for the
data and as many bytes, so it takes half of the op's backward, or all of it where the data has
no gradient; of issuing it the same. Until then a micro-batch keeps the op's data and the gradient
of its result.

Of each half a block waits until the device has computed and the host has issued it, as it does of
a whole backward: with C and H seconds of the two for all of it, and c and h for what is put off,
the halves take max(C - c, H - h) and max(c, h). So a faster device or host makes neither longer.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), section 2.
"""

from __future__ import annotations

from ..graph import Graph, Node, Ref
from ..rules.table import packet
from ..strategy import NodeLayout
from .choices import input_specs
from .prices import Prices
from .saved import Part, layout_of, memory_of

_CONVOLUTION = (0, (1, 2))

POSITIONS = {
    "linear": (0, (1, 2)),
    "mm": (0, (1,)),
    "bmm": (0, (1,)),
    "addmm": (1, (2, 0)),
    "embedding": (1, (0,)),
    "conv1d": _CONVOLUTION,
    "conv2d": _CONVOLUTION,
    "conv3d": _CONVOLUTION,
}
"""Of the ops that put weight gradients off, where among the arguments data and weights are."""


def late_seconds(
    node: Node, layout: NodeLayout, graph: Graph, prices: Prices
) -> tuple[float, float]:
    """Seconds of a node's backward that a split schedule may put off: computing and issuing."""
    share = late_share(node, graph, prices)
    if not share:
        return 0.0, 0.0
    own = prices.op(node, input_specs(node, graph), layout)
    return share * own.backward_compute, share * own.backward_issue


def late_parts(node: Node, layout: NodeLayout, graph: Graph, prices: Prices) -> tuple[Part, ...]:
    """What is kept for it: each storage's name and local bytes."""
    if not late_share(node, graph, prices):
        return ()
    data = node.args[POSITIONS[packet(node.op)][0]]
    root, spec = memory_of(data, node, graph, prices)
    made = prices.local_bytes(node.spec, layout.outputs[0])
    found = [(f"{node.name}:gradient", made)]
    if graph[root.name].kind in ("op", "input"):
        size = prices.local_bytes(spec, layout_of(data, node, layout))
        found.append((f"{root.name}:{root.index}", size))
    return tuple(found)


def late_share(node: Node, graph: Graph, prices: Prices) -> float:
    """The part of a node's backward that is gradients of weights: none, half or all of it."""
    positions = POSITIONS.get(packet(node.op)) if node.kind == "op" else None
    if positions is None or node.kwargs:
        return 0.0
    data, weights = _argument(node, positions[0]), [_argument(node, at) for at in positions[1]]
    given = [each for each in weights if each is not None]
    if data is None or weights[0] is None or _is_of_parameters(data, graph, prices):
        return 0.0
    if not all(_is_of_parameters(each, graph, prices) for each in given):
        return 0.0
    if not any(graph.spec(each).requires_grad for each in given):
        return 0.0
    return 0.5 if graph.spec(data).requires_grad else 1.0


def _argument(node: Node, position: int) -> Ref | None:
    found = node.args[position] if position < len(node.args) else None
    return found if isinstance(found, Ref) else None


def _is_of_parameters(ref: Ref, graph: Graph, prices: Prices) -> bool:
    """Whether a value is computed from parameters and nothing else."""
    known = prices.cache.from_parameters
    if ref.name not in known:
        for node in graph:
            known[node.name] = node.kind == "parameter" or (
                node.kind == "op"
                and bool(node.inputs)
                and all(known[each.name] for each in node.inputs)
            )
    return known[ref.name]
