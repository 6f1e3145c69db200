"""Rules of ops for which the correspondence of dimensions depends on the arguments."""

from __future__ import annotations

from dataclasses import replace

from ..graph.layout import InnerCollective
from .annotation import FLOATS, Letters, Signature, bind
from .case import Case, is_ref, letters_of, linear
from .equation import parse_equation

_COUNT_BYTES = 8
_REDUCTION_MEAN = 1
_REDUCTION_NONE = 0


def annotate(case: Case, annotation: str) -> Signature | None:
    """Return the signature of an annotation for the shapes of a node."""
    return bind(
        annotation,
        [spec.shape for spec in case.inputs],
        [spec.shape for spec in case.outputs],
    )


def add(case: Case) -> Signature | None:
    """Split all dims; a sum of tensors is linear in them jointly, adding a number is not linear."""
    return annotate(case, "* + * -> *" if len(case.inputs) == 2 else "* => *")


def divide(case: Case) -> Signature | None:
    """Split all dims; linear in the dividend, unless it rounds."""
    if case.argument(2, "rounding_mode") is not None or not is_ref(case.node.args[0]):
        return annotate(case, "*, * => *")
    return annotate(case, "*, [*] -> *")


def where(case: Case) -> Signature | None:
    """Split all dims; linear in both branches jointly when both are tensors."""
    return annotate(case, "[*], * + * -> *" if len(case.inputs) == 3 else "*, * => *")


def masked_fill(case: Case) -> Signature | None:
    """Split all dims; linear when it fills with zero."""
    value = case.argument(2, "value")
    if is_ref(value) or value:
        return annotate(case, "*, *, * => *")
    return annotate(case, "*, [*] -> *")


def dropout(case: Case) -> Signature | None:
    """Split all dims without randomness; a random mask must be the same on every rank."""
    if case.argument(2, "train") and case.argument(1, "p"):
        return None
    return annotate(case, "* -> *")


def convert(case: Case) -> Signature:
    """Split all dims of a cast; a tensor that only gives the dtype stays whole."""
    letters = letters_of(case.rank)
    others = tuple((None,) * len(spec.shape) for spec in case.inputs[1:])
    return Signature((letters, *others), (letters,), ((0,),))


def matmul(case: Case) -> Signature | None:
    """Split dims by the ranks of the operands, as torch's ``matmul`` does."""
    left, right = (min(len(spec.shape), 2) for spec in case.inputs)
    return annotate(
        case,
        {
            (1, 1): "k, k -> ",
            (1, 2): "k, *b k j -> *b j",
            (2, 1): "*b i k, k -> *b i",
            (2, 2): "*b i k, *b k j -> *b i j",
        }[left, right],
    )


def einsum(case: Case) -> Signature | None:
    """Split the dims of the equation, which is the annotation."""
    ranks = [len(spec.shape) for spec in case.inputs]
    operands, output = parse_equation(str(case.argument(0, "equation")), ranks)
    left = ", ".join(" ".join(names) for names in operands)
    return annotate(case, f"{left} -> {' '.join(output)}")


def attention(case: Case) -> Signature | None:
    """Split the batch, heads (with grouped key/value heads) or queries."""
    if case.argument(4, "dropout_p", 0.0):
        return None
    return annotate(case, "*b q _, *b _ _, *b _ _, *b q _ => *b q _")


def embedding(case: Case) -> Signature | None:
    """Split vocabulary rows (each rank looks up its own, zero elsewhere), columns or indices."""
    if case.argument(3, "scale_grad_by_freq", False) or case.argument(4, "sparse", False):
        return None
    return annotate(case, "v d, [*b] -> *b d")


def normalized_last(case: Case) -> Signature:
    """Split any dim before the normalized dims of ``layer_norm`` or ``rms_norm``."""
    normalized = len(case.argument(1, "normalized_shape"))
    letters = letters_of(case.rank, tuple(range(case.rank - normalized, case.rank)))
    weights = tuple((None,) * len(spec.shape) for spec in case.inputs[1:])
    return Signature((letters, *weights), (letters,))


def grouped_norm(case: Case) -> Signature:
    """Split the batch, or the channels of ``group_norm`` between groups."""
    letters: Letters = ("n", "c", *(None,) * (case.rank - 2))
    weights: tuple[Letters, ...] = (("c",),) * (len(case.inputs) - 1)
    groups = {"c": int(case.argument(1, "num_groups"))}
    return Signature((letters, *weights), (letters,), groups=groups)


def instance_norm(case: Case) -> Signature | None:
    """Split the batch or the channels, unless running statistics are kept."""
    if is_ref(case.argument(3, "running_mean")):
        return None
    letters: Letters = ("n", "c", *(None,) * (case.rank - 2))
    weights: tuple[Letters, ...] = (("c",),) * (len(case.inputs) - 1)
    return Signature((letters, *weights), (letters,))


def batch_norm(case: Case) -> Signature:
    """Split the channels or the batch: in training the ranks then share their statistics.

    They gather means and variances by channel forward, and reduce two sums backward.
    """
    letters: Letters = ("n", "c", *(None,) * (case.rank - 2))
    channels: tuple[Letters, ...] = (("c",),) * (len(case.inputs) - 1)
    statistics: tuple[Letters, ...] = (("c",),) * (len(case.outputs) - 1)
    inner: dict[str, tuple[InnerCollective, ...]] = {}
    if case.argument(5, "training"):
        num_bytes = 2 * case.shape[1] * max(case.inputs[0].itemsize, 4)
        gathered = InnerCollective("all_gather", num_bytes)
        reduced = InnerCollective("all_reduce", num_bytes, backward=True)
        inner["n"] = (gathered, reduced)
    return Signature((letters, *channels), (letters, *statistics), inner=inner, invariant="n")


