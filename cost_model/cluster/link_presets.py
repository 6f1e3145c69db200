"""Links by name: latency, bandwidth per device in one direction, and where they come from.

Rates are those that collectives reach, not those on the data sheet, wherever there is a
measurement: the bus bandwidth of nccl-tests at large sizes ("busbw": bytes over seconds,
times 2(n − 1)/n for an all-reduce). Latencies and protocols are fitted to published times of
16 KB to 16 GB by ``benchmarks/collectives/calibrate.py``, which also says how well they
predict sources that were left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .cluster import Link


@dataclass(frozen=True, slots=True)
class Protocols:
    """What NCCL's protocols make of a kind of link.

    ``short_share`` is the part of the link's rate that the protocols for short messages reach
    (LL and LL128, which send flags with the data). ``long_alpha_seconds`` is what each message
    costs more under the protocol that reaches the whole rate (Simple, which synchronizes at
    every step and fills a buffer at every hop). ``switch_fill_seconds`` is the time of the
    first chunk through a summing switch. ``exchange_seconds`` and ``exchange_share`` are what
    an all-to-all costs more to start and the part of the rate that it reaches: NCCL makes it
    of sends and receives. A send between two ranks alone is given few channels up to
    ``p2p_few_bytes`` and reaches ``p2p_few_share`` of the rate.
    """

    short_share: float = 1.0
    long_alpha_seconds: float = 0.0
    switch_fill_seconds: float = 0.0
    exchange_seconds: float = 0.0
    exchange_share: float = 1.0
    p2p_few_share: float = 1.0
    p2p_few_bytes: float = 0.0


_ML_ENGINEERING = "stas00/ml-engineering@744d01e network/README.md"
_AZURE = "Azure/AI-benchmarking-guide@8fd0c6e"
_AWS = "aws-samples/awsome-distributed-training@7217859 nccl-tests"
_STEP = "1 us per step: NCCL 2.27.5's tuning logs (meta-pytorch/autoparallel@a54c252)"
_FIT = "start fitted to nccl-tests; " + _STEP


def _net(name: str, gigabits: float, source: str, *, fraction: float) -> Link:
    """A network card of ``gigabits`` per second per device, of which ``fraction`` is reached."""
    text = f"spec {gigabits:g} Gb/s per device x {fraction:g}; {source}"
    return Link(name, 25e-6, gigabits / 8 * 1e9 * fraction, text, base_seconds=60e-6)


def _rdma(name: str, gigabits: float, source: str, *, fraction: float = 0.95) -> Link:
    """A network card that reads and writes the devices' memory itself."""
    text = f"spec {gigabits:g} Gb/s per device x {fraction:g}; {source}"
    return Link(name, 5e-6, gigabits / 8 * 1e9 * fraction, text, base_seconds=28e-6)


_NDR = (
    "fraction and protocols fitted to 16 and 256 H100 on 8x400 Gb/s (drmysore/nebius-h100-16gpu; "
    "NVIDIA/nccl#1218); 5 us per step: NCCL 2.27.5's tuning logs "
    "(meta-pytorch/autoparallel@a54c252); start as NVLink 4"
)
_AS_NDR = "latency and protocols as infiniband-ndr's; "
_SHARED_HDR = "a 200 Gb/s card per two A100; fraction: NVIDIA/nccl-tests#119, busbw 96 GB/s of 100"
_TCP = "fraction as RDMA's, less what TCP costs; no measurement; latencies estimated"

