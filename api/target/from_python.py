"""Targets made from Python objects: a model, or a function that builds it, and an example batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from autoparallel.passes.programs.batch import LeafPath, dims_of_size, leaves, resize_batch
from autoparallel.planner.errors import UsageError
from autoparallel.target.load import load_target
from autoparallel.target.target import Batch, LossFn, Target, check_batch, checked_batches


def make_target(
    model: nn.Module | Callable[[], nn.Module] | str,
    example_batch: Batch | Callable[..., Batch] | None,
    loss_fn: LossFn | None,
    global_batch: int | None = None,
) -> Target:
    """Make a ``Target`` from Python objects. Raises UsageError AP140 for other types."""
    if isinstance(model, str):
        return load_target(model)
    if isinstance(model, nn.Module):
        build: Callable[[], nn.Module] = partial(_with_same_tensors, model)
        name = type(model).__name__
    elif callable(model):
        build = model
        name = getattr(model, "__name__", type(model).__name__)
    else:
        raise UsageError(
            "AP140",
            f"a {type(model).__name__} is not a model",
            fix="pass an nn.Module, a function that builds one, or a target's name",
        )
    if example_batch is None:
        raise UsageError(
            "AP140",
            "example_batch is missing",
            fix="pass a batch of global shapes, or a function (global_batch, seq) that returns one",
        )
    return Target(name, build, batch_function(example_batch, global_batch), loss_fn, is_named=False)


def _with_same_tensors(model: nn.Module) -> nn.Module:
    """Copy the modules of ``model`` but share its tensors, because planning removes tensors.

    Raises UsageError AP851 if the modules cannot be copied.
    """
    tensors = (*model.parameters(), *model.buffers())
    try:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    except (TypeError, RuntimeError, pickle.PicklingError) as error:
        raise UsageError(
            "AP851",
            f"the {type(model).__name__} cannot be copied, which planning requires",
            why=f"{type(error).__name__}: {error}",
            fix="pass a function that builds it",
        ) from error


def batch_function(
    example_batch: Batch | Callable[..., Batch], global_batch: int | None = None
) -> Callable[..., Batch]:
    """Return a checked function ``(global_batch, seq)`` that makes batches; a given batch is
    resized along its rows.

    With ``global_batch`` 1 a batch is a single sample without rows and is not resized.
    """
    if isinstance(example_batch, Tensor):
        example_batch = (example_batch,)
    if callable(example_batch):
        return checked_batches(example_batch, "example_batch")
    check_batch(example_batch, 1, "example_batch")
    rows = batch_rows(example_batch, global_batch) or 1
    dims = dims_of_rows(example_batch, rows) if global_batch != 1 else {}

    def sized(global_batch: int, seq: int | None = None) -> Batch:
        return resize_batch(example_batch, dims, lambda path, size: global_batch)

    return checked_batches(sized, "example_batch")


def batch_rows(example_batch: Any, global_batch: int | None = None) -> int | None:
    """Return the number of rows of a batch, None for a function or a batch without tensors.

    The number is ``global_batch`` if every tensor has a dimension of this size, else the size of
    the first tensor's first dimension.
    """
    if isinstance(example_batch, Tensor):
        example_batch = (example_batch,)
    if not isinstance(example_batch, Mapping | tuple | list):
        return None
    shapes = [
        leaf.shape for _, leaf in leaves(example_batch) if isinstance(leaf, Tensor) and leaf.ndim
    ]
    if shapes and all(global_batch in each for each in shapes):
        return global_batch
    return shapes[0][0] if shapes else None


def dims_of_rows(example_batch: Batch, rows: int) -> dict[LeafPath, int]:
    """Return the dimension of size ``rows`` of each tensor by path. If a tensor has none, only
    tensors whose dimension 0 has this size are included."""
    found = dims_of_size(example_batch, rows)
    shaped = [leaf for _, leaf in leaves(example_batch) if isinstance(leaf, Tensor) and leaf.ndim]
    return found if len(found) == len(shaped) else {p: dim for p, dim in found.items() if not dim}
