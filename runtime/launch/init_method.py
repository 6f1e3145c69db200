"""Where the ranks of a process group meet: a file, or the store of a launcher's agent.

In: a file, or the environment that torchrun gives. Out: arguments of ``init_process_group``.

An agent keeps its store over restarts, and with it the addresses and communicators of processes
that have ended, which a rank may read before the new ones are there: it then connects to nobody.
So the ranks first agree on a prefix that no earlier process has used. Each asks under a token of
its own, and rank 0 answers every token that it sees until all ranks have heard its answer.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

POLL_SECONDS = 0.02
MEETING_SECONDS = 300.0
"""How long the ranks of an agent wait for each other."""
ROOM = "autoparallel/meeting"


def meeting_at_file(path: str, rank: int, world_size: int) -> dict[str, Any]:
    """A file that all ranks see and no earlier process group has used."""
    from torch._C._distributed_c10d import FileStore

    return {"store": FileStore(path, world_size), "rank": rank, "world_size": world_size}


def meeting_at_agent(environment: Mapping[str, str]) -> dict[str, Any]:
    """The store of torchrun's agent, at a place that is new; empty where there is no agent.

    Collective over all ranks.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    store = TCPStore(
        environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False,
        timeout=timedelta(seconds=MEETING_SECONDS),
    )  # fmt: skip
    name = agree_on_name(store, rank, world_size)
    return {"store": PrefixStore(name, store), "rank": rank, "world_size": world_size}


def agree_on_name(store: Any, rank: int, world_size: int) -> str:
    """A name of rank 0's that all ranks of now have heard, whatever ``store`` holds of earlier."""
    token = uuid.uuid4().hex
    if rank != 0:
        store.set(f"{ROOM}/asks/{rank}", token)
        name: str = store.get(f"{ROOM}/answers/{token}").decode()
        store.set(f"{name}/heard/{rank}", "")
        return name
    name = f"{ROOM}/{token}"
    missing = set(range(1, world_size))
    answered: set[str] = set()
    deadline = time.monotonic() + MEETING_SECONDS
    while missing:
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(missing)} did not come to the store")
        for other in sorted(missing):
            if store.check([f"{name}/heard/{other}"]):
                missing.discard(other)
            elif store.check([f"{ROOM}/asks/{other}"]):
                asked = store.get(f"{ROOM}/asks/{other}").decode()
                if asked not in answered:
                    store.set(f"{ROOM}/answers/{asked}", name)
                    answered.add(asked)
        if missing:
            time.sleep(POLL_SECONDS)
    return name
