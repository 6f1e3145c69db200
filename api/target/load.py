"""Targets by name: functions that build a model, its batches and its loss.

A target is ``model.py``, ``model.py:function``, ``package.module:function`` or ``hf:PATH_OR_NAME``.
Functions of a model file::

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
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autoparallel.options.collection import rare_collections
from autoparallel.options.parse import did_you_mean
from autoparallel.planner.errors import UsageError
from autoparallel.target.target import Batch, Target, checked_batches, running_user_code, takes_seq

if TYPE_CHECKING:
    from torch import nn


@rare_collections()
def load_target(text: str, settings: Mapping[str, Any] | None = None) -> Target:
    """Load the target ``text`` (file or ``hf:`` model), and check its functions; no model is built.

    Raises UsageError (AP101 to AP105) if the target cannot be found or a function is wrong.
    """
    settings = dict(settings or {})
    if text.startswith("hf:"):
        from autoparallel.target.huggingface import load_huggingface

        return load_huggingface(text, settings)
    place, function = split_target(text)
    module = _load_file(place, text) if _is_file(place) else _load_module(place, text)
    build = _build_function(module, function, place)
    _check_settings(build, settings, f"{place}:{function or 'build_model'}")
    return Target(
        name=text,
        build_model=lambda: _build_model(build, settings, place),
        example_batch=_batches(module, place),
        loss_fn=_optional(module, "loss_fn", place),
        build_optimizer=_optional(module, "build_optimizer", place),
        build_data=_optional(module, "build_data", place),
        build_scheduler=_optional(module, "build_scheduler", place),
        callbacks=_optional(module, "callbacks", place),
        settings=settings,
        takes_seq=takes_seq(module.example_batch),
    )


def split_target(text: str) -> tuple[str, str]:
    """Split ``model.py:function`` into (``model.py``, ``function``); the function may be ""."""
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


def _build_model(build: Callable[..., Any], settings: Mapping[str, Any], place: str) -> nn.Module:
    from torch import nn

    model = build(**settings)
    if not isinstance(model, nn.Module):
        raise UsageError(
            "AP106",
            f"build_model of {place} returns a {type(model).__name__}, not an nn.Module",
            where=place,
        )
    return model.train()  # from_pretrained returns evaluation mode, without dropout


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
