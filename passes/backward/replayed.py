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
from ...planner.kernels.tiles import TiledRegion
from ...planner.plan import Recompute
from ..ops.torch_ops import is_pointwise, is_view, returns_several

MARK = "when recomputed"
KEPT, SPARED, PRODUCT, AGAIN, TILED = "kept", "spared", "product", "again", "tiled"
"""Marks that say what recomputation does with an op. KEPT: its result is kept. SPARED: it is not
executed again. PRODUCT: of a matrix product, only the tensors that autograd saves are recomputed.
AGAIN: it is executed again as a whole, and no result inside it is kept. TILED: the last ops of the
block, which compute tile by tile and need their inputs alone."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Function object that marks the ops of a block (layer) which the backward does not simply run
    again. ``mode`` is the kind of recomputation ("full", "selective", …), without offloading;
    ``replay`` the planner's lists of ops that may be skipped or kept."""

    mode: Recompute
    replay: Replay
    last: tuple[TiledRegion, int] | None = None
    """The last ops of the block, if they may run tile by tile, and the most tiles."""
    is_recorded: bool = False
    """True if autograd goes through what runs again, so that every op must run there."""

    def mark(self, node: Node, results: Sequence[fx.Node]) -> None:
        """Set the recomputation mark on the fx nodes ``results`` that implement the op ``node``:
        its call and, if there is one, the scaling of its result."""
        how = self._mark(node)
        if how is None:
            return
        for result in results if how != AGAIN else ():
            result.meta[MARK] = SPARED
        results[-1 if how == KEPT else 0].meta[MARK] = how

    def _mark(self, node: Node) -> str | None:
        """Return the mark that says how recomputation treats an op: ``KEPT``, ``SPARED`` (skipped),
        ``PRODUCT`` or ``AGAIN``. None if the op simply runs again; expensive kernels inside it may
        then be kept by ``Context``. With ``AGAIN`` all kernels inside it run again, as in a layer
        of experts."""
        if node.name not in self.replay.skipped[self.mode]:
            is_plain = is_pointwise(node.op) or is_view(node.op)
            return None if self.mode == "full" or is_plain else AGAIN
        is_kept = node.name in self.replay.kept[self.mode]
        if is_costly(node):
            return None if is_kept else PRODUCT
        if self.is_recorded:
            return None
        if returns_several(node.op):
            return None
        return KEPT if is_kept else SPARED

    def mark_unread(self, uses: Mapping[fx.Node, Iterable[tuple[str, int]]]) -> None:
        """Mark layout conversions that need not be repeated, as no repeated op reads their results.
        ``uses`` maps each conversion to its readers, as (op, position of the input)."""
        for converted, readers in () if self.is_recorded else uses.items():
            if self.replay.unread[self.mode].issuperset(readers):
                converted.meta[MARK] = SPARED


def is_tiled(graph: fx.GraphModule) -> bool:
    """Return whether a block's last ops compute tile by tile."""
    return any(node.meta.get(MARK) == TILED for node in graph.graph.nodes)
