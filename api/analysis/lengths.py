"""A plan's steps when sequences have several lengths: padded to the planned one, or in buckets.

In: a plan with its model, and the lengths of a corpus. Out: for the planned length alone and for
the best one, two and three buckets beside it, the mean seconds of a step and the padding. Samples
are taken to be drawn independently, so the longest of B has at most length l with probability
F(l)^B, F being the share of the corpus up to l. Beside that batches of sequences of one bucket each
are priced, with as many rows as make no more positions than planned. Steps of every bucket are
priced as the plan is, in the layouts that a run would use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
Shape = tuple[int, int]
"""Length and number of rows of a batch."""
MULTIPLE = 64
"""Number that divides the lengths of buckets: a tile of GPU kernels."""


@dataclass(frozen=True, slots=True)
class Bucketed:
    """Steps in buckets. ``buckets``: lengths, the planned one last; ``shares``: of steps, by
    bucket; ``seconds``: of a step, by bucket; ``step_seconds``: of a step in the mean;
    ``tokens_per_second``: without padding; ``padding``: share of the computed positions; ``rows``:
    of a step, by bucket."""

    buckets: tuple[int, ...]
    shares: tuple[float, ...]
    seconds: tuple[float, ...]
    step_seconds: float
    tokens_per_second: float
    padding: float
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LengthPrices:
    """Prices of a corpus' lengths: their number, mean and largest, and steps by number of
    buckets, from none on: ``options`` of samples drawn at random, ``grouped`` by bucket."""

    number: int
    mean: float
    largest: int
    options: tuple[Bucketed, ...]
    grouped: tuple[Bucketed, ...]


def best_of(options: Sequence[Bucketed]) -> Bucketed:
    """Return the steps with the fewest buckets within 1 % of the most tokens per second."""
    most = max(each.tokens_per_second for each in options)
    return next(each for each in options if 1.01 * each.tokens_per_second >= most)


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
    batch = model.plan.model.global_batch
    steps = _Steps(sorted(lengths), batch)
    shorter = steps.candidates(planned)
    shapes = [(each, batch) for each in shorter]
    shapes += [(each, batch * (planned // each)) for each in shorter if 2 * each <= planned]
    seconds = dict(_bucket_seconds(model, shapes))
    seconds[planned, batch] = model.plan.prediction.step_seconds
    drawn = {shape: each for shape, each in seconds.items() if shape[1] == batch}
    options, grouped = _options(steps.bucketed, drawn), _options(steps.grouped, seconds)
    return LengthPrices(len(lengths), fmean(lengths), largest, options, grouped)


def _options(
    price: Callable[[tuple[Shape, ...], Mapping[Shape, float]], Bucketed],
    seconds: Mapping[Shape, float],
) -> tuple[Bucketed, ...]:
    """Return the best steps for each number of buckets. ``seconds``: of a step of each shape; of
    several with one length, the last has most rows. ``price`` prices some of them."""
    *shorter, planned = {length: (length, rows) for length, rows in sorted(seconds)}.values()
    found = []
    for number in range(min(MOST_BUCKETS, len(shorter)) + 1):
        choices = (price((*each, planned), seconds) for each in combinations(shorter, number))
        found.append(max(choices, key=lambda each: each.tokens_per_second))
    return tuple(found)


def _bucket_seconds(model: PlanModel, shapes: Iterable[Shape]) -> Iterator[tuple[Shape, float]]:
    """Yield the shapes of batches that the plan can run, with the seconds of a step."""
    planned, plan = variant_of(model.program, model.plan), model.plan
    ratio = plan.prediction.step_seconds / model.base.step_seconds
    _, basis = priced(model.program, model.target, plan.cluster, model.options)
    for shape in shapes:
        try:
            (variant,) = bucket_variants(planned, (shape,), basis)
        except AutoparallelError as error:
            if error.code == "AP560":
                raise
            continue
        (own,) = variant.slices
        program = replace(model.program, graph=own.graph, blocks=own.blocks)
        graph, used = priced(program, model.target, plan.cluster, model.options)
        found = Evaluator(graph, own.blocks, basis=used).evaluation(own.plan, plan.cluster)
        yield shape, ratio * found.step_seconds


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

    def bucketed(self, shapes: tuple[Shape, ...], seconds: Mapping[Shape, float]) -> Bucketed:
        """Return the steps in buckets of ``shapes`` of samples drawn at random; ``seconds`` of a
        step by shape."""
        upto = [0.0, *(self.share_upto(length) for length, _ in shapes)]
        shares = [after - before for before, after in pairwise(upto)]
        return self._of_shares(shares, shapes, seconds)

    def grouped(self, shapes: tuple[Shape, ...], seconds: Mapping[Shape, float]) -> Bucketed:
        """Return the steps whose sequences are all of one bucket."""
        upto = [0, *(bisect_right(self.lengths, length) for length, _ in shapes)]
        numbers = [
            (after - before) / rows
            for (before, after), (_, rows) in zip(pairwise(upto), shapes, strict=True)
        ]
        return self._of_shares([each / sum(numbers) for each in numbers], shapes, seconds)

    def _of_shares(
        self, shares: Sequence[float], shapes: tuple[Shape, ...], seconds: Mapping[Shape, float]
    ) -> Bucketed:
        lengths, rows = zip(*shapes, strict=True)
        own = tuple(seconds[each] for each in shapes)
        step = sum(share * each for share, each in zip(shares, own, strict=True))
        samples = sum(share * each for share, each in zip(shares, rows, strict=True))
        computed = sum(share * a * b for share, (a, b) in zip(shares, shapes, strict=True))
        kept = samples * fmean(self.lengths)
        return Bucketed(lengths, tuple(shares), own, step, kept / step, 1 - kept / computed, rows)
