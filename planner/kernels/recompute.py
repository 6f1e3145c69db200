"""Recomputation in the backward: the ops that run again, and the values kept until then.

``full`` keeps only the values that a block reads from outside, and reruns its forward up to the
last op that saves a tensor. ``selective`` also keeps the results of matrix products, convolutions
and attention, which are expensive for their size, and reruns the other ops with their collectives
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", drop
cheap results instead).

``attention`` also keeps attention's results and its statistics, and reruns everything else: in long
sequences attention takes most of the time. ``…-offloaded`` is the mode before the hyphen, whose
kept values wait in the host's memory.

Values that no gradient reads are not kept, recomputed or converted again. The last product of a
block that ends in a residual sum is neither kept nor rerun. If a product is only an operand of a
sum, the sum is kept instead: it is as large, and no op before it is rerun; if the product is a
partial sum on every rank (row-parallel), the kept sum is reduced, so its collective is not rerun.

``passes.backward.recomputing`` executes it with ``torch.utils.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from ..graph.graph import Block, Graph, Node, Ref
from ..ops import Rules
from ..ops.attention import is_attention
from ..ops.case import packet
from ..ops.catalog import spec_of
from ..plan import Recompute

RECOMPUTE_MODES: tuple[Recompute, ...] = ("full", "selective", "attention")
"""Recomputation modes, in the order of arrays that are indexed by mode."""

BLOCK_MODES: tuple[Recompute, ...] = (
    "none",
    *RECOMPUTE_MODES,
    "attention-offloaded",
    "none-offloaded",
)
"""Modes of a block: no recomputation, the modes of ``RECOMPUTE_MODES``, and those of both whose
kept values can be offloaded."""

ONCE: tuple[int, ...] = tuple(int(mode == "none") for mode in BLOCK_MODES)
"""Occurrences, by ``BLOCK_MODES``, of a part of a stage that occurs once and is not recomputed."""

_OFFLOADED = "-offloaded"

RecomputedPart = Literal[
    "core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts", "ssm"
]
"""Parts of a layer that can be recomputed. ``core_attn``: scores, softmax and their product with
values. ``layernorm``: the norms of a layer. ``mla_up_proj``: queries, keys and values from their
latent forms. ``mlp``: a dense feed-forward. ``moe``: router, experts and shared experts.
``moe_act``: the experts' activation function, taken as free. ``shared_experts``: shared experts
alone. ``ssm``: a state-space layer between its projections, always recomputed by mamba_ssm."""

RECOMPUTED_PARTS: tuple[RecomputedPart, ...] = get_args(RecomputedPart)

_SUMS = frozenset(("add", "sub"))


Storages = Mapping[tuple[str, int], tuple[str, int]]
"""Map each value, (node, output index), to the value that owns its memory: ``Rules.storage_of``."""


def without_offload(mode: Recompute) -> Recompute:
    """Return the mode in which a block recomputes if nothing is offloaded.

    >>> without_offload("none-offloaded"), without_offload("full")
    ('none', 'full')
    """
    found: dict[str, Recompute] = {each: each for each in BLOCK_MODES}
    return found[mode.removesuffix(_OFFLOADED)]


def is_offloaded(mode: Recompute) -> bool:
    """Return whether the values that a block keeps wait in the host's memory."""
    return mode.endswith(_OFFLOADED)


def has_tiles(mode: Recompute) -> bool:
    """Return whether the last ops of a block may run tile by tile, as nothing of them is kept."""
    return without_offload(mode) in ("full", "attention")


def is_costly(node: Node) -> bool:
    """Return whether an op is a matrix product, convolution or attention, whose result selective
    recomputation keeps instead of rerunning the op.

    >>> [is_costly(Node("up", "op", f"aten.{op}")) for op in ("linear.default", "add.Tensor")]
    [True, False]
    """
    is_inner = node.fused is not None and not node.fused.writes  # part of a kernel over products
    return spec_of(node).is_costly and not is_inner


