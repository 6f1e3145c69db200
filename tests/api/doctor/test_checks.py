"""What ``doctor`` says of a machine, by its facts: each known fault alone, and none."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.doctor.checks import DoctorRequest, Finding, check_machine
from autoparallel.doctor.facts import Facts, Gpu, Interface, machine_facts, parse_gpus, parse_triton
from autoparallel.doctor.known import SUPPORTED_EXTRAS, SUPPORTED_TORCH

GIB = 2**30
GPU = Gpu(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    driver="580.65.06",
    memory_bytes=80 * GIB,
    used_bytes=0,
    is_mig=False,
    uncorrected_errors=0,
    clock_mhz=345,
    most_clock_mhz=1980,
    throttle=1,
    pcie_width=16,
    most_pcie_width=16,
)
NIC = Interface("eth0", has_ipv4=True, has_ipv6=True)
HEALTHY = Facts(
    host="node1",
    kernel="6.8.0-1",
    python="3.11.7",
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    nccl="2.28.9",
    has_cuda=True,
    architectures=("sm_80", "sm_90"),
    capabilities=((9, 0),) * 2,
    gpus=(GPU, replace(GPU, index=1)),
    open_files=65536,
    locked_bytes=-1,
    shared_bytes=64 * GIB,
    memory_bytes=512 * GIB,
    free_bytes=500 * GIB,
    num_cores=64,
    interfaces=(Interface("lo", True, True, is_loopback=True), NIC),
    addresses=("10.0.0.1",),
    infiniband=(("mlx5_0:1", "ACTIVE"),),
)
WANTED = DoctorRequest(parse_cluster("2x2xH100"), memory_bytes=70 * GIB)


def bad(facts: Facts, wanted: DoctorRequest = WANTED) -> list[Finding]:
    return [each for each in check_machine(facts, wanted) if each.level != "OK"]


def test_a_healthy_machine_has_nothing_to_mend() -> None:
    findings = check_machine(HEALTHY, WANTED)
    assert {each.level for each in findings} == {"OK"}
    assert len({each.name for each in findings}) >= 9


def gpu(**changes: Any) -> dict[str, Any]:
    return {"gpus": (replace(GPU, **changes), replace(GPU, index=1))}


@pytest.mark.parametrize(
    ("changes", "level", "name", "words"),
    [
        ({"torch": "2.10.1+cu130"}, "FAIL", "torch", "2.11 to 2.15"),
        ({"torch": "2.16.0"}, "FAIL", "torch", "2.11 to 2.15"),
        ({"extras": {"torchao": "0.17.0"}}, "WARN", "torchao", "fp8"),
        ({"triton": "3.6.0", "extras": {"triton": "3.4.0"}}, "WARN", "triton", "asks for 3.6.0"),
        ({"triton": "3.6.0"}, "WARN", "triton", "none is installed"),
        ({"nccl": "2.29.2"}, "WARN", "NCCL", "pytorch/pull/174338"),
        ({"nccl": "2.28.9", "machine": "aarch64"}, "WARN", "NCCL", "marin/pull/8038"),
        ({"nccl": "2.25.1"}, "WARN", "NCCL", "pytorch/issues/149153"),
        ({"nccl": "2.26.1"}, "WARN", "NCCL", "aborted"),
        ({"kernel": "4.18.0-553"}, "WARN", "kernel", "hang"),
        (gpu(driver="535.104.05"), "FAIL", "driver", "too old for CUDA 13.0"),
        ({"torch_cuda": None}, "FAIL", "CUDA", "without CUDA"),
        ({"has_cuda": False}, "FAIL", "CUDA", "sees no GPU"),
        ({"has_cuda": False, "gpus": ()}, "FAIL", "GPUs", "needs GPUs"),
        ({"architectures": ("sm_70", "sm_80")}, "FAIL", "GPU 0", "no kernels"),
        (gpu(is_mig=True), "FAIL", "GPU 0", "MIG"),
        (gpu(uncorrected_errors=3), "FAIL", "GPU 0", "3 uncorrected"),
        (gpu(throttle=0x48), "FAIL", "GPU 0", "hot"),
        (gpu(throttle=0x20), "WARN", "GPU 0", "temperature"),
        (gpu(pcie_width=4), "WARN", "GPU 0", "4 of 16"),
        (gpu(used_bytes=20 * GIB), "FAIL", "GPU 0", "needs 70.0 GiB, and 60.0 GiB are free"),
        (gpu(used_bytes=9 * GIB), "WARN", "GPU 0", "other processes use 9.00 GiB"),
        (gpu(memory_bytes=48 * GIB), "FAIL", "GPU 0", "it has 48.0 GiB"),
        ({"peers": ((0, 1), (1, 0))}, "WARN", "GPU links", "0→1, 1→0"),
        ({"open_files": 1024}, "WARN", "open files", "1024"),
        ({"open_files": 64}, "FAIL", "open files", "64"),
        ({"shared_bytes": 64 * 2**20}, "WARN", "shared memory", "64.0 MiB"),
        ({"locked_bytes": 65536}, "WARN", "locked memory", "64.0 KiB"),
        ({"limit_bytes": 2 * GIB}, "WARN", "host memory", "container's limit: 2.00 GiB"),
        ({"interfaces": ()}, "FAIL", "network", "no interface"),
        ({"interfaces": (replace(NIC, has_ipv4=False),)}, "WARN", "network", "only IPv6"),
        ({"interfaces": (NIC, replace(NIC, name="eth1"))}, "WARN", "network", "eth0, eth1"),
        ({"addresses": ("127.0.1.1",)}, "FAIL", "host name", "127.0.1.1"),
        ({"addresses": ()}, "FAIL", "host name", "no address"),
        ({"infiniband": (("mlx5_0:1", "DOWN"),)}, "WARN", "InfiniBand", "mlx5_0:1 is DOWN"),
        ({"environment": {"GLOO_SOCKET_IFNAME": "ib0"}}, "FAIL", "GLOO_SOCKET_IFNAME", "lo, eth0"),
        ({"environment": {"NCCL_SOCKET_IFNAME": "=eth"}}, "FAIL", "NCCL_SOCKET_IFNAME", "=eth"),
        ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "WARN", "NCCL_P2P_DISABLE", "NVLink"),
        ({"environment": {"NCCL_IB_DISABLE": "1"}}, "WARN", "NCCL_IB_DISABLE", "TCP"),
        (
            {"environment": {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}},
            "WARN",
            "TORCH_NCCL_USE_COMM_NONBLOCKING",
            "2.26",
        ),
        ({"environment": {"MALLOC_PERTURB_": "7"}}, "WARN", "MALLOC_PERTURB_", "filled"),
    ],
)
def test_each_fault_is_named_with_its_fix(
    changes: dict[str, Any], level: str, name: str, words: str
) -> None:
    found = bad(replace(HEALTHY, **changes))
    fault = next(each for each in found if each.name == name and words in each.what)
    assert fault.level == level
    assert fault.fix


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"interfaces": (NIC, Interface("docker0", True, False, is_virtual=True))}, WANTED),
        (
            {
                "interfaces": (NIC, replace(NIC, name="eth1")),
                "environment": {"GLOO_SOCKET_IFNAME": "eth1"},
            },
            WANTED,
        ),
        (
            {
                "interfaces": (replace(NIC, has_ipv4=False),),
                "environment": {"NCCL_SOCKET_FAMILY": "AF_INET6"},
            },
            WANTED,
        ),
        ({"environment": {"NCCL_SOCKET_IFNAME": "^docker"}}, WANTED),
        ({"environment": {"NCCL_SOCKET_IFNAME": "eth"}}, WANTED),
        ({"environment": {"NCCL_IB_DISABLE": "1"}, "infiniband": ()}, WANTED),
        ({"environment": {"NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "INFO"}}, WANTED),
        ({"environment": {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}}, WANTED),
        ({"triton": "3.6.0", "extras": {"triton": "3.6.1"}}, WANTED),
        ({"nccl": "2.29.3", "machine": "aarch64"}, WANTED),
        ({"nccl": "2.28.9", "machine": "x86_64"}, WANTED),
        ({"nccl": "2.26.2"}, WANTED),
        ({"nccl": ""}, WANTED),
        ({"addresses": ("127.0.1.1",)}, DoctorRequest(parse_cluster("2xH100"))),
        ({"locked_bytes": 65536, "infiniband": ()}, WANTED),
        (
            {"gpus": (), "has_cuda": False, "torch_cuda": None, "torch": "2.13.0+cpu"},
            DoctorRequest(),
        ),
    ],
)
def test_what_does_no_harm_is_no_fault(changes: dict[str, Any], wanted: DoctorRequest) -> None:
    assert bad(replace(HEALTHY, **changes), wanted) == []


def test_gpus_are_read_from_nvidia_smi() -> None:
    text = (
        "0, NVIDIA A100-SXM4-80GB, 550.54.15, 81920, 512, Disabled, 0, 210, 1410, "
        "0x0000000000000001, 16, 16\n"
        "1, NVIDIA GeForce RTX 4090, 550.54.15, 24564, 20, [N/A], [N/A], 2520, 3105, "
        "0x0000000000000020, 8, 16\nNo devices were found\n"
    )
    first, second = parse_gpus(text)
    assert (first.name, first.memory_bytes, first.used_bytes) == (
        "NVIDIA A100-SXM4-80GB",
        80 * GIB,
        GIB // 2,
    )
    assert (second.is_mig, second.uncorrected_errors, second.throttle) == (False, 0, 0x20)
    assert (second.pcie_width, second.most_pcie_width) == (8, 16)


def test_the_triton_that_torch_asks_for_is_read_from_its_requirements() -> None:
    wheel = [
        "sympy>=1.13.3",
        "nvidia-nccl-cu13==2.28.9; platform_system == 'Linux'",
        "triton==3.6.0; platform_system == 'Linux'",
    ]
    assert parse_triton(wheel) == "3.6.0"
    assert parse_triton(["sympy>=1.13.3", "tritonclient==2.0"]) == ""


def test_this_machine_has_facts() -> None:
    facts = machine_facts()
    assert facts.machine
    assert facts.open_files > 0
    assert facts.free_bytes < facts.memory_bytes
    assert any(each.is_loopback for each in facts.interfaces)


def test_versions_are_those_of_the_packaging() -> None:
    path = Path(__file__).resolve().parents[3] / "pyproject.toml"
    project = tomllib.loads(path.read_text())["project"]
    least, below = (".".join(map(str, each)) for each in SUPPORTED_TORCH)
    assert f"torch>={least},<{below}" in project["dependencies"]
    extras = [each for group in project["optional-dependencies"].values() for each in group]
    for name, (version, _) in SUPPORTED_EXTRAS.items():
        text = f"{name}>={'.'.join(map(str, version))}"
        declared = (*extras, *project["dependencies"])
        assert any(each == text or each.startswith(f"{text},") for each in declared)
