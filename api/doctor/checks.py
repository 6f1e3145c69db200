"""Checks of one machine: facts in, findings out. No rendezvous is needed.

Each check is a function of the facts and of the planned use; ``CHECKS`` lists them in the order of
the report. A finding that is not OK has a fix.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.doctor.facts import Facts, Interface
from autoparallel.doctor.known import (
    BAD_NCCL,
    HURTFUL_VARIABLES,
    LEAST_DRIVERS,
    LEAST_KERNEL,
    SUPPORTED_EXTRAS,
    SUPPORTED_TORCH,
    THROTTLE_REASONS,
    TRITON_THREAD,
    numbers,
)
from autoparallel.options.words import bytes_text

Level = Literal["OK", "WARN", "FAIL"]

GIB = 2**30
LEAST_SHARED_BYTES = 1 * GIB
"""Minimum size of /dev/shm, as NVIDIA's manuals recommend for containers (--shm-size=1g)."""
LEAST_OPEN_FILES, FEW_OPEN_FILES = 256, 4096
LEAST_MEMORY_BYTES = 2 * GIB
"""Minimum host memory per process: for importing torch, a capture and NCCL."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check, a line of the report. ``fix`` is the user's remedy, "" if all is well."""

    level: Level
    name: str
    what: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """Requirements to check a machine for: to be a host of ``cluster``; None checks for any use.

    ``memory_bytes`` is the plan's predicted peak of its fullest device, 0 without a plan.
    """

    cluster: Cluster | None = None
    memory_bytes: int = 0

    @property
    def num_hosts(self) -> int:
        return len(self.cluster.hosts) if self.cluster else 1

    @property
    def uses_gpus(self) -> bool:
        hosts = self.cluster.hosts if self.cluster else ()
        return any(host.device.kind == "cuda" for host in hosts)

    @property
    def most_devices(self) -> int:
        """Number of devices of the host that has most; 1 without a cluster."""
        return (
            max((host.num_devices for host in self.cluster.hosts), default=1) if self.cluster else 1
        )


Findings = Iterator[Finding]
Check = Callable[[Facts, DoctorRequest], Findings]


def check_machine(facts: Facts, wanted: DoctorRequest) -> tuple[Finding, ...]:
    """Run all checks of a machine on its ``facts``; return their results."""
    return tuple(finding for check in CHECKS for finding in check(facts, wanted))


def _torch(facts: Facts, wanted: DoctorRequest) -> Findings:
    least, below = SUPPORTED_TORCH
    version = numbers(facts.torch)[:2]
    supported = f"{_text(least)} to {_text((below[0], below[1] - 1))}"
    if least <= version < below:
        yield Finding("OK", "torch", f"{facts.torch} (supported: {supported})")
    else:
        yield Finding(
            "FAIL",
            "torch",
            f"{facts.torch} is not supported, which are {supported}",
            f"pip install 'torch>={_text(least)},<{_text(below)}'",
        )
    for name, (lowest, why) in SUPPORTED_EXTRAS.items():
        found = facts.extras.get(name)
        if found is not None and numbers(found)[: len(lowest)] < lowest:
            yield Finding(
                "WARN",
                name,
                f"{found} is older than {_text(lowest)}, which {why} needs",
                f"pip install '{name}>={_text(lowest)}'",
            )


def _triton(facts: Facts, wanted: DoctorRequest) -> Findings:
    """Check that torch.compile has the version of triton that torch requires."""
    found = facts.extras.get("triton", "")
    if facts.triton and numbers(found)[:2] != numbers(facts.triton)[:2]:
        yield Finding(
            "WARN",
            "triton",
            f"{found or 'none'} is installed, and torch {facts.torch} asks for "
            f"{facts.triton}: --compile can fail ({TRITON_THREAD})",
            f"pip install triton=={facts.triton}",
        )


def _nccl(facts: Facts, wanted: DoctorRequest) -> Findings:
    """Check NCCL for versions with known faults."""
    version = numbers(facts.nccl)
    for known in BAD_NCCL:
        if known.first <= version < known.fixed and known.machine in ("", facts.machine):
            cuda = (facts.torch_cuda or "13").partition(".")[0]
            yield Finding(
                "WARN",
                "NCCL",
                f"{facts.nccl} {known.what} ({known.thread})",
                f"pip install 'nvidia-nccl-cu{cuda}>={_text(known.fixed)}'",
            )


