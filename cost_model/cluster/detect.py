"""The machines at hand as a cluster: their GPUs, or shares of their CPU, measured in a moment.

In: how many devices of this machine to use, or the device and host of each process that a launcher
started. Out: a ``Cluster`` of one host, or of all the processes' hosts, with a device for each rank
in order; the processes of a host must be consecutive ranks, as torchrun and Slurm number them.

A GPU's figures are its preset's, with the memory that the driver reports; an unknown GPU's rates
are measured. A CPU "device" is one process's share: ``threads_per_device`` threads and an equal
part of the memory that is free. Its matmul rates are measured and taken as the peak; the other
families' efficiencies are measured against the peak or the copy bandwidth. Torch is imported on
use.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import psutil

from .cluster import Cluster, ClusterError, Device, Host, Link
from .presets import Preset, device_presets, link_presets
from .tf32 import TFLOAT32, torch_computing

BFLOAT16_CAPABILITY = (8, 0)
"""First CUDA compute capability with units for bfloat16 (NVIDIA, CUDA C++ Programming Guide)."""

MAX_CPU_DEVICES = 8
"""Default maximum of the number of processes (each one device) into which a detected CPU is
divided."""

BUSY = 1.5
"""Load average per core above which a machine counts as busy with other programs."""

UNKNOWN_FABRIC = "ethernet-10g"
"""Name of the network link that is assumed between hosts whose devices have no preset."""

_PATIENCE_SECONDS = 0.06
_CGROUP = Path("/sys/fs/cgroup")


def detect_local() -> Cluster:
    """Return this machine as a cluster: its GPUs if it has any, else its CPU cores as devices."""
    import torch

    return _detect_gpus() if torch.cuda.is_available() else detect_cpu()


def detect_cpu(num_devices: int | None = None) -> Cluster:
    """Return this machine's CPU as a cluster of ``num_devices`` devices, each of which is a
    process; by default one per core, at most 8. Memory that other programs use now is excluded. The
    link between the devices has typical figures of gloo between processes of one machine."""
    cores = usable_cores()
    num = num_devices or min(cores, MAX_CPU_DEVICES)
    link = link_presets()["loopback"]
    host = Host(device=_measure_cpu(num, cores), num_devices=num, link=link)
    return Cluster(name=f"cpu:{num}", hosts=(host,), inter_link=link)


def usable_cores() -> int:
    """Return the number of physical cores that this process may use by CPU affinity and container
    quota."""
    if hasattr(os, "sched_getaffinity"):
        logical = len(os.sched_getaffinity(0))
    else:
        logical = os.cpu_count() or 1
    all_logical = psutil.cpu_count(logical=True) or logical
    all_physical = psutil.cpu_count(logical=False) or all_logical
    cores = max(1, logical * all_physical // max(all_logical, 1))
    quota = _read_words(_CGROUP / "cpu.max")
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        cores = min(cores, max(1, int(quota[0]) // max(1, int(quota[1]))))
    return cores


def threads_per_device(num_devices: int) -> int:
    """Return the number of threads that each of ``num_devices`` CPU processes should use."""
    return max(1, usable_cores() // num_devices)


def busy_text() -> str:
    """Return a warning that this machine is busy; "" if its load per core is below ``BUSY``."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < BUSY * cores:
        return ""
    return f"predictions assume an idle machine; load {load:.0f} on {cores} cores"


def available_memory_bytes() -> int:
    """Return the bytes of this machine's memory that are free now, within the container's limit."""
    available = int(psutil.virtual_memory().available)
    limit, used = _read_words(_CGROUP / "memory.max"), _read_words(_CGROUP / "memory.current")
    if limit and used and limit[0].isdigit() and used[0].isdigit():
        available = min(available, max(0, int(limit[0]) - int(used[0])))
    return available


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _seconds_per_call(
    function: Callable[[], Any], wait: Callable[[], None] = lambda: None
) -> float:
    """Return the seconds of the fastest of several calls of ``function``. After one warm-up call it
    is called for ``_PATIENCE_SECONDS``; ``wait`` blocks until the work of a call is done."""
    function()
    wait()
    best = float("inf")
    end = time.perf_counter() + _PATIENCE_SECONDS
    while True:
        start = time.perf_counter()
        function()
        wait()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best


