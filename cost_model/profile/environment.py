"""Environments of measured times: device, driver, torch, threads.

Times of one environment say nothing certain about another; ``difference`` puts their difference
into words where a profile is used all the same.
"""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_CPU_FILE = Path("/proc/cpuinfo")
_DISTINCT_WORDS = frozenset({"PCIE", "NVL"})
"""Words in GPU names that tell apart two boards with the same chip."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Conditions of a measurement. ``device`` is a CPU's model name or the driver's name of a GPU;
    ``driver`` the GPU driver's version ("" on CPUs); ``torch`` the version of torch; ``threads``
    the number of threads of a process on a CPU, 0 on a GPU."""

    device: str
    driver: str
    torch: str
    threads: int

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.threads else "cuda"

    def __str__(self) -> str:
        where = f"driver {self.driver}" if self.kind == "cuda" else f"{self.threads} thread(s)"
        return f"{self.device}, {where}, torch {self.torch}"


def environment_of(device: str = "local", *, threads: int | None = None) -> Environment:
    """Return the conditions of measurements on ``device``. ``"local"`` is this machine's GPU if it
    has one, else its CPU; ``"cpu"`` and ``"cuda"`` choose one of them. Any other text is the name
    of a GPU elsewhere (a preset's or the driver's), with unknown driver ("") and this machine's
    version of torch. ``threads``: number of threads on a CPU, by default torch's present number."""
    if device not in ("local", "cpu", "cuda"):
        return Environment(device, "", metadata.version("torch"), 0)
    import torch

    if device == "cuda" or (device == "local" and torch.cuda.is_available()):
        name = torch.cuda.get_device_name()
        return Environment(name, _gpu_driver(), str(torch.__version__), 0)
    return Environment(_cpu_name(), "", str(torch.__version__), threads or torch.get_num_threads())


def difference(measured: Environment, wanted: Environment) -> str:
    """Return a clause that describes how the environment of a measurement differs from the wanted
    one; "" if they agree in all properties that are known.

    >>> here = Environment("cpu A", "", "2.13.0+cpu", 2)
    >>> difference(Environment("cpu A", "", "2.12.1+cpu", 2), here)
    'measured with torch 2.12.1+cpu, not 2.13.0+cpu'
    """
    parts = []
    if not is_same_device(measured, wanted):
        parts.append(f"on {measured.device}, not {wanted.device}")
    if wanted.driver and measured.driver != wanted.driver:
        parts.append(f"with driver {measured.driver}, not {wanted.driver}")
    if _release(measured.torch) != _release(wanted.torch):
        parts.append(f"with torch {measured.torch}, not {wanted.torch}")
    if wanted.threads and measured.threads != wanted.threads:
        parts.append(f"with {measured.threads} thread(s), not {wanted.threads}")
    return f"measured {', '.join(parts)}" if parts else ""


def nearest(measured: tuple[Environment, ...], wanted: Environment) -> Environment | None:
    """Return the environment among ``measured`` with the same device (and threads) that differs
    least from ``wanted``; None if none has this device. If several differ equally, the newest torch
    decides, then the last position in ``measured``."""
    candidates = [
        each
        for each in reversed(measured)
        if is_same_device(each, wanted) and (not wanted.threads or each.threads == wanted.threads)
    ]

    def closeness(each: Environment) -> tuple[bool, bool, bool, list[int]]:
        return (
            each == wanted,
            _release(each.torch) == _release(wanted.torch),
            each.driver == wanted.driver,
            [int(number) for number in re.findall(r"\d+", _release(each.torch))],
        )

    return max(candidates, key=closeness, default=None)


def is_same_device(measured: Environment, wanted: Environment) -> bool:
    """Return true if two environments name one device, possibly as "H200" and "NVIDIA H200".

    >>> full, preset = Environment("NVIDIA H100 PCIe", "", "", 0), Environment("H100", "", "", 0)
    >>> is_same_device(full, preset)
    False
    """
    if measured.device == wanted.device:
        return True
    if measured.threads or wanted.threads:
        return False
    first, second = _words(measured.device), _words(wanted.device)
    return (first <= second or second <= first) and not (first ^ second) & _DISTINCT_WORDS


def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[\s_-]+", name.upper()))


def _release(version: str) -> str:
    """Return a version without its build suffix: "2.13.0" for "2.13.0+cpu"."""
    return version.split("+")[0]


def _cpu_name() -> str:
    try:
        text = _CPU_FILE.read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _gpu_driver() -> str:
    """Return the NVIDIA driver's version; "" if neither the kernel nor nvidia-smi reports it."""
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", _DRIVER_FILE.read_text())
        if found:
            return found.group(1)
    except OSError:
        pass
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.split("\n")[0].strip()
