"""Interpreters that are forked from a server instead of started.

In: the arguments with which ``subprocess.Popen`` starts a Python interpreter. Out: an object with
the attributes and methods of ``Popen`` that the launcher and torchrun use. The forked process has
imported torch and this package already, which saves three seconds of processor time. What it does
not cover is the start and the end of an interpreter.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import brief_search
import processes
import pytest
from brief_search import searches_are_brief
from kept_captures import FOLDER
from processes import forking_context, measure_briefly, profile_briefly

from autoparallel.runtime.launch import launch

HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
WORKER = "autoparallel.runtime.launch.process"
OPTIONS = ("-P", "-u")
"""Options of interpreters that forked ones need not heed."""


class ForkedInterpreter:
    """What the launcher and torchrun use of ``subprocess.Popen``."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        stdin: int | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.args, self.stdin, self.stdout = args, None, None
        inner = [os.dup(0), _duplicate(stdout, 1), _duplicate(stderr, 2)]
        if stdin == subprocess.PIPE:
            os.close(inner[0])
            inner[0], outer = os.pipe()
            self.stdin = os.fdopen(outer, "wb")
        if stdout == subprocess.PIPE:
            os.close(inner[1])
            outer, inner[1] = os.pipe()
            self.stdout = os.fdopen(outer, "rb")
        if stderr == subprocess.STDOUT:
            os.close(inner[2])
            inner[2] = os.dup(inner[1])
        # A Connection is how the number of an open file reaches a process of the fork server.
        files = [Connection(file) for file in inner]
        self._process = forking_context().Process(
            target=_interpret,
            args=(list(args[1:]), dict(env), os.path.abspath(cwd or "."), files, start_new_session),
        )
        self._process.start()
        for file in files:
            file.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode


def _duplicate(file: int | IO[bytes] | None, usual: int) -> int:
    """A new number of ``file``, or of the ``usual`` one if it is none or made elsewhere."""
    return os.dup(usual if file is None or isinstance(file, int) else file.fileno())


@contextmanager
def interpreters_are_forked() -> Iterator[None]:
    """Within it, the launcher forks its workers, and torchrun in this process its ranks."""
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedInterpreter})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "subprocess", forking)
        if HANDLER in sys.modules:
            patch.setattr(f"{HANDLER}.Popen", ForkedInterpreter)
        yield


def _interpret(
    arguments: list[str],
    environment: Mapping[str, str],
    folder: str,
    files: Sequence[Connection],
    is_new_session: bool,
) -> None:
    """The forked process becomes one that ``python`` has started."""
    if is_new_session:
        os.setsid()
    atexit._clear()  # those of the fork server
    kept = os.environ.get(FOLDER, "")
    # What this process forks comes from the same server.
    processes.server.ensure_running = lambda: None  # type: ignore[method-assign]
    os.environ.clear()
    os.environ.update({FOLDER: kept, **environment})
    measure_briefly()
    profile_briefly()
    os.chdir(folder)
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )
    is_brief = brief_search.VARIABLE in os.environ
    try:
        with interpreters_are_forked(), searches_are_brief() if is_brief else nullcontext():
            _run(arguments, folder)
    except Exception:  # noqa: BLE001  # whatever ends the program, as an interpreter does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # there is one
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


def _run(arguments: list[str], folder: str) -> None:
    while arguments[0] in OPTIONS:
        arguments.pop(0)
    if arguments[0] != "-m":
        sys.path.insert(0, str(Path(folder, arguments[0]).parent))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    elif arguments[1] == WORKER:
        from autoparallel.runtime.launch.process import main

        main(arguments[2])
    else:
        sys.path.insert(0, folder)
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
