"""Initial weights from files: each rank reads the boxes that it holds, and nothing else.

In: a file or folder (``weight_files``) and a model on ``meta``. Out: ``Pretrained``, a source
of initial values that a stage is filled from; what the files lack comes from another source.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...passes.capture.tie import find_tied
from ...passes.initialization.deferred_init import Deferred
from ...planner.errors import UsageError
from ..checkpoint.weight_files import WeightFiles, open_weights, whole_region
from ..checkpoint.weight_names import MatchedNames, match_names, without
from .stage import StageModule

LISTED = 5
"""How many names of a kind an error and a summary list."""


@dataclass(frozen=True)
class Pretrained:
    """Values from ``files`` for the names in ``sources`` (each with its name there); others from
    ``rest``. ``missing`` and ``unexpected`` are the names that only one side has."""

    files: WeightFiles
    sources: Mapping[str, str]
    rest: Deferred | Mapping[str, Tensor]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def fill(self, stage: StageModule) -> frozenset[str]:
        """Fills what the files have of the stage's tensors, cast to the stage's dtypes.

        Returns the names that were filled.
        """
        filled = []
        for name in (*stage.by_name, *stage.buffer_regions):
            if name not in self.sources:
                continue
            filled.append(name)
            parameter = stage.by_name.get(name)
            region = stage.buffer_regions[name] if parameter is None else parameter.region
            target = stage.buffer(name) if parameter is None else parameter.local
            with torch.no_grad():
                target.copy_(self.files.read(self.sources[name], region))
            if parameter is not None:
                parameter.refresh()
        return frozenset(filled)

    def whole(self, name: str) -> Tensor:
        """All of a tensor, in the dtype that it is stored in."""
        source = self.sources[name]
        return self.files.read(source, whole_region(self.files.shape(source)))

    def summary(self) -> str:
        """What was taken from where, in a line or a few."""
        lines = [f"weights: {len(self.sources)} tensors from {self.files.place}"]
        if self.missing:
            lines.append(f"not in the file, so newly initialized: {_few(self.missing)}")
        if self.unexpected:
            lines.append(f"not in the model, so not used: {_few(self.unexpected)}")
        return "\n  ".join(lines)


def pretrained(
    path: str | Path,
    model: nn.Module,
    rest: Deferred | Mapping[str, Tensor],
    *,
    partial: bool = False,
) -> Pretrained:
    """The weights at ``path`` for ``model``, which may be on ``meta``.

    All names must be in both and all shapes equal; with ``partial`` names may be in one only,
    and what the file lacks comes from ``rest``. What the model's attributes
    ``_keys_to_ignore_on_load_missing`` and ``_unexpected`` match (patterns, as in
    transformers) is no error either way.

    Raises UsageError: AP860 and AP861 as ``open_weights``, AP862 where names or shapes differ.
    """
    files = open_weights(path)
    shapes, optional = _tensors(model)
    matched = match_names(
        shapes, files.names(), tied=find_tied(model), optional=optional,
        ignored=getattr(model, "_keys_to_ignore_on_load_unexpected", None) or (),
    )  # fmt: skip
    _check(matched, shapes, files, model, partial=partial)
    return Pretrained(files, matched.sources, rest, matched.missing, matched.unexpected)


def load_pretrained(path: str | Path, model: nn.Module, *, partial: bool = False) -> Pretrained:
    """Fills a model in this process's memory from ``path``. Raises as ``pretrained`` does."""
    tensors = {**dict(_named(model, "parameters")), **dict(_named(model, "buffers"))}
    found = pretrained(path, model, tensors, partial=partial)
    with torch.no_grad():
        for name in found.sources:
            tensors[name].copy_(found.whole(name))
    return found


def _named(model: nn.Module, kind: str) -> list[tuple[str, Tensor]]:
    named: list[tuple[str, Tensor]] = list(getattr(model, f"named_{kind}")(remove_duplicate=False))
    return named


def _tensors(model: nn.Module) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """The shapes of what a state dict of the model holds, and the names of other buffers."""
    passing = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    named = [*_named(model, "parameters"), *_named(model, "buffers")]
    shapes = {name: tuple(tensor.shape) for name, tensor in named if name not in passing}
    return shapes, tuple(passing)


def _check(
    matched: MatchedNames,
    shapes: Mapping[str, tuple[int, ...]],
    files: WeightFiles,
    model: nn.Module,
    *,
    partial: bool,
) -> None:
    """Raises UsageError AP862, with all that differs, where the weights are not the model's."""
    initialized = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    kinds = {
        "missing in the file": () if partial else without(matched.missing, initialized),
        "not in the model": () if partial else matched.unexpected,
        "of another shape": tuple(
            f"{name} {files.shape(source)} in the file, {shapes[name]} in the model"
            for name, source in matched.sources.items()
            if files.shape(source) != shapes[name]
        ),
    }
    wrong = [f"{len(names)} {kind}: {_few(names)}" for kind, names in kinds.items() if names]
    if not wrong and (matched.sources or not shapes):
        return
    is_shape_alone = not kinds["missing in the file"] and not kinds["not in the model"]
    raise UsageError(
        "AP862",
        f"the weights are not those of {type(model).__name__}",
        why="\n       ".join(wrong) or "no name is in both the file and the model",
        where=files.place,
        fix="use the weights of this model and configuration"
        if is_shape_alone
        else "--weights-partial (weights_partial=True) loads only the names that are in both",
    )


def _few(names: Collection[str]) -> str:
    rest = len(names) - LISTED
    return ", ".join(itertools.islice(names, LISTED)) + (f" and {rest} more" if rest > 0 else "")
