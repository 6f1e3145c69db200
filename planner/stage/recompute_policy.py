"""Recomputation policies: the numbers of a stage's blocks that are recomputed, by mode.

In: the stage's classes of equal blocks, with counts; the seconds and bytes that a recomputed block
of each class adds. Out: the policies worth trying (numbers of fully and selectively recomputed
blocks of each class) and their added seconds and bytes, which are sums over blocks.

If there are few policies, all are tried. Otherwise the blocks of the commonest kind mix two of the
modes at a time, and all blocks of another kind are in one mode: among equal blocks, the best
mix for a memory limit, up to rounding to whole blocks, lies between two neighbours on the convex
hull of (bytes, seconds).

With ten kinds of blocks there are a million such policies. The policies that can be the best for
some limit are then found group by group (``efficient_policies``): seconds and bytes add up over
groups and transient bytes are a maximum, so a choice that is dominated within some groups stays
dominated whatever the other groups do (Bellman 1957; as for the states of a knapsack, Nemhauser and
Ullmann, Management Science 15, 1969). Long Pareto fronts are thinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from math import comb, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.recompute import BLOCK_MODES
from ..plan import Recompute
from ..requests.features import PLAIN_MODES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FEW_POLICIES = 400
"""Number of a stage's recomputation policies up to which all are tried."""

MOST_STEPS = 180
"""Maximum numbers of recomputed blocks to try; more are sampled evenly."""

MOST_POLICIES = 5_000
"""Maximum number of listed policies, and approximate maximum of points on a Pareto front."""

FEWEST_POINTS = 10
"""Minimum number of Pareto points that are kept for each size of transient bytes."""


POLICY_MODES = BLOCK_MODES[1:]
"""Modes of the blocks that a policy counts: all but "none"."""

USUAL_MODES = tuple(mode for mode in POLICY_MODES if mode in PLAIN_MODES)
"""Modes of ``POLICY_MODES`` that policies use unless another is asked for."""


def recomputing(forced: Recompute | None, modes: Sequence[Recompute] = ()) -> tuple[Recompute, ...]:
    """Return the modes that the policies of a stage use if one is ``forced`` or, with None, if
    blocks may be in ``modes``: ``USUAL_MODES``, of which some may not be allowed, unless another is
    asked for.

    >>> recomputing(None, ("none", "full", "attention")), recomputing("full")
    (('full', 'attention'), ('full', 'selective'))
    """
    asked = modes if forced is None else (forced,)
    found = tuple(mode for mode in POLICY_MODES if mode in asked)
    return USUAL_MODES if set(found) <= set(USUAL_MODES) else found


