"""Workers of the launcher that are forked from a server, not started as new interpreters.

In: the arguments with which ``autoparallel.runtime.launch`` calls ``subprocess.Popen``. Out: an
object with the attributes and methods of ``Popen`` that the launcher uses. A worker that is forked
has imported torch and this package already, which saves three seconds of processor time each.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import IO

import pytest
import processes
from processes import forking_context, measure_briefly

from autoparallel.runtime import launch

class ForkedWorker:
    """What the launcher uses of ``subprocess.Popen``, for a process of the fork server."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: int | IO[bytes] | None,
        stderr: int | None,
        start_new_session: bool,
    ) -> None:
        assert (stdin, start_new_session) == (subprocess.PIPE, True)
        assert stderr in (None, subprocess.STDOUT)
        read, write = os.pipe()
        self.stdin, self.stdout = os.fdopen(write, "wb"), None
        if stdout == subprocess.PIPE:
            lines, out = os.pipe()
            self.stdout = os.fdopen(lines, "rb")
        else:
            out = os.dup(1 if stdout is None else stdout.fileno())  # type: ignore[union-attr]
        err = os.dup(2 if stderr is None else out)
        # A Connection is how a number of an open file reaches a process of the fork server.
        files = [Connection(file) for file in (read, out, err)]
        self._process = forking_context().Process(
            target=_work, args=(command[-1], dict(env), os.getcwd(), files)
        )
        self._process.start()
        for file in files:
            file.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return self._process.exitcode


@contextmanager
def workers_are_forked() -> Iterator[None]:
    """Within it, the launcher forks its workers; other processes are started as ever."""
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedWorker})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "subprocess", forking)
        yield


def use_the_same_fork_server() -> None:
    """In a process of the fork server: what it forks comes from that server too."""
    processes.ensure_running = lambda: None
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]


def replace_process(environment: Mapping[str, str], folder: str, files: Sequence[int]) -> None:
    """A forked process gets the environment, folder and standard files of a started one.

    ``files`` are the numbers of open files for stdin, stdout and stderr; those not given stay.
    """
    atexit._clear()  # those of the fork server
    measure_briefly()
    use_the_same_fork_server()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, file in zip((0, 1, 2)[-len(files) :], files, strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )


def _work(
    job_path: str, environment: Mapping[str, str], folder: str, files: Sequence[Connection]
) -> None:
    os.setsid()
    replace_process(environment, folder, [os.dup(file.fileno()) for file in files])
    for file in files:
        file.close()
    import torch

    from autoparallel.runtime.process import main

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    try:
        main(job_path)
    finally:
        atexit._run_exitfuncs()
