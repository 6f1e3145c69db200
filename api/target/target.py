"""User's model, batch and loss as a ``Target``, and checks of them."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoparallel.planner.errors import AutoparallelError, UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from autoparallel.passes.programs.batch import Example, LeafPath


Batch = Any
"""Arguments of a forward, as a dict, list or tuple (``passes.programs.batch``)."""


LossFn = Callable[[Any, Batch], "Tensor"]


Change = Callable[[Batch], Batch]


CAPTURE_BATCH = 2
"""Number of rows of the captured batch; the graph is rescaled to the planned number."""


WRITTEN_ROWS = 64
"""Largest number of rows for which ``example_batch`` is called with the whole global batch."""


@dataclass(frozen=True, slots=True)
class Target:
    """User's model, batch and loss. ``name`` and ``settings`` identify it in other processes.

    ``example_batch(global_batch, seq)`` returns a checked batch of global shapes. ``returns_loss``
    False means that no scalar among the model's outputs is its loss. ``is_named`` is False for a
    target made from objects in this process.
    """

    name: str
    build_model: Callable[[], nn.Module]
    example_batch: Callable[[int, int | None], Batch]
    loss_fn: LossFn | None = None
    build_optimizer: Callable[[Any], Optimizer] | None = None
    build_data: Callable[..., Any] | None = None
    build_scheduler: Callable[[Optimizer], Any] | None = None
    callbacks: Callable[[], Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    takes_seq: bool = True
    returns_loss: bool = True
    is_named: bool = True


def keep_batch(batch: Batch) -> Batch:
    """Return the batch unchanged."""
    return batch


def changed_target(target: Target, change: Change) -> Target:
    """Return a target whose example batches are passed through ``change``."""
    made = target.example_batch
    return replace(target, example_batch=lambda rows, seq: change(made(rows, seq)))


def takes_seq(example_batch: Callable[..., Any]) -> bool:
    """Return whether ``example_batch`` accepts a sequence length as second argument."""
    return len(inspect.signature(example_batch).parameters) > 1


def building(target: Target) -> running_user_code:
    """Return a context for calls of ``build_model`` that turns errors into UsageError AP106."""
    return running_user_code("AP106", f"build_model of {target.name} fails")


class running_user_code:  # noqa: N801 - reads as a statement
    """Context that turns an exception of user code into a UsageError with file and line."""

    def __init__(self, code: str, what: str, where: str = "") -> None:
        self.code, self.what, self.where = code, what, where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, AutoparallelError):
            return
        raise UsageError(
            self.code,
            self.what,
            why=f"{type(error).__name__}: {error}",
            where=_user_line(error) or self.where,
        ) from error


def _user_line(error: BaseException) -> str:
    """Return ``file:line`` of the last frame outside this package and installed libraries."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    ours = str(Path(__file__).resolve().parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        library = "site-packages" in frame.filename or frame.filename.startswith("<frozen")
        if not library and not frame.filename.startswith(ours):
            return f"{frame.filename}:{frame.lineno}  {frame.line or ''}".rstrip()
    return ""


def checked_batches(
    example_batch: Callable[..., Batch], where: str
) -> Callable[[int, int | None], Batch]:
    """Wrap ``example_batch`` to check its batches, and to pass it ``seq`` only if it takes it.

    The returned function raises UsageError AP107 and AP108, located at ``where``.
    """
    has_length = takes_seq(example_batch)

    def batch(global_batch: int, seq: int | None) -> Batch:
        if seq is not None and not has_length:
            raise UsageError(
                "AP107",
                "--seq is given, but example_batch takes no sequence length",
                where=where,
                fix="remove --seq, or define example_batch(global_batch, seq=None)",
            )
        with running_user_code("AP107", f"example_batch of {where} fails"):
            made = example_batch(global_batch, **({} if seq is None else {"seq": seq}))
        check_batch(made, global_batch, where)
        return made

    return batch


def example_batches(
    target: Target, global_batch: int, seq: int | None
) -> tuple[Example, Example | None]:
    """Return the example batch to capture, and the global batch or None if both have equal size.

    The batch dimension of a tensor is where batches of different size differ. Above
    ``WRITTEN_ROWS`` rows the global shapes are extrapolated from batches of 2 and 3 rows, on
    ``meta``, since a whole batch of images may not fit memory. Raises UsageError AP107 and AP108 if
    such batches cannot be made.
    """
    from autoparallel.passes.programs.batch import (
        Example,
        dims_of_size,
        leaf_at,
        resize_batch,
        row_dims,
    )

    try:
        few = target.example_batch(CAPTURE_BATCH, seq)
    except UsageError:
        whole = target.example_batch(global_batch, seq)
        return Example(whole, dims_of_size(whole, global_batch) if global_batch > 1 else {}), None
    if CAPTURE_BATCH < global_batch <= WRITTEN_ROWS:
        whole = target.example_batch(global_batch, seq)
        dims = row_dims(few, whole)
        return Example(few, dims), Example(whole, dims)
    try:
        more = target.example_batch(CAPTURE_BATCH + 1, seq)
        dims = row_dims(few, more)
    except UsageError:
        whole = target.example_batch(global_batch, seq)
        dims = row_dims(few, whole) or dims_of_size(few, CAPTURE_BATCH)
        return Example(few, dims), Example(whole, dims)
    if global_batch == CAPTURE_BATCH:
        return Example(few, dims), None

    def grown(path: LeafPath, size: int) -> int:
        step = leaf_at(more, path).shape[dims[path]] - size
        return int(size + (global_batch - CAPTURE_BATCH) * step)

    return Example(few, dims), Example(resize_batch(few, dims, grown), dims)


def check_batch(batch: Batch, global_batch: int, where: str) -> None:
    """Raise UsageError AP108 unless ``batch`` holds tensors with ``global_batch`` rows.

    For a ``global_batch`` of 1 any tensors are accepted, as a sample may have no rows.
    """
    import torch

    from autoparallel.passes.programs.batch import leaves, path_text, register_dataclasses

    register_dataclasses(batch)
    shape = "return a dict or a tuple of forward's arguments, whose tensors have global_batch rows"
    if not isinstance(batch, Mapping | tuple | list) or not batch:
        raise UsageError(
            "AP108", f"example_batch returns a {type(batch).__name__}", where=where, fix=shape
        )
    tensors = [(path, leaf) for path, leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise UsageError("AP108", "the example batch holds no tensor", where=where, fix=shape)
    if global_batch > 1 and not any(global_batch in leaf.shape for _, leaf in tensors):
        sizes = ", ".join(f"{path_text(path)} is {tuple(leaf.shape)}" for path, leaf in tensors)
        raise UsageError(
            "AP108",
            f"no tensor of the example batch has {global_batch} rows",
            why=sizes,
            where=where,
            fix=shape + " (the whole batch, not one device's share); for data that is not "
            "divided into rows, such as one graph, pass global_batch=1",
        )