class RecomputePolicy(NamedTuple):
    """Numbers of blocks of a stage in each of ``POLICY_MODES``, by class of equal blocks; () where
    no block is in a mode."""

    full: tuple[int, ...] = ()
    selective: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()
    attention_offloaded: tuple[int, ...] = ()
    none_offloaded: tuple[int, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks that are recomputed or offloaded."""
        return sum(map(sum, self))

    def filled(self, num_classes: int) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of blocks, by mode and class."""
        return tuple(own or (0,) * num_classes for own in self)


NO_RECOMPUTE = RecomputePolicy()


def uniform_policy(mode: Recompute, counts: Sequence[int]) -> RecomputePolicy:
    """Return the policy that recomputes all blocks in one mode; ``counts``: blocks of each class.

    >>> uniform_policy("full", (1, 3))[:2]
    ((1, 3), (0, 0))
    """
    none = (0,) * len(counts)
    return RecomputePolicy(*(tuple(counts) if own == mode else none for own in POLICY_MODES))


@dataclass(frozen=True)
class Policies:
    """Recomputation policies of a stage as an array ``blocks[mode, policy, class]``: numbers of
    blocks by mode (``POLICY_MODES``) and class of equal blocks. The first recomputes no block."""

    blocks: Ints

    @staticmethod
    def of(policy: RecomputePolicy, num_classes: int) -> Policies:
        """Return one policy for a stage of ``num_classes`` classes of equal blocks, as an array."""
        return Policies(np.array(policy.filled(num_classes))[:, None])

    def __len__(self) -> int:
        return len(self.blocks[0])

    def __getitem__(self, number: int) -> RecomputePolicy:
        return RecomputePolicy(*map(tuple, self.blocks[:, number].tolist()))

    def within(self, modes: Sequence[Recompute]) -> NDArray[np.bool_]:
        """Return a mask by policy: whether it recomputes only in the modes ``modes``."""
        is_used: NDArray[np.bool_] = np.logical_or.reduce(self.blocks > 0, axis=2)
        denied = [number for number, mode in enumerate(POLICY_MODES) if mode not in modes]
        allowed: NDArray[np.bool_] = ~np.logical_or.reduce(is_used[denied], axis=0)
        return allowed

    def allowed(
        self, forced: Recompute | None, modes: Sequence[Recompute], counts: Sequence[int]
    ) -> NDArray[np.bool_]:
        """Return a mask by policy: whether it is allowed. ``counts``: blocks of each class.

        If a mode is ``forced``, only the policy with all blocks in this mode is allowed; otherwise
        every policy that recomputes only in ``modes`` is.
        """
        if forced is None:
            return self.within(modes)
        only = np.array(uniform_policy(forced, counts))[:, None]
        allowed: NDArray[np.bool_] = (self.blocks == only).all(axis=(0, 2))
        return allowed

    def sums(self, added: Floats) -> Floats:
        """Return, for each policy, the sum over its recomputed blocks of ``added[mode, class]``."""
        total = np.zeros(len(self))
        for own, of_mode in zip(self.blocks, added, strict=True):
            if own.any():
                total += own @ of_mode
        return total

    def largest(self, sizes: Floats) -> Floats:
        """Return, for each policy, the largest size of its recomputed blocks, 0 if none.

        Takes ``sizes[mode, …, class]``; returns ``[…, policy]``.
        """
        largest = np.zeros((*sizes.shape[1:-1], len(self)))
        for used, of_mode in zip(self._is_used, sizes, strict=True):
            for number, used_of_class in enumerate(used if used.any() else ()):
                np.maximum(largest, used_of_class * of_mode[..., number, None], out=largest)
        return largest

    def rest(self, counts: Sequence[int]) -> NDArray[np.bool_]:
        """Return ``[policy, class]``: whether a policy leaves blocks of a class as they are;
        ``counts``: blocks of each class."""
        found: NDArray[np.bool_] = np.array(counts) > self.blocks.sum(axis=0)
        return found

    @cached_property
    def _is_used(self) -> NDArray[np.bool_]:
        """Return ``[mode, class, policy]``: whether a policy recomputes any block of a class."""
        return self.blocks.swapaxes(1, 2) > 0


@dataclass(frozen=True, slots=True)
class RecomputeCosts:
    """Cost that recomputing a block adds: ``seconds[mode, class]`` per micro-batch,
    ``kept_bytes[mode, class]`` per micro-batch (negative for savings), ``transient_bytes[mode,
    zero, class]`` while it is recomputed. Of offloaded blocks: ``host_bytes[mode, class]`` per
    micro-batch in the host's memory, and ``exposed_seconds[direction, mode, class]``: the part of
    ``seconds`` in which the forward and the backward wait for copies."""

    seconds: Floats
    kept_bytes: Floats
    transient_bytes: Floats
    host_bytes: Floats
    exposed_seconds: Floats


def group_policies(
    counts: tuple[int, ...], kinds: tuple[str, ...], modes: tuple[Recompute, ...] = USUAL_MODES
) -> tuple[list[list[int]], list[Ints]]:
    """Return groups of classes (equal blocks), and for each group its policies: numbers of
    recomputed blocks ``[mode, policy, class]``. Every combination of the groups' policies is a
    policy of the stage. ``counts``, ``kinds``: blocks and kind of each class; ``modes``: modes of
    ``POLICY_MODES`` that they use."""
    number = len(modes)
    if prod(comb(count + number, number) for count in counts) <= FEW_POLICIES:
        return (
            [[number] for number in range(len(counts))],
            [_of_modes(_all_numbers(count, number), modes)[:, :, None] for count in counts],
        )
    groups = [[n for n, own in enumerate(kinds) if own == kind] for kind in dict.fromkeys(kinds)]
    sizes = [sum(counts[n] for n in group) for group in groups]
    commonest = sizes.index(max(sizes))
    numbers = [
        _mixes(size, number)
        if at == commonest
        else size * np.eye(number + 1, dtype=np.int64)[:number, ::-1]
        for at, size in enumerate(sizes)
    ]
    return groups, [
        _distributed(_of_modes(own, modes), counts=np.array([counts[n] for n in group]))
        for group, own in zip(groups, numbers, strict=True)
    ]


@lru_cache(maxsize=4096)
def num_policies(
    counts: tuple[int, ...], kinds: tuple[str, ...], modes: tuple[Recompute, ...] = USUAL_MODES
) -> int:
    """Return the number of recomputation policies that ``policies`` returns for these arguments."""
    return prod(own.shape[1] for own in group_policies(counts, kinds, modes)[1])


def _of_modes(blocks: Ints, modes: Sequence[Recompute]) -> Ints:
    """Return numbers of blocks, given by ``modes``, by ``POLICY_MODES``."""
    found = np.zeros((len(POLICY_MODES), *blocks.shape[1:]), dtype=np.int64)
    found[[POLICY_MODES.index(mode) for mode in modes]] = blocks
    return found


@lru_cache(maxsize=4096)
def policies(
    counts: tuple[int, ...], kinds: tuple[str, ...], modes: tuple[Recompute, ...] = USUAL_MODES
) -> Policies:
    """Return the recomputation policies of a stage to try, given the number of blocks and the kind
    of each class of equal blocks, and the modes that they use.

    >>> listed = policies((1,), ("layer",))
    >>> [listed[number][:2] for number in range(3)]
    [((0,), (0,)), ((0,), (1,)), ((1,), (0,))]
    """
    groups, of_group = group_policies(counts, kinds, modes)
    indices = np.indices([own.shape[1] for own in of_group]).reshape(len(of_group), -1)
    blocks = np.zeros((len(POLICY_MODES), indices.shape[1], len(counts)), dtype=np.int64)
    for group, own, chosen in zip(groups, of_group, indices, strict=True):
        blocks[:, :, group] = own[:, chosen]
    return Policies(blocks)


def _all_numbers(count: int, num_modes: int) -> Ints:
    """Return, as ``[mode, policy]``, all numbers of blocks among ``count`` in each of several
    modes.

    >>> _all_numbers(2, 2).tolist()
    [[0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 1, 0]]
    """
    every = np.indices((count + 1,) * num_modes).reshape(num_modes, -1)
    found: Ints = every[:, every.sum(axis=0) <= count]
    return found


def _mixes(count: int, num_modes: int) -> Ints:
    """Return, as ``[mode, policy]``, numbers of blocks that mix two of several modes and "none"
    over ``count`` blocks, sampled evenly if many.

    >>> _mixes(100, 2).shape, _mixes(1000, 2).shape, _mixes(1000, 2)[:, -1].tolist()
    ((2, 300), (2, 540), [994, 6])
    """
    steps = min(count, MOST_STEPS)
    numbers = np.round(count * np.arange(1, steps + 1) / steps).astype(np.int64)
    one = np.eye(num_modes, dtype=np.int64)
    parts = [np.zeros((num_modes, 1), dtype=np.int64)]
    parts += [own[:, None] * numbers for own in one[::-1]]
    parts += [
        one[a][:, None] * numbers[:-1] + one[b][:, None] * (count - numbers[:-1])
        for a, b in combinations(range(num_modes), 2)
    ]
    return np.concatenate(parts, axis=1)


def _distributed(blocks: Ints, *, counts: Ints) -> Ints:
    """Distribute recomputed ``blocks[mode, policy]`` over classes in order, first those of the
    first mode; return ``[mode, policy, class]``. ``counts``: blocks of each class."""
    before = np.cumsum(counts) - counts
    both = np.clip(np.cumsum(blocks, axis=0)[:, :, None] - before, 0, counts)
    return np.diff(both, axis=0, prepend=0)


def efficient_policies(
    counts: tuple[int, ...],
    kinds: tuple[str, ...],
    modes: tuple[Recompute, ...] = USUAL_MODES,
    *,
    costs: RecomputeCosts,
) -> Policies:
    """Return the policies on the Pareto fronts of seconds, kept bytes and transient bytes, a front
    for ``modes`` and one for each of them. The first recomputes nothing, and uniform policies are
    included."""
    allowed = [modes, *((mode,) for mode in modes if len(modes) > 1)]
    every: tuple[Recompute, ...] = ("none", *modes)
    none, *uniform = (np.array(uniform_policy(mode, counts))[:, None] for mode in every)
    groups = group_policies(counts, kinds, modes)
    fronts = [_front(groups, len(counts), costs, own).blocks for own in allowed]
    blocks = np.concatenate([none, *fronts, *uniform], axis=1)
    _, first = np.unique(np.concatenate(list(blocks), axis=1), axis=0, return_index=True)
    return Policies(blocks[:, np.sort(first)])


@dataclass(frozen=True, slots=True)
class _Points:
    """Recomputation policies as points of seconds and bytes. ``blocks[mode, point, class]``: number
    of recomputed blocks."""

    blocks: Ints
    seconds: Floats
    kept_bytes: Floats
    transient_bytes: Floats

    def take(self, index: Ints) -> _Points:
        return _Points(
            self.blocks[:, index],
            self.seconds[index],
            self.kept_bytes[index],
            self.transient_bytes[index],
        )


def _front(
    groups: tuple[list[list[int]], list[Ints]],
    num_classes: int,
    costs: RecomputeCosts,
    modes: Sequence[Recompute],
) -> _Points:
    """Return the Pareto front (seconds, bytes) of policies that recompute only in ``modes``."""
    points = _points(np.zeros((len(POLICY_MODES), 1, num_classes), dtype=np.int64), costs)
    for group, own in zip(*groups, strict=True):
        allowed = own[:, Policies(own).within(modes)]
        blocks = np.zeros((len(POLICY_MODES), allowed.shape[1], num_classes), dtype=np.int64)
        blocks[:, :, group] = allowed
        points = _undominated(_combined(points, _points(blocks, costs)))
    return points


def _points(blocks: Ints, costs: RecomputeCosts) -> _Points:
    used = (blocks > 0)[:, None] * costs.transient_bytes[:, :, None]
    return _Points(
        blocks,
        np.einsum("mpc,mc->p", blocks, costs.seconds),
        np.einsum("mpc,mc->p", blocks, costs.kept_bytes),
        used.max(axis=(0, 3)).T,
    )


def _combined(one: _Points, other: _Points) -> _Points:
    """Return all policies that join a policy of ``one`` and a policy of ``other``; their seconds
    and kept bytes add up."""
    here = np.repeat(np.arange(len(one.seconds)), len(other.seconds))
    there = np.tile(np.arange(len(other.seconds)), len(one.seconds))
    return _Points(
        one.blocks[:, here] + other.blocks[:, there],
        one.seconds[here] + other.seconds[there],
        one.kept_bytes[here] + other.kept_bytes[there],
        np.maximum(one.transient_bytes[here], other.transient_bytes[there]),
    )


def _undominated(points: _Points) -> _Points:
    """Return, for each distinct size of transient bytes, the Pareto front of seconds and kept
    bytes, thinned if long."""
    _, group = np.unique(points.transient_bytes, axis=0, return_inverse=True)
    group = group.ravel()
    order = np.lexsort((points.seconds, points.kept_bytes, group))
    fronts = []
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    most = max(FEWEST_POINTS, MOST_POLICIES // len(starts))
    for own in np.split(order, starts[1:]):
        least = np.minimum.accumulate(points.seconds[own])
        front = own[np.append(True, points.seconds[own][1:] < least[:-1])]
        if len(front) > most:
            front = front[np.linspace(0, len(front) - 1, most).astype(np.int64)]
        fronts.append(front)
    return points.take(np.concatenate(fronts))