def _kernel(facts: Facts, wanted: DoctorRequest) -> Findings:
    version = numbers(facts.kernel)[:2]
    if version and version < LEAST_KERNEL:
        yield Finding(
            "WARN",
            "kernel",
            f"Linux {facts.kernel} can make distributed processes hang",
            f"update to {_text(LEAST_KERNEL)} or later",
        )
    else:
        yield Finding("OK", "kernel", f"Linux {facts.kernel}, Python {facts.python}")


def _driver(facts: Facts, wanted: DoctorRequest) -> Findings:
    """Check that torch can use the GPUs, and that the driver supports torch's CUDA."""
    if not facts.gpus and not facts.has_cuda:
        if wanted.uses_gpus:
            yield Finding(
                "FAIL",
                "GPUs",
                "the plan needs GPUs, and this machine shows none",
                "check nvidia-smi; in a container, --gpus all",
            )
        else:
            yield Finding("OK", "GPUs", f"none; {facts.num_cores} CPU cores")
        return
    if facts.torch_cuda is None:
        yield Finding(
            "FAIL" if wanted.uses_gpus else "WARN",
            "CUDA",
            f"torch {facts.torch} is built without CUDA, and there are {len(facts.gpus)} GPUs",
            "install a build of torch with CUDA: https://pytorch.org/get-started/locally",
        )
        return
    driver = facts.gpus[0].driver if facts.gpus else ""
    least = LEAST_DRIVERS.get(numbers(facts.torch_cuda)[0])
    if driver and least is not None and numbers(driver)[0] < least:
        yield Finding(
            "FAIL",
            "driver",
            f"{driver} is too old for CUDA {facts.torch_cuda}",
            f"update the driver to {least} or later, or install torch for an older CUDA",
        )
    elif not facts.has_cuda:
        yield Finding(
            "FAIL",
            "CUDA",
            "torch sees no GPU although the driver does",
            "check CUDA_VISIBLE_DEVICES and python -c 'import torch; torch.cuda.init()'",
        )
    else:
        nccl = f", NCCL {facts.nccl}" if facts.nccl else ""
        yield Finding("OK", "driver", f"{driver or 'unknown'}, CUDA {facts.torch_cuda}{nccl}")


def _architecture(facts: Facts, wanted: DoctorRequest) -> Findings:
    """Check that torch has kernels for the GPUs; kernels of the same major version suffice."""
    majors = {
        numbers(name.rpartition("_")[2])[0] // 10
        for name in facts.architectures
        if numbers(name.rpartition("_")[2])
    }
    for index, (major, minor) in enumerate(facts.capabilities):
        if majors and major not in majors:
            yield Finding(
                "FAIL",
                f"GPU {index}",
                f"torch {facts.torch} has no kernels for its compute capability {major}.{minor}",
                f"install a build of torch for it; this has {' '.join(facts.architectures)}",
            )


def _gpus(facts: Facts, wanted: DoctorRequest) -> Findings:
    """Check errors, clocks, PCIe lanes, memory and MIG mode of each GPU."""
    for gpu in facts.gpus:
        name = f"GPU {gpu.index}"
        bad: list[Finding] = []
        if gpu.is_mig:
            several = wanted.most_devices > 1
            bad.append(
                Finding(
                    "FAIL" if several else "WARN",
                    name,
                    "it is in MIG mode"
                    + (", and NCCL does not join several parts of GPUs" if several else ""),
                    f"nvidia-smi -i {gpu.index} -mig 0",
                )
            )
        if gpu.uncorrected_errors:
            bad.append(
                Finding(
                    "FAIL",
                    name,
                    f"{gpu.uncorrected_errors} uncorrected memory errors since the "
                    "driver was loaded",
                    "restart the machine; if they come back, replace the GPU",
                )
            )
        for bit, (level, reason, fix) in THROTTLE_REASONS.items():
            if gpu.throttle & bit:
                bad.append(Finding(level, name, f"its clock is lowered: {reason}", fix))
        if 0 < gpu.pcie_width < gpu.most_pcie_width:
            bad.append(
                Finding(
                    "WARN",
                    name,
                    f"it uses {gpu.pcie_width} of {gpu.most_pcie_width} PCIe lanes",
                    "reseat the card, or check the slot",
                )
            )
        bad += _memory_of(name, gpu.memory_bytes, gpu.used_bytes, wanted)
        yield from bad or [
            Finding(
                "OK",
                name,
                f"{gpu.name}, {_gib(gpu.memory_bytes - gpu.used_bytes)} of "
                f"{_gib(gpu.memory_bytes)} free, clock {gpu.clock_mhz} of {gpu.most_clock_mhz} MHz",
            )
        ]


