"""Output paths, checked before anything slow begins."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autoparallel.cost_model.cluster.given_text import shortened
from autoparallel.planner.errors import UsageError


def file_error(error: OSError) -> UsageError:
    """Return UsageError AP134 for a file system error that no other code handles."""
    name, why = shortened(str(error.filename or "a file")), error.strerror or error
    return UsageError("AP134", f"{name}: {why}")


@contextmanager
def writing(path: str | Path, option: str = "") -> Iterator[None]:
    """Turn file system errors inside the context into UsageError AP101 for ``path``, the value of
    ``option``."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise _unwritable(path, option, why) from error


def check_output_file(path: str | Path | None, option: str = "-o") -> None:
    """Raise UsageError AP101 if no file can be written at ``path``, the value of ``option``."""
    if path is None:
        return
    path = Path(path)
    with writing(path, option):
        if path.is_dir():
            raise _unwritable(path, option, "it is a folder")
        if not path.parent.is_dir():
            folder = path.parent
            _check_folders(folder, path, option)
            raise _unwritable(path, option, f"there is no folder {folder}", f"mkdir -p {folder}")
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()


def check_output_folder(path: str | Path | None, option: str = "-o") -> None:
    """Raise UsageError AP101 if files cannot be written into folder ``path``, the value of
    ``option``; the folder need not exist."""
    if path is None:
        return
    path = Path(path)
    with writing(path, option):
        tempfile.TemporaryFile(dir=_check_folders(path, path, option)).close()


def _check_folders(folder: Path, path: Path, option: str) -> Path:
    """Return the nearest of a folder and its parents that exists. Raise UsageError AP101 for
    ``path`` if it is a file."""
    whole = folder.absolute()
    existing = next(place for place in (whole, *whole.parents) if place.exists())
    if not existing.is_dir():
        raise _unwritable(path, option, f"{existing} is a file")
    return existing


def _unwritable(path: str | Path, option: str, why: str, fix: str = "") -> UsageError:
    where = f"{option} {path}".strip()
    fix = fix or f"give another place by {option or '-o'}"
    return UsageError("AP101", f"cannot write {path}", why=why, where=where, fix=fix)
