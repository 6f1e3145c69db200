"""Worker process: runs one function as one rank, and reports its value or its error.

``python -m autoparallel.runtime.launch.process JOB.json`` is how the launcher starts a worker; the
rank comes from the environment, as under torchrun (RANK, WORLD_SIZE, LOCAL_RANK). The
function is named ``"module:function"`` and is called with a ``Worker`` and the job's
arguments by name. Its value on the first rank of a machine, or the error of any rank, goes
into a file of the job's folder for the launcher to read.

The ranks of a process group meet at a file, or at the store of a launcher's agent. An agent keeps
its store over restarts, and with it the addresses and communicators of ended processes; a rank that
reads these before the new ones are there connects to nobody. So the ranks first agree on a prefix
that no earlier process has used: each rank asks under a random token of its own, and rank 0 answers
every token that it sees until all ranks have heard its answer.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ...planner.errors import AutoparallelError, DeviceMemoryError, HangError, WorkerError
from ..messages.failure_store import (
    FailureReport,
    FailureStore,
    FolderStore,
    Ranks,
    SharedStore,
    write_whole,
)
from ..messages.watchdog import Watchdog, print_error

POLL_SECONDS = 0.02
MEETING_SECONDS = 300.0
"""Time limit for the ranks of torchrun's agent to find each other in its store."""
ROOM = "autoparallel/meeting"


def meeting_at_file(path: str, rank: int, world_size: int) -> dict[str, Any]:
    """Return arguments with which ``init_process_group`` uses a store in the new file ``path``, for
    ranks of one machine."""
    from torch._C._distributed_c10d import FileStore

    return {"store": FileStore(path, world_size), "rank": rank, "world_size": world_size}


def meeting_at_agent(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments with which ``init_process_group`` uses the store of torchrun's agent, or {}
    if no agent runs. Keys get a prefix that no earlier attempt of the run has used. Collective over
    all ranks."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    store = TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=MEETING_SECONDS),
    )
    name = agree_on_name(store, rank, world_size)
    return {"store": PrefixStore(name, store), "rank": rank, "world_size": world_size}


def agree_on_name(store: Any, rank: int, world_size: int) -> str:
    """Return a name, the same on all ranks, that no earlier attempt of the run has used. Rank 0
    chooses it, and waits until every current rank has confirmed it through ``store``."""
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


RESULT, FAILURE, STORE = "result-{}.json", "failure", "store"
"""Names of files in a job's folder: of the value that a rank's function returned, of the ranks'
reports to the launcher, and of the process group's store."""
OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA out of memory",
    "Unable to allocate",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",
    "Cuda failure 'out of memory'",  # as NCCL says it
)
CONNECTION_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "remote process exited",
    "Connection was likely closed",
    "recvValue failed",
)


@dataclass(frozen=True, slots=True)
class Worker:
    """This process in its role as a rank; calls of ``watchdog.progress`` show that it is alive.
    ``meet`` returns the arguments of ``init_process_group``; all ranks call it at once.
    ``restarts`` is the number of times that all ranks were started again."""

    rank: int
    world_size: int
    local_rank: int
    watchdog: Watchdog
    meet: Callable[[], Mapping[str, Any]] = dict
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """The function that every worker process of a launch calls, and its settings. Workers write
    their reports into ``folder`` and import from ``sys_path``, by default the launcher's.

    ``is_alone``: all ranks are on this machine, and find each other through ``folder`` too.
    ``survives``: the run goes on when a signal ends a rank.
    """

    entry: str
    arguments: Mapping[str, Any]
    folder: str
    timeout_seconds: float
    sys_path: tuple[str, ...] = field(default_factory=lambda: tuple(map(os.path.abspath, sys.path)))
    is_alone: bool = True
    survives: bool = False


