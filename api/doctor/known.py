"""Known faults: versions, environment variables, reasons for low clocks, each with its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SUPPORTED_TORCH = ((2, 11), (2, 16))
"""First supported release, and the first unsupported release after it. Source: pyproject.toml."""

SUPPORTED_EXTRAS: Mapping[str, tuple[tuple[int, ...], str]] = {
    "transformers": ((5, 0), "an hf: target"),
    "torchao": ((0, 18), "--precision fp8"),
    "pulp": ((3, 3, 2), "--solver"),
}
"""Optional packages: minimum version, and the feature that needs it. Source: pyproject.toml."""

LEAST_KERNEL = (5, 5)
"""Oldest kernel under which processes are not known to hang. Source: huggingface/accelerate,
``check_os_kernel``."""

LEAST_DRIVERS: Mapping[int, int] = {11: 450, 12: 525, 13: 580}
"""First driver series that supports each major version of CUDA. Source:
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1."""


@dataclass(frozen=True, slots=True)
class KnownNccl:
    """Bug of NCCL versions from ``first`` up to, not including, ``fixed``, on ``machine`` ("" for
    all). ``what`` describes the bug; ``thread`` is the address of its report."""

    first: tuple[int, ...]
    fixed: tuple[int, ...]
    what: str
    thread: str
    machine: str = ""


BAD_NCCL = (
    KnownNccl(
        (2, 29, 2),
        (2, 29, 3),
        "can hang in collectives",
        "https://github.com/pytorch/pytorch/pull/174338",
    ),
    KnownNccl(
        (2, 0),
        (2, 29, 3),
        "loses slots of its proxy on ARM, until all ranks hang",
        "https://github.com/marin-community/marin/pull/8038",
        machine="aarch64",
    ),
    KnownNccl(
        (2, 25, 1),
        (2, 26, 2),
        "hangs when a failed run is aborted",
        "https://github.com/pytorch/pytorch/issues/149153",
    ),
)
"""Versions of NCCL with bugs, read 2026-11-25. The second bug was found with 2.28.9 and is in
NVIDIA's notes to 2.29.3; its thread says that older versions have it too. torch 2.11 and later come
with newer versions than the third; builds with a system's NCCL may not."""

TRITON_THREAD = "https://github.com/triton-lang/triton/issues/6080"
"""Address of the report that torch.compile uses private names of torch's own triton version."""

THROTTLE_REASONS: Mapping[int, tuple[Literal["WARN", "FAIL"], str, str]] = {
    0x08: ("FAIL", "the hardware slows down", "check cooling and power supply"),
    0x40: ("FAIL", "it is too hot", "check fans, cooling and the temperature of the room"),
    0x80: ("FAIL", "the power supply asks for less", "check the power supply"),
    0x20: ("WARN", "it is near its highest temperature", "check fans and cooling"),
    0x02: ("WARN", "application clocks are set", "nvidia-smi -rac"),
}
"""Bits of nvidia-smi's clocks_throttle_reasons.active. The power limit (0x4) is left out: a GPU
under load is usually at it. Source: nvml.h, nvmlClocksThrottleReasons."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault caused by an environment variable that has one of ``values`` (in capitals; () for any
    value): ``why`` says how it slows or hangs a run."""

    why: str
    values: tuple[str, ...] = ()
    needs_infiniband: bool = False


_ON = ("1", "TRUE", "Y", "YES")

HURTFUL_VARIABLES: Mapping[str, Fault] = {
    "NCCL_P2P_DISABLE": Fault("GPUs of a host talk through host memory, not NVLink or PCIe", _ON),
    "NCCL_SHM_DISABLE": Fault("ranks of a host talk over the network", _ON),
    "NCCL_IB_DISABLE": Fault("hosts talk over TCP, not InfiniBand", _ON, needs_infiniband=True),
    "NCCL_NET_GDR_LEVEL": Fault(
        "the network card copies through host memory", ("0", "LOC"), needs_infiniband=True
    ),
    "NCCL_ALGO": Fault("NCCL cannot choose its algorithm by size; meant for debugging"),
    "NCCL_PROTO": Fault("NCCL cannot choose its protocol by size; meant for debugging"),
    "NCCL_DEBUG": Fault("every call is written to a log", ("TRACE",)),
    "NCCL_MAX_NCHANNELS": Fault("limits the channels, and with them the bandwidth"),
    "NCCL_MAX_CTAS": Fault("limits the channels, and with them the bandwidth"),
    "CUDA_LAUNCH_BLOCKING": Fault("the host waits for every kernel", _ON),
    "CUDA_DEVICE_MAX_CONNECTIONS": Fault("ZeRO's collectives queue behind compute", ("1",)),
    "TORCH_NCCL_BLOCKING_WAIT": Fault("the host waits for every collective", _ON),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Fault("a rank that fails leaves the others hanging", ("0",)),
    "TORCH_NCCL_USE_COMM_NONBLOCKING": Fault("communicators hung at random with NCCL 2.26", _ON),
    "TORCH_DISTRIBUTED_DEBUG": Fault("every collective is checked by another", ("DETAIL",)),
    "MALLOC_PERTURB_": Fault("every block of memory is filled when it is freed"),
    "MALLOC_CHECK_": Fault("every allocation is checked", ("1", "2", "3")),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Fault("every tensor is allocated by the driver", _ON),
}
"""Environment variables that make runs slow or hang. Sources:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html for NCCL_, the pages distributed,
torch_nccl_environment_variables and cuda_environment_variables of
https://docs.pytorch.org/docs/stable/ for TORCH_, PYTORCH_ and CUDA_LAUNCH_BLOCKING,
pytorch/torchtitan issue 1147 and verl-project/verl pull request 6976 for
CUDA_DEVICE_MAX_CONNECTIONS, pytorch/pytorch issue 153960 and pull request 154055 for
TORCH_NCCL_USE_COMM_NONBLOCKING, mallopt(3) for MALLOC_."""


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version.

    >>> numbers("2.13.0+cpu"), numbers("5.10.0-28-amd64"), numbers("580.65.06")
    ((2, 13, 0), (5, 10, 0), (580, 65, 6))
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()
