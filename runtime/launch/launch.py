"""Launching: one process per device on this machine, or joining processes of torchrun.

In: a function by name and its arguments. Out: its value on rank 0; or, when a worker fails, hangs
or runs out of memory, the others are ended at once and its error is raised here. Workers meet at a
file of the job's folder, which only this user can open; no port is opened. RANK, WORLD_SIZE and
LOCAL_RANK are as under torchrun, where the same function runs on many hosts.

A restart of all ranks may help when a rank died, hangs or lost another rank. A wrong option, plan
or model, too little memory or a loss that is not finite would only fail again.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

from ...cost_model.cluster.detect import threads_per_device
from ...planner.errors import AutoparallelError, HangError, UsageError, WorkerError
from ..messages.failure_store import FailureReport, FailureStore, FolderStore, blame
from ..messages.watchdog import on_termination
from .process import FAILURE, RESULT, Job, call_entry, current_worker

POLL_SECONDS = 0.02
GRACE_SECONDS = 10.0
"""Time in which, after the first failure, the other workers may report errors of their own."""


def is_launched(environment: Mapping[str, str]) -> bool:
    """Tell whether torchrun (or this launcher) has started this process."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def launch(
    entry: str,
    arguments: Mapping[str, Any],
    *,
    num_processes: int,
    timeout_seconds: float = 600.0,
    environment: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    finishes: bool = False,
    survives: bool = False,
) -> Any:
    """Run ``entry`` (``"module:function"``) on every rank; return rank 0's value.

    The function is called as ``function(worker, **arguments)``; arguments and value pass through
    JSON. Each rank computes with its share of the cores. Rank 0 writes to this process' stdout and
    stderr, the others' lines go to stderr with their rank before them. A worker that reports no
    progress for ``timeout_seconds`` counts as hanging. After a failure that a restart can mend all
    ranks are started again, ``max_restarts`` times at most. If ``finishes``, a first SIGTERM is
    passed on to the workers, which end when they have finished their step. If ``survives``, the
    other workers go on when a signal ends a worker, and the value is the first remaining rank's.

    Under torchrun the function runs in this process as its rank; when torchrun ends it because
    another rank has failed, it reports its last action. Raises UsageError AP152 if torchrun started
    another number of processes, else the error of the first worker that failed.
    """
    environment = os.environ if environment is None else environment
    if is_launched(environment):
        started = int(environment["WORLD_SIZE"])
        if started != num_processes:
            raise UsageError(
                "AP152",
                f"the plan needs {num_processes} processes, torchrun started {started}",
                where="torchrun",
                fix="start as many as the plan has devices, or plan again",
            )
        worker = current_worker(environment, timeout_seconds)
        with on_termination(worker.watchdog.terminate):
            return call_entry(entry, worker, arguments)
    shared = {
        **environment,
        "OMP_NUM_THREADS": str(threads_per_device(num_processes)),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "GROUP_RANK": "0",
        "PYTHONUNBUFFERED": "1",
        **_loopback(environment),
    }
    job = Job(entry, arguments, "", timeout_seconds, survives=survives)
    return _restarting(partial(_attempt, job, finishes=finishes), shared, max_restarts)


def _restarting(
    start: Callable[[Mapping[str, str]], Any], shared: Mapping[str, str], max_restarts: int
) -> Any:
    """Call ``start`` with the environment of the ranks, and again after each error that a restart
    can fix, ``max_restarts`` times at most. Return its value or raise its last error."""
    for restarts in range(max_restarts + 1):
        try:
            return start({**shared, "TORCHELASTIC_RESTART_COUNT": str(restarts)})
        except AutoparallelError as error:
            if restarts == max_restarts or not can_mend(error):
                raise
            tell_restart(error, restarts + 1, max_restarts)
    raise AssertionError("the last attempt returns or raises")


def _attempt(job: Job, shared: Mapping[str, str], *, finishes: bool) -> Any:
    """Start all ranks once, with the environment variables ``shared`` and a new temporary folder
    for the job; return the value of the first rank. If ``finishes``, a first SIGTERM lets them end
    their step."""
    with tempfile.TemporaryDirectory(prefix="autoparallel-") as folder:
        job_path = Path(folder) / "job.json"
        job_path.write_text(json.dumps(asdict(replace(job, folder=folder))))
        num_processes = int(shared["WORLD_SIZE"])
        workers = Workers(job_path, shared, num_processes, survives=job.survives)
        workers.run(job.timeout_seconds, finishes=finishes)
        ranks = range(num_processes) if job.survives else (0,)
        results = [path for rank in ranks if (path := Path(folder) / RESULT.format(rank)).exists()]
        return json.loads(results[0].read_text()) if results else None


