"""Links by name: latency, bandwidth per device in one direction, and where they come from.

Rates are those that collectives reach, not those on the data sheet, wherever there is a
measurement: the bus bandwidth of nccl-tests at large sizes ("busbw": bytes over seconds,
times 2(n − 1)/n for an all-reduce). ``base_seconds`` and ``alpha_seconds`` are fitted to
measured all-reduce times of 64 KB to 16 GB as this package's formulas use them.
"""

from __future__ import annotations

from collections.abc import Mapping

from .cluster import Link

_ML_ENGINEERING = "stas00/ml-engineering@744d01e network/README.md"
_AZURE = "Azure/AI-benchmarking-guide@8fd0c6e"
_FIT = "latencies fitted to nccl-tests"


def _net(name: str, gigabits: float, source: str, *, fraction: float = 0.9) -> Link:
    """A network card of ``gigabits`` per second per device, of which ``fraction`` is reached."""
    text = f"spec {gigabits:g} Gb/s per device x {fraction:g}; {source}"
    return Link(name, 25e-6, gigabits / 8 * 1e9 * fraction, text, base_seconds=60e-6)


_RDMA = (
    "fraction from 256 H100 on 8x400 Gb/s, all-reduce busbw 340 GB/s (NVIDIA/nccl#1218), and "
    f"32 B200 on 8x400 Gb/s, 381 GB/s ({_ML_ENGINEERING}); " + _FIT
)
_TCP = "fraction as of RDMA, less what TCP costs; no measurement"

_LINKS = (
    Link(
        "nvlink2", 4e-6, 124e9,
        "measured: all-reduce busbw 124 GB/s on 4 V100-SXM2 (bigscience@9e64ede, "
        "n1_32gb_all_reduce_bench); spec 150 GB/s; latencies as NVLink 3",
        base_seconds=45e-6,
    ),
    Link(
        "nvlink3", 4e-6, 235e9,
        f"measured: all-reduce busbw 235 GB/s on 8 A100 ({_ML_ENGINEERING}; 231: {_AZURE}); "
        f"spec 300 GB/s; {_FIT}",
        base_seconds=45e-6,
    ),
    Link(
        "nvlink4", 3e-6, 366e9,
        f"measured: ring all-reduce busbw 366 GB/s, all-gather 361, in-switch sums 272 GB/s "
        f"of tensor, on 8 H200 ({_ML_ENGINEERING}); spec 450 GB/s; {_FIT}",
        base_seconds=35e-6, reduction_bytes_per_second=272e9,
    ),
    Link(
        "nvlink4-bridge", 3e-6, 240e9,
        "spec 300 GB/s between two cards x 0.8, the share that NVLink 4 reaches with a switch",
        base_seconds=20e-6,
    ),
    Link(
        "nvlink3-bridge", 4e-6, 235e9,
        "spec 300 GB/s between two cards x 0.78, the share that NVLink 3 reaches with a switch",
        base_seconds=45e-6,
    ),
    Link(
        "nvlink5", 3e-6, 680e9,
        f"measured: ring all-reduce busbw 678 GB/s, in-switch sums 480 GB/s of tensor, on "
        f"8 B200 ({_ML_ENGINEERING}); spec 900 GB/s; {_FIT}",
        base_seconds=45e-6, reduction_bytes_per_second=480e9,
    ),
    Link("pcie3", 8e-6, 12e9, "spec 15.8 GB/s (PCIe 3.0 x16) x 0.75; latency estimated", 20e-6),
    Link("pcie4", 8e-6, 24e9, "spec 31.5 GB/s (PCIe 4.0 x16) x 0.75; latency estimated", 20e-6),
    Link("pcie5", 8e-6, 48e9, "spec 63 GB/s (PCIe 5.0 x16) x 0.75; latency estimated", 20e-6),
    _net("infiniband-edr", 100, _RDMA),
    _net("infiniband-edr-shared", 50, "a 100 Gb/s card per two V100 (DGX-1V, DGX-2); " + _RDMA),
    _net("infiniband-hdr", 200, _RDMA),
    _net("infiniband-ndr", 400, _RDMA),
    _net("infiniband-xdr", 800, _RDMA),
    _net("ethernet-10g", 10, _TCP, fraction=0.8),
    _net("ethernet-25g", 25, _TCP, fraction=0.8),
    _net("ethernet-50g", 50, _TCP, fraction=0.8),
    _net("ethernet-100g", 100, _TCP, fraction=0.8),
    _net("ethernet-200g", 200, _TCP, fraction=0.8),
    _net("ethernet-400g", 400, _TCP, fraction=0.8),
    Link(
        "efa-p4d", 20e-6, 5.25e9,
        "measured: 16 A100 on 4x100 Gb/s per host, all-reduce algbw 42 GB/s of 50 "
        "(aws-samples/awsome-distributed-training@7217859 nccl-tests)",
        base_seconds=100e-6,
    ),
    Link(
        "loopback", 100e-6, 1.5e9,
        "spec: typical of gloo between processes of one machine; replace by a measurement",
        base_seconds=100e-6,
    ),
)  # fmt: skip

LINKS: Mapping[str, Link] = {link.name: link for link in _LINKS}

LINK_ALIASES: Mapping[str, str] = {
    "nvlink": "nvlink4", "nvswitch": "nvlink4", "pcie": "pcie4",
    "edr": "infiniband-edr", "hdr": "infiniband-hdr", "ndr": "infiniband-ndr",
    "xdr": "infiniband-xdr", "infiniband": "infiniband-ndr", "ib": "infiniband-ndr",
    "ethernet": "ethernet-100g", "gloo": "loopback",
}  # fmt: skip

INTRA_PREFIXES = ("nvlink", "pcie", "loopback")
"""Links within a host; all others join hosts."""