@dataclass(frozen=True, slots=True)
class Replay:
    """Ops and layout conversions that the backward of a recomputed block reruns.

    By mode, ``kept``: ops whose results are kept; ``skipped``: ops that are not rerun, including
    ``kept``; ``unread``: uses of values (an op and the position of its input) that recomputation
    does not need, so their layout conversion is not repeated.
    """

    kept: Mapping[Recompute, frozenset[str]]
    skipped: Mapping[Recompute, frozenset[str]]
    unread: Mapping[Recompute, frozenset[tuple[str, int]]]

    def repeats(self, uses: Iterable[tuple[str, int]]) -> tuple[bool, ...]:
        """Return, by ``RECOMPUTE_MODES``, whether the backward repeats a value's layout conversion.

        ``uses`` are all its uses in the block: an op and the position of its input.
        """
        uses = tuple(uses)
        return tuple(not self.unread[mode].issuperset(uses) for mode in RECOMPUTE_MODES)


def find_replay(block: Block, graph: Graph, rules: Rules, storages: Storages) -> Replay:
    """Return the ops and layout conversions that the backward of a recomputed block reruns.
    ``storages`` maps each value to the value that owns its memory."""
    return _Replays(block, graph, rules, storages).found


@dataclass
class _Replays:
    """Analysis of a block's ops: the values they save for the backward, and their users."""

    block: Block
    graph: Graph
    rules: Rules
    storages: Storages
    nodes: dict[str, Node] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = {name: self.graph[name] for name in self.block.nodes}

    @property
    def found(self) -> Replay:
        names = list(self.nodes)
        found: dict[Recompute, tuple[set[str], set[str]]] = {
            "full": (set(names[: self._stop]), set()),
            "selective": self._keeping(is_costly),
            "attention": self._keeping(is_attention),
        }
        skipped = {mode: frozenset(names) - again for mode, (again, _) in found.items()}
        unread = {mode: frozenset(self._unread(own)) for mode, own in skipped.items()}
        return Replay({mode: frozenset(kept) for mode, (_, kept) in found.items()}, skipped, unread)

    def _keeping(self, keeps: Callable[[Node], bool]) -> tuple[set[str], set[str]]:
        """Return the names of the ops that are rerun, and of the ops whose results are kept, if
        those of ops for which ``keeps`` is true are kept, or sums in place of them."""
        replaced: dict[str, str] = {}
        while True:
            again, kept = self._rerun(keeps, replaced)
            sums = dict(self._sums(again, kept))
            if not sums:
                return again, kept
            replaced |= sums

    @cached_property
    def _saved(self) -> dict[str, tuple[Ref, ...]]:
        return {name: self.rules.saved(node, self.graph) for name, node in self.nodes.items()}

    @cached_property
    def _makes(self) -> frozenset[str]:
        """Return the ops whose backward reads values that they make (result, statistics)."""
        extra = self.rules.saved_extra_bytes
        return frozenset(
            name
            for name, node in self.nodes.items()
            if any(ref.name == name for ref in self._saved[name])
            or extra(node, tuple(self.graph.spec(ref) for ref in node.inputs), node.outputs)
        )

    @cached_property
    def _roots(self) -> frozenset[str]:
        """Return the ops whose results are saved for the backward, directly or through views."""
        return frozenset(
            self.storages[ref.name, ref.index][0] for refs in self._saved.values() for ref in refs
        )

    @cached_property
    def _users(self) -> dict[str, dict[str, None]]:
        found: dict[str, dict[str, None]] = {name: {} for name in self.nodes}
        for name, node in self.nodes.items():
            for ref in node.inputs:
                if ref.name in found:
                    found[ref.name][name] = None
        return found

    @cached_property
    def _stop(self) -> int:
        """Return the number of ops that ``checkpoint`` reruns, until all saved values are complete.

        An op's inputs are saved before it runs; so a last product that saves only inputs is not
        run.
        """
        if self._reached and self._reached[-1] in self._products:
            return len(self._reached) - 1
        return len(self._reached)

    @cached_property
    def _reached(self) -> list[str]:
        """Return the ops of the block up to the last op that saves a tensor."""
        last = max((at for at, name in enumerate(self.nodes) if self._keeps(name)), default=-1)
        return list(self.nodes)[: last + 1]

    @cached_property
    def _products(self) -> frozenset[str]:
        """Return the costly ops that save only inputs, so recomputation need not rerun them."""
        costly = (name for name in self._reached if is_costly(self.nodes[name]))
        return frozenset(name for name in costly if name not in self._makes)

    @cached_property
    def _called(self) -> frozenset[str]:
        """Return the costly ops that the rerun calls because they save tensors: they need all their
        inputs, though their kernel's result is kept or not computed."""
        return frozenset(
            name for name in self._reached if is_costly(self.nodes[name]) and self._keeps(name)
        )

    @cached_property
    def _inner(self) -> frozenset[str]:
        """Return the ops of fused product kernels whose results stay out of memory: they run as
        part of the kernel of the last product."""
        kernels = (
            (name, node.fused) for name, node in self.nodes.items() if node.fused is not None
        )
        return frozenset(
            name for name, fused in kernels if fused.in_product_kernel and not fused.writes
        )

    def _keeps(self, name: str) -> bool:
        return bool(self._saved[name]) or name in self._makes

    def _rerun(
        self, keeps: Callable[[Node], bool], replaced: Mapping[str, str]
    ) -> tuple[set[str], set[str]]:
        """Return the names of ops that are rerun, and of ops whose results are kept.

        ``replaced`` maps an op whose result need not be kept to the sum that is kept instead.
        """
        sums = set(replaced.values())
        again: set[str] = set()
        kept: set[str] = set()
        without = self._products | self._inner
        keeping = (name for name in self._reached if self._keeps(name))
        wanted = [name for name in keeping if name not in without]
        wanted += [ref.name for refs in self._saved.values() for ref in refs]
        called = (ref.name for name in self._called for ref in self.nodes[name].inputs)
        wanted += [name for name in called if name not in self._inner]
        while wanted:
            name = wanted.pop()
            if name not in self.nodes or name in again or name in kept:
                continue
            if (name in sums or keeps(self.nodes[name])) and name not in replaced:
                kept.add(name)
            else:
                again.add(name)
                wanted += [ref.name for ref in self.nodes[name].inputs]
        return again, kept

    def _sums(self, again: set[str], kept: set[str]) -> Iterator[tuple[str, str]]:
        """Yield (kept op, sum) if recomputation needs the op's result only to compute the sum."""
        for name in self.nodes:
            found = self._sum_of(name, again) if name in kept else None
            if found is not None:
                yield name, found

    def _sum_of(self, kept: str, again: set[str]) -> str | None:
        """Return the only sum for which recomputation needs the result of ``kept``; else None."""
        if kept in self._roots or len(self.nodes[kept].outputs) > 1:
            return None
        most, name = self.nodes[kept].spec.num_bytes, kept
        while True:
            users = [user for user in self._users[name] if user in again or user in self._called]
            if len(users) != 1 or users[0] in self._called:
                return None
            (name,) = users
            node = self.nodes[name]
            if self._keeps(name) or len(node.outputs) > 1 or node.spec.num_bytes > most:
                return None
            if self._has_rows(name) != self._has_rows(kept):
                return None
            if packet(node.op) in _SUMS:
                return name
            if name in self._roots:
                return None

    def _has_rows(self, name: str) -> bool:
        """Return whether an op's result has a batch dimension, so that it grows with the batch."""
        return any(dim is not None for dim in self.graph.batch_dims.get(name, ()))

    def _unread(self, skipped: frozenset[str]) -> Iterator[tuple[str, int]]:
        """Yield (op, input position) of the inputs that recomputation does not need: of ops not
        rerun (``skipped``), except inputs saved for the backward and inputs of costly ops that are
        called for their saved tensors."""
        for name in skipped - self._called:
            for position, ref in enumerate(self.nodes[name].inputs):
                if ref not in self._saved[name]:
                    yield name, position
