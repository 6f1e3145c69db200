"""Reports of ranks that end, for the other ranks and for their launcher.

In: the report of a rank that ends: its action, the ranks it waited for, its error. Out: the reports
of the other ranks, and from them the ranks that failed first. Reports lie in the job's folder where
a launcher has started all ranks on one machine (``FolderStore``), else in the store that the ranks
met at (``SharedStore``). Nothing is written while all goes well.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ...planner import errors
from ...planner.errors import AutoparallelError

T = TypeVar("T")

# If a rank is lost while a checkpoint is written (AP886), ``lost_rank`` turns the error into AP820.
CONSEQUENCES = ("AP820", "AP821")
"""Codes of the errors of ranks that end only because another rank has failed."""

GATHER_SECONDS = 4.0
"""Time that an ending rank waits for the others' reports, so as to name the failed rank."""
ANSWER_SECONDS = 1.0
"""Time limit for an answer of the store."""
MOST_FAILURES = 3
"""Number of failed attempts to reach a store after which it gets no more requests."""


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Report that a rank leaves when it ends: its last action, and the ranks for whose message it
    waited. ``cause`` is the text of its own error; empty if it only waited for or lost another
    rank. Reports to the launcher also have the ``error``'s class and fields, and the time."""

    rank: int
    doing: str = ""
    waits_for: tuple[int, ...] = ()
    cause: str = ""
    error: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @staticmethod
    def of(rank: int, error: AutoparallelError) -> FailureReport:
        """Make the report from which the launcher can raise a rank's ``error`` again."""
        fields = {name: getattr(error, name) for name in ("code", "what", "why", "where", "fix")}
        fields["kind"] = type(error).__name__
        return FailureReport(rank, error=fields, seconds=time.time())

    @staticmethod
    def parse(text: str) -> FailureReport:
        """Parse the text that ``str(report)`` returns."""
        fields = json.loads(text)
        return FailureReport(**{**fields, "waits_for": tuple(fields["waits_for"])})

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @property
    def is_consequence(self) -> bool:
        """Tell whether the rank ended only because another rank had failed."""
        return self.error["code"] in CONSEQUENCES

    def exception(self) -> AutoparallelError:
        """Make the error that the rank has reported to the launcher, to be raised again there."""
        fields = dict(self.error)
        kind: type[AutoparallelError] = getattr(errors, fields.pop("kind"))
        return kind(fields.pop("code"), fields.pop("what"), **fields)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: it appears with all of its text."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(text)
    partial.rename(path)


class FailureStore(Protocol):
    """Interface of a store of failure reports. A call takes at most twice ``ANSWER_SECONDS`` and
    never raises."""

    def tell(self, report: FailureReport) -> None: ...
    def read(self) -> dict[int, FailureReport]: ...
    def is_empty(self) -> bool: ...
    def finish(self) -> None:
        """Wait for a request that the store has not answered yet; to be called before the
        interpreter ends."""


@dataclass(frozen=True, slots=True)
class FolderStore:
    """Store of failure reports as files in a folder that all ranks can read."""

    folder: Path
    prefix: str = "note"

    def tell(self, report: FailureReport) -> None:
        with suppress(OSError):
            write_whole(self.folder / f"{self.prefix}-{report.rank}.json", str(report))

    def read(self) -> dict[int, FailureReport]:
        reports = [FailureReport.parse(path.read_text()) for path in self._paths()]
        return {report.rank: report for report in reports}

    def is_empty(self) -> bool:
        return next(self._paths(), None) is None

    def _paths(self) -> Iterator[Path]:
        return self.folder.glob(f"{self.prefix}-*.json")

    def finish(self) -> None:
        """Do nothing: this store answers each request at once, so none is pending."""


