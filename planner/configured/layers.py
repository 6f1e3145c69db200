"""The model's layers among its blocks, and the number of layers of each pipeline stage.

In: the blocks. Out: where the layers are, and the first block of each stage and the one after its
last. Blocks before the layers join the first stage, blocks after them the last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..errors import UsageError
from ..graph import Blocks
from ..requests.pins import plain_kind

_NUMBER = re.compile(r"\.\d+(\+\d+)?$")
"""Suffix of the name of a block that is a member of a list of layers, or a copy of a member."""


def find_layers(blocks: Blocks) -> range:
    """Find the layers: the longest run of equal blocks, or of numbered members of one list, if
    longer. A member whose kind no other block has is no layer."""
    kinds = [plain_kind(block.kind) for block in blocks.blocks]
    counts, numbers = Counter(kinds), [_NUMBER.search(block.name) for block in blocks.blocks]
    lists = [
        found.string[: found.start()] if found and counts[kind] > 1 else ""
        for found, kind in zip(numbers, kinds, strict=True)
    ]
    return max(_longest_run(lists), find_equal(blocks), key=len)


def find_equal(blocks: Blocks) -> range:
    """Find the longest run of equal blocks. Pins make no difference."""
    return _longest_run([plain_kind(block.kind) for block in blocks.blocks])


def _longest_run(values: Sequence[str]) -> range:
    """Return the positions of the longest run of equal values that are not empty."""
    starts = [at for at, each in enumerate(values) if at == 0 or each != values[at - 1]]
    runs = (range(a, b) for a, b in pairwise([*starts, len(values)]))
    return max((run for run in runs if values[run.start]), key=len, default=range(0))


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The number of layers of each stage. Extra layers go to the inner stages, then to the first.

    >>> even_layers(8, 4), even_layers(10, 4), even_layers(3, 4)
    ((2, 2, 2, 2), (2, 3, 3, 2), (1, 1, 1, 0))
    """
    each, left = divmod(num_layers, num_stages)
    inner = [*range(1, num_stages - 1), 0, num_stages - 1]
    if each == 0:
        inner = list(range(num_stages))
    more = set(inner[:left])
    return tuple(each + (stage in more) for stage in range(num_stages))


def stage_bounds(
    blocks: Blocks, layers: tuple[int, ...] | None, num_stages: int
) -> tuple[tuple[int, int], ...]:
    """Return the numbers of the first block of each stage and of the block after its last.

    Raises ``UsageError`` AP128 if ``layers`` does not match the model.
    """
    found = find_layers(blocks)
    if layers is None:
        layers = even_layers(len(found), num_stages)
    if len(layers) != num_stages or sum(layers) != len(found):
        raise UsageError(
            "AP128",
            f"--layers-per-stage has {sum(layers)} layers in {len(layers)} stages, not "
            f"{len(found)} in {num_stages}",
            fix=f"for example: {','.join(map(str, even_layers(len(found), num_stages)))}",
        )
    inner = list(accumulate(layers, initial=found.start))[1:-1]
    return tuple(pairwise((0, *inner, len(blocks.blocks))))
