"""The workers of a checkout of the project: this one, or another beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("cost_model", "planner", "passes", "runtime")


class Worker:
    """A process of ``worker.py`` in a checkout, until the end of a ``with``.

    ``package`` is the folder of ``linked_package``.
    """

    def __init__(self, root: Path, package: Path) -> None:
        paths = [str(package), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, str(root / "benchmarks" / "corpus" / "worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "OMP_NUM_THREADS": "1",
            },
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._process.kill()
        self._process.communicate()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request, see ``jobs.answer``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        text = self._process.stdout.readline()
        if not text:
            raise RuntimeError(f"the worker ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(text)
        return answer


@contextmanager
def linked_package(root: Path) -> Iterator[Path]:
    """A folder in which ``autoparallel`` is the package of a checkout, whichever is installed."""
    with TemporaryDirectory() as folder:
        package = Path(folder) / "autoparallel"
        package.mkdir()
        for source in (*(root / "api").iterdir(), *(root / room for room in ROOMS)):
            (package / source.name).symlink_to(source)
        yield Path(folder)
