"""Rules of ops that move, repeat, cut or join dimensions."""

from __future__ import annotations

from .annotation import Letters, Shape, Signature
from .case import Case, letters_of, linear

_LARGEST = 2**63 - 1
"""Value of ``end`` in a slice without an end."""


def match_dims(source: Shape, target: Shape) -> tuple[Letters, Letters]:
    """Return the letters of a reshape: dimensions with the same letter carry the same split.

    The shapes fall into groups of dimensions with equal products; in each group the outermost
    dimensions (of size above 1) correspond: a contiguous part of one is a contiguous part of the
    other.

    >>> match_dims((2, 6, 8), (12, 4, 2))
    (('d0', None, 'd2'), ('d0', 'd2', None))
    """
    before: list[str | None] = [None] * len(source)
    after: list[str | None] = [None] * len(target)
    if 0 in source or 0 in target:
        return tuple(before), tuple(after)
    left = [dim for dim, size in enumerate(source) if size > 1]
    right = [dim for dim, size in enumerate(target) if size > 1]
    i = j = 0
    while i < len(left) and j < len(right):
        before[left[i]] = after[right[j]] = f"d{left[i]}"
        product_left, product_right = source[left[i]], target[right[j]]
        i, j = i + 1, j + 1
        while product_left != product_right:
            if product_left < product_right:
                product_left *= source[left[i]]
                i += 1
            else:
                product_right *= target[right[j]]
                j += 1
    return tuple(before), tuple(after)


def reshape(case: Case) -> Signature:
    """Split dims that correspond, in ``view``, ``squeeze``, ``unsqueeze`` and similar ops."""
    before, after = match_dims(case.shape, case.outputs[0].shape)
    return linear((before,), (after,), is_linear=case.node.op != "aten.view.dtype")


def expand(case: Case) -> Signature:
    """Split dims aligned from the right; a dim that is expanded exists in the output only."""
    return _broadcast(case)


def like_other(case: Case) -> Signature:
    """Split as the plain op of ``expand_as``, ``view_as``; the other tensor is like the output."""
    plain = (expand if case.node.op.startswith("aten.expand") else reshape)(case)
    return Signature((plain.inputs[0], plain.outputs[0]), plain.outputs, plain.terms)


def repeat(case: Case) -> Signature:
    """Split dims of ``repeat`` and ``tile`` that are not repeated, or have size 1."""
    return _broadcast(case)


def _broadcast(case: Case) -> Signature:
    shape = case.outputs[0].shape
    offset = len(shape) - case.rank
    before: list[str | None] = [None] * case.rank
    after: list[str | None] = [None] * len(shape)
    for dim, size in enumerate(shape):
        source = case.shape[dim - offset] if dim >= offset else 1
        if source == size:
            if dim >= offset:
                before[dim - offset] = after[dim] = f"d{dim}"
        elif source == 1 and case.node.op != "aten.tile.default":
            after[dim] = f"e{dim}"
    return linear((tuple(before),), (tuple(after),))


def repeat_interleave(case: Case) -> Signature | None:
    """Split any dim: a part of the repeated dim is the repetition of a part."""
    if case.argument(2, "dim") is None or len(case.inputs) > 1:
        return None
    letters = letters_of(case.rank)
    return linear((letters,), (letters,))


def moved_order(case: Case) -> tuple[int, ...] | None:
    """Return, for an op that permutes dims, the input dim at each output dim; None for others."""
    name = case.node.op.split(".")[1]
    order = list(range(case.rank))
    if name == "permute":
        return case.dims(1, "dims")
    if name == "numpy_T":
        return tuple(order[::-1])
    if name in ("movedim", "moveaxis"):
        return _moved(case.dims(1, "source"), case.dims(2, "destination"), case.rank)
    if name in ("transpose", "swapaxes", "swapdims"):
        first, second = case.dims(1, "dim0")[0], case.dims(2, "dim1")[0]
    elif name in ("t", "mT"):
        first, second = case.rank - 2, case.rank - 1
    else:
        return None
    if case.rank > 1:
        order[first], order[second] = second, first
    return tuple(order)


