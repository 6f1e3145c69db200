"""The position of a view in its base tensor, dimension by dimension.

In: two fake tensors in one storage, the first of that storage (the base) and another. Out:
conversions of boxes between view and base; and the view of a buffer that holds only a box of the
base.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from torch import Tensor

from ...planner.graph.layout import Region


@dataclass(frozen=True, slots=True)
class BoxView:
    """Position of a view in its base tensor, if every box (range of indices per dimension) of the
    view is a strided box of the base. ``starts`` has the first index in each dimension of the base.
    ``dims`` has for each dimension of the view the (dimension of the base, step in it), None if the
    view's size is 1."""

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    dims: tuple[tuple[int, int] | None, ...]

    def in_base(self, box: Region) -> Region:
        """Return the smallest box (range of indices per dimension) of the base that contains all
        elements of ``box`` of the view."""
        found = [(start, start + 1) for start in self.starts]
        for (low, high), along in zip(box, self.dims, strict=True):
            if along is not None:
                dim, step = along
                start = self.starts[dim]
                found[dim] = (start + low * step, start + (high - 1) * step + 1)
        return tuple(found)

    def in_view(self, box: Region) -> Region | None:
        """Return the box of the view with all elements that lie in ``box`` of the base; None if it
        is empty."""
        found = [(0, size) for size in self.sizes]
        along = {dim: at for at, each in enumerate(self.dims) if each for dim in each[:1]}
        for dim, (low, high) in enumerate(box):
            start = self.starts[dim]
            if dim not in along:
                if not low <= start < high:
                    return None
                continue
            at = along[dim]
            step = self.dims[at][1]  # type: ignore[index]
            first = max(0, ceil((low - start) / step))
            last = min(self.sizes[at], ceil((high - start) / step))
            if first >= last:
                return None
            found[at] = (first, last)
        return tuple(found)

    def of_buffer(self, buffer: Tensor, held: Region, box: Region) -> Tensor:
        """Return ``box`` of the view as a view of ``buffer``, a tensor that holds box ``held`` of
        the base."""
        along = {each[0]: at for at, each in enumerate(self.dims) if each}
        index: list[slice | int] = []
        for dim, (low, _) in enumerate(held):
            start = self.starts[dim] - low
            if dim not in along:
                index.append(start)
                continue
            step = self.dims[along[dim]][1]  # type: ignore[index]
            first, last = box[along[dim]]
            index.append(slice(start + first * step, start + (last - 1) * step + 1, step))
        view = buffer[tuple(index)]
        kept = [along[dim] for dim in sorted(along)]
        view = view.permute([kept.index(at) for at in sorted(kept)])
        for at, each in enumerate(self.dims):
            if each is None:
                view = view.unsqueeze(at)
        return view


def box_view(view: Tensor, base: Tensor) -> BoxView | None:
    """Return the position of ``view`` in ``base``; None if a box (range of indices per dimension)
    of the view is not a box of the base, as for views that join or split dimensions, repeat
    elements, or change the dtype."""
    if view.dtype != base.dtype or 0 in view.shape or not _is_dense(base):
        return None
    left = int(view.storage_offset()) - int(base.storage_offset())
    if left < 0:
        return None
    order = sorted((d for d, size in enumerate(base.shape) if size > 1), key=base.stride)
    starts = [0] * base.dim()
    for dim in reversed(order):
        starts[dim], left = divmod(left, base.stride(dim))
        if starts[dim] >= base.shape[dim]:
            return None
    if left:
        return None
    dims: list[tuple[int, int] | None] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        dims.append(None)
        if size == 1:
            continue
        below = [dim for dim in order if 0 < base.stride(dim) <= stride]
        if not below or stride % base.stride(below[-1]):
            return None
        dim, step = below[-1], stride // base.stride(below[-1])
        if starts[dim] + (size - 1) * step >= base.shape[dim]:
            return None
        if dim in [each[0] for each in dims if each]:
            return None
        dims[-1] = (dim, step)
    return BoxView(tuple(view.shape), tuple(starts), tuple(dims))


def _is_dense(base: Tensor) -> bool:
    """Return whether a tensor contains every element of its storage exactly once."""
    expected = 1
    for dim in sorted(range(base.dim()), key=base.stride):
        if base.shape[dim] > 1:
            if base.stride(dim) != expected:
                return False
            expected *= base.shape[dim]
    full = base.numel() * base.element_size() == base.untyped_storage().nbytes()
    return full and base.storage_offset() == 0
