"""Locations in the user's code: frames and stack traces to ``file:line``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.fx import proxy

from ...planner.errors import CaptureError

_TORCH = str(Path(torch.__file__).parent)
_ROOT = Path(__file__).parents[2]
_PARTS = ("api", "cost_model", "passes", "planner", "runtime")
_OURS = tuple(f"{_ROOT / part}" for part in (_PARTS if _ROOT.name != "autoparallel" else ("",)))
"""Folders of this package, installed or in a checkout."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_DATA_DEPENDENT = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "UserError",
    "DynamicOutputShapeException",
    "Could not guard on data-dependent",
    "data-dependent",
    "Could not extract specialized integer",
)


_FIXES = {
    'missing the required "forward"': "name the method that is trained: methods=[...]",
    "positional arguments but": "let example_batch be a dict: what forward does not take is given "
    "to loss_fn(outputs, batch) alone",
}
"""Remedies for errors, by words that an error's text contains."""
_OTHER_FIX = (
    "call the model with the example batch on the CPU, without autoparallel; the same error there "
    "is the model's own"
)


def user_source(stack_trace: str | None) -> str:
    """Return the ``file:line`` of the innermost frame of the user's code in a stack trace; "" if
    there is none.

    >>> user_source('  File "model.py", line 12, in forward')
    'model.py:12'
    """
    frames = _FRAME.findall(stack_trace or "")
    for file, line in reversed(frames):
        if _is_users(file):
            return f"{file}:{line}"
    return ""


@cache
def _is_users(file: str) -> bool:
    return not (file.startswith((_TORCH, *_OURS, "<")) or "/torch/" in file)


class _UserFrames:
    """Replacement of torch's ``CapturedTraceback``, which records the call stack of each op. Within
    the outermost ``forward``, it keeps only frames in users' files or in a ``forward``. torch
    itself keeps all frames with their source text, which takes a seventh of a capture's time."""

    def __init__(self, frames: list[FrameSummary]) -> None:
        self._frames = frames

    @staticmethod
    def extract() -> _UserFrames:
        found, num_inside, frame = list[FrameSummary](), 0, sys._getframe(1)
        while frame is not None:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if name == "forward" or _is_users(file):
                found.append(FrameSummary(file, frame.f_lineno, name, lookup_line=False, line=""))
                num_inside = len(found) if name == "forward" else num_inside
            frame = frame.f_back  # type: ignore[assignment]
        return _UserFrames(found[:num_inside][::-1])

    def summary(self) -> StackSummary:
        return StackSummary(self._frames)


@contextmanager
def noting_user_frames() -> Iterator[None]:
    """Make tracers record for each op only the frames that ``user_source`` reads, within a ``with``
    block."""
    tracers: Any = proxy
    before, tracers.CapturedTraceback = tracers.CapturedTraceback, _UserFrames
    try:
        yield
    finally:
        tracers.CapturedTraceback = before


def capture_error(error: BaseException, model: nn.Module, prefix: str) -> CaptureError:
    """Convert an exception of ``torch.export`` to an error for the user. ``model`` is the exported
    wrapper, which holds the user's model under the attribute ``prefix``."""
    text = _first_lines(str(error))
    where = _where(error, model, prefix)
    if any(mark in f"{type(error).__name__} {error}" for mark in _DATA_DEPENDENT):
        return CaptureError(
            "AP202",
            "the model's control flow depends on the values of tensors",
            why=text,
            where=where,
            fix="replace the `if`/`for`/`.item()` by tensor operations (`torch.where`, masks)",
        )
    return CaptureError(
        "AP201",
        f"the model cannot be captured: {type(error).__name__}",
        why=text,
        where=where,
        fix=next((fix for sign, fix in _FIXES.items() if sign in text), _OTHER_FIX),
    )


def uncounted_error(function: str, where: str) -> CaptureError:
    """Return the error for a random ``function`` that cannot be made counter-based (see
    ``random_ops``), called at the user's line ``where``."""
    return CaptureError(
        "AP211",
        f"the model draws random numbers with {function}, which is not supported",
        why="every rank would draw different numbers, from its own generator",
        where=where,
        fix="call torch.rand, randn, randint, normal, exponential_ or dropout in the forward "
        "itself (not through a function of torch that calls it) and without a generator, or draw "
        "the numbers with the batch and give them to the model as an input",
    )


def failing_module(error: BaseException, model: nn.Module) -> str:
    """Return the path of the innermost submodule in whose forward ``error`` was raised; "" if
    none."""
    paths = {id(module): name for name, module in model.named_modules()}
    found = ""
    for frame, _ in _frames(error):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            found = paths.get(id(owner), found)
    return found


def _first_lines(text: str, limit: int = 400) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:3]).partition(" Caused by:")[0][:limit]


def _where(error: BaseException, model: nn.Module, prefix: str) -> str:
    paths = {id(module): name for name, module in model.named_modules()}
    best: tuple[bool, str, str] | None = None
    module_path = ""
    for frame, line in _frames(error):
        owner = frame.f_locals.get("self")
        if id(owner) in paths and paths[id(owner)]:
            module_path = paths[id(owner)].removeprefix(prefix).removeprefix(".")
        file = frame.f_code.co_filename
        if _is_users(file):
            is_own = "site-packages" not in file
            if best is None or is_own >= best[0]:
                best = (is_own, f"{file}:{line}", module_path)
    if best is None:
        return user_source(str(error))
    return best[1] + (f" in module {best[2]!r}" if best[2] else "")


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield every stack frame of an error with its line, outermost first, after the frames of the
    errors that caused it."""
    chain: list[BaseException] = []
    current: Any = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    for link in reversed(chain):
        traceback = link.__traceback__
        while traceback is not None:
            yield traceback.tb_frame, traceback.tb_lineno
            traceback = traceback.tb_next
