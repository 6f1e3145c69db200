"""TARGET in, what it holds out: how to build the model, its batches, its loss.

A target is ``model.py``, ``model.py:function``, ``package.module:function`` or
``hf:PATH_OR_NAME``. A model file's contract::

    build_model(**settings) -> nn.Module                  required
    example_batch(global_batch, seq=None) -> dict or tuple of tensors, global shapes; required
    loss_fn(outputs, batch) -> scalar                     if forward returns no loss
    build_optimizer(params) -> Optimizer                  AdamW if absent; an argument called
                                                          named_parameters gets (name, parameter)
    build_scheduler(optimizer) -> scheduler               stepped after each update
    callbacks() -> list of autoparallel.Callback          told of each step, on rank 0
    build_data(rank, world) -> iterable of batches        random batches if absent

Loading a target runs its file.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autoparallel.options.parse import did_you_mean
from autoparallel.planner.errors import AutoparallelError, UsageError
from autoparallel.planning.collection import rare_collections

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from autoparallel.passes.programs.batch import Example, LeafPath

Batch = Any
"""A dict, list or tuple of a forward's arguments (``passes.programs.batch``)."""

LossFn = Callable[[Any, Batch], "Tensor"]


Change = Callable[[Batch], Batch]

CAPTURE_BATCH = 2
"""Rows of the batch that models are captured at; the graph is rescaled to what is planned."""

WRITTEN_ROWS = 64
"""Up to this many rows the global batch is the one that ``example_batch`` makes."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a target holds. ``name`` and ``settings`` find it again in another process.

    ``example_batch(global_batch, seq)`` gives a checked batch of global shapes.
    ``returns_loss`` False says that no scalar among the model's outputs is its loss.
    ``is_named``: not of one made of objects in this process.
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


def unchanged(batch: Batch) -> Batch:
    """Return the batch."""
    return batch


def changed_target(target: Target, change: Change) -> Target:
    """Return a target with other example batches."""
    made = target.example_batch
    return replace(target, example_batch=lambda rows, seq: change(made(rows, seq)))


@rare_collections()
def load_target(text: str, settings: Mapping[str, Any] | None = None) -> Target:
    """The target that ``text`` names, its contract checked but its model not yet built.

    Raises UsageError (AP101 to AP105) where the contract is not kept.
    """
    settings = dict(settings or {})
    if text.startswith("hf:"):
        from autoparallel.target.huggingface import load_huggingface

        return load_huggingface(text, settings)
    place, function = _split(text)
    module = _load_file(place, text) if _is_file(place) else _load_module(place, text)
    build = _build_function(module, function, place)
    _check_settings(build, settings, f"{place}:{function or 'build_model'}")
    return Target(
        name=text,
        build_model=lambda: _built(build, settings, place),
        example_batch=_batches(module, place),
        loss_fn=_optional(module, "loss_fn", place),
        build_optimizer=_optional(module, "build_optimizer", place),
        build_data=_optional(module, "build_data", place),
        build_scheduler=_optional(module, "build_scheduler", place),
        callbacks=_optional(module, "callbacks", place),
        settings=settings,
        takes_seq=takes_seq(module.example_batch),
    )


def takes_seq(example_batch: Callable[..., Any]) -> bool:
    """Whether ``example_batch`` takes a sequence length beside the batch."""
    return len(inspect.signature(example_batch).parameters) > 1


def _split(text: str) -> tuple[str, str]:
    """``model.py:function`` as (``model.py``, ``function``); the function may be empty."""
    place, separator, function = text.rpartition(":")
    if separator and function.isidentifier() and place:
        return place, function
    if separator and not (text.endswith(".py") or Path(text).exists()):
        raise UsageError(
            "AP102",
            f"{text!r} is not a target",
            fix="use model.py, model.py:function, package.module:function or hf:PATH_OR_NAME",
        )
    return text, ""


def _is_file(place: str) -> bool:
    return place.endswith(".py") or os.sep in place or Path(place).exists()


def _load_file(place: str, text: str) -> ModuleType:
    path = Path(place)
    if path.is_dir():
        fix = (
            f"for a folder with a config.json: hf:{place}"
            if (path / "config.json").exists()
            else ""
        )
        raise UsageError("AP101", f"{place} is a folder, not a Python file", where=text, fix=fix)
    if not path.exists():
        folder = path.parent if path.parent.is_dir() else Path()
        known = sorted(file.name for file in folder.glob("*.py"))
        raise UsageError(
            "AP101",
            f"there is no file {place}",
            where=str(path.resolve()),
            fix=did_you_mean(path.name, known) or f"{folder.resolve()} holds {_few(known)}",
        )
    folder_name = str(path.resolve().parent)
    if folder_name not in sys.path:
        sys.path.insert(0, folder_name)
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_target"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError("AP102", f"{place} is not a Python file", where=text)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with running_user_code("AP103", f"{place} fails when it is imported"):
        spec.loader.exec_module(module)
    return module


def _load_module(place: str, text: str) -> ModuleType:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        found = None
    if found is None:
        known = sorted(file.name for file in Path().glob("*.py"))
        raise UsageError(
            "AP101",
            f"there is no module {place}",
            where=text,
            fix=did_you_mean(f"{place}.py", known) or "give a file with its ending: model.py",
        )
    with running_user_code("AP103", f"{place} fails when it is imported"):
        return importlib.import_module(place)


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "") if names else "no Python file"


def building(target: Target) -> running_user_code:
    """The block in which ``target.build_model`` is called: its errors become AP106."""
    return running_user_code("AP106", f"build_model of {target.name} fails")


class running_user_code:  # noqa: N801 - reads as a statement
    """Turns an exception of the user's code into a UsageError with the user's file and line."""

    def __init__(self, code: str, what: str) -> None:
        self.code, self.what = code, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, AutoparallelError):
            return
        raise UsageError(
            self.code,
            self.what,
            why=f"{type(error).__name__}: {error}",
            where=_user_line(error),
        ) from error


def _user_line(error: BaseException) -> str:
    """``file:line`` of the last frame that is neither ours nor a library's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    ours = str(Path(__file__).resolve().parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        library = "site-packages" in frame.filename or frame.filename.startswith("<frozen")
        if not library and not frame.filename.startswith(ours):
            return f"{frame.filename}:{frame.lineno}  {frame.line or ''}".rstrip()
    return ""