def _moved(sources: Shape, targets: Shape, rank: int) -> tuple[int, ...]:
    """Return the order of the input's dims after ``movedim``.

    >>> _moved((0,), (2,), 3)
    (1, 2, 0)
    """
    placed = dict(zip(targets, sources, strict=True))
    rest = iter([dim for dim in range(rank) if dim not in sources])
    return tuple(placed[at] if at in placed else next(rest) for at in range(rank))


def permute(case: Case) -> Signature | None:
    """Split any dim: it moves with its split."""
    order = moved_order(case)
    if order is None:
        return None
    letters = letters_of(case.rank)
    return linear((letters,), (tuple(letters[dim] for dim in order),))


def cut(case: Case) -> Signature:
    """Split any dim except the cut dim of ``slice``, ``narrow``, ``split`` or ``chunk``.

    A slice of everything (``x[:]``) cuts nothing, whatever the size.
    """
    position = 1 if case.node.op.startswith(("aten.slice", "aten.narrow")) else 2
    dim = case.dims(position, "dim", 0)[0]
    letters = letters_of(case.rank, () if _is_everything(case) else (dim,))
    return linear((letters,), (letters,) * len(case.outputs))


def _is_everything(case: Case) -> bool:
    if not case.node.op.startswith("aten.slice."):
        return False
    start, end = case.argument(2, "start"), case.argument(3, "end")
    return not start and (end is None or end >= _LARGEST) and case.argument(4, "step", 1) == 1


def take(case: Case) -> Signature:
    """Split any dim except the dim that ``select`` or ``unbind`` removes."""
    dim = case.dims(1, "dim", 0)[0]
    letters = letters_of(case.rank, (dim,))
    return linear((letters,), (letters[:dim] + letters[dim + 1 :],) * len(case.outputs))


def cat(case: Case) -> Signature:
    """Split any dim except the joined dim; all inputs pass partial sums together.

    torch lets an empty tensor of shape (0,) join any others; it has nothing to split.
    """
    rank = len(case.outputs[0].shape)
    joined = int(case.argument(1, "dim", 0)) % rank
    letters = letters_of(rank, (joined,))
    return _joined(case, letters, letters)


def stack(case: Case) -> Signature:
    """Split any dim of the inputs; the new dim stays whole."""
    dim = case.argument(1, "dim", 0) % (case.rank + 1)
    letters = letters_of(case.rank)
    return _joined(case, letters, (*letters[:dim], None, *letters[dim:]))


def _joined(case: Case, letters: Letters, output: Letters) -> Signature:
    full = [len(spec.shape) == len(letters) for spec in case.inputs]
    return Signature(
        tuple(letters if is_full else (None,) for is_full in full),
        (output,),
        tuple((position,) for position, is_full in enumerate(full) if is_full),
    )


def scatter_part(case: Case) -> Signature:
    """Split any dim except the dim that ``slice_scatter`` or ``select_scatter`` writes along."""
    dim = case.dims(2, "dim", 0)[0]
    letters = letters_of(case.rank, (dim,))
    part = letters if len(case.inputs[1].shape) == case.rank else letters[:dim] + letters[dim + 1 :]
    return Signature((letters, part), (letters,), ((0,), (1,)))


def pad(case: Case) -> Signature:
    """Split any dim that is not padded; linear when the padding is zero."""
    amounts = tuple(case.argument(1, "pad"))
    padded = tuple(
        case.rank - 1 - index
        for index in range(len(amounts) // 2)
        if amounts[2 * index] or amounts[2 * index + 1]
    )
    if case.node.op.startswith("aten.constant_pad_nd"):
        mode, value = "constant", case.argument(2, "value", 0)
    else:
        mode, value = case.argument(2, "mode", "constant"), case.argument(3, "value")
    letters = letters_of(case.rank, padded)
    return linear((letters,), (letters,), is_linear=mode == "constant" and not value)


def new(case: Case) -> Signature:
    """Split any dim of ``new_zeros`` and similar ops; equal dims of the input go together."""
    shape = case.outputs[0].shape
    before: list[str | None] = [None] * case.rank
    for dim, (source, size) in enumerate(zip(case.shape, shape, strict=False)):
        if source == size:
            before[dim] = f"d{dim}"
    return Signature((tuple(before),), (letters_of(len(shape)),))
