"""Records of ops that move, repeat, cut or join dimensions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from ..graph.graph import Node
from .annotation import Letters, Shape, Signature
from .case import Case, Specs, argument, letters_of, linear
from .elementwise import UNARY
from .spec import Change, along, annotated, by, named, per_element, size_at

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


def _unflattened(node: Node, inputs: Specs, outputs: Specs) -> tuple[Change, ...]:
    dim = _dim(node, 1, inputs)
    count = len(argument(node, 2, "sizes"))
    return ((2, "sizes", list(outputs[0].shape[dim : dim + count])),)


def _repeats(node: Node, inputs: Specs, outputs: Specs) -> tuple[Change, ...]:
    output, own = outputs[0].shape, inputs[0].shape
    own = (1,) * (len(output) - len(own)) + own
    repeats = [whole // part for whole, part in zip(output, own, strict=True)]
    return ((1, "dims" if node.op.startswith("aten.tile") else "repeats", repeats),)


def _dim(node: Node, position: int, inputs: Specs) -> int:
    return int(argument(node, position, "dim", 0)) % max(len(inputs[0].shape), 1)


def _parts(node: Node, inputs: Specs, outputs: Specs) -> tuple[Change, ...]:
    """Return the sizes of parts; if ranks exchange the parts that they cut, the local tensor is cut
    in proportion."""
    dim = _dim(node, 2, inputs)
    sizes = [spec.shape[dim] for spec in outputs]
    if sum(sizes) != inputs[0].shape[dim]:
        whole = sum(spec.shape[dim] for spec in node.outputs)
        sizes = [spec.shape[dim] * inputs[0].shape[dim] // whole for spec in node.outputs]
    name = "split_sizes" if node.op.startswith("aten.split_with_sizes") else "split_size"
    is_number = isinstance(argument(node, 1, name), int)
    return ((1, name, sizes[0] if is_number else sizes),)


def _whole(name: str) -> Callable[[Node, Specs, Specs], tuple[Change, ...]]:
    """Return the local form of an op that cuts from a start to its argument ``name``: if it keeps
    the whole dim, it keeps the whole part; else the dim is not split."""

    def local(node: Node, inputs: Specs, outputs: Specs) -> tuple[Change, ...]:
        dim = _dim(node, 1, inputs)
        size = inputs[0].shape[dim]
        if outputs[0].shape[dim] != size:
            return ()
        return (1, "dim", dim), (2, "start", 0), (3, name, sys.maxsize if name == "end" else size)

    return local


RESHAPE = replace(
    UNARY,
    name="reshape",
    rule=by(reshape),
    family="view",
    flops=per_element(0, 0),
    keeps="nothing",
    form="reshape",
    memory="view",
    local=size_at(1),
    is_sized=True,
    script=".{}(*)",
)
UNSIZED = replace(RESHAPE, local=None, is_sized=False, script=".{}()")
MOVE = replace(UNSIZED, name="transpose", rule=by(permute), form="move")
SPLIT = replace(RESHAPE, name="split", rule=by(cut), form="parts", local=_parts, script=".split()")
SLICE = replace(
    UNSIZED,
    name="slice",
    rule=by(cut),
    form="cut",
    local=_whole("end"),
    script="",
    result="part",
    is_inline=True,
)
COMPLEX = replace(UNSIZED, family="elementwise", flops=per_element(1, 2), script="")
REPEAT = replace(
    RESHAPE,
    name="repeat",
    rule=by(repeat),
    family="copy",
    form="repeat",
    memory="new",
    local=_repeats,
)
JOIN = replace(
    UNSIZED, name="cat", rule=by(cat), family="copy", form="other", memory="new", script=""
)
PAD = replace(JOIN, name="pad", rule=by(pad), form="pad")

SPECS = (
    *named(RESHAPE, "reshape view"),
    *named(RESHAPE, "_unsafe_view", script=""),
    *named(RESHAPE, "view_copy", memory="new", script=""),
    *named(RESHAPE, "squeeze", script=".{}()"),
    *named(RESHAPE, "unflatten", local=_unflattened, script=".{}()"),
    *named(UNSIZED, "flatten unsqueeze"),
    *named(UNSIZED, "reshape_as view_as", rule=by(like_other), script=""),
    *named(UNSIZED, "expand_as", rule=by(like_other), form="expand", script=""),
    *named(RESHAPE, "expand", rule=by(expand), form="expand"),
    *named(MOVE, "movedim t transpose"),
    *named(MOVE, "permute", script=".{}(*)"),
    *named(MOVE, "mT moveaxis numpy_T swapaxes swapdims", script=""),
    *named(SPLIT, "split split_with_sizes"),
    *named(SPLIT, "unsafe_split", memory="new", script=""),
    *named(SPLIT, "chunk", local=None, is_sized=False, script=".{}()"),
    *named(SPLIT, "tensor_split", local=None, is_sized=False, script=""),
    *named(SPLIT, "unsafe_chunk", memory="new", local=None, is_sized=False, script=""),
    SLICE,
    *named(SLICE, "narrow", local=_whole("length"), script=".{}()", result="", is_inline=False),
    *named(UNSIZED, "select unbind", rule=by(take), form="take"),
    *named(COMPLEX, "view_as_complex", rule=annotated("*b _ => *b"), form="as_complex"),
    *named(COMPLEX, "view_as_real", rule=annotated("*b => *b _"), form="as_real"),
    REPEAT,
    *named(REPEAT, "tile", script=""),
    *named(
        REPEAT,
        "repeat_interleave",
        rule=by(repeat_interleave),
        form="other",
        local=lambda node, inputs, outputs: ((3, "output_size", None),),
        script="",
    ),
    replace(JOIN, result="joined"),
    *named(JOIN, "concat concatenate"),
    *named(JOIN, "stack", rule=by(stack)),
    *named(JOIN, "select_scatter slice_scatter", rule=by(scatter_part)),
    replace(PAD, script="F.{}()", result="padded"),
    *named(PAD, "constant_pad_nd"),
    *named(JOIN, "flip", rule=along(1, None, is_linear=True)),
    *named(JOIN, "roll", rule=along(2, None, is_linear=True)),
    *named(JOIN, "pixel_shuffle pixel_unshuffle", rule=annotated("*b _ _ _ -> *b _ _ _")),
)