def _measure_cpu(num_devices: int, cores: int) -> Device:
    import torch

    threads = max(1, cores // num_devices)
    share = min(1.0, cores / num_devices)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with torch.no_grad():
            peak = {name: share * rate for name, rate in _cpu_matmul_rates().items()}
            one_process = share * _cpu_copy_rate()
            launch_seconds = _cpu_launch_seconds()
            families = _cpu_families(peak["float32"] / share, one_process / share)
            torch.set_num_threads(min(cores, threads * num_devices))
            all_processes = _cpu_copy_rate() / num_devices
    finally:
        torch.set_num_threads(before)
    memory_bytes = available_memory_bytes() // num_devices
    how = f"measured in a process of {threads} thread(s), {num_devices} on {cores} core(s)"
    return Device(
        name="cpu",
        kind="cpu",
        memory_bytes=int(psutil.virtual_memory().total) // num_devices,
        usable_memory_bytes=memory_bytes * 95 // 100,
        memory_bytes_per_second=min(one_process, all_processes),
        peak_flops=peak,
        efficiency=families,
        launch_seconds=launch_seconds,
        sources={
            "memory_bytes": "the machine's, divided by the processes",
            "usable_memory_bytes": "95 % of what is free, divided by the processes",
            "memory_bytes_per_second": how + "; the lesser of one's and an equal part of all's",
            "peak_flops": how + ": matmul of 512 x 512",
            "efficiency": how,
            "launch_seconds": how + ": an addition of two numbers that need a gradient",
        },
    )


def _cpu_matmul_rates() -> dict[str, float]:
    """Measure the FLOP/s of a 512 x 512 matmul in this process; return them by dtype name."""
    import torch

    size = 512
    rates = {}
    for name in ("float32", "float64", "bfloat16"):
        left = torch.randn(size, size).to(getattr(torch, name))
        out = torch.empty_like(left)
        rates[name] = 2 * size**3 / _seconds_per_call(partial(torch.mm, left, left, out=out))
    return rates


def _cpu_copy_rate() -> float:
    """Measure the rate of copying a tensor larger than the caches of a core, in bytes per second;
    bytes read and bytes written both count."""
    import torch

    source = torch.ones(4_000_000)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _seconds_per_call(lambda: target.copy_(source))


def _cpu_launch_seconds() -> float:
    """Measure the seconds that the host takes to run one op on a single number with autograd on."""
    import torch

    with torch.enable_grad():
        value = torch.ones(1, requires_grad=True)

        def dispatch() -> None:
            for _ in range(100):
                value + value

        return _seconds_per_call(dispatch) / 100


def _cpu_families(peak: float, bandwidth: float) -> dict[str, float]:
    """Measure the efficiency of each op family on tensors of a small model: FLOP/s as a share of
    ``peak``, or bytes per second as a share of ``bandwidth`` (norms, elementwise ops, copies)."""
    import torch
    from torch.nn import functional as F  # noqa: N812

    query = torch.randn(2, 4, 256, 64)
    image, kernel = torch.randn(2, 32, 32, 32), torch.randn(32, 32, 3, 3)
    hidden = torch.randn(1024, 1024)
    weight = torch.ones(1024)

    def attend() -> Any:
        return F.scaled_dot_product_attention(query, query, query, is_causal=False)

    attention_flops = 4 * 2 * 4 * 256 * 256 * 64
    conv_flops = 2 * 2 * 32 * 32 * 32 * 32 * 9
    tensor_bytes = hidden.numel() * 4
    gelu_seconds = _seconds_per_call(lambda: F.gelu(hidden))
    add_seconds = _seconds_per_call(lambda: hidden + hidden)
    norm_seconds = _seconds_per_call(lambda: F.layer_norm(hidden, (1024,), weight, weight))
    return {
        "matmul": 1.0,
        "attention": attention_flops / _seconds_per_call(attend) / peak,
        "conv": conv_flops / _seconds_per_call(lambda: F.conv2d(image, kernel, padding=1)) / peak,
        "norm": 2 * tensor_bytes / norm_seconds / bandwidth,
        "elementwise": 5 * tensor_bytes / (gelu_seconds + add_seconds) / bandwidth,
        "copy": 1.0,
    }


def _detect_gpus() -> Cluster:
    import torch

    names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    hosts = []
    for name, run in groupby(enumerate(names), key=itemgetter(1)):
        indices = [index for index, _ in run]
        total = int(torch.cuda.get_device_properties(indices[0]).total_memory)
        hosts.append(gpu_host(name, total, len(indices), indices[0]))
    return _cluster_of(hosts)


def _cluster_of(hosts: Sequence[Host], inter_link: Link | None = None) -> Cluster:
    """Return the cluster of ``hosts``, joined by ``inter_link``. Without ``inter_link``, several
    hosts represent GPUs of different kinds in one machine, which PCIe joins."""
    if inter_link is None:
        inter_link = hosts[0].link if len(hosts) == 1 else link_presets()["pcie4"]
    name = "+".join(f"{host.num_devices}x{host.device.name}" for host in hosts)
    return Cluster(name, tuple(hosts), inter_link)


def gpu_host(name: str, total: int, num_devices: int, index: int = 0) -> Host:
    """Return a host of ``num_devices`` equal GPUs with the usual link of their preset. ``name`` is
    torch's name of the GPU, ``total`` the bytes of memory of each. If there is no preset of that
    name, GPU number ``index`` of this machine is measured."""
    preset = match_gpu_name(name, total)
    if preset is None:
        return Host(_measure_gpu(name, index, total), num_devices, link_presets()["pcie4"])
    sources = {
        **preset.device.sources,
        "memory_bytes": "torch.cuda",
        "usable_memory_bytes": "torch.cuda",
    }
    device = replace(preset.device, memory_bytes=total, usable_memory_bytes=total, sources=sources)
    if "SXM3" in name:  # comes with a switch
        return Host(device, num_devices, link_presets()[preset.link])
    return preset.host(num_devices, device)


def match_gpu_name(name: str, memory_bytes: int) -> Preset | None:
    """Return the preset for the GPU that the driver calls ``name``. If several presets match, the
    one whose memory is nearest to ``memory_bytes`` is returned.

    >>> match_gpu_name("NVIDIA A100-SXM4-40GB", 42 * 10**9).device.name
    'A100-40GB'
    >>> match_gpu_name("NVIDIA H100 PCIe", 85 * 10**9).device.name
    'H100-PCIe'

    Returns None if no preset matches, for a MIG slice (which has only a part of the GPU's units),
    and for variants of other speed (Ti, laptop).

    >>> match_gpu_name("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 21 * 10**9)
    """
    words = name.upper().replace("GEFORCE RTX ", "RTX").replace("-", " ").split()
    if {"MIG", "TI", "D", "LAPTOP"} & set(words):
        return None
    is_pcie = any(word.startswith("PCIE") for word in words)
    is_nvl = "NVL" in words
    candidates = [
        preset
        for preset in device_presets().values()
        if preset.device.name.split("-")[0].upper() in words
        and preset.device.name.endswith("-PCIe") == is_pcie
        and preset.device.name.endswith("-NVL") == is_nvl
    ]
    if not candidates:
        return None
    return min(candidates, key=lambda preset: abs(preset.device.memory_bytes - memory_bytes))


def is_at_hand(cluster: Cluster) -> bool:
    """Return true if this machine has the devices of a cluster: processes on its CPU, or GPUs."""
    if len(cluster.hosts) != 1:
        return False
    (host,) = cluster.hosts
    if host.device.kind == "cpu":
        is_detected = cluster.name == f"cpu:{host.num_devices}"
        return is_detected and host.num_devices <= MAX_CPU_DEVICES
    if "torch" not in sys.modules and shutil.which("nvidia-smi") is None:
        return False  # without loading torch, which takes a second or two
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() < host.num_devices:
        return False
    memory_bytes = int(torch.cuda.get_device_properties(0).total_memory)
    preset = match_gpu_name(torch.cuda.get_device_name(0), memory_bytes)
    name = preset.device.name if preset is not None else torch.cuda.get_device_name(0)
    return host.device.name == name


def _measure_gpu(name: str, index: int, total: int) -> Device:
    """Measure GPU number ``index`` of this machine, called ``name``, which has no preset: its peak
    FLOP/s by large matmuls, its memory bandwidth by a copy. ``total``: bytes of its memory."""
    import torch

    where = torch.device("cuda", index)

    def seconds(function: Callable[[], Any]) -> float:
        return _seconds_per_call(function, lambda: torch.cuda.synchronize(where))

    size = 4096
    peak = {}
    has_bfloat16 = torch.cuda.get_device_capability(where) >= BFLOAT16_CAPABILITY
    since_ampere = (TFLOAT32, "bfloat16") if has_bfloat16 else ()
    for dtype in ("float32", *since_ampere, "float16"):
        held = "float32" if dtype == TFLOAT32 else dtype
        left = torch.randn(size, size, device=where, dtype=getattr(torch, held))
        with torch_computing(("matmul",) if dtype == TFLOAT32 else ()):
            peak[dtype] = 2 * size**3 / seconds(partial(torch.mm, left, left))
    source = torch.ones(2**26, device=where)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() * 4 / seconds(lambda: target.copy_(source))
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=total,
        usable_memory_bytes=total,
        memory_bytes_per_second=bandwidth,
        peak_flops=peak,
        efficiency={"attention": 0.5, "conv": 0.6, "norm": 0.85},
        launch_seconds=4e-6,
        sources={
            "memory_bytes": "torch.cuda",
            "usable_memory_bytes": "torch.cuda",
            "peak_flops": "measured: matmul of 4096 x 4096, taken as the peak",
            "memory_bytes_per_second": "measured: a copy of 256 MB",
            "efficiency": "estimate",
            "launch_seconds": "estimate",
        },
    )


