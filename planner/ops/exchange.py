"""Exchange of splits: a matrix is cut along one dimension while its split moves to that dimension.

A matrix of several parts (a fused weight) that is split along its other dimension becomes its
parts, each split along the dimension that is cut: one all-to-all for all parts, and one back for
the gradient.
"""

from __future__ import annotations

from ..graph.layout import AxisStrategy, InnerCollective, shard
from .case import Case

EXCHANGED = "aten.split_with_sizes.default"
"""Op by which the pass ``split-fused`` cuts weights into parts."""


def exchanged_parts(case: Case, axis_size: int) -> tuple[AxisStrategy, ...]:
    """Return the strategy of an op that cuts a fused weight into parts: the weight is split along
    the dimension that is not cut, the parts along the other, after an all-to-all."""
    if case.node.op != EXCHANGED or case.rank != 2:
        return ()
    cut = case.dims(2, "dim", 0)[0]
    sizes = [case.shape[1 - cut], *(spec.shape[cut] for spec in case.outputs)]
    if any(not size or size % axis_size for size in sizes):
        return ()
    num_bytes = case.inputs[0].num_bytes // axis_size
    both = [InnerCollective("all_to_all", num_bytes)]
    if case.inputs[0].requires_grad:
        both.append(InnerCollective("all_to_all", num_bytes, backward=True))
    return (
        AxisStrategy("exchange", (shard(1 - cut),), (shard(cut),) * len(case.outputs), tuple(both)),
    )
