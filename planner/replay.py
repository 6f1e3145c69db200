"""What recomputation runs again in the backward, and what it keeps until then.

``full`` keeps only what a block reads from outside, and runs its forward again as far as the
last op that keeps anything. ``selective`` keeps the results of matrix products, convolutions
and attention besides, and runs the rest again, collectives included: these results cost much to
make for their size (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", drop what costs little instead).

Nothing is kept, run or converted again that no gradient reads. The last product of a block that
ends in a residual sum is neither kept nor run again. Of a product that is only added to something
the sum is kept in its place: it is as large, and nothing before it is wanted again; where the
product is a partial sum on every rank (row-parallel), what is kept is reduced, and its collective
is not run again either.

It is what ``passes.local.recomputing`` does with ``torch.utils.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from .graph import Block, Graph, Node, Ref
from .plan import Recompute
from .rules.table import packet
from .rules_protocol import Rules

RECOMPUTE_MODES: tuple[Recompute, Recompute] = ("full", "selective")
"""The ways to recompute, as arrays over them have them."""

RecomputedPart = Literal[
    "core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts", "ssm"
]
"""``core_attn``: scores, softmax and their product with values. ``layernorm``: the norms of a
layer. ``mla_up_proj``: queries, keys and values from their latent forms. ``mlp``: a dense
feed-forward. ``moe``: router, experts and shared experts. ``moe_act``: the activation of experts,
which takes no time of note. ``shared_experts``: those alone. ``ssm``: a state-space layer between
its projections, which mamba_ssm's kernel runs again whatever is asked."""

RECOMPUTED_PARTS: tuple[RecomputedPart, ...] = get_args(RecomputedPart)

_COSTLY = frozenset(
    (
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "convolution"),
        *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
        "scaled_dot_product_attention",
    )
)
_SUMS = frozenset(("add", "sub"))


Storages = Mapping[tuple[str, int], tuple[str, int]]
"""For each value the one whose memory it lives in, as ``Rules.storage_of`` gives them."""


def is_costly(node: Node) -> bool:
    """Return whether selective recomputation does not run an op again.

    >>> [is_costly(Node("up", "op", f"aten.{op}")) for op in ("linear.default", "add.Tensor")]
    [True, False]
    """
    is_inner = node.fused is not None and not node.fused.writes  # of a kernel over products
    return packet(node.op) in _COSTLY and not is_inner


@dataclass(frozen=True, slots=True)
class Replay:
    """What the backward of a recomputed block does to have again what gradients read.

    ``kept``: the ops whose results ``selective`` keeps. By mode ``skipped``: the ops that are not
    run again, those among them; ``unread``: the uses (an op and the position of its input)
    whose value is not brought again to the layout that the op wants.
    """

    kept: frozenset[str]
    skipped: Mapping[Recompute, frozenset[str]]
    unread: Mapping[Recompute, frozenset[tuple[str, int]]]

    def repeats(self, uses: Iterable[tuple[str, int]]) -> tuple[bool, bool]:
        """Return whether a value is converted again, in each of ``RECOMPUTE_MODES``.

        ``uses`` are all those in the block: an op and the position of its input.
        """
        uses = tuple(uses)
        full, selective = (not self.unread[mode].issuperset(uses) for mode in RECOMPUTE_MODES)
        return full, selective


def find_replay(block: Block, graph: Graph, rules: Rules, storages: Storages) -> Replay:
    """What the backward of a block runs again, in each of ``RECOMPUTE_MODES``."""
    return _Replays(block, graph, rules, storages).found