@dataclass(frozen=True, slots=True)
class ProcessDevice:
    """Device that one process computes on. ``host`` is the name of its machine; ``name`` and
    ``memory_bytes`` are reported by the GPU driver. ``reaches_peers``: true if the GPU can read the
    memory of all other GPUs that the process sees; None if the process sees no other GPU."""

    host: str
    kind: Literal["cuda", "cpu"]
    name: str = "cpu"
    memory_bytes: int = 0
    reaches_peers: bool | None = None


def own_process_device(index: int | None) -> ProcessDevice:
    """Return the device that this process computes on: GPU number ``index`` among the GPUs that it
    sees, or the CPU if ``index`` is None."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    if index is None:
        return ProcessDevice(host, "cpu")
    import torch

    name = torch.cuda.get_device_name(index)
    memory_bytes = int(torch.cuda.get_device_properties(index).total_memory)
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    reaches = [torch.cuda.can_device_access_peer(index, other) for other in others]
    return ProcessDevice(host, "cuda", name, memory_bytes, all(reaches) if others else None)


def joined_cluster(found: Sequence[ProcessDevice]) -> Cluster:
    """Return the cluster of the devices of all processes; ``found`` is in the order of their ranks.
    Rank 0 calls it, and measures its own GPU if that has no preset. Raises ``ClusterError`` if the
    ranks of a host are not consecutive, or if another host has GPUs without a preset.

    >>> gpus = [ProcessDevice(host, "cuda", "NVIDIA H100 80GB HBM3", 85 * 10**9, True)
    ...         for host in "ab" for _ in range(8)]
    >>> cluster = joined_cluster(gpus)
    >>> len(cluster.hosts), cluster.num_devices, cluster.inter_link.name
    (2, 16, 'infiniband-ndr')
    """
    names = [name for name, _ in groupby(each.host for each in found)]
    if len(set(names)) < len(names):
        again = next(name for at, name in enumerate(names) if name in names[:at])
        raise ClusterError(
            f"the ranks of host {again!r} are not consecutive",
            fix="start the processes host by host, or pass --cluster",
        )
    hosts: list[Host] = []
    fabrics: list[Link] = []
    for _, run in groupby(found, key=lambda each: (each.host, each.name)):
        devices = list(run)
        host, fabric = _process_host(devices, own=devices[0] == found[0])
        hosts.append(host)
        fabrics.append(fabric)
    if len(names) > 1:
        return _cluster_of(hosts, min(fabrics, key=lambda link: link.bytes_per_second))
    cluster = _cluster_of(hosts)
    on_cpus = {each.kind for each in found} == {"cpu"}
    return replace(cluster, name=f"cpu:{len(found)}") if on_cpus else cluster


def _process_host(devices: Sequence[ProcessDevice], *, own: bool) -> tuple[Host, Link]:
    """Return the host of ``devices``, which are equal and in one machine, and the usual link
    between such hosts. ``own``: the machine is this process's own, so its GPU can be measured."""
    first, count = devices[0], len(devices)
    if first.kind == "cpu":
        return detect_cpu(count).hosts[0], link_presets()[UNKNOWN_FABRIC]
    preset = match_gpu_name(first.name, first.memory_bytes)
    if preset is None and not own:
        raise ClusterError(
            f"there is no preset for {first.name!r} of host {first.host!r}",
            fix="describe the cluster in a TOML file, and pass that",
        )
    host = gpu_host(first.name, first.memory_bytes, count)
    if any(each.reaches_peers is False for each in devices):
        host = replace(host, link=link_presets()["pcie4"], wires=(), detour=None)
    return host, link_presets()[preset.fabric if preset else UNKNOWN_FABRIC]
