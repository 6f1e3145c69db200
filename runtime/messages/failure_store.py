"""What ranks tell each other when one of them fails, beside their messages.

In: the note of a rank that ends: what it was doing, and whom it waited for. Out: the notes
of the others, and from them who is to blame. Notes lie in the job's folder where a launcher
has started all ranks on one machine (``FolderBoard``), else in the store that they met at
(``StoreBoard``). Nothing is written while all goes well.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

GATHER_SECONDS = 4.0
"""How long a rank that ends waits for the others' notes, to say who failed."""
ANSWER_SECONDS = 1.0
"""How long the store may take to answer."""
MOST_FAILURES = 3
"""How often a store may be out of reach."""


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank was doing when it ended, and the ranks whose message it waited for.

    ``cause`` is its own error; empty where it waits for another rank or has lost one.
    """

    rank: int
    doing: str
    waits_for: tuple[int, ...] = ()
    cause: str = ""

    @staticmethod
    def parse(text: str) -> Note:
        """The inverse of ``json.dumps(asdict(note))``."""
        fields = json.loads(text)
        return Note(**{**fields, "waits_for": tuple(fields["waits_for"])})


class Board(Protocol):
    """Where notes are left. No call takes longer than twice ``ANSWER_SECONDS``, and none raises."""

    def tell(self, note: Note) -> None: ...
    def read(self) -> dict[int, Note]: ...
    def is_empty(self) -> bool: ...
    def finish(self) -> None:
        """Wait for what is still asked, before the interpreter ends."""


@dataclass(frozen=True, slots=True)
class FolderBoard:
    """Notes as files of a folder that all ranks see."""

    folder: Path

    def tell(self, note: Note) -> None:
        path = self.folder / f"note-{note.rank}.json"
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps(asdict(note)))
            partial.rename(path)
        except OSError:
            return

    def read(self) -> dict[int, Note]:
        notes = {}
        for path in self.folder.glob("note-*.json"):
            note = Note.parse(path.read_text())
            notes[note.rank] = note
        return notes

    def is_empty(self) -> bool:
        return next(self.folder.glob("note-*.json"), None) is None

    def finish(self) -> None:
        """Nothing is under way."""


class StoreBoard:
    """Notes in the store of MASTER_ADDR and MASTER_PORT, by a connection of its own.

    Nothing more is asked of a store while it owes an answer, or when it cannot be reached for
    ``MOST_FAILURES`` times. Where no agent of torchrun keeps the store, rank 0 makes it with the
    process group; it is not asked before. Made in the main thread: two threads that import
    ``torch.distributed`` at once would end the process.
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

    def tell(self, note: Note) -> None:
        text = json.dumps(asdict(note)) + "\n"
        self._ask(lambda store: store.append(self._key, text), None)

    def read(self) -> dict[int, Note]:
        def get(store: Any) -> bytes:
            found: bytes = store.get(self._key) if store.check([self._key]) else b""
            return found

        notes = map(Note.parse, self._ask(get, b"").decode().splitlines())
        return {note.rank: note for note in notes}

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

        asking = threading.Thread(target=ask, name="board", daemon=True)
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
    """One rank among all: what it tells the others at its end, and learns from them."""

    rank: int
    world_size: int
    board: Board

    def has_failure(self) -> bool:
        """Whether any rank has left a note."""
        return not self.board.is_empty()

    def blame(self, note: Note) -> str:
        """Leaves ``note``, waits for those of the others, and says who has failed."""
        self.board.tell(note)
        deadline = time.monotonic() + GATHER_SECONDS
        notes = self.board.read()
        while len(notes) < self.world_size and time.monotonic() < deadline:
            if any(other.cause for other in notes.values()):
                break
            time.sleep(0.05)
            notes = self.board.read()
        return blame({**notes, note.rank: note}, self.world_size)


def blame(notes: Mapping[int, Note], world_size: int) -> str:
    """Who has failed, by the notes that ``world_size`` ranks have left.

    First those with an error of their own; else those that left no note, for they are dead,
    stopped or out of reach; else those that wait for nobody, for the others wait for them. Where
    all wait, what each is at.

    >>> waiting = Note(0, "0B0: waiting for gradients", (1,))
    >>> blame({0: waiting}, 2)
    'rank 1 failed to come: it does not answer'
    >>> blame({0: waiting, 1: Note(1, "1F0: computing")}, 2)
    'rank 1 failed to come: it was at 1F0: computing'
    """
    failed = [note for note in notes.values() if note.cause]
    if failed:
        return "; ".join(f"rank {note.rank} failed: {note.cause}" for note in failed)
    silent = [rank for rank in range(world_size) if rank not in notes]
    if len(silent) == 1:
        return f"rank {silent[0]} failed to come: it does not answer"
    if silent:
        return f"ranks {', '.join(map(str, silent))} failed to come: they do not answer"
    ordered = [note for _, note in sorted(notes.items())]
    last = [note for note in ordered if not note.waits_for] or ordered
    return "; ".join(f"rank {note.rank} failed to come: it was at {note.doing}" for note in last)