def _build_function(module: ModuleType, function: str, place: str) -> Callable[..., nn.Module]:
    name = function or "build_model"
    build = getattr(module, name, None)
    if build is None:
        known = [key for key, value in vars(module).items() if callable(value)]
        raise UsageError(
            "AP104",
            f"{place} has no {name}",
            where=place,
            fix=did_you_mean(name, known)
            or "define build_model(**settings) that returns the nn.Module",
        )
    return _callable(build, name, place)


def _callable(value: Any, name: str, place: str) -> Callable[..., Any]:
    if not callable(value):
        raise UsageError(
            "AP104", f"{name} of {place} is a {type(value).__name__}, not a function", where=place
        )
    function: Callable[..., Any] = value
    return function


def _optional(module: ModuleType, name: str, place: str) -> Callable[..., Any] | None:
    value = getattr(module, name, None)
    return None if value is None else _callable(value, name, place)


def _check_settings(build: Callable[..., Any], settings: Mapping[str, Any], where: str) -> None:
    parameters = inspect.signature(build).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [name for name, parameter in parameters.items() if parameter.kind.value in (1, 3)]
    for name in settings:
        if name not in known:
            takes = ", ".join(known) or "no settings"
            raise UsageError(
                "AP105",
                f"build_model takes no setting {name!r}",
                where=where,
                fix=did_you_mean(name, known) or f"it takes {takes}",
            )
    for name in known:
        if parameters[name].default is inspect.Parameter.empty and name not in settings:
            raise UsageError(
                "AP105",
                f"build_model needs the setting {name!r}",
                where=where,
                fix=f"--set {name}=VALUE",
            )


def _built(build: Callable[..., Any], settings: Mapping[str, Any], place: str) -> nn.Module:
    from torch import nn

    model = build(**settings)
    if not isinstance(model, nn.Module):
        raise UsageError(
            "AP106",
            f"build_model of {place} returns a {type(model).__name__}, not an nn.Module",
            where=place,
        )
    return model.train()  # from_pretrained gives one in evaluation mode, without dropout


def _batches(module: ModuleType, place: str) -> Callable[[int, int | None], Batch]:
    if not hasattr(module, "example_batch"):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise UsageError(
            "AP107",
            f"{place} has no example_batch",
            where=place,
            fix=did_you_mean("example_batch", known)
            or "define example_batch(global_batch, seq=None) that returns a dict of tensors",
        )
    return checked_batches(_callable(module.example_batch, "example_batch", place), place)


def checked_batches(
    example_batch: Callable[..., Batch], where: str
) -> Callable[[int, int | None], Batch]:
    """``example_batch`` with its result checked, and ``seq`` passed only where it is taken.

    Raises UsageError (AP107, AP108) when called.
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
    """Make the batch that a target is captured with, and the global batch: None if it is as large.

    In which dimension a tensor counts rows is seen where two batches differ. Of more rows than
    ``WRITTEN_ROWS`` the shapes follow from those of batches of 2 and 3 rows, and the tensors are on
    ``meta``: whole batches of images need not fit here.

    Raises UsageError AP107 and AP108 where the target makes no such batches.
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
    """Raises UsageError AP108 unless ``batch`` holds tensors of ``global_batch`` rows.

    A batch without rows is one sample.
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
