"""Command lines and scripts in processes that have imported torch and this package already.

In: what follows ``python`` on a command line. Out: what ``subprocess.run`` would return. The
processes, and the workers that they launch, are forked from the fork server of ``processes``, which
saves the seconds that the imports take. They do not cover the start and the end of an interpreter:
the tests of the launcher, of failures and of torchrun (``tests/runtime``) start real processes.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

from forked_workers import replace_process, workers_are_forked
from processes import forking_context


def run_python(
    *arguments: str, folder: Path | str = ".", timeout_seconds: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """``python`` with ``arguments``: ``-m`` and a module, or a script, and what these are given."""
    return _run(arguments, [{}], folder, timeout_seconds)


def run_torchrun(
    script: Path | str, *arguments: str, num_processes: int = 2, timeout_seconds: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """A script on several ranks, in the environment that torchrun gives them.

    As under torchrun, the ranks meet at a store that is not theirs. What the ranks wrote follows
    one another in rank order.
    """
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )  # fmt: skip
    shared = {
        "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes, "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    environments = [
        {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(num_processes)
    ]
    return _run((str(script), *arguments), environments, ".", timeout_seconds)


def _run(
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    folder: Path | str,
    timeout_seconds: float,
) -> subprocess.CompletedProcess[str]:
    """A process for each of ``environments``, which are added to this process's own."""
    context = forking_context()
    with tempfile.TemporaryDirectory() as written:
        processes: list[BaseProcess] = []
        for rank, environment in enumerate(environments):
            files = Path(written) / f"{rank}.out", Path(written) / f"{rank}.err"
            process = context.Process(
                target=_process,
                args=(arguments, {**os.environ, **environment}, os.path.abspath(folder), files),
            )
            process.start()
            processes.append(process)
        try:
            codes = _exit_codes(processes, time.monotonic() + timeout_seconds)
            if None in codes and not any(codes):
                raise subprocess.TimeoutExpired(["python", *arguments], timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()
        out, err = (
            "".join((Path(written) / f"{rank}.{end}").read_text() for rank in range(len(processes)))
            for end in ("out", "err")
        )
    code = next((code for code in codes if code), 0)
    return subprocess.CompletedProcess(["python", *arguments], code, out, err)


def _exit_codes(processes: Sequence[BaseProcess], deadline: float) -> list[int | None]:
    """When all processes have ended, one has failed, or the deadline has passed."""
    while True:
        codes = [process.exitcode for process in processes]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.02)


def _process(
    arguments: Sequence[str], environment: Mapping[str, str], folder: str, files: tuple[Path, Path]
) -> None:
    """The forked process becomes one that ``python`` has started."""
    written = [os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for file in files]
    replace_process(environment, folder, written)
    try:
        with workers_are_forked():
            if arguments[0] == "-m":
                sys.path.insert(0, folder)
                sys.argv = list(arguments[1:])
                runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(folder, arguments[0]).parent))
                sys.argv = list(arguments)
                runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
