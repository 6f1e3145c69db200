"""Seconds of an op between measured ones of its kind.

In: measured samples (features, FLOPs, bytes, seconds) of one kind of op in one direction.
Out: for another size, seconds and the relative error to expect, or None.

The base is the roofline that fits the samples best, t₀ + FLOPs/F + bytes/B with t₀, 1/F and
1/B not negative, by least squares of relative errors. The rest, log(measured / base), is
interpolated over the logarithms of the features by a local linear regression (Cleveland,
"Robust Locally Weighted Regression", JASA 74, 1979; weights (d² + s²)⁻² for a distance of d
octaves, slopes damped), and held within the measured range. The answer is then bounded: an op
no smaller in any feature than a measured one is not faster, one no larger is not slower.
Where the only feature is a size in bytes, the measured points are made monotone (pool
adjacent violators) and joined by straight lines in log-log instead, so that more bytes are
never faster.

A size may lie outside the measured ones by a factor of ``MAX_EXTRAPOLATION`` in all, over
its features and in FLOPs and bytes; beyond that the answer is None.

The error is found by leaving out: each sample is predicted by the others (of other ops, where
the samples are of several ops and stand in for one that was never measured). The error of an
answer is the root mean square of these errors, half of the weight on all alike and half by
nearness. It grows by half per factor of two outside the measured sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import log2
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MAX_EXTRAPOLATION = 4.0
MIN_SAMPLES = 3

_MOST_OCTAVES = log2(MAX_EXTRAPOLATION) + 1e-9
_NEAR_OCTAVES = 0.5
"""Distance, in factors of two of the features, within which samples have nearly equal weight."""
_DAMPING = 0.05
_REFIT_LIMIT = 48
"""Number of samples above which the roofline is not fitted again when one is left out, as that
hardly changes it."""
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured ``seconds`` of an op's forward or backward. ``features`` are the sizes (≥ 1) that
    its speed depends on, such as (batch, m, n, k) of a matrix product."""

    features: tuple[float, ...]
    flops: float
    num_bytes: float
    seconds: float
    op: str


