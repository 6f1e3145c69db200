"""Records of attention, and its strategies over split positions: balanced, and a ring.

Attention of B×H heads over S queries and T keys takes 4·B·H·S·T·D FLOPs in the forward (half if
causal), and 2.5 times that in the backward, which recomputes the scores (Dao 2023,
FlashAttention-2, section 3).

Balanced: causal attention on an axis of n ranks that splits its queries' positions. Ranks swap
halves of their queries, and the busiest rank then executes another call.

Rank r has the r-th part of the queries, and query i sees the keys up to i: the last rank computes
(2n - 1)/n times the mean. With 2n chunks, chunk i takes about i + 1/2. Rank r keeps its chunk 2r
and takes chunk 2n - 1 - 2r, the second chunk of rank n - 1 - r, which takes chunk 2r + 1 instead:
2n for every rank. Half of the queries are sent there and half of the results back, as are their
gradients; keys and values are whole on every rank. If several axes split the positions, the partner
is the rank at the opposite end of each balancing axis.

Source of the pairs of chunks: Dubey et al. 2024, Llama 3 (arXiv:2407.21783), section 3.3.2, where
the sequence itself is distributed in this way.

Ring: the positions of keys and values are split as well, and no rank ever holds all of them. In n
steps each rank attends to the part of one rank, while it sends this part on to the next rank and
receives another; partial results are merged by the logarithms of their sums of exponentials. In the
backward the sums of the gradients of keys and values follow these: the part that has passed all
ranks is home after n - 1 messages, as each rank keeps its own share until then. With causal
attention halves of queries, keys and values are swapped as above, so that in every step each rank
computes half of the pairs of its queries and the keys that it has (``passes.ops.ring``).

Source: Liu et al. 2023, Ring Attention with Blockwise Transformers (arXiv:2310.01889).

Halo: with a window of W keys, the queries of a rank see no key further than W - 1 positions before
them. The positions of keys and values are split as those of queries, and a rank with L positions
receives the last W - 1 before its own in one exchange, from the rank before, or if W - 1 > L from
several. The gradients of received keys and values return to their ranks (``passes.ops.halo``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ..graph.graph import Node, TensorSpec
from ..graph.layout import (
    BALANCED,
    HALO,
    INVARIANT,
    OF_GROUPS,
    REPLICATE,
    RING,
    RINGS,
    AxisStrategy,
    InnerCollective,
    NodeLayout,
    shard,
)
from .annotation import Signature
from .attention_limits import is_packed, unpacked, window_of
from .case import Case, Specs, annotate, argument, packet
from .elementwise import UNARY
from .spec import Product, Products, by, statistic_bytes

BALANCED_ATTENTION = "autoparallel.balanced_attention.default"
"""Op of causal attention on two runs of query positions (``passes.ops.lower_right``)."""

RING_ATTENTION = "autoparallel.ring_attention.default"
BALANCED_RING = "autoparallel.balanced_ring_attention.default"
"""Ops of one rank's part of ring attention, without and with causality, whose fourth argument is
the number of ranks (``passes.ops.ring``)."""

HALO_ATTENTION = "autoparallel.halo_attention.default"
"""Op of one rank's part of attention with a window, whose fourth argument is the number of
positions that the rank receives (``passes.ops.halo``)."""

_BACKWARD = 2.5


def attention(case: Case) -> Signature | None:
    """Split the batch, heads (with grouped key/value heads) or queries."""
    if case.argument(4, "dropout_p", 0.0):
        return None
    return annotate(case, "*b q _, *b _ _, *b _ _, *b q _ => *b q _")


def is_grouped(node: Node) -> bool:
    """Return whether a node is attention in which a head of keys and values may be read by a group
    of heads of queries."""
    return bool(node.kwargs.get("enable_gqa", False))


def is_attention(node: Node) -> bool:
    """Return whether a node is fused attention, with a window or without."""
    return node.kind == "op" and packet(node.op) == ATTENTION.name


def _keys_seen(node: Node, inputs: Specs) -> int:
    """Return the number of keys that each query is multiplied with: all keys; with a window the
    keys of two chunks or, if the queries are no two windows long, all that some of them see
    (``passes.ops.windowed``)."""
    window, rows, length = window_of(node), inputs[0].shape[-2], inputs[1].shape[-2]
    if not window:
        return length
    return 2 * window if is_chunked(node, inputs) else min(length, rows + window - 1)


def copies_keys(node: Node, inputs: Specs) -> bool:
    """Return whether attention keeps copies of keys and values in place of its inputs: behind their
    halo, or with a head for each head of queries."""
    if node.op in (RING_ATTENTION, BALANCED_RING, HALO_ATTENTION):
        return node.op == HALO_ATTENTION
    if is_packed(node):
        return is_grouped(node) and window_of(unpacked(node, inputs)[0]) > 0
    return is_grouped(node) and (window_of(node) > 0 or _copied_heads_bytes(node, inputs) > 0)


def is_chunked(node: Node, inputs: Specs) -> bool:
    """Return whether attention has a window and cuts its queries into chunks."""
    return 0 < 2 * window_of(node) <= inputs[0].shape[-2]


def _copied_heads_bytes(node: Node, inputs: Specs) -> int:
    """Return the bytes of keys and values with a head for each head of queries, which attention of
    groups makes in 32 and 64 bits: PyTorch's fused GPU kernels for these read no groups."""
    query, key, value = inputs[:3]
    heads, held = query.shape[-3], key.shape[-3]
    if not is_grouped(node) or query.itemsize <= 2 or heads == held:
        return 0
    return (key.num_bytes + value.num_bytes) * heads // held


