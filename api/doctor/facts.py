"""Facts of a machine, for ``checks``: software, GPUs, limits, network, environment.

Nothing is judged here. Unknown facts are None, 0 or empty, and are not checked.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

VARIABLES = (
    "NCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "CUDA_",
    "MALLOC_",
    "PYTORCH_",
    "TORCH_DISTRIBUTED_",
    "OMP_",
    "LD_PRELOAD",
)
"""Prefixes of the environment variables that are read."""

_GPU_FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU as nvidia-smi reports it. ``throttle`` is a bit mask of reasons for a lower clock."""

    index: int
    name: str
    driver: str
    memory_bytes: int
    used_bytes: int
    is_mig: bool
    uncorrected_errors: int
    clock_mhz: int
    most_clock_mhz: int
    throttle: int
    pcie_width: int
    most_pcie_width: int


@dataclass(frozen=True, slots=True)
class Interface:
    """Network interface that is up; ``is_virtual`` if it connects containers or guests."""

    name: str
    has_ipv4: bool
    has_ipv6: bool
    is_loopback: bool = False
    is_virtual: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Software, limits and GPUs of a host. ``architectures`` lists torch's kernels (``sm_90``),
    ``capabilities`` the compute capabilities of the GPUs; ``peers`` are pairs of GPUs without
    direct access. ``addresses`` belong to the host name; ``limit_bytes`` is the container's memory
    limit, 0 for none. ``infiniband`` has name and state of each port; ``machine`` is the processor
    type (``x86_64``); ``triton`` is the version that torch requires, "" for none."""

    host: str
    kernel: str
    python: str
    torch: str
    torch_cuda: str | None
    nccl: str
    has_cuda: bool
    architectures: tuple[str, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ()
    gpus: tuple[Gpu, ...] = ()
    peers: tuple[tuple[int, int], ...] = ()
    open_files: int = 0
    locked_bytes: int = 0
    shared_bytes: int = 0
    memory_bytes: int = 0
    free_bytes: int = 0
    limit_bytes: int = 0
    num_cores: int = 0
    in_container: bool = False
    interfaces: tuple[Interface, ...] = ()
    addresses: tuple[str, ...] = ()
    infiniband: tuple[tuple[str, str], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""
    triton: str = ""


def machine_facts() -> Facts:
    """Return the software versions, limits, network and GPUs of this machine."""
    import torch

    has_cuda = torch.cuda.is_available()
    count = torch.cuda.device_count() if has_cuda else 0
    return Facts(
        host=socket.gethostname(),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        nccl=_nccl(has_cuda),
        has_cuda=has_cuda,
        architectures=tuple(torch.cuda.get_arch_list()) if has_cuda else (),
        capabilities=tuple(torch.cuda.get_device_capability(each) for each in range(count)),
        gpus=parse_gpus(_nvidia_smi()),
        peers=tuple(
            (one, other)
            for one in range(count)
            for other in range(count)
            if one != other and not torch.cuda.can_device_access_peer(one, other)
        ),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shared_bytes=_shared_bytes(),
        memory_bytes=psutil.virtual_memory().total,
        free_bytes=psutil.virtual_memory().available,
        limit_bytes=_memory_limit(),
        num_cores=len(os.sched_getaffinity(0)),
        in_container=_in_container(),
        interfaces=_interfaces(),
        addresses=_addresses(),
        infiniband=_infiniband(),
        environment={
            name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)
        },
        extras=_extras(),
        machine=platform.machine(),
        triton=_wanted_triton(),
    )


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse the output of nvidia-smi for ``_GPU_FIELDS``, as CSV without units.

    Missing values ("[N/A]", "[Not Supported]") count as 0.
    """
    found = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(_GPU_FIELDS) or not values[0].isdecimal():
            continue
        number = [_number(value) for value in values]
        found.append(
            Gpu(
                index=number[0],
                name=values[1],
                driver=values[2],
                memory_bytes=number[3] * MIB,
                used_bytes=number[4] * MIB,
                is_mig=values[5] == "Enabled",
                uncorrected_errors=number[6],
                clock_mhz=number[7],
                most_clock_mhz=number[8],
                throttle=number[9],
                pcie_width=number[10],
                most_pcie_width=number[11],
            )
        )
    return tuple(found)


def _number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return 0


def _nvidia_smi() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(_GPU_FIELDS)}",
        "--format=csv,noheader,nounits",
    ]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _nccl(has_cuda: bool) -> str:
    if not has_cuda:
        return ""
    import torch

    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _shared_bytes() -> int:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return 0


def _memory_limit() -> int:
    """Return the memory limit of this process' control group (version 2 or 1), 0 without one."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        limit = int(text) if text.isdecimal() else 0
        return limit if limit < psutil.virtual_memory().total else 0
    return 0


def _in_container() -> bool:
    return Path("/.dockerenv").exists() or "KUBERNETES_SERVICE_HOST" in os.environ


_VIRTUAL = ("docker", "veth", "virbr", "br-", "cni", "flannel", "cali", "tun", "tap")


def _interfaces() -> tuple[Interface, ...]:
    found = []
    states = psutil.net_if_stats()
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if name not in states or not states[name].isup:
            continue
        ips = [
            address.address.partition("%")[0]
            for address in addresses
            if address.family in (socket.AF_INET, socket.AF_INET6)
        ]
        parsed = [ipaddress.ip_address(each) for each in ips]
        routed = [each for each in parsed if not each.is_link_local]
        found.append(
            Interface(
                name,
                has_ipv4=any(each.version == 4 for each in routed),
                has_ipv6=any(each.version == 6 for each in routed),
                is_loopback=bool(parsed) and all(each.is_loopback for each in parsed),
                is_virtual=name.startswith(_VIRTUAL),
            )
        )
    return tuple(found)


def _addresses() -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(each[4][0]) for each in found))


def _infiniband() -> tuple[tuple[str, str], ...]:
    found = []
    for path in sorted(Path("/sys/class/infiniband").glob("*/ports/*/state")):
        try:
            state = path.read_text().partition(":")[2].strip()
        except OSError:
            continue
        found.append((f"{path.parts[-4]}:{path.parts[-2]}", state))
    return tuple(found)


def _extras() -> Mapping[str, str]:
    """Return the versions of installed optional packages."""
    found = {}
    for name in ("transformers", "torchao", "pulp", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _wanted_triton() -> str:
    """Return the version of triton that torch's package metadata requires, "" if none."""
    try:
        lines = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return ""
    return parse_triton(lines)


def parse_triton(requirements: Iterable[str]) -> str:
    """Return the version of triton in a package's requirements, "" if none.

    >>> parse_triton(["sympy>=1.13", "triton==3.6.0; platform_system == 'Linux'"])
    '3.6.0'
    """
    found = (re.match(r"triton==([\d.]+)", line) for line in requirements)
    return next((match.group(1) for match in found if match), "")
