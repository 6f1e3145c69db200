"""Running a function on several gloo processes of this machine.

A fork server imports torch and this package once; each rank is forked from it, so a run of a few
ranks starts in a fraction of a second. The workers of pytest-xdist share one server. Ranks find
each other through a file.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import cache, wraps
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import _forkserver as server
from pathlib import Path
from typing import Any

import pytest

from autoparallel.cost_model.cluster import detect
from autoparallel.cost_model.cluster.cluster import Device

HERE = Path(__file__).resolve().parent

PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "torch.utils.checkpoint",
    "torch._inductor.codecache",
    "torch.export._trace",
    "numpy.ma",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "autoparallel.actions.export",
    "autoparallel.actions.plan",
    "autoparallel.actions.run",
    "autoparallel.adoption.join",
    "autoparallel.adoption.module",
    "autoparallel.passes.capture.capture_model",
    "autoparallel.planning.objectives",
    "autoparallel.planning.plan",
    "autoparallel.profiling.worker",
    "autoparallel.adoption.parallelize",
    "autoparallel.adoption.step",
    "autoparallel.training.worker",
    "pytest",
    "first_uses",
]
"""What most ranks and commands use; a module that is not installed is left out."""


FULL_SECONDS = detect._PATIENCE_SECONDS
BRIEF_SECONDS = 0.003
"""For so long the product measures each of a CPU's rates, and tests do that need no exact rates."""


ADDRESS = "AUTOPARALLEL_TEST_FORK_SERVER"
"""The variable with the address of a fork server that several processes share."""


class RankError(AssertionError):
    """A rank failed; the text is its traceback."""


BACKEND = os.environ.get("AUTOPARALLEL_TEST_BACKEND", "gloo")
"""The default group of ranks: ``gloo``, or ``strict`` (see ``strict_group``)."""


def run_processes(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 400.0,
    backend: str = BACKEND,
    may_die: Collection[int] = (),
) -> list[Any]:
    """What ``function(*args)`` returns on each of ``num_ranks`` ranks, in rank order.

    ``function`` is a module-level function; it runs with the default process group made and
    one thread. The first ranks that fail end the others and their tracebacks are raised as
    RankError; so does running out of time. Of a rank that ``may_die``, and does, None is returned.
    """
    context = forking_context()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes, ends = [], []
        job = (function, args, not may_die, dict(os.environ))
        for rank in range(num_ranks):
            end, child_end = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank,
                args=(child_end, store, rank, num_ranks, timeout_seconds, backend, job),
                daemon=True,
            )
            process.start()
            child_end.close()
            processes.append(process)
            ends.append(end)
        try:
            return _collect(ends, time.monotonic() + timeout_seconds, may_die)
        finally:
            for process in processes:
                process.join(2.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def forking_context() -> ForkServerContext:
    """Processes of this context are forked from the fork server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    os.environ["OMP_NUM_THREADS"] = "1"
    if (address := os.environ.get(ADDRESS)) and server._forkserver_address is None:
        server._forkserver_address = address
        server._forkserver_alive_fd = os.pipe()[1]  # ours, for the processes that are forked
        server.ensure_running = lambda: None  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        # Where the server finds ``first_uses``, and the package that this process has imported.
        patch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
        server.ensure_running()
    return context


def share_fork_server() -> None:
    """Start a fork server for this process and all that it starts."""
    forking_context()
    if not hasattr(server, "_forkserver_authkey"):  # Python 3.14's has a key of its own
        os.environ[ADDRESS] = str(server._forkserver_address)


def set_torchrun_variables() -> None:
    """Set the variables by which torchrun tells a rank its place, on a rank of this machine."""
    import torch.distributed as dist

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)


def _collect(ends: list[Connection], deadline: float, may_die: Collection[int] = ()) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        pending = [end for rank, end in enumerate(ends) if rank not in results]
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = [rank for rank in range(len(ends)) if rank not in results]
            raise RankError(f"no answer in time from ranks {silent}")
        failures = []
        for end in ready:
            assert isinstance(end, Connection)
            rank = ends.index(end)
            try:
                succeeded, value = end.recv()
            except EOFError:
                if rank in may_die:
                    results[rank] = None
                else:
                    failures.append(f"rank {rank} died")
                continue
            if succeeded:
                results[rank] = value
            else:
                failures.append(f"rank {rank} failed\n{value}")
        if failures:  # on a busy machine those too that the first one made fail
            raise RankError("\n".join(failures))
    return [results[rank] for rank in range(len(ends))]


def measure_briefly() -> None:
    """Measure a CPU's rates for ``BRIEF_SECONDS`` each, and once in the session."""
    from kept_captures import once

    detect._PATIENCE_SECONDS = BRIEF_SECONDS
    measure = detect._measure_cpu
    if hasattr(measure, "cache_info"):
        return

    @cache
    @wraps(measure)
    def measured(*asked: int) -> Device:
        return once(lambda: measure(*asked), "cpu", *asked)

    detect._measure_cpu = measured


def profile_briefly() -> None:
    """In this process, ops, blocks and transfers are measured for a few hundredths of a second."""
    from autoparallel.profiling import work_list as measured_first
    from autoparallel.profiling import worker as profile_worker

    profile_worker.LEAST_CASE_SECONDS, profile_worker.MOST_CASE_SECONDS = 0.02, 0.05
    profile_worker.LINK_SECONDS = 0.02
    measured_first.LEAST_SECONDS, measured_first.MOST_SECONDS = 0.02, 0.2


def _rank(
    end: Connection,
    store: str,
    rank: int,
    num_ranks: int,
    timeout_seconds: float,
    backend: str,
    job: tuple[Callable[..., Any], tuple[Any, ...], bool, dict[str, str]],
) -> None:
    """``job``: the function, its arguments, whether all ranks meet at the end, the environment."""
    function, args, meets, environment = job
    os.environ.clear()
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    measure_briefly()
    if backend == "strict":
        from strict_group import register

        register()
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_seconds),
        )
        value = function(*args)
        if meets:
            dist.barrier()
        dist.destroy_process_group()
        end.send((True, value))
    except BaseException:  # noqa: BLE001 - whatever it is, the test shows it
        end.send((False, traceback.format_exc()))
        os._exit(1)