_LINKS = (
    Link(
        "nvlink2", 1e-6, 124e9,
        "measured: all-reduce busbw 124 GB/s on 4 V100-SXM2 (bigscience@9e64ede, "
        "n1_32gb_all_reduce_bench); spec 150 GB/s by 6 links; latencies and protocols as NVLink 3",
        base_seconds=29e-6, num_links=6,
    ),
    Link(
        "nvlink3", 1e-6, 232e9,
        f"measured: all-reduce busbw 235 GB/s on 8 A100 ({_ML_ENGINEERING}; 231: {_AZURE}); "
        f"spec 300 GB/s; {_FIT}",
        base_seconds=29e-6,
    ),
    Link(
        "nvlink4", 1e-6, 366e9,
        f"measured: ring all-reduce busbw 366 GB/s, all-gather 361, in-switch sums 272 GB/s "
        f"of tensor, on 8 H200 ({_ML_ENGINEERING}); spec 450 GB/s; {_FIT}",
        base_seconds=28e-6, reduction_bytes_per_second=272e9,
    ),
    Link(
        "nvlink4-h800", 1e-6, 160e9,
        "160 GB/s: DeepSeek-V3 technical report (arXiv:2412.19437), section 3.2.2, on H800; spec "
        "200 GB/s; in-switch sums and latencies: NVLink 4's, by the spec's share of them",
        base_seconds=28e-6, reduction_bytes_per_second=121e9,
    ),
    Link(
        "nvlink4-bridge", 1e-6, 240e9,
        "spec 300 GB/s between two cards x 0.8, the share that NVLink 4 reaches with a switch",
        base_seconds=28e-6,
    ),
    Link(
        "nvlink3-bridge", 1e-6, 232e9,
        "spec 300 GB/s between two cards x 0.77, the share that NVLink 3 reaches with a switch",
        base_seconds=29e-6,
    ),
    Link(
        "nvlink5", 1e-6, 680e9,
        f"measured: ring all-reduce busbw 678 GB/s, in-switch sums 423 to 483 GB/s of tensor "
        f"(4 to 16 GiB), on 8 B200 ({_ML_ENGINEERING}); spec 900 GB/s; {_FIT}",
        base_seconds=45e-6, reduction_bytes_per_second=450e9,
    ),
    Link(
        "infinity-fabric-2", 2e-6, 70e9,
        "spec 50 GB/s per link (rocm.docs.amd.com MI250 microarchitecture), two links between "
        "neighbouring dies of different modules, x 0.7: estimate; latencies estimated",
        base_seconds=35e-6,
    ),
    Link(
        "infinity-fabric-3", 2e-6, 365e9,
        f"measured: all-reduce busbw 313 GB/s on 8 MI300X, whose rings use 6 of 7 links "
        f"({_ML_ENGINEERING}); 47.7 GB/s on 2; spec 448 GB/s; latencies estimated",
        base_seconds=35e-6, num_links=7,
    ),
    Link("pcie3", 8e-6, 12e9, "spec 15.8 GB/s (PCIe 3.0 x16) x 0.75; latency estimated", 20e-6),
    Link(
        "pcie4", 8e-6, 24e9,
        f"spec 31.5 GB/s (PCIe 4.0 x16) x 0.75 (26 from a host to an A100: {_AZURE}); latency "
        "estimated",
        base_seconds=20e-6,
    ),
    Link(
        "pcie5", 8e-6, 48e9,
        f"spec 63 GB/s (PCIe 5.0 x16) x 0.75 (51 from a host to an H100: {_AZURE}); latency "
        "estimated",
        base_seconds=20e-6,
    ),
    _rdma("infiniband-edr", 100, _AS_NDR + _SHARED_HDR),
    _rdma("infiniband-edr-shared", 50, "a 100 Gb/s card per two V100 (DGX-1V, DGX-2); " + _AS_NDR),
    _rdma("infiniband-hdr", 200, _AS_NDR + _SHARED_HDR),
    _rdma("infiniband-hdr-shared", 100, _AS_NDR + _SHARED_HDR),
    _rdma("infiniband-ndr", 400, _NDR, fraction=0.94),
    _rdma(
        "infiniband-xdr", 800,
        "measured: all-gather busbw 357 GB/s on 8 GB300, 4 per host (Google Cloud, A4X Max)",
        fraction=0.9,
    ),
    _net("ethernet-10g", 10, _TCP, fraction=0.8),
    _net("ethernet-25g", 25, _TCP, fraction=0.8),
    _net("ethernet-50g", 50, _TCP, fraction=0.8),
    _net("ethernet-100g", 100, _TCP, fraction=0.8),
    _net("ethernet-200g", 200, _TCP, fraction=0.8),
    _net("ethernet-400g", 400, _TCP, fraction=0.8),
    Link(
        "efa-p4d", 89e-6, 5.25e9,
        f"measured: 16 A100 on 4x100 Gb/s per host, all-reduce algbw 42 GB/s of 50 ({_AWS}); "
        "latency fitted to it",
        base_seconds=28e-6,
    ),
    Link(
        "efa-p5", 52e-6, 48.5e9,
        f"spec 400 Gb/s per device x 0.97; fitted to 16 H100 ({_AWS}), 32 H200 and 32 B200 "
        f"({_ML_ENGINEERING})",
        base_seconds=28e-6,
    ),
    Link(
        "gpudirect-tcpxo", 60e-6, 22.5e9,
        "spec 200 Gb/s per device x 0.9; fitted to 16 H100 "
        "(lessizzmore/create-a3mega-ztan-fork@02dd8f4)",
        base_seconds=28e-6,
    ),
    Link(
        "loopback", 100e-6, 1.5e9,
        "spec: typical of gloo between processes of one machine; replace by a measurement",
        base_seconds=100e-6,
    ),
)  # fmt: skip