def _memory_of(name: str, total: int, used: int, wanted: DoctorRequest) -> Findings:
    """Check that other processes leave enough memory of GPU ``name`` for the plan."""
    free, needed = total - used, wanted.memory_bytes
    fix = "end the processes that nvidia-smi shows"
    if needed > total:
        yield Finding(
            "FAIL",
            name,
            f"the plan needs {_gib(needed)}, and it has {_gib(total)}",
            "plan for this device",
        )
    elif needed > free:
        yield Finding(
            "FAIL", name, f"the plan needs {_gib(needed)}, and {_gib(free)} are free", fix
        )
    elif used > total // 10:
        yield Finding("WARN", name, f"other processes use {_gib(used)} of {_gib(total)}", fix)


def _peers(facts: Facts, wanted: DoctorRequest) -> Findings:
    """Check that GPUs can access each other's memory."""
    if facts.peers:
        pairs = ", ".join(f"{one}→{other}" for one, other in facts.peers[:4])
        more = f" and {len(facts.peers) - 4} more" if len(facts.peers) > 4 else ""
        yield Finding(
            "WARN",
            "GPU links",
            f"no direct access between GPUs: {pairs}{more}",
            "check nvidia-smi topo -m, and that IOMMU and ACS are off: "
            "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        )
    elif len(facts.capabilities) > 1:
        yield Finding("OK", "GPU links", "all GPUs reach each other's memory")


def _limits(facts: Facts, wanted: DoctorRequest) -> Findings:
    """Check the limits on open files, /dev/shm, locked memory and host memory."""
    if facts.open_files < FEW_OPEN_FILES:
        level: Level = "FAIL" if facts.open_files < LEAST_OPEN_FILES else "WARN"
        yield Finding(
            level,
            "open files",
            f"a process may open {facts.open_files} files; each connection "
            "to a rank, and each file of data, is one",
            "ulimit -n 65536",
        )
    else:
        yield Finding("OK", "open files", f"{facts.open_files}")
    needs_shared = wanted.uses_gpus or bool(facts.gpus)
    if 0 < facts.shared_bytes < LEAST_SHARED_BYTES and needs_shared:
        yield Finding(
            "WARN",
            "shared memory",
            f"/dev/shm has {_gib(facts.shared_bytes)}: NCCL and loaders of data share memory there",
            "docker run --shm-size=8g; on Kubernetes an emptyDir of medium Memory at /dev/shm",
        )
    elif facts.shared_bytes:
        yield Finding("OK", "shared memory", f"/dev/shm has {_gib(facts.shared_bytes)}")
    if facts.infiniband and 0 <= facts.locked_bytes < GIB:
        yield Finding(
            "WARN",
            "locked memory",
            f"a process may lock {_gib(facts.locked_bytes)}, and InfiniBand locks its buffers",
            "ulimit -l unlimited; docker run --ulimit memlock=-1",
        )


def _host_memory(facts: Facts, wanted: DoctorRequest) -> Findings:
    if not facts.memory_bytes:
        return
    free = min(facts.free_bytes, facts.limit_bytes or facts.free_bytes)
    needed = LEAST_MEMORY_BYTES * wanted.most_devices
    if wanted.cluster is not None and not wanted.uses_gpus:
        needed = max(needed, wanted.memory_bytes * wanted.most_devices)
    limit = f" (the container's limit: {_gib(facts.limit_bytes)})" if facts.limit_bytes else ""
    what = f"{_gib(free)} of {_gib(facts.memory_bytes)} free{limit}"
    if free < needed:
        each = f"{wanted.most_devices} processes" if wanted.most_devices > 1 else "a process"
        yield Finding(
            "WARN",
            "host memory",
            f"{what}; {each} may need {_gib(needed)}",
            "end other processes, or raise the limit",
        )
    else:
        yield Finding("OK", "host memory", what)


def _network(facts: Facts, wanted: DoctorRequest) -> Findings:
    """Check that InfiniBand ports, network interfaces and the host's address suit several hosts."""
    own = [each for each in facts.interfaces if not each.is_loopback and not each.is_virtual]
    usable = [each for each in own if each.has_ipv4 or each.has_ipv6]
    yield from _named_interfaces(facts)
    for port, state in facts.infiniband:
        if state != "ACTIVE":
            yield Finding(
                "WARN",
                "InfiniBand",
                f"port {port} is {state}",
                "check the cable and ibstat, or leave it out by NCCL_IB_HCA",
            )
    if wanted.num_hosts == 1:
        return
    if not usable:
        yield Finding(
            "FAIL", "network", "no interface has an address but the loopback", "check ip address"
        )
        return
    yield from _families(facts, usable)
    loopback = [each for each in facts.addresses if ipaddress.ip_address(each).is_loopback]
    if facts.addresses and len(loopback) == len(facts.addresses):
        yield Finding(
            "FAIL" if "GLOO_SOCKET_IFNAME" not in facts.environment else "WARN",
            "host name",
            f"{facts.host} stands for {loopback[0]} here, which other hosts cannot reach",
            f"export GLOO_SOCKET_IFNAME={usable[0].name}, or correct /etc/hosts",
        )
    elif not facts.addresses:
        yield Finding(
            "FAIL", "host name", f"{facts.host} has no address", "add it to DNS or /etc/hosts"
        )


def _named_interfaces(facts: Facts) -> Findings:
    """Check that the network interfaces which GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name exist.
    NCCL's prefix ``^`` excludes interfaces and is not checked; ``=`` asks for exact names."""
    known = [each.name for each in facts.interfaces]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = facts.environment.get(variable, "")
        if not text or text.startswith("^"):
            continue
        is_exact = text.startswith("=") or variable.startswith("GLOO")
        wanted = [name.partition(":")[0] for name in text.lstrip("=").split(",")]
        if not any(
            name == each if is_exact else name.startswith(each) for name in known for each in wanted
        ):
            yield Finding(
                "FAIL",
                variable,
                f"it names {text}, and there is {', '.join(known)}",
                f"export {variable}=…, or unset it",
            )


def _families(facts: Facts, usable: list[Interface]) -> Findings:
    if not any(each.has_ipv4 for each in usable):
        if facts.environment.get("NCCL_SOCKET_FAMILY") != "AF_INET6":
            yield Finding(
                "WARN",
                "network",
                "only IPv6 addresses",
                "export NCCL_SOCKET_FAMILY=AF_INET6, and give the rendezvous by name",
            )
    elif len(usable) > 1 and "GLOO_SOCKET_IFNAME" not in facts.environment:
        names = ", ".join(each.name for each in usable)
        yield Finding(
            "WARN",
            "network",
            f"several interfaces ({names}), and gloo takes the one that the host's name stands for",
            f"export GLOO_SOCKET_IFNAME={usable[0].name} and "
            f"NCCL_SOCKET_IFNAME={usable[0].name}, or whichever joins the hosts",
        )
    else:
        yield Finding("OK", "network", ", ".join(each.name for each in usable))


def _environment(facts: Facts, wanted: DoctorRequest) -> Findings:
    """Check for environment variables that make a run slow or hang."""
    found = False
    for variable, known in HURTFUL_VARIABLES.items():
        value = facts.environment.get(variable)
        if value is None or (known.values and value.upper() not in known.values):
            continue
        if known.needs_infiniband and not facts.infiniband:
            continue
        found = True
        yield Finding("WARN", variable, f"{value}: {known.why}", f"unset {variable}")
    if not found:
        yield Finding("OK", "environment", "no variable that is known to hurt")


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _gib(num_bytes: int) -> str:

    return bytes_text(num_bytes)


CHECKS: tuple[Check, ...] = (
    _torch,
    _triton,
    _kernel,
    _driver,
    _nccl,
    _architecture,
    _gpus,
    _peers,
    _limits,
    _host_memory,
    _network,
    _environment,
)