class SharedStore:
    """Store of failure reports in torch's store at MASTER_ADDR and MASTER_PORT, over its own
    connection.

    No request is made while an earlier request is unanswered, or after ``MOST_FAILURES`` failed
    attempts to reach it. Where no agent of torchrun keeps the store, rank 0 makes the store with
    the process group; no request is made before. This object must be made in the main thread: two
    threads that import ``torch.distributed`` at once would end the process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        import torch.distributed  # noqa: F401

        self._address = (environment.get("MASTER_ADDR"), environment.get("MASTER_PORT"))
        restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"autoparallel/notes/{restart}"
        self._store: Any = None
        self._has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._failures = MOST_FAILURES if None in self._address else 0
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None

    def tell(self, report: FailureReport) -> None:
        self._ask(lambda store: store.append(self._key, f"{report}\n"), None)

    def read(self) -> dict[int, FailureReport]:
        def get(store: Any) -> bytes:
            found: bytes = store.get(self._key) if store.check([self._key]) else b""
            return found

        reports = map(FailureReport.parse, self._ask(get, b"").decode().splitlines())
        return {report.rank: report for report in reports}

    def is_empty(self) -> bool:
        return not self._ask(lambda store: store.check([self._key]), False)

    def finish(self) -> None:
        if self._asking is not None:
            self._asking.join(2 * ANSWER_SECONDS)

    def _ask(self, question: Callable[[Any], T], otherwise: T) -> T:
        if not self._lock.acquire(timeout=ANSWER_SECONDS):
            return otherwise
        try:
            return self._asked(question, otherwise)
        finally:
            self._lock.release()

    def _asked(self, question: Callable[[Any], T], otherwise: T) -> T:
        deadline = time.monotonic() + ANSWER_SECONDS
        if self._asking is not None:
            self._asking.join(ANSWER_SECONDS)
        is_owing = self._asking is not None and self._asking.is_alive()
        if is_owing or self._failures >= MOST_FAILURES or not self._is_there():
            return otherwise
        answers: list[T] = []

        def ask() -> None:
            try:
                if self._store is None:
                    self._store = self._connect()
                answers.append(question(self._store))
                self._failures = 0
            except RuntimeError:
                self._store = None
                self._failures += 1

        asking = threading.Thread(target=ask, name="failure store", daemon=True)
        asking.start()
        self._asking = asking  # only now: ``finish`` may join it at any time
        asking.join(max(0.0, deadline - time.monotonic()))
        return answers[0] if answers else otherwise

    def _is_there(self) -> bool:
        import torch.distributed as dist

        return self._has_agent or dist.is_initialized()

    def _connect(self) -> Any:
        import torch.distributed as dist

        host, port = self._address
        return dist.TCPStore(  # type: ignore[attr-defined]
            str(host),
            int(str(port)),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=ANSWER_SECONDS),
        )


@dataclass(frozen=True, slots=True)
class Ranks:
    """A rank's view of all ranks: it leaves a report for the others, and reads their reports."""

    rank: int
    world_size: int
    store: FailureStore

    def has_failure(self) -> bool:
        """Tell whether any rank has left a report."""
        return not self.store.is_empty()

    def blame(self, report: FailureReport) -> str:
        """Store ``report``, wait for the other ranks' reports, and return text that names the
        failed ranks."""
        self.store.tell(report)
        deadline = time.monotonic() + GATHER_SECONDS
        reports = self.store.read()
        while len(reports) < self.world_size and time.monotonic() < deadline:
            if any(other.cause for other in reports.values()):
                break
            time.sleep(0.05)
            reports = self.store.read()
        return blame({**reports, report.rank: report}, self.world_size)


def blame(reports: Mapping[int, FailureReport], world_size: int) -> str:
    """Return text that names the failed ranks, from the reports that ranks have left.

    These are the ranks with an error of their own; if there are none, the ranks without a report
    (dead, stopped or unreachable); else the ranks that wait for no other rank. If all ranks wait,
    each one's action is named.

    >>> waiting = FailureReport(0, "0B0: waiting for gradients", (1,))
    >>> blame({0: waiting}, 2)
    'rank 1 failed to come: it does not answer'
    >>> blame({0: waiting, 1: FailureReport(1, "1F0: computing")}, 2)
    'rank 1 failed to come: it was at 1F0: computing'
    """
    failed = [report for report in reports.values() if report.cause]
    if failed:
        return "; ".join(f"rank {report.rank} failed: {report.cause}" for report in failed)
    silent = [rank for rank in range(world_size) if rank not in reports]
    if len(silent) == 1:
        return f"rank {silent[0]} failed to come: it does not answer"
    if silent:
        return f"ranks {', '.join(map(str, silent))} failed to come: they do not answer"
    ordered = [reports[rank] for rank in sorted(reports)]
    last = [report for report in ordered if not report.waits_for] or ordered
    return "; ".join(
        f"rank {report.rank} failed to come: it was at {report.doing}" for report in last
    )
