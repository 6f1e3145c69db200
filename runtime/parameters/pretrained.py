"""Initial weights from files: each rank reads the boxes that it holds, and nothing else.

In: a file or folder (``weight_files``) and a model on ``meta``. Out: ``Pretrained``, a source of
initial values that a stage is filled from; names that the files lack come from another source.

Names of a model and of a file match however the model is wrapped. Parts of names that wrappers add
(``_orig_mod``) do not count. Of the prefixes that one side has before all its names (``module.``,
``model.``, ``base_model.model.``), the prefix that makes the most names equal is taken.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...passes.capture.repeats import find_tied
from ...passes.initialization.deferred_init import Deferred, named_tensors
from ...planner.errors import UsageError
from ...planner.graph.layout import whole_region
from ..checkpoint.weight_files import WeightFiles, few_names, open_weights
from .stage import StageModule

WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}
)
"""Components that ``torch.compile``, FSDP, checkpointing and peft adapters add to tensor names."""


@dataclass(frozen=True, slots=True)
class MatchedNames:
    """Match between a model's tensor names and a file's: ``sources`` maps the model's names to the
    file's; ``missing`` are names that only the model has, ``unexpected`` names that only the file
    has."""

    sources: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match_names(
    wanted: Iterable[str],
    stored: Iterable[str],
    *,
    tied: Mapping[str, str] | None = None,
    optional: Collection[str] = (),
    ignored: Iterable[str] = (),
) -> MatchedNames:
    """Match each of the model's tensor names ``wanted`` to a name ``stored`` in a file.

    ``tied`` maps further names of a tied tensor to its first name; the file needs only one of them.
    ``optional`` are names of the model that a file may have or lack: they are neither missing nor
    unexpected. Stored names that match a pattern of ``ignored`` are not unexpected.

    >>> match_names(["a.weight", "a.bias"], ["module.a.weight", "module.b"]).sources
    {'a.weight': 'module.a.weight'}
    """
    names, files = list(wanted), list(stored)
    plain_names = {_plain(name): name for name in (*optional, *names)}
    plain_files = {_plain(name): name for name in files}
    removed, added = _prefix(plain_files, plain_names)
    found: dict[str, str] = {}
    taken: set[str] = set()
    for plain, file in plain_files.items():
        for candidate in _candidates(plain, removed, added):
            if candidate in plain_names:
                found.setdefault(plain_names[candidate], file)
                taken.add(file)
                break
    first_names = tied or {}
    shared: dict[str, str] = {}
    for name, file in found.items():
        shared.setdefault(first_names.get(name, name), file)
    found |= {
        name: shared[first]
        for name in names
        if name not in found and (first := first_names.get(name, name)) in shared
    }
    sources = {name: found[name] for name in names if name in found}
    return MatchedNames(
        sources,
        tuple(name for name in names if name not in sources and name not in first_names),
        names_without([file for file in files if file not in taken], ignored),
    )


def names_without(names: Iterable[str], patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the names in which none of the regular expressions is found."""
    compiled = [re.compile(pattern) for pattern in patterns]
    return tuple(name for name in names if not any(each.search(name) for each in compiled))


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _prefix(stored: Collection[str], wanted: Collection[str]) -> tuple[str, str]:
    """Return the prefix to remove from the stored names so that they match the wanted names, and
    the prefix to add; at least one of them is empty. The prefix that makes most names match is
    chosen; among equals, the shortest."""
    votes: Counter[tuple[str, str]] = Counter()
    for name in stored:
        votes.update((name[: -len(end)], "") for end in _ends(name) if end in wanted)
    for name in wanted:
        votes.update(("", name[: -len(end)]) for end in _ends(name) if end in stored)
    votes[("", "")] = sum(name in wanted for name in stored)
    return max(votes, key=lambda pair: (votes[pair], -len(pair[0]) - len(pair[1])))


def _ends(name: str) -> Iterator[str]:
    """Yield a dotted name without its first component, without its first two, and so on."""
    while "." in name:
        _, _, name = name.partition(".")
        yield name


