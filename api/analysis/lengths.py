"""A plan's steps when sequences have several lengths: padded to the planned one, or in buckets.

In: a plan with its model, and the lengths of a corpus. Out: for the planned length alone and for
the best one, two and three buckets beside it, the mean seconds of a step and the padding. Samples
are taken to be drawn independently, so the longest of B has at most length l with probability
F(l)^B, F being the share of the corpus up to l. Steps of every bucket are priced as the plan is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import fmean

from autoparallel.analysis.plan_model import PlanModel
from autoparallel.planner.dims.padding import find_padding
from autoparallel.planner.errors import AutoparallelError, UsageError
from autoparallel.planner.evaluate.evaluate import Evaluator
from autoparallel.planning.plan import priced
from autoparallel.runtime.data.variants import bucket_variants, variant_of

MOST_BUCKETS = 3
"""Buckets beside the planned length at the most: each is a program of its own."""
NUM_CANDIDATES = 10
"""Lengths of buckets that are priced: quantiles of the longest sequences of steps."""
MULTIPLE = 64
"""Number that divides the lengths of buckets: a tile of GPU kernels."""


@dataclass(frozen=True, slots=True)
class Bucketed:
    """Steps in buckets. ``buckets``: lengths, the planned one last; ``shares``: of steps, by
    bucket; ``seconds``: of a step, by bucket; ``step_seconds``: of a step in the mean;
    ``tokens_per_second``: without padding; ``padding``: share of the computed positions."""

    buckets: tuple[int, ...]
    shares: tuple[float, ...]
    seconds: tuple[float, ...]
    step_seconds: float
    tokens_per_second: float
    padding: float


@dataclass(frozen=True, slots=True)
class LengthPrices:
    """Prices of a corpus' lengths: their number, mean and largest, and steps by number of
    buckets, from none on."""

    number: int
    mean: float
    largest: int
    options: tuple[Bucketed, ...]

    @property
    def best(self) -> Bucketed:
        """Steps with the fewest buckets within 1 % of the fastest."""
        least = min(each.step_seconds for each in self.options)
        return next(each for each in self.options if each.step_seconds <= 1.01 * least)


def price_lengths(model: PlanModel, lengths: Sequence[int]) -> LengthPrices:
    """Return prices of a plan's steps for sequences of ``lengths`` positions.

    Raises UsageError AP379 if a sequence is longer than planned, and PlanError AP560 if padding
    would change the model's result.
    """
    planned, _ = find_padding(model.program.graph)
    largest = max(lengths)
    if largest > planned:
        longer = sum(each > planned for each in lengths)
        raise UsageError(
            "AP379",
            f"{longer} of {len(lengths)} sequences are longer than the plan's {planned} positions",
            why=f"the longest has {largest}",
            fix=f"plan with --seq {largest}, or cut the sequences",
        )
    steps = _Steps(sorted(lengths), model.plan.model.global_batch)
    seconds = {planned: model.plan.prediction.step_seconds}
    seconds |= _bucket_seconds(model, steps.candidates(planned))
    shorter = sorted(set(seconds) - {planned})
    options = []
    for number in range(min(MOST_BUCKETS, len(shorter)) + 1):
        choices = ((*each, planned) for each in combinations(shorter, number))
        options.append(
            min(
                (steps.bucketed(each, seconds) for each in choices),
                key=lambda each: each.step_seconds,
            )
        )
    return LengthPrices(len(lengths), fmean(lengths), largest, tuple(options))


def _bucket_seconds(model: PlanModel, lengths: Iterable[int]) -> Iterator[tuple[int, float]]:
    """Yield lengths that the plan's layouts divide, with the seconds of a step of that length."""
    planned, plan = variant_of(model.program, model.plan), model.plan
    ratio = plan.prediction.step_seconds / model.base.step_seconds
    for length in lengths:
        try:
            (variant,) = bucket_variants(planned, (length,))
        except AutoparallelError as error:
            if error.code == "AP560":
                raise
            continue
        (own,) = variant.slices
        program = replace(model.program, graph=own.graph, blocks=own.blocks)
        graph, basis = priced(program, model.target, plan.cluster, model.options)
        found = Evaluator(graph, own.blocks, basis=basis).evaluation(own.plan, plan.cluster)
        yield length, ratio * found.step_seconds


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of ``batch`` samples each, whose lengths are drawn from ``lengths``, in order."""

    lengths: Sequence[int]
    batch: int

    def share_upto(self, length: int) -> float:
        """Return the share of steps without a sequence longer than ``length``."""
        return float((bisect_right(self.lengths, length) / len(self.lengths)) ** self.batch)

    def candidates(self, planned: int) -> list[int]:
        """Return lengths of buckets: quantiles of the longest sequence of a step, rounded up."""
        found = set()
        for number in range(1, NUM_CANDIDATES + 1):
            share = (number / NUM_CANDIDATES) ** (1 / self.batch)
            longest = self.lengths[min(int(share * len(self.lengths)), len(self.lengths) - 1)]
            found.add(-(-longest // MULTIPLE) * MULTIPLE)
        return sorted(each for each in found if each < planned)

    def bucketed(self, buckets: tuple[int, ...], seconds: Mapping[int, float]) -> Bucketed:
        """Return the steps in ``buckets``; ``seconds`` of a step by length."""
        upto = [0.0, *map(self.share_upto, buckets)]
        shares = tuple(after - before for before, after in pairwise(upto))
        own = tuple(seconds[each] for each in buckets)
        mean = sum(share * each for share, each in zip(shares, own, strict=True))
        computed = sum(share * each for share, each in zip(shares, buckets, strict=True))
        kept = fmean(self.lengths)
        return Bucketed(buckets, shares, own, mean, self.batch * kept / mean, 1 - kept / computed)
