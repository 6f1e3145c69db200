"""Output folder that appears only when complete: written beside its path, and then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autoparallel.planner.errors import UsageError


def check_free(place: Path, force: bool) -> None:
    """Raise UsageError AP869 if ``place`` is a file, or is not empty and ``force`` is not set.

    It is also raised if ``place`` is or contains the current folder, which cannot be replaced.

    >>> check_free(Path("no_such_folder"), force=False)
    """
    if place.exists() and not place.is_dir():
        raise UsageError("AP869", f"{place} is a file, not a folder", where=str(place.resolve()))
    if Path.cwd().is_relative_to(place.resolve()):
        raise UsageError(
            "AP869",
            f"the folder {place} is or holds the current one",
            where=str(place.resolve()),
            why="a folder is written beside its place, and then takes it",
            fix="name a folder that does not exist yet: -o exported",
        )
    if place.exists() and any(place.iterdir()) and not force:
        raise UsageError(
            "AP869",
            f"the folder {place} is not empty",
            where=str(place.resolve()),
            fix="choose another folder, or --force to replace its contents",
        )


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """Yield a folder beside ``place``, which replaces ``place`` if the block ends without error."""
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if place.exists():
            shutil.rmtree(place)
        temporary.rename(place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