LINKS: Mapping[str, Link] = {link.name: link for link in _LINKS}

_NVLINK3 = Protocols(
    short_share=0.54, long_alpha_seconds=10.3e-6, exchange_seconds=49e-6, exchange_share=0.82,
    p2p_few_share=0.47, p2p_few_bytes=2**27,
)  # fmt: skip
"""Fitted to 8 A100 (stas00, Azure) and 2, 4, 8 (Galvatron); sends: li-plus/playground."""
_NVLINK4 = Protocols(
    short_share=0.5, long_alpha_seconds=0.2e-6, switch_fill_seconds=47e-6,
    exchange_seconds=46e-6, exchange_share=0.94, p2p_few_share=0.38, p2p_few_bytes=2**26,
)  # fmt: skip
"""Fitted to 8 H100 (NVIDIA, Azure) and 4 to 8 H200 (stas00, Azure, MIT); sends, exchanges: MIT."""
_RDMA = Protocols(short_share=0.5, long_alpha_seconds=140e-6)
"""Fitted to nebius-h100-16gpu and NVIDIA/nccl#1218 (8x400 Gb/s); assumed of slower InfiniBand."""

PROTOCOLS: Mapping[str, Protocols] = {
    "nvlink2": _NVLINK3,
    "nvlink3": _NVLINK3,
    "nvlink3-bridge": _NVLINK3,
    "nvlink4": _NVLINK4,
    "nvlink4-h800": _NVLINK4,
    "nvlink4-bridge": replace(_NVLINK4, switch_fill_seconds=0.0),
    "nvlink5": replace(
        _NVLINK4, short_share=0.75, long_alpha_seconds=4e-6, switch_fill_seconds=80e-6
    ),
    "infiniband-edr": _RDMA,
    "infiniband-edr-shared": _RDMA,
    "infiniband-hdr": _RDMA,
    "infiniband-hdr-shared": _RDMA,
    "infiniband-ndr": _RDMA,
    "infiniband-xdr": Protocols(short_share=0.73, long_alpha_seconds=10e-6),
    "efa-p4d": Protocols(short_share=0.32, long_alpha_seconds=210e-6),
    "efa-p5": Protocols(short_share=0.36, long_alpha_seconds=96e-6),
    "gpudirect-tcpxo": Protocols(short_share=0.115, long_alpha_seconds=360e-6),
}
"""By a link's name; a link of another name has one protocol, its latency and its rate."""

LINK_ALIASES: Mapping[str, str] = {
    "nvlink": "nvlink4", "nvswitch": "nvlink4", "pcie": "pcie4",
    "edr": "infiniband-edr", "hdr": "infiniband-hdr", "ndr": "infiniband-ndr",
    "xdr": "infiniband-xdr", "infiniband": "infiniband-ndr", "ib": "infiniband-ndr",
    "xgmi": "infinity-fabric-3", "ethernet": "ethernet-100g", "gloo": "loopback",
}  # fmt: skip

INTRA_PREFIXES = ("nvlink", "infinity-fabric", "pcie", "loopback")
"""Links within a host; all others join hosts."""
