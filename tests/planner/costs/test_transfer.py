"""Cross-mesh transfers: exact coverage, nothing twice, balanced senders."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.planner.costs.conversions import transfers
from autoparallel.planner.graph.layout import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Layout,
    Mesh,
    divides,
    intersect,
    local_region,
    region_slices,
    shard,
)

DP2 = Mesh(("dp", "tp"), (2, 1))
TP2 = Mesh(("dp", "tp"), (1, 2))
PLACEMENTS = (shard(0), shard(1), INVARIANT, REPLICATE)


def elements(box):
    return product(*(range(start, stop) for start, stop in box))


@st.composite
def placed(draw, shape):
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (1, 2), (2, 1), (2, 2), (2, 4), (3, 2)]))
    mesh = Mesh(("dp", "tp")[: len(sizes)], sizes)
    layouts = [
        layout for layout in product(PLACEMENTS, repeat=len(sizes)) if divides(shape, layout, sizes)
    ]
    return draw(st.sampled_from(layouts)), mesh


@st.composite
def problems(draw):
    shape = draw(st.sampled_from([(24, 24), (12, 16, 3), (8, 6), (48, 1)]))
    return shape, draw(placed(shape)), draw(placed(shape))


@given(problems())
def test_every_target_gets_exactly_its_box_once_from_devices_that_hold_it(problem):
    shape, (source_layout, source_mesh), (target_layout, target_mesh) = problem
    messages = transfers(shape, source_layout, source_mesh, target_layout, target_mesh)
    received: dict[int, Counter] = {target: Counter() for target in range(target_mesh.size)}
    for message in messages:
        held = local_region(
            shape, source_layout, source_mesh, source_mesh.coordinates(message.source)
        )
        assert intersect(held, message.box) == message.box
        received[message.target].update(elements(message.box))
    for target, counts in received.items():
        wanted = local_region(shape, target_layout, target_mesh, target_mesh.coordinates(target))
        assert counts == Counter(elements(wanted))


@given(problems())
def test_a_pair_of_devices_exchanges_at_most_one_box(problem):
    shape, (source_layout, source_mesh), (target_layout, target_mesh) = problem
    messages = transfers(shape, source_layout, source_mesh, target_layout, target_mesh)
    pairs = Counter((message.source, message.target) for message in messages)
    assert set(pairs.values()) == {1}


@given(problems())
def test_replicas_share_the_load_to_within_one_message(problem):
    shape, (source_layout, source_mesh), (target_layout, target_mesh) = problem
    messages = transfers(shape, source_layout, source_mesh, target_layout, target_mesh)
    loads: dict[tuple, list[int]] = {}
    for source in range(source_mesh.size):
        region = local_region(shape, source_layout, source_mesh, source_mesh.coordinates(source))
        sent = sum(message.numel for message in messages if message.source == source)
        loads.setdefault(region, []).append(sent)
    largest = max(message.numel for message in messages)
    assert all(max(replicas) - min(replicas) <= largest for replicas in loads.values())


def test_data_parallel_before_tensor_parallel():
    """Batch rows on two ranks, then the whole batch on both: each target takes both halves."""
    messages = transfers((4, 6), (shard(0), INVARIANT), DP2, (INVARIANT, INVARIANT), TP2)
    assert [(m.source, m.target, m.box) for m in messages] == [
        (0, 0, ((0, 2), (0, 6))),
        (1, 0, ((2, 4), (0, 6))),
        (0, 1, ((0, 2), (0, 6))),
        (1, 1, ((2, 4), (0, 6))),
    ]


def test_equal_meshes_and_layouts_send_from_each_device_to_its_counterpart():
    mesh = Mesh(("dp", "tp"), (2, 4))
    layout: Layout = (shard(0), INVARIANT)
    messages = transfers((8, 3), layout, mesh, layout, mesh)
    assert [(m.source, m.target) for m in messages] == [(i, i) for i in range(8)]


def test_one_replicated_source_group_spreads_over_a_larger_target():
    source, target = Mesh(("tp",), (2,)), Mesh(("dp",), (4,))
    messages = transfers((8, 3), (INVARIANT,), source, (shard(0),), target)
    assert Counter(m.source for m in messages) == {0: 2, 1: 2}


def test_a_scalar_goes_whole():
    (message,) = transfers((), (INVARIANT,), Mesh(("dp",), (1,)), (INVARIANT,), Mesh(("dp",), (1,)))
    assert message.box == ()
    assert message.numel == 1


@pytest.mark.parametrize("layout", [(PARTIAL,), (shard(0),)])
def test_partial_values_and_uneven_splits_are_refused(layout):
    with pytest.raises(ValueError, match=r"partial|divide"):
        transfers((3, 2), layout, Mesh(("dp",), (2,)), (INVARIANT,), Mesh(("dp",), (1,)))


def test_a_box_is_cut_out_of_the_local_tensor_that_holds_it():
    assert region_slices(((2, 3), (4, 6)), ((2, 4), (4, 8))) == (slice(0, 1), slice(0, 2))
