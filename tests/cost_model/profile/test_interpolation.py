"""Interpolation against laws that are known: it recovers them within the error it states."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.cost_model.profile.interpolation import (
    MAX_EXTRAPOLATION,
    Curve,
    Sample,
    fit_base,
    pooled_adjacent,
)

Law = Callable[[float, float, float], float]


def roofline(m: float, n: float, k: float) -> float:
    """5 µs, 100 TFLOP/s, 2 TB/s."""
    return 5e-6 + 2 * m * n * k / 100e12 + 2 * (m * k + n * k + m * n) / 2e12


def uneven(m: float, n: float, k: float) -> float:
    """Small sides fill tiles of 128 badly: the rate rises with m and n, and saturates."""
    rate = 400e12 * m / (m + 128) * n / (n + 128)
    return 4e-6 + 2 * m * n * k / rate


def drawn(law: Law, count: int, *, seed: int, noise: float = 0.0) -> list[Sample]:
    generator = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        m, n, k = (float(2**p) for p in generator.uniform(6, 13, 3))
        seconds = law(m, n, k) * float(np.exp(noise * generator.standard_normal()))
        num_bytes = 2 * (m * k + n * k + m * n)
        samples.append(Sample((1.0, m, n, k), 2 * m * n * k, num_bytes, seconds, "linear"))
    return samples


def errors_of(curve: Curve, asked: list[Sample]) -> tuple[list[float], list[float]]:
    """True and stated relative errors of the sizes that the curve answers."""
    true, stated = [], []
    for each in asked:
        found = curve.estimate(each.features, each.flops, each.num_bytes)
        if found is not None:
            assert found[0] == curve.at(each.features, each.flops, each.num_bytes)
            true.append(float(np.expm1(abs(np.log(found[0] / each.seconds)))))
            stated.append(found[1])
    return true, stated


@pytest.mark.parametrize("law", [roofline, uneven])
@pytest.mark.parametrize("count", [12, 60])
def test_a_known_law_is_recovered_within_the_stated_error(law: Law, count: int) -> None:
    curve = Curve(tuple(drawn(law, count, seed=1)))
    true, stated = errors_of(curve, drawn(law, 300, seed=2))
    assert len(true) > 250
    assert np.sqrt(np.mean(np.square(true))) <= 1.5 * np.sqrt(np.mean(np.square(stated)))
    assert np.mean(np.array(true) <= 2 * np.array(stated) + 1e-6) > 0.9


def test_an_exact_roofline_is_recovered_exactly() -> None:
    curve = Curve(tuple(drawn(roofline, 20, seed=3)))
    true, stated = errors_of(curve, drawn(roofline, 100, seed=4))
    assert max(true) < 1e-3
    assert max(stated) < 1e-3


def test_more_samples_make_both_errors_smaller() -> None:
    asked = drawn(uneven, 300, seed=2)
    few = errors_of(Curve(tuple(drawn(uneven, 10, seed=1))), asked)
    many = errors_of(Curve(tuple(drawn(uneven, 120, seed=1))), asked)
    assert np.mean(many[0]) < np.mean(few[0]) / 2
    assert np.mean(many[1]) < np.mean(few[1]) / 2


def test_noise_of_the_measurements_is_in_the_stated_error() -> None:
    quiet = Curve(tuple(drawn(roofline, 60, seed=5)))
    noisy = Curve(tuple(drawn(roofline, 60, seed=5, noise=0.1)))
    place = (1.0, 700.0, 700.0, 700.0)
    flops, num_bytes = 2 * 700.0**3, 6 * 700.0**2
    assert (quiet.estimate(place, flops, num_bytes) or (0.0, 1.0))[1] < 1e-3
    assert 0.05 < (noisy.estimate(place, flops, num_bytes) or (0.0, 0.0))[1] < 0.25


def test_nothing_is_extrapolated_by_more_than_the_stated_factor() -> None:
    def sample(size: float) -> Sample:
        return Sample((size,), 0.0, size, 1e-6 + size / 1e9, "add")

    curve = Curve(tuple(sample(2.0**p) for p in range(10, 21)))
    low, high = 2.0**10, 2.0**20
    for inside in (low / MAX_EXTRAPOLATION, high * MAX_EXTRAPOLATION):
        assert curve.at((inside,), 0.0, inside) == pytest.approx(1e-6 + inside / 1e9, rel=1e-3)
    for outside in (low / MAX_EXTRAPOLATION * 0.9, high * MAX_EXTRAPOLATION * 1.1):
        assert curve.at((outside,), 0.0, outside) is None


def test_work_beyond_all_samples_is_refused_though_each_side_was_seen() -> None:
    """Thin matmuls in three directions say nothing about a cube of their longest sides."""
    sides = [(4096.0, 64.0, 64.0), (64.0, 4096.0, 64.0), (64.0, 64.0, 4096.0), (64.0,) * 3]
    samples = [
        Sample((1.0, *side), 2 * np.prod(side), 1e6, roofline(*side), "linear") for side in sides
    ]
    cube = 4096.0
    assert Curve(tuple(samples)).at((1.0, cube, cube, cube), 2 * cube**3, 1e6) is None


@given(
    st.lists(st.tuples(st.floats(1e3, 1e9), st.floats(1e-6, 1e-2)), min_size=3, max_size=20),
    st.floats(1e3, 1e9),
    st.floats(1.0, 4.0),
)
def test_more_bytes_are_never_faster(
    points: list[tuple[float, float]], size: float, factor: float
) -> None:
    samples = [Sample((size,), 0.0, size, seconds, "add") for size, seconds in points]
    curve = Curve(tuple(samples))
    less, more = curve.at((size,), 0.0, size), curve.at((size * factor,), 0.0, size * factor)
    if less is not None and more is not None:
        assert more >= less * (1 - 1e-9)


@given(st.integers(0, 1000), st.floats(0.0, 0.5))
def test_an_op_is_bounded_by_the_smaller_and_larger_measured_ones(seed: int, noise: float) -> None:
    samples = drawn(uneven, 15, seed=seed, noise=noise)
    curve = Curve(tuple(samples))
    for asked in drawn(uneven, 5, seed=seed + 1):
        found = curve.at(asked.features, asked.flops, asked.num_bytes)
        if found is None:
            continue
        inside = [
            each.seconds
            for each in samples
            if all(a <= b for a, b in zip(each.features, asked.features, strict=True))
        ]
        around = [
            each.seconds
            for each in samples
            if all(a >= b for a, b in zip(each.features, asked.features, strict=True))
        ]
        low, high = max(inside, default=0.0), min(around, default=np.inf)
        if low <= high:
            assert low * (1 - 1e-9) <= found <= high * (1 + 1e-9)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_pooling_gives_the_nearest_rising_sequence(values: list[float]) -> None:
    """By the min-max formula of isotonic regression (Robertson, Wright, Dykstra, 1988, 1.4)."""
    found = pooled_adjacent(np.array(values), np.ones(len(values)))
    count = len(values)
    for at in range(count):
        expected = max(
            min(np.mean(values[low : high + 1]) for high in range(at, count))
            for low in range(at + 1)
        )
        assert found[at] == pytest.approx(expected, abs=1e-9)


@given(st.floats(0, 1e-4), st.floats(1e9, 1e15), st.floats(1e8, 1e13), st.integers(0, 100))
def test_the_base_finds_the_terms_of_a_roofline(
    start: float, rate: float, bandwidth: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    work = np.column_stack(
        [np.ones(20), 10.0 ** generator.uniform(6, 12, 20), 10.0 ** generator.uniform(4, 9, 20)]
    )
    seconds = work @ np.array((start, 1 / rate, 1 / bandwidth))
    found = fit_base(work, seconds)
    assert (found >= 0).all()
    np.testing.assert_allclose(work @ found, seconds, rtol=1e-4)
