"""What recomputation runs again in the backward, and what it keeps until then.

``full`` keeps only what a block reads from outside, and runs all of its forward again.
``selective`` keeps the results of matrix products, convolutions and attention besides, and
runs the rest again, collectives included: these results cost much to make for their size
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
drop what costs little instead). It is what ``runtime.stage`` does with
``torch.utils.checkpoint`` and its selective contexts.
"""

from __future__ import annotations

from ..graph import Graph, Node
from ..rules.table import packet
from ..strategy import NodeLayout
from .choices import input_specs
from .prices import Prices
from .saved import Part

_KEPT = frozenset(
    (
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "convolution"),
        *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
        "scaled_dot_product_attention",
    )
)


def is_kept(node: Node) -> bool:
    """Whether selective recomputation keeps what an op makes instead of running it again.

    >>> [is_kept(Node("up", "op", f"aten.{op}")) for op in ("linear.default", "add.Tensor")]
    [True, False]
    """
    return packet(node.op) in _KEPT


def kept_parts(node: Node, layout: NodeLayout, graph: Graph, prices: Prices) -> tuple[Part, ...]:
    """What selective recomputation keeps of an op on a rank: each storage and its local bytes."""
    if not is_kept(node):
        return ()
    found = [
        (f"{node.name}:{index}", prices.local_bytes(spec, placed))
        for index, (spec, placed) in enumerate(zip(node.outputs, layout.outputs, strict=True))
    ]
    inputs = tuple(
        prices.local(spec, each)
        for spec, each in zip(input_specs(node, graph), layout.inputs, strict=True)
    )
    outputs = tuple(
        prices.local(spec, each) for spec, each in zip(node.outputs, layout.outputs, strict=True)
    )
    extra = prices.rules.saved_extra_bytes(node, inputs, outputs)
    if extra:
        found.append((f"{node.name}:extra", int(extra)))
    return tuple(found)
