"""What a file that cannot be read says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...planner.errors import AutoparallelError, UsageError


@contextmanager
def reading(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Inside, an error of ``kinds`` becomes a UsageError AP861 that names the file."""
    try:
        yield
    except AutoparallelError:
        raise
    except kinds as error:
        lines = str(error).strip().splitlines()
        raise UsageError(
            "AP861",
            f"the weights in {path} cannot be read",
            why=f"{type(error).__name__}: {lines[0] if lines else ''}",
            where=str(path.resolve()),
            fix="write the file again; a .pt file may contain only tensors by name",
        ) from error