@dataclass(frozen=True)
class Curve:
    """Interpolation of the seconds of one kind of op between measured samples. ``pooled``: the
    samples are of several ops and are used for an op without samples. ``base``: the roofline's
    coefficients that ``fit_base`` would return, if known."""

    samples: tuple[Sample, ...]
    pooled: bool = False
    base: tuple[float, float, float] | None = None
    features: Floats = field(init=False)
    logs: Floats = field(init=False)
    work: Floats = field(init=False)
    coefficients: Floats = field(init=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        sizes = np.array([sample.features for sample in self.samples], dtype=np.float64)
        work = np.array([(1.0, each.flops, each.num_bytes) for each in self.samples])
        seconds = np.array([sample.seconds for sample in self.samples])
        fitted = fit_base(work, seconds) if self.base is None else np.array(self.base)
        set_field(self, "features", np.log2(np.maximum(sizes, 1.0)))
        set_field(self, "work", work)
        set_field(self, "coefficients", fitted)
        set_field(self, "logs", np.log(seconds / (work @ fitted)))

    def at(self, features: Sequence[float], flops: float, num_bytes: float) -> float | None:
        """Return the seconds of an op with these features (sizes such as m, n, k), FLOPs and bytes;
        None if they are outside the range of the samples by more than ``MAX_EXTRAPOLATION``."""
        place, work = _place(features), np.array((1.0, flops, num_bytes))
        if self._octaves_outside(place, work) > _MOST_OCTAVES:
            return None
        return self._seconds(place, work, self._squares(place))

    def estimate(
        self, features: Sequence[float], flops: float, num_bytes: float
    ) -> tuple[float, float] | None:
        """Return (seconds, expected relative error) of an op with these features (sizes such as m,
        n, k), FLOPs and bytes; None if they are too far from the samples, or these too few."""
        place, work = _place(features), np.array((1.0, flops, num_bytes))
        outside = self._octaves_outside(place, work)
        known, errors, overall = self._known_errors
        if outside > _MOST_OCTAVES or not len(errors):
            return None
        squares = self._squares(place)
        weights = 1.0 / (squares[known] + (2 * _NEAR_OCTAVES) ** 2) ** 2
        near = float(weights @ errors / weights.sum())
        error = float(np.sqrt((near + overall) / 2)) * (1 + 0.5 * outside)
        return self._seconds(place, work, squares), error

    @cached_property
    def _known_errors(self) -> tuple[Any, Floats, float]:
        """Indices of the samples that can be predicted from the other samples, the squared relative
        error of each prediction, and the mean of these squares."""
        known = np.flatnonzero(~np.isnan(self.left_out))
        errors = self.left_out[known] ** 2
        return known, errors, float(errors.mean()) if len(errors) else 0.0

    @cached_property
    def left_out(self) -> Floats:
        """Relative error of predicting each sample from the others; NaN if these are too few."""
        errors = np.full(len(self.samples), np.nan)
        for at, sample in enumerate(self.samples):
            curve = self._without(at)
            if curve is None:
                continue
            found = curve.at(sample.features, sample.flops, sample.num_bytes)
            if found is not None:
                errors[at] = np.expm1(abs(np.log(found / sample.seconds)))
        return errors

    def _without(self, at: int) -> Curve | None:
        left = self.samples[at]
        others = tuple(
            each
            for index, each in enumerate(self.samples)
            if index != at and not (self.pooled and each.op == left.op)
        )
        if len(others) < 2:
            return None
        keep = len(self.samples) > _REFIT_LIMIT and not self.pooled
        base = tuple(float(each) for each in self.coefficients) if keep else None
        return Curve(others, self.pooled, base)  # type: ignore[arg-type]

    def _octaves_outside(self, place: Floats, work: Floats) -> float:
        """Return by how many factors of two an op lies outside the samples' range: the larger of
        the sum over features and the maximum over FLOPs and bytes. ``place``: log2 of the op's
        features; ``work``: (1, FLOPs, bytes)."""
        low, high, least, most = self._box
        over = np.maximum(place - high, low - place)
        wanted = np.log2(np.maximum(work[1:], 1.0))
        beyond = np.maximum(wanted - most, least - wanted)
        return max(float(over[over > 0].sum()), float(beyond.max()), 0.0)

    @cached_property
    def _box(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Least and greatest features of the samples, then least and greatest FLOPs and bytes
        (log2)."""
        logs = np.log2(np.maximum(self.work[:, 1:], 1.0))
        return (*_ends(self.features), *_ends(logs))

    def _seconds(self, place: Floats, work: Floats, squares: Floats) -> float:
        base = float(work @ self.coefficients)
        if self.features.shape[1] == 1:
            return base * float(np.exp(self._joined_at(float(place[0]), base)))
        found = base * float(np.exp(self._residual(place, squares)))
        return found if self.pooled else self._bounded(found, place, work)

    def _squares(self, place: Floats) -> Floats:
        """Return each sample's squared distance from ``place`` (log2 of features)."""
        offsets = self.features - place
        squares: Floats = np.einsum("ij,ij->i", offsets, offsets)
        return squares

    def _residual(self, place: Floats, squares: Floats) -> float:
        """Return the logarithm of the ratio of measured to roofline seconds, interpolated at
        ``place`` (log2 of features) by linear regression. ``squares``: squared distance of each
        sample, which lowers its weight."""
        weights = 1.0 / (squares + _NEAR_OCTAVES**2) ** 2
        weights /= weights.sum()
        offsets = self.features - place
        mean_offset = weights @ offsets
        mean = float(weights @ self.logs)
        centred = offsets - mean_offset
        spread = (centred * weights[:, None]).T @ centred
        spread[np.diag_indices_from(spread)] += _DAMPING
        slopes = np.linalg.solve(spread, centred.T @ (weights * (self.logs - mean)))
        found = mean - float(slopes @ mean_offset)
        return min(max(found, self._log_range[0]), self._log_range[1])

    @cached_property
    def _log_range(self) -> tuple[float, float]:
        return float(self.logs.min()), float(self.logs.max())

    def _bounded(self, seconds: float, place: Floats, work: Floats) -> float:
        """Return ``seconds`` of an op, raised to the time of any measured op that is no larger in
        any size, and lowered to the time of any that is no smaller. ``place``: log2 of the op's
        features; ``work``: (1, FLOPs, bytes)."""
        smaller = (self.features <= place + 1e-9).all(axis=1)
        smaller &= (self.work <= work * _ROUNDING).all(axis=1)
        larger = (self.features >= place - 1e-9).all(axis=1)
        larger &= (self.work * _ROUNDING >= work).all(axis=1)
        low = float(self._measured[smaller].max(initial=0.0))
        high = float(self._measured[larger].min(initial=np.inf))
        if low > high:  # noise: the two measurements contradict each other
            return float(np.sqrt(low * high))
        return min(max(seconds, low), high)

    @cached_property
    def _measured(self) -> Floats:
        return np.array([sample.seconds for sample in self.samples])

    @cached_property
    def _joined(self) -> tuple[Floats, Floats]:
        """Line through the samples of an op with a single feature: the distinct values of log2 of
        the feature, and log(seconds) at each, made non-decreasing."""
        sizes, groups = np.unique(self.features[:, 0], return_inverse=True)
        counts = np.bincount(groups).astype(np.float64)
        means = np.bincount(groups, weights=np.log(self._measured)) / counts
        return sizes, pooled_adjacent(means, counts)

    def _joined_at(self, place: float, base: float) -> float:
        """Return the logarithm of the ratio of seconds to the roofline's ``base`` seconds at
        ``place`` (log2 of the only feature), on the line through the samples, continued like the
        roofline."""
        sizes, values = self._joined
        if sizes[0] <= place <= sizes[-1]:
            return float(np.interp(place, sizes, values) - np.log(base))
        end = 0 if place < sizes[0] else -1
        last = float(2.0 ** sizes[end])
        there = self.coefficients[0] + self._seconds_per_byte * last
        here = self.coefficients[0] + self._seconds_per_byte * 2.0**place
        return float(values[end] + np.log(here / there) - np.log(base))

    @cached_property
    def _seconds_per_byte(self) -> float:
        """Seconds per unit of the only feature (bytes) in the roofline, if FLOPs are in
        proportion."""
        sizes = 2.0 ** self.features[:, 0]
        variable = self.work[:, 1:] @ self.coefficients[1:]
        return float((variable / sizes).mean())


def _ends(values: Floats) -> tuple[Floats, Floats]:
    return values.min(axis=0), values.max(axis=0)


def _place(features: Sequence[float]) -> Floats:
    return np.array([log2(max(each, 1.0)) for each in features])


def fit_base(work: Floats, seconds: Floats) -> Floats:
    """Fit the roofline t₀ + FLOPs/F + bytes/B to measured ``seconds``; return (t₀, 1/F, 1/B), all ≥
    0, with the least squares of relative errors. ``work`` has a row (1, FLOPs, bytes) per
    measurement. Of all subsets of the three terms, the best without a negative one is returned."""
    rows = work / seconds[:, None]
    best: tuple[float, Floats] | None = None
    for count in (1, 2, 3):
        for terms in combinations(range(3), count):
            chosen = rows[:, terms]
            scale = np.maximum(np.abs(chosen).max(axis=0), 1e-300)
            found: Any = np.linalg.lstsq(chosen / scale, np.ones(len(rows)), rcond=1e-9)[0]
            if (found < 0).any():
                continue
            coefficients = np.zeros(3)
            coefficients[list(terms)] = found / scale
            residue = float(((rows @ coefficients - 1) ** 2).sum())
            if (best is None or residue < best[0] - 1e-12) and (work @ coefficients > 0).all():
                best = residue, coefficients
    if best is None:  # only a constant fits, and a constant always does
        return np.array((float(np.median(seconds)), 0.0, 0.0))
    return best[1]


def pooled_adjacent(values: Floats, counts: Floats) -> Floats:
    """Return the non-decreasing sequence that is nearest to ``values``: neighbours that decrease
    are replaced by their mean (isotonic regression). ``counts``: weights of the values.

    >>> pooled_adjacent(np.array([1.0, 3.0, 2.0]), np.ones(3)).tolist()
    [1.0, 2.5, 2.5]
    """
    pools: list[list[float]] = []
    for value, count in zip(values, counts, strict=True):
        pools.append([float(value), float(count), 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            last = pools.pop()
            into = pools[-1]
            total = into[1] + last[1]
            into[0] = (into[0] * into[1] + last[0] * last[1]) / total
            into[1], into[2] = total, into[2] + last[2]
    return np.repeat([pool[0] for pool in pools], [int(pool[2]) for pool in pools])
