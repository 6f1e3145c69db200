"""Detection of the machine at hand, and what the modules import."""

import doctest
import importlib
import inspect
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from processes import FULL_SECONDS

from autoparallel.cost_model.cluster import detect
from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.cluster_file import from_dict, to_dict
from autoparallel.cost_model.cluster.detect import (
    detect_cpu,
    detect_local,
    match_gpu_name,
    threads_per_device,
    usable_cores,
)
from autoparallel.cost_model.cluster.shorthand import resolve_cluster

OF_CLUSTERS = [
    "cluster",
    "cluster_file",
    "detect",
    "figures",
    "presets",
    "shorthand",
    "tf32",
]
MODULES = [
    *(f"cluster.{name}" for name in OF_CLUSTERS),
    *("collectives.collectives", "ops.compute", "ops.memory"),
]


def measure_anew(patch: pytest.MonkeyPatch) -> None:
    """Have the CPU measured as the product does: for its full time, and anew in each test."""
    patch.setattr(detect, "_PATIENCE_SECONDS", FULL_SECONDS)
    patch.setattr(detect, "_measure_cpu", inspect.unwrap(detect._measure_cpu))


@pytest.fixture(scope="module")
def cpu() -> Cluster:
    """Measured for as long as the product does."""
    with pytest.MonkeyPatch.context() as patch:
        measure_anew(patch)
        return detect_cpu()


def test_the_cpu_has_a_device_per_core(cpu: Cluster) -> None:
    assert cpu.num_devices == min(usable_cores(), detect.MAX_CPU_DEVICES)
    assert cpu.device(0).kind == "cpu"
    assert from_dict(to_dict(cpu)) == cpu


def test_measured_figures_are_those_of_a_cpu(cpu: Cluster) -> None:
    device = cpu.device(0)
    assert 1e8 < device.peak_flops["float64"] < device.peak_flops["float32"] * 2 < 1e14
    assert 1e8 < device.memory_bytes_per_second < 1e13
    assert 1e-8 < device.launch_seconds < 1e-3
    assert set(device.efficiency) == {
        "matmul",
        "attention",
        "conv",
        "norm",
        "elementwise",
        "copy",
    }
    assert all(share > 0 for share in device.efficiency.values())


def test_processes_share_the_memory() -> None:
    device = detect_cpu(4).device(0)
    assert 4 * device.usable_memory_bytes <= psutil.virtual_memory().total
    assert device.usable_memory_bytes <= device.memory_bytes


def test_detection_waits_no_longer_than_its_patience_and_keeps_the_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that goes on by a millisecond whenever it is looked at: under three seconds."""
    before, ticks = torch.get_num_threads(), count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-3)
    monkeypatch.setattr(detect, "time", clock)
    measure_anew(monkeypatch)
    detect_cpu(2)
    assert FULL_SECONDS < clock.perf_counter() < 3.0
    assert torch.get_num_threads() == before


def test_cores_are_divided_among_the_processes() -> None:
    assert threads_per_device(1) == usable_cores()
    assert threads_per_device(10**6) == 1


def test_a_container_quota_limits_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    monkeypatch.setattr(detect, "_CGROUP", tmp_path)
    assert usable_cores() == 1
    assert detect.available_memory_bytes() == 600000


def test_cpu_n_is_measured_here() -> None:
    cluster = resolve_cluster("cpu:3")
    assert cluster.num_devices == 3
    assert "measured" in cluster.device(0).sources["peak_flops"]


@pytest.mark.parametrize(
    ("name", "gigabytes", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 85, "H100"),
        ("NVIDIA H100 PCIe", 85, "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", 85, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 42, "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", 42, "A100-40GB-PCIe"),
        ("NVIDIA A100 80GB PCIe", 85, "A100-80GB-PCIe"),
        ("Tesla V100-SXM2-32GB", 34, "V100-32GB"),
        ("NVIDIA H200", 150, "H200"),
        ("NVIDIA H100 NVL", 100, "H100-NVL"),
        ("NVIDIA H200 NVL", 150, "H200-NVL"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 21, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10, None),
        ("NVIDIA B200", 192, "B200"),
        ("NVIDIA L40S", 48, "L40S"),
        ("NVIDIA A10G", 24, "A10G"),
        ("NVIDIA GeForce RTX 4090", 25, "RTX4090"),
        ("NVIDIA GeForce RTX 3060", 12, None),
        ("NVIDIA GeForce RTX 3090", 25, "RTX3090"),
        ("NVIDIA GeForce RTX 3090 Ti", 25, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17, None),
        ("NVIDIA GeForce RTX 4090 D", 25, None),
        ("NVIDIA GeForce RTX 5090", 34, "RTX5090"),
        ("NVIDIA RTX A6000", 51, "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", 51, None),
        ("Tesla T4", 16, "T4"),
        ("NVIDIA L4", 24, "L4"),
        ("NVIDIA A30", 25, "A30"),
        ("NVIDIA H20", 102, "H20"),
        ("NVIDIA H800", 85, "H800"),
        ("NVIDIA B300", 288, "B300"),
        ("AMD Instinct MI250X", 68, "MI250X"),
        ("AMD Instinct MI300X", 206, "MI300X"),
        ("AMD Instinct MI325X", 275, "MI325X"),
    ],
)
def test_a_driver_name_finds_its_preset(name: str, gigabytes: int, preset: str | None) -> None:
    found = match_gpu_name(name, gigabytes * 10**9)
    assert (found.device.name if found else None) == preset


@pytest.mark.gpu
def test_gpus_are_found() -> None:
    cluster = detect_local()
    assert cluster.num_devices == torch.cuda.device_count()
    assert cluster.device(0).kind == "cuda"


def test_the_cost_model_imports_without_torch() -> None:
    imports = "".join(f"import autoparallel.cost_model.{name}\n" for name in MODULES)
    script = imports + "import sys\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_hold(name: str) -> None:
    module = importlib.import_module(f"autoparallel.cost_model.{name}")
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0
