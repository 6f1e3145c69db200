"""What every preset device is made of: its figures with their sources, and its usual hosts.

In: figures from data sheets and published measurements. Out: a ``Device``, and a ``Preset`` that
makes hosts of it. Peaks are dense (no structured sparsity); those in float32 are without TF32,
which has its own ("tfloat32", half of bfloat16's by the vendor's data sheets). Memory is what
nvidia-smi or rocm-smi shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .cluster import Device, Host
from .gpu_links import WIRES, wires_among
from .link_presets import LINKS
from .preset_references import (
    AZURE,
    DGX_1_MEMORY,
    DGX_A100_MEMORY,
    DGX_H100_MEMORY,
    NVIDIA_SMI,
    ROME_CHANNELS,
    TWO_MODULES,
    read,
)

MIB = 2**20
LARGE_MATMUL = (
    f"x 0.94, what large square matmuls on A100 (253.7 TFLOP/s at 8192, {AZURE}) reach of the "
    "best shape's rate (271.2)"
)
ESTIMATE = "estimate, no published measurement at hand"
LAUNCH = f"fitted on products of 1024 on A100 and H100 ({AZURE})"
ISSUE = "estimate: PyTorch's eager dispatch of an op under autograd on a server's core"


@dataclass(frozen=True, slots=True)
class HostShare:
    """What a GPU has of its usual host: a link, and an eighth of the memory and of its rate."""

    link: str
    bytes_per_second: float
    memory_bytes: int
    text: str
    source: str

    @property
    def sources(self) -> dict[str, str]:
        return {
            "host_link_bytes_per_second": f"{self.link}: {LINKS[self.link].source}",
            "host_bytes_per_second": f"an eighth of {self.text}; {self.source}",
            "host_memory_bytes": f"an eighth of {self.text}; {self.source}",
        }


DGX_1 = HostShare(
    "pcie3",
    17.064e9,
    64 * 10**9,
    "a DGX-1's 2 Xeons of 4 channels DDR4-2133, 512 GB",
    f"{DGX_1_MEMORY}; {read('four channels: Dell manual of the NX3230, p. 52')}",
)
DGX_A100 = HostShare(
    "pcie4",
    51.2e9,
    128 * 10**9,
    "a DGX A100's 2 EPYCs of 8 channels DDR4-3200, 1 TB",
    f"{DGX_A100_MEMORY}; {ROME_CHANNELS}",
)
DGX_H100 = HostShare(
    "pcie5",
    70.4e9,
    256 * 10**9,
    "a DGX H100's 2 Xeons of 8 channels DDR5 at 4400 MT/s, 2 TB",
    f"{DGX_H100_MEMORY}; {TWO_MODULES}",
)


@dataclass(frozen=True, slots=True)
class Preset:
    """A device, the names of the links in and between its usual hosts, the devices of a host.

    ``wires`` are the names of those of hosts without a switch, each with the most devices that
    it is for, in rising order; ``detour`` is the link of those of its devices that no wires join.
    """

    device: Device
    link: str
    fabric: str
    host_size: int = 8
    wires: tuple[tuple[int, str], ...] = ()
    detour: str = "pcie3"

    def host(self, num_devices: int, device: Device | None = None) -> Host:
        """So many of these devices, or of ``device``, as they are usually joined.

        >>> from autoparallel.cost_model.cluster.presets import find_preset
        >>> find_preset("V100-16GB").host(4).link_among((0, 1)).num_links
        1
        """
        own, link = device or self.device, LINKS[self.link]
        for most, name in self.wires:
            if 1 < num_devices <= most:
                wires = wires_among(WIRES[name], range(num_devices))
                return Host(own, num_devices, link, wires=wires, detour=LINKS[self.detour])
        return Host(own, num_devices, link)


def gpu(
    name: str,
    *,
    memory_mib: int,
    bandwidth_gb: float,
    tflops: Mapping[str, float],
    efficiency: Mapping[str, float],
    sources: Mapping[str, str],
    num_units: int,
    host: HostShare = DGX_A100,
) -> Device:
    memory_bytes = memory_mib * MIB
    common = {
        "memory_bytes": NVIDIA_SMI,
        "usable_memory_bytes": "memory less 1 % that the driver keeps",
        "launch_seconds": LAUNCH,
        "issue_seconds": ISSUE,
    }
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=memory_bytes,
        usable_memory_bytes=memory_bytes * 99 // 100,
        memory_bytes_per_second=bandwidth_gb * 1e9,
        peak_flops={dtype: value * 1e12 for dtype, value in tflops.items()},
        efficiency=efficiency,
        launch_seconds=2e-6,
        issue_seconds=8e-6,
        num_units=num_units,
        sources={**common, **sources, **host.sources},
        host_link_bytes_per_second=LINKS[host.link].bytes_per_second,
        host_bytes_per_second=host.bytes_per_second,
        host_memory_bytes=host.memory_bytes,
    )


def families(matmul: float, attention: float, conv: float, memory: float) -> dict[str, float]:
    """Efficiencies: of the peak for the first three, of the bandwidth for the rest."""
    return {
        "matmul": matmul, "attention": attention, "conv": conv,
        "norm": round(memory * 0.85, 3), "elementwise": memory, "copy": memory,
    }  # fmt: skip


def device_sources(
    peak: str, bandwidth: str, matmul: str, attention: str, memory: str
) -> dict[str, str]:
    return {
        "peak_flops": peak,
        "memory_bytes_per_second": bandwidth,
        "efficiency.matmul": matmul,
        "efficiency.attention": attention,
        "efficiency.conv": ESTIMATE,
        "efficiency.copy": memory,
        "efficiency.elementwise": "as copy",
        "efficiency.norm": "copy x 0.85; " + ESTIMATE,
    }
