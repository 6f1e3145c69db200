"""Looking up: measured, interpolated or nothing, with what error, from which environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from profile_cases import attention, elementwise, gelu, layer_norm, linear, softmax

from autoparallel.cost_model.cluster.cluster import Link
from autoparallel.cost_model.collectives.collectives import Group, p2p_seconds
from autoparallel.cost_model.profile import lookup
from autoparallel.cost_model.profile.case import OpCase
from autoparallel.cost_model.profile.database import (
    Database,
    Environment,
    Measurement,
    Transfer,
)
from autoparallel.cost_model.profile.lookup import Profile, level_of, load_profile, load_shipped
from autoparallel.cost_model.profile.transfers import overlapped

HERE = Environment("cpu A", "", "2.13.0", 2)


def law(case: OpCase, factor: float = 1.0) -> Measurement:
    """4 µs, 100 GFLOP/s and 10 GB/s, in both directions."""

    def seconds(direction: int) -> float:
        flops, num_bytes = case.flops[direction], case.num_bytes[direction]
        if not (flops or num_bytes):
            return 0.0
        return factor * (4e-6 + flops / 1e11 + num_bytes / 1e10)

    return Measurement(seconds(0), seconds(1), 20, 0.01)


def profile_of(*cases: OpCase, of: Callable[[OpCase], Measurement] = law) -> Profile:
    return Profile(HERE, {case: of(case) for case in cases})


SIZES = (32, 64, 128, 256, 512, 1024)
MATMULS = [linear(m, n, 128) for m in SIZES for n in SIZES[::2]]


def test_a_measured_op_answers_with_its_median_and_spread() -> None:
    profile = profile_of(*MATMULS)
    found = profile.op(linear(64, 128, 128))
    assert found is not None
    assert found.source == "measured"
    assert found.error == 0.01
    assert (found.forward_seconds, found.backward_seconds) == (
        law(linear(64, 128, 128)).forward_seconds,
        law(linear(64, 128, 128)).backward_seconds,
    )


@pytest.mark.parametrize(
    ("measured", "asked"),
    [
        (MATMULS, linear(300, 200, 128)),
        (
            [attention(h, s, 32) for h in (4, 16) for s in (64, 128, 512, 1024)],
            attention(8, 256, 32),
        ),
        ([layer_norm(r, c) for r in SIZES for c in SIZES[::2]], layer_norm(200, 300)),
        ([gelu(size, 128) for size in SIZES], gelu(300, 128)),
    ],
    ids=["matmul", "attention", "norm", "elementwise"],
)
def test_an_op_of_every_family_is_interpolated_to_the_law(
    measured: list[OpCase], asked: OpCase
) -> None:
    profile = profile_of(*measured)
    found = profile.op(asked)
    assert found is not None
    assert found.source == "interpolated"
    assert found.forward_seconds == pytest.approx(law(asked).forward_seconds, rel=0.05)
    assert found.backward_seconds == pytest.approx(law(asked).backward_seconds, rel=0.05)
    error = abs(found.forward_seconds / law(asked).forward_seconds - 1)
    assert error <= 2 * found.error + 1e-6
    assert profile.interpolation_error(asked.family) == pytest.approx(0.0, abs=0.15)


def test_an_op_without_gradients_is_asked_for_no_backward() -> None:
    found = profile_of(*MATMULS).op(linear(300, 200, 128, grad=False))
    assert found is not None
    assert found.backward_seconds == 0.0


def test_nothing_is_made_up_far_from_what_was_measured() -> None:
    profile = profile_of(*MATMULS)
    assert profile.op(linear(64, 64, 128 * 5)) is None
    assert profile.op(replace(linear(64, 100, 128), family="conv")) is None
    assert profile.op(gelu(64, 64)) is None
    assert profile_of(*MATMULS[:2]).op(linear(48, 32, 128)) is None
    half = linear(48, 32, 128)
    tensors = tuple(replace(each, dtype="bfloat16") for each in half.tensors)
    assert profile.op(replace(half, tensors=tensors)) is None


def test_a_causal_attention_is_not_taken_from_a_full_one() -> None:
    full = [attention(heads, length, 32) for heads in (4, 16) for length in (64, 256, 1024)]
    causal = [replace(attention(h, s, 32, is_causal=True)) for h in (4, 16) for s in (64, 1024)]
    twice = {case: law(case, 3.0) for case in causal}
    profile = Profile(HERE, {case: law(case) for case in full} | twice)
    asked = attention(8, 512, 32, is_causal=True)
    found = profile.op(asked)
    assert found is not None
    assert found.forward_seconds == pytest.approx(law(asked, 3.0).forward_seconds, rel=0.05)


def test_an_unmeasured_op_is_taken_from_its_family_with_the_error_between_ops() -> None:
    """Two ops that differ by a factor of 2: each predicts the other with an error of 1."""
    adds = [elementwise("aten.add.Tensor", 2, size, 128) for size in SIZES]
    slow = [elementwise("aten.tanh.default", 1, size, 128) for size in SIZES]
    ops = {case: law(case) for case in adds} | {case: law(case, 2.0) for case in slow}
    profile = Profile(HERE, ops)
    asked = elementwise("aten.sigmoid.default", 1, 200, 128)
    found = profile.op(asked)
    assert found is not None
    assert law(asked).forward_seconds * 0.9 <= found.forward_seconds
    assert found.forward_seconds <= law(asked, 2.0).forward_seconds * 1.1
    assert found.error == pytest.approx(1.0, abs=0.3)
    assert Profile(HERE, {case: law(case) for case in adds}).op(asked) is None


def test_a_familys_error_is_found_by_leaving_out() -> None:
    quiet = profile_of(*MATMULS)
    factors = (1.0, 1.3)

    def uneven(case: OpCase) -> Measurement:
        return law(case, factors[hash(case.products) % 2])

    noisy = profile_of(*MATMULS, of=uneven)
    assert (quiet.interpolation_error("matmul") or 0.0) < 0.01
    assert 0.05 < (noisy.interpolation_error("matmul") or 0.0) < 0.5
    assert quiet.interpolation_error("conv") is None


def test_softmax_and_layer_norm_do_not_mix() -> None:
    norms = {layer_norm(r, c): law(layer_norm(r, c), 5.0) for r in SIZES for c in SIZES[::2]}
    softmaxes = {softmax(r, c): law(softmax(r, c)) for r in SIZES for c in SIZES[::2]}
    found = Profile(HERE, norms | softmaxes).op(softmax(200, 300))
    assert found is not None
    assert found.forward_seconds == pytest.approx(law(softmax(200, 300)).forward_seconds, rel=0.05)


def test_the_nearest_environment_is_loaded_and_the_difference_said() -> None:
    with Database(":memory:") as database:
        assert load_profile(database, HERE) is None
        database.put(HERE, linear(4, 8, 16), law(linear(4, 8, 16)))
        exact = load_profile(database, HERE)
        assert exact is not None
        assert exact.mismatch == ""
        assert len(exact.ops) == 1
        newer = load_profile(database, replace(HERE, torch="2.14.0"))
        assert newer is not None
        assert newer.environment == HERE
        assert newer.mismatch == "measured with torch 2.13.0, not 2.14.0"
        assert load_profile(database, replace(HERE, device="cpu B")) is None


def test_a_profile_is_a_snapshot() -> None:
    with Database(":memory:") as database:
        database.put(HERE, gelu(4), law(gelu(4)))
        profile = load_profile(database, HERE)
        database.put(HERE, gelu(8), law(gelu(8)))
        assert profile is not None
        assert profile.op(gelu(8)) is None


def test_a_shipped_profile_is_an_exported_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Environment("NVIDIA H200", "550", "2.13.0", 0)
    with Database(":memory:") as database:
        database.put(gpu, linear(4, 8, 16), law(linear(4, 8, 16)))
        database.export_file(tmp_path / "H200.jsonl")
    monkeypatch.setattr(lookup, "_DATA", tmp_path)
    profile = load_shipped("H200")
    assert profile is not None
    assert profile.environment == gpu
    assert profile.op(linear(4, 8, 16)) is not None
    assert load_shipped("A100") is None


WIRE = Link("wire", 1e-6, 1e9)
RING = Group(4, 4, 1, WIRE, WIRE, library="gloo")


def transfers(kind: str, *, ranks: int = 4, hosts: int = 1) -> list[Transfer]:
    return [
        Transfer("intra:wire", "gloo", kind, ranks, hosts, size, 1e-5 + size / 1e9)
        for size in (1 << 10, 1 << 14, 1 << 20)
    ]


def test_a_collective_is_measured_interpolated_or_unknown() -> None:
    profile = Profile(HERE, {}, tuple(transfers("all_reduce")))
    assert len(profile.transfers) == 3
    assert profile.collective("all_reduce", 1 << 14, RING) == (1e-5 + (1 << 14) / 1e9, "measured")
    found = profile.collective("all_reduce", 1 << 17, RING)
    assert found is not None
    assert found[0] == pytest.approx(1e-5 + (1 << 17) / 1e9)
    assert found[1] == "interpolated"
    for kind, num_bytes, group in (
        ("all_gather", 1 << 14, RING),
        ("all_reduce", 0, RING),
        ("all_reduce", 1 << 14, replace(RING, num_ranks=2, ranks_per_host=2)),
        ("all_reduce", 1 << 14, replace(RING, library="nccl")),
        ("all_reduce", 1 << 14, replace(RING, intra=Link("other", 0.0, 1.0))),
    ):
        assert profile.collective(kind, num_bytes, group) is None


def test_one_small_collective_says_nothing_of_large_ones() -> None:
    small = Transfer("intra:wire", "gloo", "zero_gather", 4, 1, 4096, 1e-3)
    profile = Profile(HERE, {}, (small,))
    assert profile.collective("zero_gather", 1024, RING) == (1e-3, "interpolated")
    assert profile.collective("zero_gather", 3 * 4096, RING) == (3e-3, "interpolated")
    assert profile.collective("zero_gather", 1 << 20, RING) is None
    large = replace(small, num_bytes=1 << 20, seconds=2e-3)
    both = Profile(HERE, {}, (small, large)).collective("zero_gather", 1 << 21, RING)
    assert both is not None
    assert both[0] == pytest.approx(3e-3, rel=0.01)


def test_the_share_of_compute_lost_beside_a_collective_is_that_of_the_largest_measured() -> None:
    alone = transfers("all_gather")
    lost = [
        replace(each, kind=overlapped("all_gather"), seconds=each.seconds / 2) for each in alone
    ]
    lost[-1] = replace(lost[-1], seconds=alone[-1].seconds / 4)
    profile = Profile(HERE, {}, (*alone, *lost))
    assert profile.slowed_share("all_gather", RING) == pytest.approx(0.25)
    assert profile.slowed_share("reduce_scatter", RING) is None
    assert profile.slowed_share("all_gather", replace(RING, library="nccl")) is None
    assert Profile(HERE, {}, tuple(lost)).slowed_share("all_gather", RING) is None
    longer = [replace(each, seconds=2 * each.seconds) for each in lost]
    worst = Profile(HERE, {}, (*(replace(each, seconds=1e-6) for each in alone), *longer))
    assert worst.slowed_share("all_gather", RING) == 1.0


def test_the_levels_of_a_cluster_are_told_apart() -> None:
    fast, slow = Link("fast", 0.0, 1.0), Link("slow", 0.0, 1.0)
    assert level_of(Group(4, 4, 1, fast, slow)) == "intra:fast"
    assert level_of(Group(4, 1, 4, fast, slow)) == "inter:slow"
    assert level_of(Group(8, 2, 4, fast, slow)) == "mixed:fast+slow"
    assert level_of(Group(3, 1, 2, fast, slow)) == "mixed:fast+slow"


def test_a_link_is_fitted_to_messages_and_then_prices_any() -> None:
    messages = [
        Transfer("intra:wire", "gloo", "p2p", 2, 1, size, 3e-5 + size / 2e9)
        for size in (1 << 8, 1 << 14, 1 << 22)
    ]
    profile = Profile(HERE, {}, tuple(messages))
    wire = Link("wire", 0.0, 1.0)
    fitted = profile.link("intra:wire", "gloo")
    assert fitted == pytest.approx((3e-5, 2e9))
    alpha, rate = fitted or (0.0, 0.0)
    assert p2p_seconds(1 << 18, Link("x", alpha, rate)) == pytest.approx(
        (profile.p2p(1 << 18, Group(2, 2, 1, wire, wire, "gloo")) or (0.0,))[0]
    )
    assert profile.link("inter:wire", "gloo") is None
    assert profile.p2p(1 << 18, Group(2, 1, 2, wire, wire, "gloo")) is None


def test_messages_between_hosts_take_as_long_as_measured_with_as_many_pairs_at_once() -> None:
    wire = Link("wire", 0.0, 1.0)
    messages = [
        Transfer("inter:wire", "gloo", "p2p", 2 * num_pairs, 2, 1 << 20, float(num_pairs))
        for num_pairs in (1, 4)
    ]
    profile = Profile(HERE, {}, tuple(messages))
    seconds = [
        profile.p2p(1 << 20, Group(2, 1, 2, wire, wire, "gloo", num_pairs))
        for num_pairs in (1, 2, 4, 8)
    ]
    assert seconds == [(each, "measured") for each in (1.0, 4.0, 4.0, 4.0)]
