"""Marks on the local ops of a recomputed block that do not simply run again.

In: a block's graph under construction, its recomputation. Out: ``MARK`` in the ``meta`` of ops and
conversions, for ``passes.backward.recomputing``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ...planner.graph.graph import Node
from ...planner.kernels.recompute import Replay, is_costly
from ...planner.plan import Recompute
from ..ops.torch_ops import is_pointwise, is_view, returns_several

MARK = "when recomputed"
KEPT, SPARED, PRODUCT, AGAIN = "kept", "spared", "product", "again"
"""Marks that say what recomputation does with an op. KEPT: its result is kept. SPARED: it is not
executed again. PRODUCT: of a matrix product, only the tensors that autograd saves are recomputed.
AGAIN: it is executed again as a whole, and no result inside it is kept."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Function object that marks a block's ops for recomputation in ``mode``, according to the
    planner's analysis ``replay``."""

    mode: Recompute
    replay: Replay

    def mark(self, node: Node, results: Sequence[fx.Node]) -> None:
        """Mark the fx nodes ``results`` that implement the op ``node`` for recomputation: its call,
        and the scaling of its result, if any."""
        how = self._mark(node)
        if how is None:
            return
        for result in results if how != AGAIN else ():
            result.meta[MARK] = SPARED
        results[-1 if how == KEPT else 0].meta[MARK] = how

    def _mark(self, node: Node) -> str | None:
        """Return the mark for an op's recomputation; None if the op is executed again without a
        mark. In mode "selective" ``Context`` then keeps the results of its costly kernels. An op
        marked ``AGAIN`` may contain costly kernels, as a layer of experts does."""
        if node.name not in self.replay.skipped[self.mode]:
            is_plain = is_pointwise(node.op) or is_view(node.op)
            return None if self.mode == "full" or is_plain else AGAIN
        is_kept = self.mode == "selective" and node.name in self.replay.kept
        if is_costly(node):
            return None if is_kept else PRODUCT
        if returns_several(node.op):
            return None
        return KEPT if is_kept else SPARED

    def mark_unread(self, uses: Mapping[fx.Node, Iterable[tuple[str, int]]]) -> None:
        """Mark layout conversions whose results no repeated op reads. ``uses``: the readers of each
        conversion, as (op, position of the input)."""
        for converted, readers in uses.items():
            if self.replay.unread[self.mode].issuperset(readers):
                converted.meta[MARK] = SPARED