def describe(error: BaseException, rank: int, world_size: int) -> AutoparallelError:
    """Convert an ``error`` of a rank to an AutoparallelError: AP803 if memory ran out, else AP801
    with the traceback. An AutoparallelError is returned as it is."""
    if isinstance(error, AutoparallelError):
        return error
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    name = f"rank {rank} of {world_size}"
    if is_out_of_memory(error):
        return DeviceMemoryError(
            "AP803",
            f"{name} ran out of memory",
            why=text,
            where=where,
            fix="plan with a smaller --memory-limit or --micro-batch, or force recompute=full",
        )
    trace = "".join(traceback.format_exception(error)).rstrip()
    return WorkerError("AP801", f"{name} failed: {text}", why=trace, where=where)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether ``error`` says that a device or the host has no memory left."""
    is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_memory or any(sign in str(error) for sign in OUT_OF_MEMORY)


def lost_rank(error: AutoparallelError, worker: Worker) -> AutoparallelError:
    """Report ``error`` of this rank to the other ranks and return it. If it only says that the
    connection to another rank is lost, return in its place an error (AP820) that says in which
    action this rank waited, and for whom."""
    ranks, doing = worker.watchdog.ranks, worker.watchdog.last
    told = f"{error.what} {error.why if error.code == 'AP886' else ''}"
    is_consequence = error.code in ("AP801", "AP886") and any(x in told for x in CONNECTION_LOST)
    if ranks is None:
        return error
    if not is_consequence:
        ranks.store.tell(FailureReport(worker.rank, doing.what, cause=error.what))
        return error
    who = ranks.blame(FailureReport(worker.rank, doing.what, doing.waits_for))
    return WorkerError(
        "AP820",
        f"rank {worker.rank} of {worker.world_size} has lost another rank",
        why=f"{doing.what}; {who}",
        where=error.where,
        fix="check why that rank ended",
    )


def current_worker(
    environment: Mapping[str, str],
    timeout_seconds: float,
    *,
    resting: Container[str] = (),
    report: Callable[[HangError], None] = print_error,
    failures: FailureStore | None = None,
    store_path: str | None = None,
) -> Worker:
    """Return a ``Worker`` for this process, whose rank and world size are in ``environment``.

    Its watchdog reports a hang to ``report`` and lets the actions ``resting`` take any time.
    Reports of failed ranks go to ``failures``, by default the store of the launcher's agent. With
    ``store_path``, the ranks (of one machine) join through a store in that file, else through the
    agent's store.
    """
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    ranks = Ranks(rank, world_size, failures or SharedStore(environment))
    watchdog = Watchdog(
        timeout_seconds,
        name=f"rank {rank} of {world_size}",
        ranks=ranks,
        resting=resting,
        report=report,
    )
    local_rank = int(environment.get("LOCAL_RANK", rank))
    restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if store_path is not None:
        meet = partial(meeting_at_file, store_path, rank, world_size)
    else:
        meet = partial(meeting_at_agent, environment)
    return Worker(rank, world_size, local_rank, watchdog, meet, restarts)


def call_entry(entry: str, worker: Worker, arguments: Mapping[str, Any]) -> Any:
    """Call the function ``entry``, ``"module:function"``, with ``worker`` and ``arguments``; the
    worker's watchdog is active meanwhile. Raises only AutoparallelErrors. Destroys a process group
    that the function has left open."""
    module, _, name = entry.partition(":")
    watched: AbstractContextManager[object] = worker.watchdog
    try:
        function = getattr(importlib.import_module(module), name)
        with watched:
            value = function(worker, **arguments)
            worker.watchdog.progress("leaving the process group")
            _leave()
    except Exception as error:
        ours = lost_rank(describe(error, worker.rank, worker.world_size), worker)
        if ours is error:
            raise
        raise ours from error
    return value


def _leave() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _end_with_launcher() -> None:
    """Start a thread that kills this process and its children when the launcher dies: the pipe from
    the launcher is closed then."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait, name="launcher", daemon=True).start()


def main(job_path: str) -> None:
    """Run a worker process from start to end, with the job in the JSON file ``job_path``; if it
    fails, exit with its error's code."""
    job = Job(**json.loads(Path(job_path).read_text()))
    folder = Path(job.folder)
    sys.path.extend(path for path in job.sys_path if path not in sys.path)
    _end_with_launcher()
    rank, launcher = int(os.environ["RANK"]), FolderStore(folder, FAILURE)
    worker = current_worker(
        os.environ,
        job.timeout_seconds,
        report=lambda error: launcher.tell(FailureReport.of(rank, error)),
        failures=FolderStore(folder) if job.is_alone else None,
        store_path=str(folder / STORE) if job.is_alone else None,
    )
    try:
        value = call_entry(job.entry, worker, job.arguments)
        if worker.local_rank == 0 or job.survives:
            write_whole(folder / RESULT.format(rank), json.dumps(value))
    except AutoparallelError as error:
        launcher.tell(FailureReport.of(rank, error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1])