def _loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that makes gloo use the loopback interface, or {} if the user
    has chosen an interface."""
    if "GLOO_SOCKET_IFNAME" in environment:
        return {}
    names = [name for _, name in socket.if_nameindex()]
    return {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in names else {}


class Workers:
    """The worker processes of one launch on this machine; their ranks count up from ``first_rank``.
    ``failures`` has the reports of failed workers, by default in the folder of the job."""

    def __init__(
        self,
        job_path: Path,
        environment: Mapping[str, str],
        num_processes: int,
        *,
        first_rank: int = 0,
        failures: FailureStore | None = None,
        survives: bool = False,
    ) -> None:
        self._survives, self._lost = survives, set[int]()
        self._folder = job_path.parent
        self._job_path = job_path
        self._environment = environment
        self._ranks = range(first_rank, first_rank + num_processes)
        self._world_size = int(environment["WORLD_SIZE"])
        self._failures = failures or FolderStore(self._folder)
        self._told = FolderStore(self._folder, FAILURE)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._is_asked = False

    def run(self, timeout_seconds: float, *, finishes: bool) -> None:
        """Start all workers and wait for them; raise the error of the first that failed."""
        with signals_raise(self.ask if finishes else None):
            try:
                self.start()
                failed = self._wait(timeout_seconds)
            finally:
                self.end()
        if self._is_asked and set(failed.values()) == {-signal.SIGTERM}:
            raise SystemExit(128 + signal.SIGTERM)
        if failed:
            raise self.error(failed)

    def start(self) -> dict[int, int]:
        """Start all workers; return their process ids by local rank."""
        for rank in self._ranks:
            self._processes.append(self._start(rank))
        return {number: process.pid for number, process in enumerate(self._processes)}

    def codes(self) -> dict[int, int | None]:
        """Return the workers' exit codes by rank: None while running. A worker that a signal ended
        has code 0 if the job goes on without it (``survives``)."""
        found = (process.poll() for process in self._processes)
        codes = dict(zip(self._ranks, found, strict=True))
        lost = {rank: code for rank, code in codes.items() if code is not None and code < 0}
        if not self._survives or len(lost) == len(codes):
            return codes
        for rank in lost.keys() - self._lost:
            self._lost.add(rank)
            _write_lines([f"{_ending(lost[rank])}; the others go on"], rank)
        return {**codes, **dict.fromkeys(lost, 0)}

    def ask(self) -> bool:
        """Pass a SIGTERM of this process on to the workers if it is the first, and return True;
        they end after their step. Return False for a later SIGTERM."""
        is_first, self._is_asked = not self._is_asked, True
        if is_first:
            for process in self._processes:
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGTERM)
        return is_first

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-P",
            "-m",
            "autoparallel.runtime.launch.process",
            str(self._job_path),
        ]
        local_rank = rank - self._ranks.start
        environment = {**self._environment, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=None if rank == 0 else subprocess.STDOUT,
            start_new_session=True,
        )
        if process.stdout is not None:
            thread = threading.Thread(target=_relay, args=(process.stdout, rank), daemon=True)
            thread.start()
            self._threads.append(thread)
        return process

    def _wait(self, timeout_seconds: float) -> dict[int, int]:
        """Wait until all workers succeed or one fails; return the failed ranks' exit codes."""
        first_end: float | None = None
        while True:
            codes = self.codes()
            failed = {rank: code for rank, code in codes.items() if code}
            if failed:
                return self.others(failed)
            if all(code == 0 for code in codes.values()):
                return {}
            if first_end is None and 0 in codes.values():
                first_end = time.monotonic()
            if first_end is not None and time.monotonic() - first_end > timeout_seconds:
                late = [rank for rank, code in codes.items() if code is None]
                raise HangError(
                    "AP802",
                    f"rank {late[0]} has not ended although other ranks have",
                    fix="check what it does after its last step",
                )
            time.sleep(POLL_SECONDS)

    def others(self, failed: dict[int, int]) -> dict[int, int]:
        """Wait after the first failure, ``GRACE_SECONDS`` at most, for other workers to fail too,
        and return the exit codes of all failed ranks. A ``failed`` rank that left no report is
        first reported to the other workers."""
        first = set(failed)
        deadline = time.monotonic() + GRACE_SECONDS
        known = {**self._failures.read(), **self._told.read()}
        for rank in failed.keys() - known:
            self._failures.tell(FailureReport(rank, cause=_ending(failed[rank])))
        while time.monotonic() < deadline and any(p.poll() is None for p in self._processes):
            time.sleep(POLL_SECONDS)
        later = {rank: code for rank, code in self.codes().items() if code and rank not in first}
        return {**failed, **later}

    def end(self) -> None:
        """End the running workers and their child processes, first by SIGTERM, then by SIGKILL."""
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
        """Print the errors of the ``failed`` ranks that only waited for another rank, one after the
        other. The workers do not print them: lines of several workers at once would mix."""
        for rank, report in sorted(self._told.read().items()):
            if rank in failed and (report.is_consequence or report.error["kind"] == "HangError"):
                _write_lines(str(report.exception()).splitlines(), rank)

    def error(self, failed: Mapping[int, int]) -> AutoparallelError:
        """Return the error to raise: of the first rank that failed by itself.

        Its note names the ranks that stopped because of it. If no rank has an error of its own, the
        errors of ranks that waited for others are printed to stderr first.
        """
        reports = self._told.read()
        silent = [rank for rank in failed if rank not in reports]
        told = sorted(
            (reports[rank] for rank in failed if rank in reports),
            key=lambda report: (report.is_consequence, report.seconds),
        )
        if told and not told[0].is_consequence and told[0].error["kind"] != "HangError":
            error = told[0].exception()
            stopped = sorted(report.rank for report in told if report.is_consequence)
            if stopped:
                word = "rank" if len(stopped) == 1 else "ranks"
                error.add_note(f"{word} {', '.join(map(str, stopped))} stopped because of it")
            return error
        self._show_waits(failed)
        waits = self._waits()
        if silent and (not told or told[0].is_consequence):
            error = self._silent_error(silent[0], failed[silent[0]])
            error.why = "; ".join(part for part in (error.why, waits) if part)
            return error
        error = told[0].exception()
        error.why = f"{waits}; {blame(self._failures.read(), self._world_size)}"
        return error

    def _waits(self) -> str:
        """Describe the last action of each rank that has no error of its own."""
        return "; ".join(
            f"rank {rank}: {report.doing}"
            for rank, report in sorted(self._failures.read().items())
            if not report.cause
        )

    def _silent_error(self, rank: int, code: int) -> WorkerError:
        name = f"rank {rank} of {self._world_size}"
        if code < 0:
            why = _ending(code)
            if code == -signal.SIGKILL:
                why += ", as the system does when memory runs out"
            return WorkerError("AP801", f"{name} died", why=why)
        return WorkerError("AP801", f"{name} exited with code {code}", why="it reported no error")