def grouped_strategies(case: Case, axis_size: int) -> tuple[AxisStrategy, ...]:
    """Return the strategy ``OF_GROUPS`` if the axis has several ranks for each head of keys: these
    ranks read the same head, for different heads of queries."""
    if not is_grouped(case.node) or not _is_unmasked(case) or axis_size == 1:
        return ()
    query, key = (spec.shape[-3] for spec in case.inputs[:2])
    is_shared = 1 < key < axis_size and axis_size % key == 0 and query % axis_size == 0
    if not is_shared or case.argument(4, "dropout_p", 0.0):
        return ()
    held = (REPLICATE if spec.requires_grad else INVARIANT for spec in case.inputs[1:])
    split = shard(case.rank - 3)
    return (AxisStrategy(OF_GROUPS, (split, *held), (split,)),)


def _is_unmasked(case: Case) -> bool:
    """Return whether the inputs of an attention are queries, keys, values, and ids of packed
    documents if it has these."""
    return len(case.inputs) == 3 + is_packed(case.node)


def _is_self_attention(case: Case) -> bool:
    """Return whether a case is attention without mask and dropout of equally many queries and
    keys."""
    if not is_attention(case.node) or not _is_unmasked(case):
        return False
    query, key = case.inputs[:2]
    return query.shape[-2] == key.shape[-2] and not case.argument(4, "dropout_p", 0.0)


