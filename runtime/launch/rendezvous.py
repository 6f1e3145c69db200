"""Rendezvous of a run's hosts: a store that listens at one address of one host.

In: HOST:PORT, the same on every host. Out: torch's dynamic rendezvous over a store that listens at
that address alone. The host that has the address keeps the store; torch's own store would listen on
all of the host's interfaces.

A connection to an unreachable host stays open, and torch's store then waits for an answer for as
long as the system retransmits: a quarter of an hour. Nothing interrupts that wait, so a thread
counts the time (``StoreWatch``) and ends the host's agent.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ...planner.errors import MachineError, UsageError

RUN = "autoparallel"
READ_SECONDS = 60.0
"""Time limit for an answer of the store."""
LAST_CALL_SECONDS = 5.0
"""Time to wait for further hosts after the least number of hosts has joined."""
BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Hosts:
    """Settings of the hosts of a run: their least and largest number, the endpoint where they find
    each other, and the time that a host waits for the others."""

    least: int
    most: int
    endpoint: str
    join_seconds: float = 600.0

    @property
    def is_elastic(self) -> bool:
        """Tell whether the run may go on with fewer hosts than it started with."""
        return self.least < self.most


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return the address and port of ``HOST:PORT``.

    Raises UsageError AP156 for other text, MachineError AP414 for an unknown host.

    >>> parse_endpoint("127.0.0.1:29400"), parse_endpoint("[::1]:29400")
    (('127.0.0.1', 29400), ('::1', 29400))
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            "AP156", f"--rdzv-endpoint {text!r} is not HOST:PORT", fix="for example 10.0.0.1:29400"
        )
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise MachineError(
            "AP414",
            f"the rendezvous endpoint {text} cannot be found",
            why=str(error),
            fix="give the address of one of the hosts, the same on every host",
        ) from error
    address = str(found[0][4][0])
    if address in ("0.0.0.0", "::"):
        raise UsageError(
            "AP156",
            f"--rdzv-endpoint {text} is no address of a host",
            why="others would reach a store that listens on every interface",
            fix="give the address at which the other hosts reach this one",
        )
    return address, int(port)


def own_address(endpoint: tuple[str, int]) -> str:
    """Return the IP address of this host on the network from which it reaches the endpoint."""
    family = socket.AF_INET6 if ":" in endpoint[0] else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(endpoint)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise _unreachable(endpoint, str(error)) from error


def interface_of(address: str) -> str | None:
    """Return the network interface that has ``address``, or None."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return str(name)
    return None


def open_store(endpoint: tuple[str, int], join_seconds: float) -> tuple[Any, bool]:
    """Return the key-value store that all hosts share, and whether this process serves it: it does
    if the endpoint is an address of this host that nobody serves yet. Raises MachineError AP414 if
    no process serves it within ``join_seconds``."""
    from torch._C._distributed_c10d import TCPStore

    timeout = timedelta(seconds=READ_SECONDS)
    listening = _listen(endpoint)
    host, port = endpoint
    if listening is not None:
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listening.detach(),
        )
        return store, True
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=join_seconds))
    except RuntimeError as error:
        why = f"nothing answers there for {join_seconds:g} s, and this host has no such address"
        raise _unreachable(endpoint, why) from error
    store.set_timeout(timeout)
    return store, False


def _listen(endpoint: tuple[str, int]) -> socket.socket | None:
    """Return a socket that listens at the endpoint; None if another process or host owns it."""
    family = socket.AF_INET6 if ":" in endpoint[0] else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(endpoint)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None  # another host or process has it
        raise _unreachable(endpoint, str(error)) from error
    return listening


def _unreachable(endpoint: tuple[str, int], why: str) -> MachineError:
    return MachineError(
        "AP414",
        f"the rendezvous endpoint {endpoint[0]}:{endpoint[1]} cannot be reached",
        why=why,
        fix="start the run on the host that has this address, and let the port through",
    )


def make_handler(
    hosts: Hosts, store: Any, endpoint: tuple[str, int], asking: Callable[[], Any]
) -> Any:
    """Make torch's rendezvous handler for the agents of ``hosts``, which meet through ``store``;
    the ranks' process group uses that store too. Each request to it is made in a context
    ``asking()``."""
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        DynamicRendezvousHandler,
        RendezvousTimeout,
    )

    # Else the host of rank 0 would open a further store, on all of its interfaces.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    class Handler(DynamicRendezvousHandler):
        """Rendezvous handler whose ranks use the hosts' store for their process group."""

        @property
        def use_agent_store(self) -> bool:
            return True

        def next_rendezvous(self) -> RendezvousInfo:
            found = super().next_rendezvous()
            return RendezvousInfo(
                found.store, found.rank, found.world_size, RendezvousStoreInfo(*endpoint)
            )

    class Backend(C10dRendezvousBackend):
        """Rendezvous backend that keeps its state in the store of all hosts."""

        def get_state(self) -> Any:
            with asking():
                return super().get_state()

        def set_state(self, state: bytes, token: Any = None) -> Any:
            with asking():
                return super().set_state(state, token)

    return Handler.from_backend(
        RUN,
        store,
        Backend(store, RUN),
        hosts.least,
        hosts.most,
        local_addr=own_address(endpoint),
        timeout=RendezvousTimeout(
            join=timedelta(seconds=hosts.join_seconds),
            last_call=timedelta(seconds=LAST_CALL_SECONDS),
        ),
    )


POLL_SECONDS = 0.5


class StoreWatch:
    """Context manager whose thread calls ``give_up`` when the store has not answered a request for
    ``lost_seconds``. Requests are to be made in the context ``asking()``."""

    def __init__(self, lost_seconds: float, give_up: Callable[[], None]) -> None:
        self._most_polls = lost_seconds / POLL_SECONDS
        self._give_up = give_up
        self._open: dict[object, int] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="store watch", daemon=True)

    def __enter__(self) -> StoreWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Count a request to the store as unanswered while the context is open."""
        question = object()
        with self._lock:
            self._open[question] = 0
        try:
            yield
        finally:
            with self._lock:
                del self._open[question]

    def _watch(self) -> None:
        """Call ``give_up`` when a request to the store is too old. Its age is counted in polls of
        this loop, not in seconds, since the process may have been stopped meanwhile."""
        while not self._stopped.wait(POLL_SECONDS):
            with self._lock:
                for question in self._open:
                    self._open[question] += 1
                is_lost = max(self._open.values(), default=0) > self._most_polls
            if is_lost:
                self._give_up()
                return