def _ending(code: int) -> str:
    """Describe how a process without an error report ended, by its exit ``code`` (negative: a
    signal)."""
    return f"{signal.Signals(-code).name} ended it" if code < 0 else f"it exited with code {code}"


def _signal_group(process: subprocess.Popen[bytes], sign: signal.Signals) -> None:
    """Send a signal to a worker and the processes that it has started."""
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
def signals_raise(ask: Callable[[], bool] | None = None) -> Iterator[None]:
    """Raise SystemExit at SIGTERM and SIGHUP inside the context, so that its cleanup ends the
    workers. A SIGTERM is ignored if ``ask()`` returns true: the workers then end by themselves."""

    def leave(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGTERM or ask is None or not ask():
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


MENDABLE = ("AP801", "AP802", "AP820", "AP821", "AP826")
"""Codes of errors after which a restart may succeed: a rank failed, died, hangs, or lost another
rank; a host is lost."""


def can_mend(error: AutoparallelError) -> bool:
    """Return whether a restart of the run may succeed after ``error``.

    >>> from ...planner.errors import DeviceMemoryError, WorkerError
    >>> can_mend(WorkerError("AP801", "rank 1 of 2 died"))
    True
    >>> can_mend(DeviceMemoryError("AP803", "rank 1 of 2 ran out of memory"))
    False
    """
    return error.code in MENDABLE


def tell_restart(error: AutoparallelError, number: int, most: int) -> None:
    """Print ``error`` on stderr, and that restart ``number`` of at most ``most`` begins."""
    print(f"{error}\nautoparallel: restart {number} of {most}", file=sys.stderr, flush=True)
