"""Launching: one process per device on this machine, or joining the ones torchrun started.

In: a function by name and its arguments. Out: what it returns on rank 0; or, when a worker
fails, hangs or runs out of memory, the others are ended at once and its error is raised
here. Workers find each other as torchrun's do (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE,
LOCAL_RANK), so the same function runs under torchrun on many hosts.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import IO, Any

from ..planner.errors import AutoparallelError, HangError, UsageError, WorkerError
from .board import FolderBoard, Note, blame
from .process import RESULT, Job, call, current_worker, read_failure
from .termination import on_termination

POLL_SECONDS = 0.02
GRACE_SECONDS = 10.0
"""How long the other workers may go on after the first failure, to report theirs."""


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether torchrun (or this launcher) has started this process."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def launch(
    entry: str,
    arguments: Mapping[str, Any],
    *,
    num_processes: int,
    timeout_seconds: float = 600.0,
    num_threads: int = 1,
    log_folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    survives: bool = False,
) -> Any:
    """Runs ``entry`` (``"module:function"``) on every rank; returns rank 0's value.

    The function is called as ``function(worker, **arguments)``; arguments and value pass
    through JSON. Rank 0 writes to this process' stdout and stderr; the others' lines go to
    ``log_folder/rank1.log`` …, or to stderr with their rank before them. A worker that tells
    its watchdog nothing for ``timeout_seconds`` counts as hanging. Of a function that ``survives``
    the others go on where a signal ends a worker, and the first rank that is left returns the
    value.

    Under torchrun the function runs in this process as its rank; when torchrun ends it because
    another rank has failed, it says what it was doing. Raises UsageError AP152 if
    torchrun started another number, else the error of the first worker that failed.
    """
    environment = os.environ if environment is None else environment
    if is_launched(environment):
        started = int(environment["WORLD_SIZE"])
        if started != num_processes:
            raise UsageError(
                "AP152", f"the plan needs {num_processes} processes, torchrun started {started}",
                where="torchrun", fix="start as many as the plan has devices, or plan again",
            )  # fmt: skip
        worker = current_worker(environment, timeout_seconds)
        with on_termination(worker.watchdog.terminate):
            return call(entry, worker, arguments)
    with tempfile.TemporaryDirectory(prefix="autoparallel-") as folder:
        job = Job(
            entry, arguments, folder, timeout_seconds, tuple(map(os.path.abspath, sys.path)),
            survives,
        )  # fmt: skip
        job_path = Path(folder) / "job.json"
        job_path.write_text(json.dumps(asdict(job)))
        with reserved_port() as port:
            shared = {
                **environment,
                "OMP_NUM_THREADS": str(num_threads),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(num_processes),
                "LOCAL_WORLD_SIZE": str(num_processes),
                "GROUP_RANK": "0",
                "PYTHONUNBUFFERED": "1",
                **_loopback(environment),
            }
            workers = _Workers(job_path, shared, num_processes, log_folder, survives=survives)
            workers.run(timeout_seconds)
        ranks = range(num_processes) if survives else (0,)
        results = [path for rank in ranks if (path := Path(folder) / RESULT.format(rank)).exists()]
        return json.loads(results[0].read_text()) if results else None


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of this host, kept from others until the workers have ended.

    Bound but not listening, it can still be listened on by rank 0, which also sets
    SO_REUSEADDR.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Gloo over the loopback interface, unless the user chose another."""
    if "GLOO_SOCKET_IFNAME" in environment:
        return {}
    names = [name for _, name in socket.if_nameindex()]
    return {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in names else {}


class _Workers:
    """The worker processes of one launch."""

    def __init__(
        self,
        job_path: Path,
        environment: Mapping[str, str],
        num_processes: int,
        log_folder: Path | None,
        *,
        survives: bool = False,
    ) -> None:
        self._survives, self._lost = survives, set[int]()
        self._folder = job_path.parent
        self._job_path = job_path
        self._environment = environment
        self._num_processes = num_processes
        self._log_folder = log_folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []

    def run(self, timeout_seconds: float) -> None:
        """Starts all and waits for all; raises the error of the first that failed."""
        with _signals_raise():
            try:
                for rank in range(self._num_processes):
                    self._processes.append(self._start(rank))
                failed = self._wait(timeout_seconds)
            finally:
                self._end()
        if failed:
            self._show_waits(failed)
            raise self._error(failed)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "autoparallel.runtime.process", str(self._job_path)]
        environment = {**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        output: int | IO[bytes] | None = None if rank == 0 else subprocess.PIPE
        if rank and self._log_folder is not None:
            self._log_folder.mkdir(parents=True, exist_ok=True)
            output = (self._log_folder / f"rank{rank}.log").open("wb")
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=None if rank == 0 else subprocess.STDOUT,
            start_new_session=True,
        )
        if process.stdout is not None:
            thread = threading.Thread(target=_relay, args=(process.stdout, rank), daemon=True)
            thread.start()
            self._threads.append(thread)
        elif output is not None and not isinstance(output, int):
            output.close()
        return process

    def _wait(self, timeout_seconds: float) -> dict[int, int]:
        """Until all have ended well, or one has failed: the failed ranks and their codes."""
        first_end: float | None = None
        while True:
            codes = self._codes()
            failed = {rank: code for rank, code in enumerate(codes) if code}
            if failed:
                return self._others(failed)
            if all(code == 0 for code in codes):
                return {}
            if first_end is None and 0 in codes:
                first_end = time.monotonic()
            if first_end is not None and time.monotonic() - first_end > timeout_seconds:
                late = [rank for rank, code in enumerate(codes) if code is None]
                raise HangError(
                    "AP802", f"rank {late[0]} has not ended although other ranks have",
                    fix="check what it does after its last step",
                )  # fmt: skip
            time.sleep(POLL_SECONDS)

    def _codes(self) -> list[int | None]:
        """How each worker has ended; well, if others are there that go on without it."""
        codes = [process.poll() for process in self._processes]
        lost = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
        if not self._survives or len(lost) == len(codes):
            return codes
        for rank in lost:
            if rank not in self._lost:
                self._lost.add(rank)
                _write_lines([f"{_ending(codes[rank] or 0)}; the others go on"], rank)
        return [0 if rank in lost else code for rank, code in enumerate(codes)]

    def _others(self, failed: dict[int, int]) -> dict[int, int]:
        """Gives the others a moment to fail by themselves: they may know more.

        For those that ended without a word the others are told here.
        """
        board = FolderBoard(self._folder)
        first = set(failed)
        deadline = time.monotonic() + GRACE_SECONDS
        known = board.read()
        for rank, code in failed.items():
            if rank not in known and read_failure(self._folder, rank) is None:
                board.tell(Note(rank, "", cause=_ending(code)))
        while time.monotonic() < deadline and any(p.poll() is None for p in self._processes):
            time.sleep(POLL_SECONDS)
        codes = [process.poll() for process in self._processes]
        later = {rank: code for rank, code in enumerate(codes) if code and rank not in first}
        return {**failed, **later}

    def _end(self) -> None:
        """Ends what still runs, with its children, politely and then for good."""
        for sign, seconds in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 5.0)):
            for process in self._processes:
                if process.poll() is None:
                    _signal_group(process, sign)
            deadline = time.monotonic() + seconds
            for process in self._processes:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue
        for thread in self._threads:
            thread.join(1.0)
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()

    def _show_waits(self, failed: Mapping[int, int]) -> None:
        """What each rank has said that waited for another, one after the other.

        The workers do not write it themselves: lines of several at once would mix.
        """
        for rank in sorted(failed):
            report = read_failure(self._folder, rank)
            if report is not None and (report.is_consequence or report.kind == "HangError"):
                _write_lines(str(report.error()).splitlines(), rank)

    def _error(self, failed: Mapping[int, int]) -> AutoparallelError:
        """The error to raise for the ranks that failed by themselves, the first one first."""
        reports = {rank: read_failure(self._folder, rank) for rank in failed}
        silent = [rank for rank in failed if reports[rank] is None]
        told = sorted(
            (report for report in reports.values() if report is not None),
            key=lambda report: (report.is_consequence, report.seconds),
        )
        waits = self._waits()
        if silent and (not told or told[0].is_consequence):
            error: AutoparallelError = self._silent_error(silent[0], failed[silent[0]])
            error.why = "; ".join(part for part in (error.why, waits) if part)
            return error
        error = told[0].error()
        if isinstance(error, HangError) or told[0].is_consequence:
            error.why = f"{waits}; {blame(self._notes(), self._num_processes)}"
        return error

    def _notes(self) -> dict[int, Note]:
        return FolderBoard(self._folder).read()

    def _waits(self) -> str:
        """What each rank that has no error of its own was doing."""
        return "; ".join(
            f"rank {rank}: {note.doing}"
            for rank, note in sorted(self._notes().items())
            if not note.cause
        )

    def _silent_error(self, rank: int, code: int) -> WorkerError:
        name = f"rank {rank} of {self._num_processes}"
        log = self._log_folder / f"rank{rank}.log" if rank and self._log_folder else ""
        if code < 0:
            why = _ending(code)
            if code == -signal.SIGKILL:
                why += ", as the system does when memory runs out"
            return WorkerError("AP801", f"{name} died", why=why, where=str(log))
        return WorkerError(
            "AP801", f"{name} exited with code {code}", why="it reported no error", where=str(log)
        )


def _ending(code: int) -> str:
    """How a process ended that left no error."""
    return f"{signal.Signals(-code).name} ended it" if code < 0 else f"it exited with code {code}"


def _signal_group(process: subprocess.Popen[bytes], sign: signal.Signals) -> None:
    """To the worker and the processes it has started."""
    try:
        os.killpg(process.pid, sign)
    except (ProcessLookupError, PermissionError):
        return


def _relay(lines: IO[bytes], rank: int) -> None:
    with lines:
        for line in lines:
            _write_lines([line.decode(errors="replace").rstrip("\n")], rank)


def _write_lines(lines: Iterable[str], rank: int) -> None:
    sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in lines))


@contextmanager
def _signals_raise() -> Iterator[None]:
    """While workers run, the signals that end this process raise SystemExit, so they end too."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {sign: signal.signal(sign, leave) for sign in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for sign, handler in previous.items():
            signal.signal(sign, handler)
