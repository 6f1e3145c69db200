"""Rules of ops that read or write at indices, and of grouped products.

Reading: a dimension that a single index reads from may be split, too; each rank reads its own part
and takes zero elsewhere, so the parts add up. Adding at indices: rows of the index may be split;
each rank adds its own rows to a partial sum.
"""

from __future__ import annotations

from dataclasses import replace

from . import structured
from .annotation import FLOATS, Letters, Signature
from .case import Case, is_ref, letters_of

_PICKED = "v"
_WRITTEN = "w"


def index(case: Case) -> Signature | None:
    """Split dims that are not indexed, dims of the indices, or the dim of a single index."""
    found = structured.index(case)
    indexed = [dim for dim, item in enumerate(case.argument(1, "indices")) if is_ref(item)]
    return _picking(case, found, indexed[0]) if len(indexed) == 1 else found


def index_select(case: Case) -> Signature | None:
    """Split any dim of the tensor, or the dim of the indices."""
    return _picking(case, structured.index_select(case), case.dims(1, "dim")[0])


def gather(case: Case) -> Signature | None:
    """Split dims that the index has whole, the index along its dim, or the gathered dim."""
    return _picking(case, structured.gather(case), case.dims(1, "dim")[0])


def _picking(case: Case, found: Signature | None, dim: int) -> Signature | None:
    """Return a signature in which the dim that is read from may be split, too."""
    if found is None or case.inputs[0].dtype not in FLOATS or not case.shape:
        return found
    source = list(found.inputs[0])
    source[dim] = _PICKED
    return replace(found, inputs=(tuple(source), *found.inputs[1:]))


def scatter(case: Case) -> Signature:
    """Split dims that index and source have whole, except the written dim."""
    letters = _common(case)
    if len(case.inputs) == 2:
        value = case.argument(3, "value", 0)
        return Signature((letters, letters), (letters,), () if value else ((0,),))
    return Signature((letters, letters, letters), (letters,), ((0,), (2,)))


def scatter_reduce(case: Case) -> Signature:
    """Split dims that index and source have whole, except the written dim."""
    letters = _common(case)
    return Signature((letters, letters, letters), (letters,))


def scatter_add(case: Case) -> Signature:
    """Split dims that index and source have whole; the index along its dim gives partial sums."""
    dim, letters = case.dims(1, "dim")[0], _common(case)
    added = tuple(_WRITTEN if at == dim else letter for at, letter in enumerate(letters))
    source = added if case.inputs[2].shape == case.inputs[1].shape else letters
    index = added if source is added else letters
    return Signature((letters, index, source), (letters,), ((0,), (2,)))


def _common(case: Case) -> Letters:
    dim = case.dims(1, "dim")[0]
    shapes = [spec.shape for spec in case.inputs]
    whole = (at for at in range(case.rank) if len({shape[at] for shape in shapes}) > 1)
    return letters_of(case.rank, (dim, *whole))


def index_add(case: Case) -> Signature:
    """Split the other dims; the dim of the indices gives partial sums."""
    return _index_written(case, adds=True)


def index_copy(case: Case) -> Signature:
    """Split any dim except the written dim."""
    return _index_written(case, adds=False)


def index_fill(case: Case) -> Signature:
    """Split any dim except the written dim."""
    dim = case.dims(1, "dim")[0]
    letters = letters_of(case.rank, (dim,))
    others: tuple[Letters, ...] = tuple((None,) * len(spec.shape) for spec in case.inputs[1:])
    is_zero = len(case.inputs) == 2 and not case.argument(3, "value")
    return Signature((letters, *others), (letters,), ((0,),) if is_zero else ())


def _index_written(case: Case, *, adds: bool) -> Signature:
    dim = case.dims(1, "dim")[0]
    letters = letters_of(case.rank, (dim,))
    along = _WRITTEN if adds else None
    source = tuple(along if at == dim else letter for at, letter in enumerate(letters))
    return Signature(
        (letters, (along,)[: len(case.inputs[1].shape)], source), (letters,), ((0,), (2,))
    )


def index_put(case: Case) -> Signature | None:
    """Split dims that are not indexed; if it adds, dims of the indices give partial sums."""
    listed, adds = case.argument(1, "indices"), bool(case.argument(3, "accumulate", False))
    indices, values = case.inputs[1:-1], case.inputs[-1]
    if any(spec.dtype in ("bool", "uint8") for spec in indices):
        return None
    indexed = tuple(dim for dim, item in enumerate(listed) if is_ref(item))
    source = letters_of(case.rank, indexed)
    rank = max(len(spec.shape) for spec in indices)
    kept = tuple(source[dim] for dim in range(case.rank) if dim not in indexed)
    adjacent = indexed == tuple(range(indexed[0], indexed[-1] + 1))
    start = indexed[0] if adjacent else 0
    whole = all(spec.shape == indices[0].shape for spec in indices)
    named = adds and whole and len(values.shape) == rank + len(kept)
    rows: Letters = tuple(f"i{dim}" if named else None for dim in range(rank))
    written: Letters = (*kept[:start], *rows, *kept[start:])
    written = written[len(written) - len(values.shape) :]
    full = zip(reversed(values.shape), reversed(written), strict=True)
    if any(size == 1 and letter is not None for size, letter in full):
        return None
    places = tuple(rows[rank - len(spec.shape) :] for spec in indices)
    return Signature((source, *places, written), (source,), ((0,), (len(case.inputs) - 1,)))


def histogram(case: Case) -> Signature | None:
    """Split ``histc`` between given bounds: the counts of parts add up."""
    if case.argument(2, "min", 0) == case.argument(3, "max", 0):
        return None
    return Signature((letters_of(case.rank),), ((None,),), sums=True)


def grouped_mm(case: Case) -> Signature | None:
    """Split the dims of each product, and the groups if these have equal sizes."""
    left, right = (len(spec.shape) for spec in case.inputs[:2])
    if len(case.inputs) == 2 and (left, right) == (3, 3):
        return structured.annotate(case, "e m k, e k n -> e m n")
    if len(case.inputs) != 3:
        return None
    patterns = {
        (2, 3): "_ k, _ k n, [_] -> _ n",
        (3, 2): "_ m k, k _, [_] -> m _",
        (2, 2): "m _, _ n, [_] -> _ m n",
    }
    pattern = patterns.get((left, right))
    return None if pattern is None else structured.annotate(case, pattern)
