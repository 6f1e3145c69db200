"""Presets: every figure has a source that was read, and the figures agree with each other.

What a card computes per clock and unit is known from vendors' architecture tables; so are its clock
and its rates with structured sparsity. None of these is in the presets, which must fit them.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from autoparallel.cost_model.cluster.presets import (
    NOT_CHECKED,
    dated,
    device_presets,
    find_preset,
    link_presets,
)

ROOT = Path(__file__).parents[2]
CARDS = [name for name in device_presets() if name != "cpu"]
SPECS = (
    "memory_bytes",
    "memory_bytes_per_second",
    "peak_flops",
    "num_units",
    "host_bytes_per_second",
    "host_memory_bytes",
)
"""Fields of a data sheet; the rest of a device is measured, fitted or estimated."""

LATEST = "2026-11-27"
"""The last day on which a source was read."""

UNCHECKED: set[tuple[str, str]] = set()
"""Figures without a source that was read, by card and field. Keep it short."""


@pytest.mark.parametrize("name", CARDS)
def test_what_data_sheets_say_was_read_somewhere(name: str) -> None:
    sources = find_preset(name).device.sources
    for field in SPECS:
        if (name, field) not in UNCHECKED:
            dates = re.findall(r"\(read (\d{4}-\d\d-\d\d)\)", sources[field])
            assert dates, (name, field, sources[field])
            assert max(dates) <= LATEST


@pytest.mark.parametrize("name", CARDS)
def test_no_figure_is_from_memory(name: str) -> None:
    for field, source in find_preset(name).device.sources.items():
        assert (NOT_CHECKED in source) == ((name, field) in UNCHECKED), (name, field)
        assert "recalled" not in source, (name, field)
    assert all("recalled" not in link.source for link in link_presets().values())


def test_the_files_of_presets_are_packaged() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert packaged["package-data"]["autoparallel.cost_model.cluster"] == ["*.toml"]


def test_a_source_has_its_date() -> None:
    assert dated("example.org", "2026-01-31") == "example.org (read 2026-01-31)"


@pytest.mark.parametrize(
    ("name", "dtype", "megahertz", "per_clock"),
    [
        # per_clock: dense operations of a unit and clock. GeForce cards and the A10G have half of
        # what their workstation siblings have, as they accumulate in float32 at half rate.
        ("V100-16GB", "float16", 1530, 1024),
        ("V100-32GB", "float32", 1530, 128),
        ("T4", "float16", 1590, 1024),
        ("T4", "float32", 1590, 128),
        ("A100-80GB", "bfloat16", 1410, 2048),
        ("A100-80GB", "tfloat32", 1410, 1024),
        ("A100-80GB", "float64", 1410, 128),
        ("A30", "bfloat16", 1440, 2048),
        ("A30", "float64", 1440, 128),
        ("A6000", "bfloat16", 1800, 1024),
        ("A6000", "float32", 1800, 256),
        ("A10G", "bfloat16", 1710, 512),
        ("A10G", "float32", 1710, 256),
        ("RTX3090", "bfloat16", 1695, 512),
        ("RTX3090", "float32", 1695, 256),
        ("RTX4090", "bfloat16", 2520, 512),
        ("RTX4090", "float8_e4m3fn", 2520, 1024),
        ("RTX5090", "bfloat16", 2407, 512),
        ("RTX5090", "float32", 2407, 256),
        ("L4", "bfloat16", 2040, 1024),
        ("L40S", "bfloat16", 2490, 1024),
        ("H100", "bfloat16", 1830, 4096),
        ("H200", "float8_e4m3fn", 1830, 8192),
        ("H100-PCIe", "bfloat16", 1620, 4096),
        ("MI250X", "bfloat16", 1700, 1024),
        ("MI250X", "float64", 1700, 256),
        ("MI300X", "bfloat16", 2100, 2048),
        ("MI325X", "float32", 2100, 256),
        ("MI355X", "bfloat16", 2400, 4096),
        ("MI355X", "float32", 2400, 256),
    ],
)
def test_a_dense_peak_is_units_times_clock_times_operations(
    name: str, dtype: str, megahertz: int, per_clock: int
) -> None:
    device = find_preset(name).device
    expected = device.num_units * megahertz * 1e6 * per_clock
    assert device.peak_flops[dtype] == pytest.approx(expected, rel=0.013)


@pytest.mark.parametrize(
    ("name", "sparse_tflops"),
    [
        # bfloat16 as vendors print it, with structured sparsity
        ("A100-40GB", 624),
        ("A30", 330),
        ("A6000", 309.7),
        ("L4", 242),
        ("L40S", 733),
        ("H100", 1979),
        ("H100-PCIe", 1513),
        ("H100-NVL", 1671),
        ("H200", 1979),
        ("H200-NVL", 1671),
        ("B200", 4500),
        ("GB200", 5000),
        ("RTX3090", 142),
        ("RTX4090", 330.3),
        ("RTX5090", 419),
    ],
)
def test_no_peak_is_the_one_with_sparsity(name: str, sparse_tflops: float) -> None:
    dense = find_preset(name).device.peak_flops["bfloat16"]
    assert dense == pytest.approx(sparse_tflops * 1e12 / 2, rel=0.013)


@pytest.mark.parametrize("name", CARDS)
def test_peaks_of_formats_keep_their_order(name: str) -> None:
    peaks = find_preset(name).device.peak_flops
    half = peaks["float16"]
    assert peaks.get("bfloat16", half) == half
    assert half >= 2 * peaks["float32"] * 0.99 or name == "H20"
    if "float8_e4m3fn" in peaks:
        assert peaks["float8_e4m3fn"] == pytest.approx(2 * half, rel=0.013)
        assert peaks["float8_e5m2"] == peaks["float8_e4m3fn"]
    if "tfloat32" in peaks:
        assert peaks["tfloat32"] == pytest.approx(half / 2, rel=0.013)
        assert peaks["tfloat32"] >= peaks["float32"]
    assert peaks.get("float64", 0.0) <= peaks["float32"]


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("V100-16GB", 16),
        ("V100-32GB", 32),
        ("T4", 16),
        ("L4", 24),
        ("A10G", 24),
        ("A30", 24),
        ("A6000", 48),
        ("L40S", 48),
        ("RTX3090", 24),
        ("RTX4090", 24),
        ("RTX5090", 32),
        ("A100-40GB", 40),
        ("A100-80GB", 80),
        ("A100-40GB-PCIe", 40),
        ("A100-80GB-PCIe", 80),
        ("H100", 80),
        ("H100-PCIe", 80),
        ("H100-96GB", 96),
        ("H100-NVL", 94),
        ("H200", 141),
        ("H200-NVL", 141),
        ("H800", 80),
        ("H20", 96),
        ("B200", 180),
        ("GB200", 186),
        ("B300", 288),
        ("MI250X", 64),
        ("MI300X", 192),
        ("MI325X", 256),
    ],
)
def test_no_card_has_more_memory_than_it_is_sold_with(name: str, gigabytes: int) -> None:
    """Vendors' "GB" are GiB, of which error correction and the driver keep up to 7 %."""
    found = find_preset(name).device.memory_bytes / 2**30
    assert 0.93 * gigabytes <= found <= gigabytes


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        # GB/s of a device in one direction, by links: 6 x 25, 12 x 25, 18 x 25, 18 x 50, 7 x 64
        ("nvlink2", 150),
        ("nvlink3", 300),
        ("nvlink4", 450),
        ("nvlink5", 900),
        ("nvlink4-h800", 200),
        ("nvlink3-bridge", 300),
        ("nvlink4-bridge", 300),
        ("infinity-fabric-2", 100),
        ("infinity-fabric-3", 448),
        ("pcie3", 15.8),
        ("pcie4", 31.5),
        ("pcie5", 63),
    ],
)
def test_collectives_reach_less_than_the_spec_of_their_link(name: str, spec: float) -> None:
    assert 0.65 * spec <= link_presets()[name].bytes_per_second / 1e9 < spec


@pytest.mark.parametrize(
    ("name", "sockets", "channels", "megatransfers"),
    [("V100-32GB", 2, 4, 2133), ("A100-80GB", 2, 8, 3200), ("H100", 2, 8, 4400)],
)
def test_a_host_has_eight_byte_channels_shared_by_eight_cards(
    name: str, sockets: int, channels: int, megatransfers: int
) -> None:
    device = find_preset(name).device
    expected = sockets * channels * megatransfers * 1e6 * 8 / 8
    assert device.host_bytes_per_second == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        # forward with backward of FlashAttention-2, as PyTorch has it, 2048 to 8192 tokens, TFLOP/s
        ("A100-80GB", 140, 182),
        ("H100", 265, 335),
    ],
)
def test_attention_is_as_fast_as_its_kernel_was_measured(name: str, low: int, high: int) -> None:
    device = find_preset(name).device
    found = device.efficiency["attention"] * device.peak_flops["bfloat16"] / 1e12
    assert low <= found <= high
