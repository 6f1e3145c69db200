"""Layouts: text, regions, and the order of conversions."""

from __future__ import annotations

from itertools import product

import pytest

from autoparallel.planner.graph.layout import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Mesh,
    conversion_steps,
    divides,
    format_layout,
    local_region,
    local_shape,
    parse_layout,
    parse_placement,
    shard,
)

PLACEMENTS = (shard(0), shard(1), REPLICATE, INVARIANT, PARTIAL)
LAYOUTS = tuple(product(PLACEMENTS, repeat=3))


def test_every_layout_survives_its_text() -> None:
    assert all(parse_layout(format_layout(layout)) == layout for layout in LAYOUTS)


@pytest.mark.parametrize("text", ["S", "S()", "S(-1)", "Q", "", "S(0"])
def test_a_text_that_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a placement"):
        parse_placement(text)


def test_conversions_reach_their_target_and_never_touch_an_outer_split_under_an_inner_one() -> None:
    for source in LAYOUTS:
        for target in LAYOUTS:
            current = list(source)
            for step in conversion_steps(source, target):
                assert current[step.axis] == step.source
                assert step.source != step.target
                for placement in (step.source, step.target):
                    inner = current[step.axis + 1 :]
                    assert not (placement.is_shard and placement in inner), (source, target)
                current[step.axis] = step.target
            assert tuple(current) == target


def test_a_conversion_takes_one_step_per_changed_axis_unless_splits_are_nested() -> None:
    for source in LAYOUTS:
        for target in LAYOUTS:
            dims = [p.dim for p in source + target if p.is_shard]
            if len(dims) == len(set(dims)):
                changed = sum(a != b for a, b in zip(source, target, strict=True))
                assert len(conversion_steps(source, target)) == changed


def test_regions_tile_the_tensor_exactly() -> None:
    mesh = Mesh(("a", "b", "c"), (2, 2, 2))
    for layout in LAYOUTS:
        regions = [local_region((8, 8), layout, mesh, mesh.coordinates(i)) for i in range(8)]
        cells = [
            cell for region in set(regions) for cell in product(*(range(*side) for side in region))
        ]
        assert len(cells) == 64, "distinct regions do not overlap and cover everything"
        assert len(set(cells)) == 64
        shape = local_shape((8, 8), layout, mesh.shape)
        assert all(tuple(b - a for a, b in region) == shape for region in regions)


def test_a_split_must_divide() -> None:
    assert not divides((6,), (shard(0), shard(0)), (2, 2))
    assert divides((8,), (shard(0), shard(0)), (2, 2))
    assert not divides((8,), (shard(1),), (2,))
    with pytest.raises(ValueError, match="does not divide"):
        local_shape((6,), (shard(0), shard(0)), (2, 2))


def test_mesh_indices_and_coordinates_are_inverse() -> None:
    mesh = Mesh(("dp", "tp"), (3, 4))
    assert [mesh.index(mesh.coordinates(i)) for i in range(mesh.size)] == list(range(12))
    assert mesh.groups(1) == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))


def test_a_mesh_whose_names_and_sizes_disagree_is_refused() -> None:
    with pytest.raises(ValueError, match="do not match"):
        Mesh(("dp",), (2, 2))
    with pytest.raises(ValueError, match="empty axis"):
        Mesh(("dp",), (0,))
