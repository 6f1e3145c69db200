"""The roofline: hand-made devices, and published matmul rates."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.cost_model.cluster.cluster import Device
from autoparallel.cost_model.cluster.presets import find_preset
from autoparallel.cost_model.ops.compute import (
    SCALED_RATES,
    eight_bit_seconds,
    peak_flops,
    rate,
    work_seconds,
)
from autoparallel.planner.ops.work import Work

DEVICE = Device(
    name="d",
    kind="cpu",
    memory_bytes=1,
    usable_memory_bytes=1,
    memory_bytes_per_second=1e9,
    peak_flops={"float32": 1e9, "bfloat16": 4e9},
    efficiency={"matmul": 0.5, "norm": 0.25, "copy": 0.5},
    launch_seconds=1.0,
)


def test_a_matmul_is_bound_by_flops_or_by_bytes() -> None:
    """10 GFLOP at 0.5 of 1 GFLOP/s is 20 s; 20 GB at 0.5 of 1 GB/s is 40 s; 1 s to launch."""
    assert rate(DEVICE, "matmul", "float32").seconds(10e9, 1e9) == pytest.approx(21.0)
    assert rate(DEVICE, "matmul", "float32").seconds(10e9, 20e9) == pytest.approx(41.0)


def test_a_dtype_has_its_own_peak() -> None:
    assert rate(DEVICE, "matmul", "bfloat16").seconds(10e9, 0) == pytest.approx(1.0 + 5.0)


def test_other_families_move_bytes_at_their_share_of_the_bandwidth() -> None:
    assert rate(DEVICE, "norm", "float32").seconds(1.0, 1e9) == pytest.approx(1.0 + 4.0)
    assert rate(DEVICE, "elementwise", "float32").seconds(1.0, 1e9) == pytest.approx(1.0 + 1.0)


def test_an_unknown_family_counts_as_elementwise() -> None:
    known = rate(DEVICE, "elementwise", "float32").seconds(5.0, 1e9)
    assert rate(DEVICE, "scan", "float32").seconds(5.0, 1e9) == known


def test_an_op_without_work_takes_no_time() -> None:
    assert rate(DEVICE, "copy", "float32").seconds(0, 0) == 0.0


def test_a_missing_dtype_runs_as_the_one_that_emulates_it() -> None:
    assert peak_flops(DEVICE, "float16") == 4e9
    assert peak_flops(DEVICE, "float64") == 1e9 / 64
    assert peak_flops(DEVICE, "int64") == 1e9
    v100 = find_preset("V100-32GB").device
    assert peak_flops(v100, "bfloat16") == 15.7e12


@given(st.floats(0, 1e15), st.floats(0, 1e15), st.floats(0, 1e12), st.floats(0, 1e12))
def test_more_work_is_never_faster(a: float, b: float, c: float, d: float) -> None:
    device = find_preset("A100-80GB").device
    flops, num_bytes = sorted((a, b)), sorted((c, d))
    less = rate(device, "matmul", "bfloat16").seconds(flops[0], num_bytes[0])
    assert less <= rate(device, "matmul", "bfloat16").seconds(flops[1], num_bytes[1])


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "measured_tflops"),
    [
        # Azure/AI-benchmarking-guide@8fd0c6e, ND_A100_v4_results.md, cuBLASLt
        ("A100-80GB", "float16", (1024, 1024, 1024), 119.4),
        ("A100-80GB", "float16", (2048, 2048, 2048), 221.8),
        ("A100-80GB", "float16", (4096, 4096, 4096), 228.0),
        ("A100-80GB", "float16", (8192, 8192, 8192), 253.7),
        ("A100-80GB", "float16", (6144, 12288, 12288), 250.8),
        # stas00/ml-engineering@744d01e, best shape of a search
        ("H100", "bfloat16", (2048, 2048, 13312), 794.5),
    ],
)
def test_published_matmul_rates_are_met_within_30_percent(
    name: str, dtype: str, shape: tuple[int, int, int], measured_tflops: float
) -> None:
    m, n, k = shape
    flops, num_bytes = 2 * m * n * k, 2 * (m * n + n * k + m * k)
    # Back-to-back launches of a benchmark hide the launch.
    device = replace(find_preset(name).device, launch_seconds=0.0)
    seconds = rate(device, "matmul", dtype).seconds(flops, num_bytes)
    assert flops / seconds / 1e12 == pytest.approx(measured_tflops, rel=0.3)


def test_an_efficiency_may_be_of_one_format() -> None:
    """Blackwell holds more of its peak in 8 bits than in bfloat16 through long runs."""
    device = find_preset("B200").device
    reached = [
        flops / rate(device, "matmul", dtype).seconds(flops, 0.0) / peak_flops(device, dtype)
        for dtype in ("bfloat16", "float8_e4m3fn", "mxfp8", "float8_rowwise")
        for flops in (1e18,)
    ]
    eight = device.efficiency["matmul_float8_e4m3fn"]
    expected = [device.efficiency["matmul"], eight, *(eight * of for of in SCALED_RATES.values())]
    assert sorted(reached) == pytest.approx(sorted(expected), rel=1e-3)


@pytest.mark.parametrize(("size", "is_faster"), [(8192, True), (512, False)])
def test_products_of_8_bits_pay_for_casting_their_factors(size: int, is_faster: bool) -> None:
    """Arithmetic falls by half, which casts of 6 bytes per element outweigh in small products."""
    device, product = find_preset("H100").device, (1, size, size, size)
    flops, moved = 2 * size**3, 6 * size**2
    work = Work("matmul", flops, 2 * flops, moved, 2 * moved, (product,), (product, product))
    plain = sum(work_seconds(device, work, "bfloat16"))
    cast = sum(eight_bit_seconds(device, work, "bfloat16", "float8_e4m3fn", 6.0))
    free = sum(eight_bit_seconds(device, work, "bfloat16", "float8_e4m3fn", 0.0))
    assert free < plain
    assert (cast < plain) == is_faster
    without_units = replace(device, num_units=0)
    assert sum(eight_bit_seconds(without_units, work, "bfloat16", "float8_e4m3fn", 6.0)) > 0
