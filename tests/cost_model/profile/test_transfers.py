"""Curves of collectives and the fit of a link, against laws that are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.cost_model.cluster.cluster import Link
from autoparallel.cost_model.collectives.collectives import Group, algorithm_seconds
from autoparallel.cost_model.profile.case import ProfileError
from autoparallel.cost_model.profile.records import Transfer
from autoparallel.cost_model.profile.transfers import (
    LinkPoint,
    fit_link,
    link_points,
    transfer_curve,
)

SIZES = tuple(4**power for power in range(5, 13))


def transfer(num_bytes: int, seconds: float, kind: str = "all_reduce") -> Transfer:
    return Transfer("intra:wire", "gloo", kind, 4, 1, num_bytes, seconds)


@given(
    st.dictionaries(st.integers(1, 10**9), st.floats(1e-6, 1.0), min_size=1, max_size=8),
    st.integers(1, 10**9),
    st.integers(0, 10**9),
)
def test_more_bytes_are_never_faster(points: dict[int, float], size: int, more: int) -> None:
    curve = transfer_curve([transfer(size, seconds) for size, seconds in points.items()])
    assert curve.at(size + more)[0] >= curve.at(size)[0] * (1 - 1e-9)


def test_below_the_smallest_latency_stays_and_above_the_largest_the_rate() -> None:
    curve = transfer_curve([transfer(size, 1e-5 + size / 1e9) for size in SIZES])
    assert curve.at(1) == (1e-5 + SIZES[0] / 1e9, "interpolated")
    assert curve.at(SIZES[-1] * 100)[0] == pytest.approx(1e-5 + SIZES[-1] * 100 / 1e9)
    assert curve.at(SIZES[3]) == (1e-5 + SIZES[3] / 1e9, "measured")


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_link_is_recovered_from_ring_collectives_of_several_group_sizes(kind: str) -> None:
    link = Link("wire", alpha_seconds=7e-6, bytes_per_second=3e9)
    measured = []
    for ranks in (2, 4, 8):
        group = Group(ranks, ranks, 1, link, link, library="any")
        for size in SIZES:
            seconds = algorithm_seconds(kind, size, group)["ring"]  # type: ignore[arg-type]
            measured.append(Transfer("intra:wire", "any", kind, ranks, 1, size, seconds))
    alpha, rate = fit_link(link_points(measured))
    assert alpha == pytest.approx(link.alpha_seconds, rel=1e-6)
    assert rate == pytest.approx(link.bytes_per_second, rel=1e-6)


def test_messages_are_preferred_to_collectives() -> None:
    ring = [transfer(size, 1.0) for size in SIZES]
    messages = [transfer(size, 1e-6 + size / 1e9, "p2p") for size in SIZES]
    assert fit_link(link_points([*ring, *messages])) == pytest.approx((1e-6, 1e9))


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-7, 1.0)), min_size=2, max_size=8))
def test_a_fit_is_never_negative(points: list[tuple[int, float]]) -> None:
    listed = [LinkPoint(1, float(size), seconds) for size, seconds in points]
    if len({point.num_bytes for point in listed}) < 2:
        with pytest.raises(ProfileError, match="two sizes"):
            fit_link(listed)
        return
    alpha, rate = fit_link(listed)
    assert alpha >= 0
    assert rate > 0
