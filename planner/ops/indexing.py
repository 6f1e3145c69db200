"""Records of ops that read or write at indices.

Reading: a dimension that a single index reads from may be split, too; each rank reads its own part
and takes zero elsewhere, so the parts add up. Adding at indices: rows of the index may be split;
each rank adds its own rows to a partial sum.
"""

from __future__ import annotations

from dataclasses import replace

from ..graph.graph import Node
from .annotation import FLOATS, Letters, Signature
from .case import Case, Specs, annotate, is_ref, letters_of, linear
from .elementwise import UNARY
from .spec import WeightGradient, by, named, per_element

_PICKED = "v"
_WRITTEN = "w"


def index(case: Case) -> Signature | None:
    """Split dims that are not indexed, dims of the indices, or the dim of a single index."""
    listed = case.argument(1, "indices")
    if any(spec.dtype in ("bool", "uint8") for spec in case.inputs[1:]):
        return None
    indexed = tuple(dim for dim, item in enumerate(listed) if is_ref(item))
    source = letters_of(case.rank, indexed)
    rank = max(len(spec.shape) for spec in case.inputs[1:])
    kept = tuple(source[dim] for dim in range(case.rank) if dim not in indexed)
    adjacent = indexed == tuple(range(indexed[0], indexed[-1] + 1))
    start = indexed[0] if adjacent else 0
    shape = case.outputs[0].shape[start : start + rank]
    letters = tuple(f"i{dim}" if size > 1 else None for dim, size in enumerate(shape))
    indices = tuple(
        tuple(
            letter if size > 1 else None
            for letter, size in zip(letters[rank - len(spec.shape) :], spec.shape, strict=True)
        )
        for spec in case.inputs[1:]
    )
    found = Signature((source, *indices), ((*kept[:start], *letters, *kept[start:]),), ((0,),))
    return _picking(case, found, indexed[0]) if len(indexed) == 1 else found


def index_select(case: Case) -> Signature:
    """Split any dim of the tensor, or the dim of the indices."""
    dim = case.dims(1, "dim")[0]
    letters = letters_of(case.rank, (dim,))
    output = tuple("i" if at == dim else letter for at, letter in enumerate(letters))
    found = Signature((letters, ("i",)[: len(case.inputs[1].shape)]), (output,), ((0,),))
    return _picking(case, found, dim)


def gather(case: Case) -> Signature:
    """Split dims that the index has whole, the index along its dim, or the gathered dim."""
    dim = case.dims(1, "dim")[0]
    source, indices = case.shape, case.inputs[1].shape
    whole = tuple(at for at in range(case.rank) if at == dim or source[at] != indices[at])
    letters = letters_of(case.rank, whole)
    picked = tuple("i" if at == dim else letter for at, letter in enumerate(letters))
    return _picking(case, Signature((letters, picked), (picked,), ((0,),)), dim)


def _picking(case: Case, found: Signature, dim: int) -> Signature:
    """Return a signature in which the dim that is read from may be split, too."""
    if case.inputs[0].dtype not in FLOATS or not case.shape:
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


def embedding(case: Case) -> Signature | None:
    """Split vocabulary rows (each rank looks up its own, zero elsewhere), columns or indices."""
    if case.argument(3, "scale_grad_by_freq", False) or case.argument(4, "sparse", False):
        return None
    return annotate(case, "v d, [*b] -> *b d")


def one_hot(case: Case) -> Signature:
    """Split any dim of the indices."""
    letters = letters_of(case.rank)
    return linear((letters,), ((*letters, None),), is_linear=False)


def _size_of_dim(node: Node, inputs: Specs) -> int | None:
    dim = node.args[1]
    return inputs[0].shape[dim] if isinstance(dim, int) else None


GATHER = replace(
    UNARY,
    name="gather",
    rule=by(gather),
    family="copy",
    flops=per_element(0, 0),
    reads="rows",
    keeps="inputs",
    memory="new",
    fusion="apart",
    largest_index=_size_of_dim,
)
SCATTER = replace(GATHER, name="scatter", rule=by(scatter), reads="inputs", keeps="written")
WRITTEN = replace(SCATTER, name="index_add", rule=by(index_add), largest_index=None)

SPECS = (
    GATHER,
    *named(GATHER, "index_select", rule=by(index_select), keeps="rest"),
    *named(
        GATHER,
        "index",
        rule=by(index),
        keeps="rest",
        largest_index=lambda node, inputs: min(inputs[0].shape),
    ),
    *named(
        GATHER,
        "embedding",
        rule=by(embedding),
        family="embedding",
        keeps="rest",
        weight_gradient=WeightGradient(1, (0,)),
        fusion="any",
        largest_index=lambda node, inputs: inputs[0].shape[0],
        is_weighted=True,
    ),
    SCATTER,
    WRITTEN,
    *named(WRITTEN, "scatter_add", rule=by(scatter_add)),
    *named(WRITTEN, "scatter_reduce", rule=by(scatter_reduce), keeps="inputs"),
    *named(WRITTEN, "index_copy", rule=by(index_copy)),
    *named(WRITTEN, "index_fill", rule=by(index_fill)),
    *named(WRITTEN, "index_put", rule=by(index_put)),
    *named(WRITTEN, "histc", rule=by(histogram), keeps="input"),
    *named(
        WRITTEN,
        "one_hot",
        rule=by(one_hot),
        keeps="input",
        # a part of the indices may lack the highest class
        local=lambda node, inputs, outputs: ((1, "num_classes", outputs[0].shape[-1]),),
        is_sized=True,
        largest_index=lambda node, inputs: node.spec.shape[-1],
    ),
)