@dataclass
class _Replays:
    """One block's ops in order, what each keeps, and who reads whom inside."""

    block: Block
    graph: Graph
    rules: Rules
    storages: Storages
    nodes: dict[str, Node] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = {name: self.graph[name] for name in self.block.nodes}

    @property
    def found(self) -> Replay:
        replaced: dict[str, str] = {}
        while True:
            again, kept = self._selective(replaced)
            sums = dict(self._sums(again, kept))
            if not sums:
                break
            replaced |= sums
        names = list(self.nodes)
        full = frozenset(names[: self._stop])
        skipped: dict[Recompute, frozenset[str]] = {
            "full": frozenset(names) - full, "selective": frozenset(names) - again
        }  # fmt: skip
        unread = {mode: frozenset(self._unread(own)) for mode, own in skipped.items()}
        return Replay(frozenset(kept), skipped, unread)

    @cached_property
    def _saved(self) -> dict[str, tuple[Ref, ...]]:
        return {name: self.rules.saved(node, self.graph)
                for name, node in self.nodes.items()}  # fmt: skip

    @cached_property
    def _makes(self) -> frozenset[str]:
        """The ops whose own run makes something that is kept for their gradient: a result, or
        more than results."""
        extra = self.rules.saved_extra_bytes
        return frozenset(
            name
            for name, node in self.nodes.items()
            if any(ref.name == name for ref in self._saved[name])
            or extra(node, tuple(self.graph.spec(ref) for ref in node.inputs), node.outputs)
        )

    @cached_property
    def _roots(self) -> frozenset[str]:
        """The ops whose memory holds what some gradient reads."""
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
        """How many ops run before all is there that gradients read: ``checkpoint`` stops then.

        What an op reads is kept before it runs.
        """
        if self._reached and self._reached[-1] in self._products:
            return len(self._reached) - 1
        return len(self._reached)

    @cached_property
    def _reached(self) -> list[str]:
        """The ops as far as the last that keeps anything."""
        last = max((at for at, name in enumerate(self.nodes) if self._keeps(name)), default=-1)
        return list(self.nodes)[: last + 1]

    @cached_property
    def _products(self) -> frozenset[str]:
        """Costly ops that keep nothing but what they read: they need not run for it."""
        costly = (name for name in self._reached if is_costly(self.nodes[name]))
        return frozenset(name for name in costly if name not in self._makes)

    @cached_property
    def _called(self) -> frozenset[str]:
        """Costly ops that are called again for what they keep, their kernels' results given back
        or not computed: whatever they read is wanted."""
        return frozenset(
            name for name in self._reached if is_costly(self.nodes[name]) and self._keeps(name)
        )

    @cached_property
    def _inner(self) -> frozenset[str]:
        """The ops of kernels over products whose results no memory holds: they run in the call of
        the last product."""
        kernels = (
            (name, node.fused) for name, node in self.nodes.items() if node.fused is not None
        )
        return frozenset(
            name for name, fused in kernels if fused.in_product_kernel and not fused.writes
        )

    def _keeps(self, name: str) -> bool:
        return bool(self._saved[name]) or name in self._makes

    def _selective(self, replaced: Mapping[str, str]) -> tuple[set[str], set[str]]:
        """The ops that run again, and those whose results are kept.

        ``replaced``: of products and sums the sum that is kept in their place.
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
            if (name in sums or is_costly(self.nodes[name])) and name not in replaced:
                kept.add(name)
            else:
                again.add(name)
                wanted += [ref.name for ref in self.nodes[name].inputs]
        return again, kept

    def _sums(self, again: set[str], kept: set[str]) -> Iterator[tuple[str, str]]:
        """What is kept of which only a sum is wanted, and that sum."""
        for name in self.nodes:
            found = self._sum_of(name, again) if name in kept else None
            if found is not None:
                yield name, found

    def _sum_of(self, kept: str, again: set[str]) -> str | None:
        """The sum that alone of what runs again reads a value, through ops that keep nothing."""
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
        """Return whether a value has the batch's rows: one without is smaller in larger batches."""
        return any(dim is not None for dim in self.graph.batch_dims.get(name, ()))

    def _unread(self, skipped: frozenset[str]) -> Iterator[tuple[str, int]]:
        """Use by what does not run again; costly ops are called for what they keep."""
        for name in skipped - self._called:
            for position, ref in enumerate(self.nodes[name].inputs):
                if ref not in self._saved[name]:
                    yield name, position
