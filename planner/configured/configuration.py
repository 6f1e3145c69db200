"""Hand-written configurations: degrees, layers per stage, schedule and options.

In: degrees; the blocks of a model. Out: a ``Configuration``, its mesh, the blocks that are layers
and the number of layers of each pipeline stage. Blocks before the layers belong to the first stage,
blocks after them to the last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from ...cost_model.ops.memory import GradientDtype, Offload, StateOptions
from ..errors import UsageError
from ..graph.graph import Blocks
from ..graph.layout import Mesh
from ..inter_op.submesh import mesh_of
from ..plan import Precision, Recompute
from ..requests.pins import plain_kind
from ..requests.request import Forced, folded_axes


@dataclass(frozen=True, slots=True)
class Configuration:
    """Parallel degrees and options of a training run, as the user writes them.

    ``dp`` ranks split the batch. ``ep`` ranks hold different experts: data-parallel ranks if ``dp``
    is a multiple of ``ep``, else tensor- and context-parallel ranks too (``folded``). ``etp`` sets
    the number of tensor-parallel ranks that share each expert instead: 1, or all ``tp``.
    ``shard``: number of neighbouring data-parallel ranks that shard states under ZeRO (default:
    all).
    ``microbatch_size``: rows of a micro-batch over all data-parallel ranks. ``num_chunks``: stages
    per pipeline rank. ``num_slices``: slices of sequences, for TeraPipe. ``layers``: number of
    layers of each stage (default: even). ``recompute`` applies to every block, or to layers alone
    unless ``recomputes_ends``. ``selective_share`` below 1: this fraction of a stage's layers is
    recomputed selectively, the others fully. ``recompute_share`` below 1: this fraction of a
    stage's layers is recomputed, the others are not. ``compiled``: blocks run compiled, or layers
    alone unless ``compiles_ends``; ``fuses_products``: with kernels over matrix products, such as
    written-out attention. ``gradient_dtype`` and ``offload`` are as in a plan.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    zero: int = 0
    shard: int | None = None
    recompute: Recompute = "none"
    microbatch_size: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    num_chunks: int = 1
    num_slices: int = 1
    layers: tuple[int, ...] | None = None
    sequence_parallel: bool | None = None
    precision: Precision = "fp32"
    optimizer: str = "adamw"
    recomputes_ends: bool = True
    selective_share: float = 1.0
    recompute_share: float = 1.0
    compiled: bool = False
    compiles_ends: bool = True
    fuses_products: bool = False
    gradient_dtype: GradientDtype = "master"
    offload: Offload = "none"

    @classmethod
    def completed(cls, choices: Forced, num_devices: int, **others: Any) -> Configuration:
        """Return the configuration of ``choices``, with ``dp`` from the remaining devices and other
        degrees 1 by default. ``others``: fields that ``choices`` lacks, or that override it.
        Raises UsageError AP121 for ``shard`` without ZeRO.

        >>> Configuration.completed(Forced(tp=2, zero=1), 8, precision="bf16").dp
        4
        """
        names = cls.__dataclass_fields__
        known = {name: value for name, value in choices.decided.items() if name in names}
        own = cls(**{"num_chunks": choices.least_chunks, **known, **others})
        if own.shard is not None and not own.zero:
            raise UsageError(
                "AP121",
                f"shard={own.shard} without zero",
                why="shard is the number of ranks over which ZeRO 1 to 3 shards states",
                where="--parallel",
                fix="zero=1, 2 or 3, or leave shard out",
            )
        left = max(1, num_devices // (own.tp * own.pp * own.cp))
        return own if "dp" in known else replace(own, dp=left)

    @property
    def form(self) -> tuple[str, bool, bool, bool]:
        """Options on which the priced graph depends: precision, compilation, fusion."""
        return self.precision, self.compiled, self.compiles_ends, self.fuses_products

    @property
    def states(self) -> StateOptions:
        """Format of summed gradients, and the states that are in host memory."""
        return StateOptions(self.gradient_dtype, self.offload)

    @property
    def rank_rows(self) -> int:
        """Rows of a micro-batch on one data-parallel rank."""
        return self.microbatch_size // self.dp

    @property
    def num_devices(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def num_stages(self) -> int:
        return self.pp * self.num_chunks

    @property
    def folded(self) -> tuple[str, ...]:
        """Return the axes besides "dp" on which ranks hold different experts."""
        return folded_axes(self.ep, self.dp, self.tp, self.cp, self.etp)[0]

    @property
    def data_ep(self) -> int:
        """Return the number of data-parallel ranks that hold different experts."""
        return folded_axes(self.ep, self.dp, self.tp, self.cp, self.etp)[1]

    @property
    def shard_degree(self) -> int:
        """Return the ``StagePlan.shard_degree`` of each stage."""
        is_part = self.zero and self.shard is not None and self.shard < self.dp * self.cp
        return self.shard or 0 if is_part else 0

    @property
    def mesh(self) -> Mesh:
        """Mesh of each stage. Its axis "ep" has the data-parallel ranks that split experts."""
        return mesh_of(self.dp // self.data_ep, self.tp, self.cp, self.data_ep)


_NUMBER = re.compile(r"\.\d+(\+\d+)?$")
"""Suffix of the name of a block in a list of layers: ".3", or ".3+1" for its second part."""


def find_layers(blocks: Blocks) -> range:
    """Return the positions of the model's layers among its blocks: the longest row of equal blocks
    or, if longer, of numbered members of one module list. A member whose kind no other block has is
    not counted as a layer."""
    kinds = [plain_kind(block.kind) for block in blocks.blocks]
    counts, numbers = Counter(kinds), [_NUMBER.search(block.name) for block in blocks.blocks]
    lists = [
        found.string[: found.start()] if found and counts[kind] > 1 else ""
        for found, kind in zip(numbers, kinds, strict=True)
    ]
    return max(_longest_run(lists), find_equal(blocks), key=len)


def find_equal(blocks: Blocks) -> range:
    """Return the positions of the longest row of equal blocks; pinned layouts may differ."""
    return _longest_run([plain_kind(block.kind) for block in blocks.blocks])


def _longest_run(values: Sequence[str]) -> range:
    """Return the positions of the longest row of equal, non-empty values."""
    starts = [at for at, each in enumerate(values) if at == 0 or each != values[at - 1]]
    runs = (range(a, b) for a, b in pairwise([*starts, len(values)]))
    return max((run for run in runs if values[run.start]), key=len, default=range(0))


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, as equal as possible. Extra layers go to inner
    stages, then the first, then the last.

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
    """Return the positions (first block, block after the last) of each stage. ``layers``: number of
    layers of each stage, even by default.

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
