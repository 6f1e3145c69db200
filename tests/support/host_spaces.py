"""Hosts with addresses of their own on one machine: network namespaces on a bridge.

Needs root and ``iproute2``; tests that ask for them are skipped elsewhere, with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SUBNET = "10.79.0"
FILES = Path("/etc/netns")
"""Where ``ip netns exec`` finds the files of a namespace that stand for those of /etc."""


@dataclass(frozen=True)
class HostSpace:
    """A host: its namespace and its address. Commands run in it behind ``prefix``."""

    space: str
    address: str

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.space]

    def unplug(self) -> None:
        """No packet reaches or leaves the host any more."""
        _ip("-n", self.space, "link", "set", "e0", "down")


@contextmanager
def host_spaces(number: int) -> Iterator[list[HostSpace]]:
    """``number`` hosts that reach each other, taken down afterwards."""
    name = f"lau{os.getpid()}"
    hosts = [HostSpace(f"{name}h{n}", f"{SUBNET}.{n + 1}") for n in range(number)]
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "br0", "type", "bridge")
        _ip("-n", name, "link", "set", "br0", "up")
        for n, host in enumerate(hosts):
            _ip("netns", "add", host.space)
            _names(host, hosts)
            _ip(
                "link",
                "add",
                "e0",
                "netns",
                host.space,
                "type",
                "veth",
                "peer",
                "name",
                f"h{n}",
                "netns",
                name,
            )
            _ip("-n", name, "link", "set", f"h{n}", "master", "br0", "up")
            _ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "e0")
            _ip("-n", host.space, "link", "set", "e0", "up")
            _ip("-n", host.space, "link", "set", "lo", "up")
        yield hosts
    finally:
        for space in (*(host.space for host in hosts), name):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
            shutil.rmtree(FILES / space, ignore_errors=True)


def _names(host: HostSpace, hosts: list[HostSpace]) -> None:
    """The hosts know each other's names; for others there is nobody to ask, which takes no time."""
    folder = FILES / host.space
    folder.mkdir(parents=True)
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    lines = [f"{each.address} {each.space}" for each in hosts]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))


def why_not() -> str:
    """Why this machine cannot have such hosts; empty where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    try:
        with host_spaces(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.decode().strip()}"


def skip_without_spaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