def ring_strategies(case: Case, axis_size: int) -> tuple[AxisStrategy, ...]:
    """Return the strategy of attention of a sequence to itself that splits keys as queries, if the
    axis divides its positions: ``HALO`` with a window, else ``RING``; with causality a rank in a
    ring must have two or more."""
    if axis_size == 1 or case.rank < 3 or not _is_self_attention(case) or is_packed(case.node):
        return ()
    query, key, value = case.inputs
    length, left = divmod(query.shape[-2], axis_size)
    window = window_of(case.node)
    is_causal = bool(case.argument(5, "is_causal", False)) and not window
    is_alike = key.shape[:-3] == query.shape[:-3] and key.dtype == query.dtype == value.dtype
    if left or length < 1 + is_causal or not is_alike:
        return ()
    sent = [(query.num_bytes, False), (case.outputs[0].num_bytes, False)]
    sent.append((key.num_bytes + value.num_bytes, True))
    directions = (False, True) if any(spec.requires_grad for spec in case.inputs) else (False,)
    split = shard(case.rank - 2)
    if window:
        row = (key.num_bytes + value.num_bytes) // query.shape[-2]
        parts = [
            InnerCollective("halo", row * part, each, of_keys=True)
            for each in directions
            for part in halo_parts(window, length, axis_size)
        ]
        return (AxisStrategy(HALO, (split,) * 3, (split,), tuple(parts)),)
    rows = [num_bytes // query.shape[-2] for num_bytes, _ in sent]
    inner = [
        InnerCollective("swap", row * (length // 2), backward, of_keys=of_keys)
        for backward in directions
        for row, (_, of_keys) in zip(rows, sent, strict=True)
        if is_causal
    ]
    inner += [InnerCollective("ring", rows[2] * length, each, of_keys=True) for each in directions]
    return (AxisStrategy(RING, (split,) * 3, (split,), tuple(inner)),)


def halo_parts(window: int, length: int, num_ranks: int) -> tuple[int, ...]:
    """Return the number of positions that the last of ``num_ranks`` ranks with ``length`` positions
    each receives for a window: from the rank before it, from the rank before that, and so on.

    >>> halo_parts(6, 4, 4)
    (4, 1)
    """
    rest = [window - 1 - before * length for before in range(num_ranks - 1)]
    return tuple(min(length, each) for each in rest if each > 0)


def ring_axes(layout: NodeLayout) -> tuple[int, ...]:
    """Return the mesh axis along which keys and values of attention pass from rank to rank, as a
    tuple; an empty tuple without one."""
    return tuple(axis for axis, label in enumerate(layout.labels) if label in RINGS)


def is_lower_right(node: Node, query: TensorSpec) -> bool:
    """Return whether an attention is causal and its queries are a part of the positions only."""
    return (
        is_attention(node)
        and bool(argument(node, 5, "is_causal", False))
        and not window_of(node)
        and query.shape[-2] != node.spec.shape[-2]
    )


def writes_scores(node: Node, inputs: Specs) -> bool:
    """Return whether an attention runs as two products and a softmax: if its mask needs a gradient,
    which PyTorch's flash attention does not compute.

    It then keeps its own copies of queries, keys and values, and the softmax's result, in float32
    at least (``_scaled_dot_product_attention_math``, ATen/native/transformers/attention.cpp).
    """
    return is_attention(node) and len(inputs) > 3 and inputs[3].requires_grad


def num_scores(inputs: Specs) -> int:
    """Return the number of scores of an attention, of each query for each key."""
    query, key = inputs[:2]
    return query.numel // query.shape[-1] * key.shape[-2]


def _kept_bytes(node: Node, inputs: Specs, outputs: Specs) -> int:
    statistic = statistic_bytes(outputs)
    if writes_scores(node, inputs):
        factors = sum(spec.numel for spec in inputs[:3])
        return (factors + num_scores(inputs)) * statistic
    copies_heads = not is_packed(node)
    node, inputs = unpacked(node, inputs)
    chunks = outputs[0].num_bytes if is_chunked(node, inputs) else 0
    copied = 0
    if window_of(node):
        copied = _window_bytes(node, inputs)
    elif copies_heads:
        copied = _copied_heads_bytes(node, inputs)
    return copied + chunks + kept_statistics(outputs)


def kept_statistics(outputs: Specs) -> int:
    """Return the bytes of the statistics of an attention, of each query and head."""
    return prod(outputs[0].shape[:-1]) * statistic_bytes(outputs)


def _window_bytes(node: Node, inputs: Specs) -> int:
    """Return the bytes of masks and of copied queries, keys and values of attention with a window.
    Keys and values are copied if a group of heads of queries reads each head. Two or more chunks
    after the first are copied, with keys and values twice; a single one is not."""
    query, key, value = inputs[:3]
    window, rows = window_of(node), query.shape[-2]
    before = min(key.shape[-2] - rows, window - 1)
    first = window + rows % window if is_chunked(node, inputs) else rows
    row = prod(query.shape[:-2]) * query.itemsize
    pair = row * (key.shape[-1] + value.shape[-1])
    copied = (rows + before) * pair * is_grouped(node)
    folded = (rows - first) * (row * query.shape[-1] + 2 * pair) * (rows - first > window)
    masks = first * (before + first) + (2 * window**2 if first < rows else 0)
    return copied + folded + masks * query.itemsize


def _halo_bytes(node: Node, inputs: Specs, outputs: Specs) -> int:
    """Return the bytes kept besides: keys and values behind their halo, or their copies."""
    query, *joined = _with_halo(node, inputs)
    own = 0 if is_grouped(node) else sum(spec.num_bytes for spec in joined)
    return own + _kept_bytes(node, (query, *joined), outputs)


def _balanced_bytes(node: Node, inputs: Specs, outputs: Specs) -> int:
    """Return the bytes kept besides: half of the queries, and the results before they are
    joined."""
    halves = inputs[0].num_bytes // 2 + outputs[0].num_bytes
    return _kept_bytes(node, inputs[:3], outputs) + halves


def _with_halo(node: Node, inputs: Specs) -> Specs:
    """Return the specs of a rank's queries and of its keys and values behind their halo."""
    keys = (
        replace(spec, shape=(*spec.shape[:-2], spec.shape[-2] + node.args[3], spec.shape[-1]))
        for spec in inputs[1:3]
    )
    return (inputs[0], *keys)


def _products(node: Node, inputs: Specs, wanted: Sequence[int]) -> Products:
    """Return (batch · heads, queries, keys, head size) of each kernel, forward and backward."""
    node, inputs = unpacked(node, inputs)
    query, seen = inputs[0], _keys_seen(node, inputs)
    own: tuple[Product, ...] = ((prod(query.shape[:-2]), query.shape[-2], seen, query.shape[-1]),)
    if is_chunked(node, inputs):
        chunks = query.shape[-2] // window_of(node)
        own = ((prod(query.shape[:-2]) * chunks, seen // 2, seen, query.shape[-1]),)
    if node.op == BALANCED_ATTENTION:
        own = _halves(node, query)
    return own, own if wanted else ()


def _halves(node: Node, query: TensorSpec) -> tuple[Product, ...]:
    heads, length, size = prod(query.shape[:-2]), query.shape[-2], query.shape[-1]
    halves = (length - length // 2, length // 2)
    return tuple((heads, rows, end, size) for rows, end in zip(halves, node.args[3], strict=True))


def _flops(node: Node, inputs: Specs, outputs: Specs, wanted: Sequence[int]) -> tuple[int, int]:
    node, inputs = unpacked(node, inputs)
    query, key = inputs[:2]
    pairs = prod(query.shape[:-1]) * _keys_seen(node, inputs)
    is_causal = bool(argument(node, 5, "is_causal", False)) and not window_of(node)
    if is_causal and query.shape[-2] == key.shape[-2]:
        pairs //= 2
    elif is_lower_right(node, query):  # the rank with the last positions: all others wait
        pairs -= prod(query.shape[:-1]) * query.shape[-2] // 2
    return _of_pairs(pairs, inputs, wanted)


def _balanced_flops(
    node: Node, inputs: Specs, outputs: Specs, wanted: Sequence[int]
) -> tuple[int, int]:
    halves = _halves(node, inputs[0])
    pairs = sum(heads * (rows * end - rows * rows // 2) for heads, rows, end, _ in halves)
    return _of_pairs(pairs, inputs, wanted)


def _of_pairs(pairs: int, inputs: Specs, wanted: Sequence[int]) -> tuple[int, int]:
    forward = 2 * pairs * (inputs[0].shape[-1] + inputs[2].shape[-1])
    return forward, int(forward * _BACKWARD) if wanted else 0


def num_steps(node: Node) -> int:
    """Return the number of kernels of one rank's part of ring attention."""
    return int(node.args[3])


def _ring_products(node: Node, inputs: Specs, wanted: Sequence[int]) -> Products:
    """Return the products of every step: with causality half of the pairs of each."""
    heads, rows, size = prod(inputs[0].shape[:-2]), *inputs[0].shape[-2:]
    columns = inputs[1].shape[-2]
    later = columns // 2 if node.op == BALANCED_RING else columns
    each = ((heads, rows, columns, size), *[(heads, rows, later, size)] * (num_steps(node) - 1))
    return each, each if wanted else ()


def _ring_flops(
    node: Node, inputs: Specs, outputs: Specs, wanted: Sequence[int]
) -> tuple[int, int]:
    pairs = num_scores(inputs) * num_steps(node)
    return _of_pairs(pairs // 2 if node.op == BALANCED_RING else pairs, inputs, wanted)


def _ring_bytes(node: Node, inputs: Specs, outputs: Specs) -> int:
    """Return the bytes kept besides: with causality the tensors in the order of the swapped halves
    instead of the inputs and the output."""
    swapped = (*inputs, *outputs) if node.op == BALANCED_RING else ()
    statistics = prod(outputs[0].shape[:-1]) * statistic_bytes(outputs)
    return statistics + sum(spec.num_bytes for spec in swapped)


def ring_traffic(node: Node, inputs: Specs, outputs: Specs) -> tuple[int, int]:
    """Return the bytes of memory traffic (forward, backward) beside the kernels of one rank's part
    of ring attention: keys and values are copied to be sent, results merged and gradients added up
    in float32 at least, and with causality halves are copied and joined. Attention with a halo
    copies keys and values as rows, and joins them; others copy nothing."""
    if node.op == HALO_ATTENTION:
        moved = 2 * sum(each.num_bytes for each in (*inputs[1:3], *_with_halo(node, inputs)[1:]))
        return moved, moved
    if node.op not in (RING_ATTENTION, BALANCED_RING):
        return 0, 0
    query, key, value, out = (each.num_bytes for each in (*inputs[:3], outputs[0]))
    wide, later = statistic_bytes(outputs), num_steps(node) - 1
    merged, summed = (spec.numel * wide for spec in (outputs[0], inputs[0]))
    swaps = 3 * (query + key + value + out) if node.op == BALANCED_RING else 0
    forward = 2 * (key + value) + later * (out + 4 * merged) + 2 * (merged + out)
    backward = later * (query + 2 * summed + 3 * (key + value)) + summed + query
    return swaps + forward, swaps + backward + 2 * (key + value)


def ring_buffers(node: Node, inputs: Specs, outputs: Specs) -> int:
    """Return the bytes that one rank's part of ring attention holds while it runs, besides inputs
    and outputs, in its backward: two parts of keys and values and of their gradients under way, and
    sums in float32 at least. With a halo: keys, values and their gradients behind it."""
    if node.op == HALO_ATTENTION:
        return 2 * sum(spec.num_bytes for spec in _with_halo(node, inputs)[1:])
    if node.op not in (RING_ATTENTION, BALANCED_RING):
        return 0
    moved = 4 * sum(spec.num_bytes for spec in inputs[1:3])
    return moved + inputs[0].numel * statistic_bytes(outputs)


ATTENTION = replace(
    UNARY,
    name="scaled_dot_product_attention",
    rule=by(attention),
    family="attention",
    flops=_flops,
    products=_products,
    keeps="both",
    kept_bytes=_kept_bytes,
    is_costly=True,
    memory="queries",
    autocast="lower",
    script="F.{}(3)",
    result="attended",
)

PART = replace(
    ATTENTION,
    rule=None,
    is_costly=False,
    memory="new",
    autocast="as inputs",
    script="",
    result="",
)
"""Record of a rank's part of attention over split positions, which ``experts.as_run`` puts in its
place to be priced; its work is that of its own kind."""

RING_RECORD = replace(
    PART,
    name="ring_attention",
    flops=_ring_flops,
    products=_ring_products,
    reads="steps",
    # Of each step: one of attention, one to send, six to merge; in the backward one of attention,
    # four to send, four to add up gradients.
    kernels=(8, 9),
    kept_bytes=_ring_bytes,
)

HALO_RECORD = replace(
    PART,
    name="halo_attention",
    flops=lambda node, inputs, *rest: _flops(node, _with_halo(node, inputs), *rest),
    products=lambda node, inputs, wanted: _products(node, _with_halo(node, inputs), wanted),
    kernels=(8, 10),  # beside attention seven copies of sent and joined rows; then two sums
    kept_bytes=_halo_bytes,
)

SPECS = (
    ATTENTION,
    HALO_RECORD,
    replace(
        PART,
        name="balanced_attention",
        flops=_balanced_flops,
        reads="halves",
        # Forward: two of attention, two copies of sent values, one to join both results. Backward:
        # two of attention, two copies of sent values, one to join the queries' gradients; two for
        # keys and two for values that pad the second attention's gradients, and the sum.
        kernels=(5, 11),
        kept_bytes=_balanced_bytes,
    ),
    RING_RECORD,
    replace(RING_RECORD, name="balanced_ring_attention", keeps="nothing"),
)


def balanced_strategies(
    case: Case, derived: Sequence[AxisStrategy], axis_size: int
) -> tuple[AxisStrategy, ...]:
    """Return a balanced variant of each strategy of causal attention that splits queries: ranks r
    and n − 1 − r swap halves of their queries, so that all compute equally many scores.

    There is no such variant unless a sequence attends to itself, with two or more positions per
    rank.
    """
    is_causal = case.argument(5, "is_causal", False) and not window_of(case.node)
    if axis_size == 1 or not is_causal or not _is_self_attention(case):
        return ()
    query, out, dim = case.inputs[0], case.outputs[0], case.rank - 2
    num_rows = query.shape[dim] // axis_size // 2
    if not num_rows:
        return ()
    sent = [spec.num_bytes // query.shape[dim] * num_rows for spec in (query, out)]
    inner = [InnerCollective("swap", num_bytes) for num_bytes in sent]
    inner += [
        InnerCollective("swap", num_bytes, backward=True)
        for num_bytes, spec in zip(sent, (query, out), strict=True)
        if spec.requires_grad
    ]
    return tuple(
        replace(each, label=BALANCED, collectives=(*each.collectives, *inner))
        for each in derived
        if each.inputs[0] == shard(dim)
    )