def convolution(case: Case) -> Signature | None:
    """Split the batch, output channels or summed input channels; with groups, between groups."""
    is_general = case.node.op.startswith("aten.convolution")
    groups = int(case.argument(8 if is_general else 6, "groups", 1))
    is_transposed = "transpose" in case.node.op or (is_general and case.argument(6, "transposed"))
    spatial = " _" * (len(case.inputs[1].shape) - 2)
    if groups == 1:
        kernel = f"i o{spatial}" if is_transposed else f"o i{spatial}"
        return annotate(case, f"n i{spatial}, {kernel} + o -> n o{spatial}")
    found = annotate(case, f"n c{spatial}, c _{spatial} + c -> n c{spatial}")
    return None if found is None else replace(found, groups={"c": groups})


def along(case: Case, position: int, default: int | None, *, is_linear: bool) -> Signature:
    """Return the signature of an op that works along dims: any other dim may be split."""
    whole = case.dims(position, "dims" if _takes_dims(case) else "dim", default)
    letters = letters_of(case.rank, whole)
    count = len(case.inputs)
    return Signature(
        (letters,) * count,
        (letters,) * len(case.outputs),
        tuple((position,) for position in range(count)) if is_linear else (),
    )


def _takes_dims(case: Case) -> bool:
    return case.node.op.startswith(("aten.flip", "aten.roll"))


def reduce(case: Case, position: int, *, is_sum: bool) -> Signature | None:
    """Return a reduction's signature: a split reduced dim gives partial sums, or is not allowed."""
    if len(case.inputs) != 1:
        return None
    kept = len(case.outputs[0].shape) == case.rank
    reduced = case.dims(position, "dim") if _has_dim(case) else tuple(range(case.rank))
    before = letters_of(case.rank, () if is_sum else reduced)
    after = tuple(
        None if dim in reduced else letter
        for dim, letter in enumerate(before)
        if kept or dim not in reduced
    )
    return Signature(
        (before,), (after,) * len(case.outputs), ((0,),) if is_sum else (), sums=is_sum
    )


def _has_dim(case: Case) -> bool:
    return len(case.node.args) > 1 or "dim" in case.node.kwargs


def elementwise_loss(case: Case, position: int) -> Signature | None:
    """Return an elementwise loss's signature: its mean or sum over a split dim is partial."""
    reduction = case.argument(position, "reduction", _REDUCTION_MEAN)
    operands = ", ".join("*" for _ in case.inputs)
    return annotate(
        case, f"{operands} => *" if reduction == _REDUCTION_NONE else f"{operands} =>+ "
    )


def class_loss(case: Case) -> Signature | None:
    """Split rows of ``cross_entropy_loss`` and ``nll_loss``, or the vocabulary of cross entropy.

    A mean over split rows divides by the count of all ranks' targets, hence a collective;
    a split vocabulary reduces a maximum and a stack of sums per row.
    """
    logits, target = case.inputs[0], case.inputs[1]
    is_mean = case.argument(3, "reduction", _REDUCTION_MEAN) == _REDUCTION_MEAN
    weighted, of_probabilities = len(case.inputs) > 2, target.dtype in FLOATS
    dims = min(1, case.rank - 1)
    rows = tuple(f"d{dim}" for dim in range(case.rank) if dim != dims)
    vocabulary = "v" if _splits_vocabulary(case) and not weighted | of_probabilities else None
    scores: Letters = (*rows[:dims], vocabulary, *rows[dims:])
    inner: dict[str, tuple[InnerCollective, ...]] = {}
    if is_mean:
        inner = dict.fromkeys(rows, (InnerCollective("all_reduce", _COUNT_BYTES),))
    count = target.numel * max(logits.itemsize, 4)
    sums = 3 if case.argument(5, "label_smoothing", 0.0) else 2
    inner["v"] = (
        InnerCollective("all_reduce", count),
        InnerCollective("all_reduce", sums * count),
    )
    return Signature(
        inputs=(scores, scores if of_probabilities else rows, *((None,),) * weighted),
        outputs=(() if case.outputs[0].shape == () else rows,),
        sums=True,
        inner=inner,
        invariant="v",
    )


def _splits_vocabulary(case: Case) -> bool:
    return case.node.op.startswith("aten.cross_entropy_loss")


def index(case: Case) -> Signature | None:
    """Split dims that are not indexed, or the dims of the indices."""
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
    return Signature((source, *indices), ((*kept[:start], *letters, *kept[start:]),), ((0,),))


def index_select(case: Case) -> Signature:
    """Split the other dims, or the dim of the indices."""
    dim = case.dims(1, "dim")[0]
    letters = letters_of(case.rank, (dim,))
    output = tuple("i" if at == dim else letter for at, letter in enumerate(letters))
    return Signature((letters, ("i",)[: len(case.inputs[1].shape)]), (output,), ((0,),))


def gather(case: Case) -> Signature:
    """Split the other dims if the index has them whole, or the index along its dim."""
    dim = case.dims(1, "dim")[0]
    source, indices = case.shape, case.inputs[1].shape
    whole = tuple(at for at in range(case.rank) if at == dim or source[at] != indices[at])
    letters = letters_of(case.rank, whole)
    picked = tuple("i" if at == dim else letter for at, letter in enumerate(letters))
    return Signature((letters, picked), (picked,), ((0,),))


def one_hot(case: Case) -> Signature:
    """Split any dim of the indices."""
    letters = letters_of(case.rank)
    return linear((letters,), ((*letters, None),), is_linear=False)