def _candidates(name: str, removed: str, added: str) -> Iterator[str]:
    """Yield names that a tensor stored under ``name`` may have in the model, the likeliest first;
    ``removed`` and ``added`` are prefixes."""
    if removed and name.startswith(removed):
        yield name[len(removed) :]
    if added:
        yield added + name
    yield name


@dataclass(frozen=True)
class Pretrained:
    """Initial values from ``files`` for the names in ``sources`` (mapped to the files' names), and
    from ``rest`` for others. ``missing`` are names that only the model has, ``unexpected`` names
    that only the files have."""

    files: WeightFiles
    sources: Mapping[str, str]
    rest: Deferred | Mapping[str, Tensor]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def fill(self, stage: StageModule) -> frozenset[str]:
        """Fill the stage's tensors that the files have, cast to their dtypes in the stage; return
        the names of the tensors filled."""
        filled = [name for name in stage.held_names() if name in self.sources]
        for name in filled:
            stage.fill(name, self.files.read(self.sources[name], stage.region_of(name)))
        return frozenset(filled)

    def whole(self, name: str) -> Tensor:
        """Read the whole tensor ``name``, in its stored dtype."""
        source = self.sources[name]
        return self.files.read(source, whole_region(self.files.shape(source)))

    def summary(self) -> str:
        """Describe the file and its tensors, and the names that only the model or the file has."""
        lines = [f"weights: {len(self.sources)} tensors from {self.files.place}"]
        if self.missing:
            lines.append(f"not in the file, so newly initialized: {few_names(self.missing)}")
        if self.unexpected:
            lines.append(f"not in the model, so not used: {few_names(self.unexpected)}")
        return "\n  ".join(lines)


def open_pretrained(
    path: str | Path,
    model: nn.Module,
    rest: Deferred | Mapping[str, Tensor],
    *,
    partial: bool = False,
) -> Pretrained:
    """Open the weight file or folder ``path`` as initial weights of ``model``, which may be on
    ``meta``.

    File and model must have the same names and shapes; if ``partial``, either may lack names, and
    values that the file lacks come from ``rest``. Names that the model's attributes
    ``_keys_to_ignore_on_load_missing`` and ``_unexpected`` match (patterns, as in transformers) are
    no error either way.

    Raises UsageError: AP860 and AP861 as ``open_weights``, AP862 where names or shapes differ.
    """
    files = open_weights(path)
    shapes = {name: tuple(each.shape) for name, each in persistent_tensors(model).items()}
    matched = match_names(
        shapes,
        files.names(),
        tied=find_tied(model),
        optional=passing_names(model),
        ignored=getattr(model, "_keys_to_ignore_on_load_unexpected", None) or (),
    )
    _check(matched, shapes, files, model, partial=partial)
    return Pretrained(files, matched.sources, rest, matched.missing, matched.unexpected)


def load_pretrained(path: str | Path, model: nn.Module, *, partial: bool = False) -> Pretrained:
    """Fill a model in this process's memory from ``path``. Raises as ``open_pretrained`` does."""
    tensors = dict(named_tensors(model))
    found = open_pretrained(path, model, tensors, partial=partial)
    with torch.no_grad():
        for name in found.sources:
            tensors[name].copy_(found.whole(name))
    return found


def persistent_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the entries of a model's ``state_dict``, with tied tensors under each of their
    names."""
    passing = frozenset(passing_names(model))
    return {name: each for name, each in named_tensors(model) if name not in passing}


def passing_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a model's non-persistent buffers, which its ``state_dict`` lacks."""
    return tuple(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    )


def _check(
    matched: MatchedNames,
    shapes: Mapping[str, tuple[int, ...]],
    files: WeightFiles,
    model: nn.Module,
    *,
    partial: bool,
) -> None:
    """Raise UsageError AP862, listing all differences, unless names and shapes in ``files`` fit the
    model."""
    initialized = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    kinds = {
        "missing in the file": () if partial else names_without(matched.missing, initialized),
        "not in the model": () if partial else matched.unexpected,
        "of another shape": tuple(
            f"{name} {files.shape(source)} in the file, {shapes[name]} in the model"
            for name, source in matched.sources.items()
            if files.shape(source) != shapes[name]
        ),
    }
    wrong = [f"{len(names)} {kind}: {few_names(names)}" for kind, names in kinds.items() if names]
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
