"""The cluster that a launcher's processes are: one device each, on all their hosts.

In: for each rank, the device and the host of its process. Out: a ``Cluster`` that has one device
for each rank, in the order of ranks. The processes of a host must be consecutive ranks, as torchrun
and Slurm number them. Torch is imported on use.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from .cluster import Cluster, ClusterError, Host, Link
from .detect import detect_cpu, gpu_host, match_gpu_name
from .presets import link_presets

UNKNOWN_FABRIC = "ethernet-10g"
"""Between hosts of devices that no preset knows."""


@dataclass(frozen=True, slots=True)
class ProcessDevice:
    """What a process has: ``name`` and ``memory_bytes`` as the driver says.

    ``reaches_peers``: whether its GPU can read the memory of all others that the process sees;
    None where it sees no other.
    """

    host: str
    kind: Literal["cuda", "cpu"]
    name: str = "cpu"
    memory_bytes: int = 0
    reaches_peers: bool | None = None


def own_process_device(index: int | None) -> ProcessDevice:
    """This process's: GPU ``index`` of those that it sees, or None for a share of the CPU."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    if index is None:
        return ProcessDevice(host, "cpu")
    import torch

    others = [other for other in range(torch.cuda.device_count()) if other != index]
    reaches = [torch.cuda.can_device_access_peer(index, other) for other in others]
    return ProcessDevice(
        host, "cuda", torch.cuda.get_device_name(index),
        int(torch.cuda.get_device_properties(index).total_memory), all(reaches) if others else None,
    )  # fmt: skip


def joined_cluster(found: Sequence[ProcessDevice]) -> Cluster:
    """The cluster of the processes, in the order of their ranks. Rank 0 calls it.

    An unknown GPU is measured on rank 0, where it has one. Raises ``ClusterError`` where the ranks
    of a host are not consecutive, or another host has GPUs that no preset knows.

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
        host, fabric = _host(devices, own=devices[0] == found[0])
        hosts.append(host)
        fabrics.append(fabric)
    kinds = {each.kind for each in found}
    if len(names) > 1:
        inter_link = min(fabrics, key=lambda link: link.bytes_per_second)
    else:
        inter_link = hosts[0].link if len(hosts) == 1 else link_presets()["pcie4"]
    name = "+".join(f"{host.num_devices}x{host.device.name}" for host in hosts)
    return Cluster(
        f"cpu:{len(found)}" if kinds == {"cpu"} and len(names) == 1 else name,
        tuple(hosts), inter_link,
    )  # fmt: skip


def _host(devices: Sequence[ProcessDevice], *, own: bool) -> tuple[Host, Link]:
    """A host's equal devices, and the link that usually joins such hosts."""
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
