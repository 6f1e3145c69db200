"""Command lines and scripts in processes that have imported torch and this package already.

In: what follows ``python`` on a command line. Out: what ``subprocess.run`` would return. The
processes, the workers that they launch and the ranks of a torchrun among them are forked: see
``forked_interpreters``.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from forked_interpreters import ForkedInterpreter


def run_python(
    *arguments: str,
    folder: Path | str = ".",
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """``python`` with ``arguments``: ``-m`` and a module, or a script, and what these are given."""
    return _run(arguments, [environment or os.environ], folder, timeout_seconds)


def run_torchrun(
    script: Path | str, *arguments: str, num_processes: int = 2, timeout_seconds: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """A script on several ranks, in the environment that torchrun gives them.

    As under torchrun, the ranks meet at a store that is not theirs. What the ranks wrote follows
    one another in rank order.
    """
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )
    shared = {
        "WORLD_SIZE": num_processes,
        "LOCAL_WORLD_SIZE": num_processes,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    environments = []
    for rank in range(num_processes):
        own = {**shared, "RANK": rank, "LOCAL_RANK": rank}
        environments.append({**os.environ, **{name: str(value) for name, value in own.items()}})
    return _run((str(script), *arguments), environments, ".", timeout_seconds)


def _run(
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    folder: Path | str,
    timeout_seconds: float,
) -> subprocess.CompletedProcess[str]:
    """A process in each of ``environments``."""
    command = ["python", *arguments]
    with tempfile.TemporaryDirectory() as written:
        processes: list[ForkedInterpreter] = []
        for rank, environment in enumerate(environments):
            path = Path(written, str(rank))
            with (
                path.with_suffix(".out").open("wb") as out,
                path.with_suffix(".err").open("wb") as err,
            ):
                processes.append(
                    ForkedInterpreter(
                        command, env=environment, cwd=str(folder), stdout=out, stderr=err
                    )
                )
        try:
            codes = _exit_codes(processes, time.monotonic() + timeout_seconds)
            if None in codes and not any(codes):
                raise subprocess.TimeoutExpired(command, timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        out_text, err_text = (
            "".join(Path(written, f"{rank}.{end}").read_text() for rank in range(len(processes)))
            for end in ("out", "err")
        )
    code = next((code for code in codes if code), 0)
    return subprocess.CompletedProcess(command, code, out_text, err_text)


def _exit_codes(processes: Sequence[ForkedInterpreter], deadline: float) -> list[int | None]:
    """When all processes have ended, one has failed, or the deadline has passed."""
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.02)
