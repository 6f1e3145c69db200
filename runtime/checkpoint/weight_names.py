"""Which tensor of a file is which of a model: names matched however the model is wrapped.

In: a model's names and a file's. Out: for each name of the model the file's, and what is left
over on both sides. Parts of names that wrappers add (``_orig_mod``) do not count. Of a prefix
that one side has before all its names (``module.``, ``model.``, ``base_model.model.``), the
one that makes the most names equal is taken.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}
)
"""Parts of names that ``torch.compile``, FSDP, checkpointing and adapters of peft add."""


@dataclass(frozen=True, slots=True)
class MatchedNames:
    """``sources`` maps names of the model to the file's; ``missing`` are the model's names that
    the file lacks, ``unexpected`` the file's that the model lacks."""

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
    """The stored name of each of ``wanted``.

    ``tied`` maps further names of a tied tensor to its first: any of them in the file serves
    all. ``optional`` are names of the model that a file may have and need not: they are
    neither missing nor unexpected. Stored names in which a pattern of ``ignored`` is found are
    not unexpected.

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
        without([file for file in files if file not in taken], ignored),
    )


def without(names: Iterable[str], patterns: Iterable[str]) -> tuple[str, ...]:
    """The names in which none of the regular expressions is found."""
    compiled = [re.compile(pattern) for pattern in patterns]
    return tuple(name for name in names if not any(each.search(name) for each in compiled))


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _prefix(stored: Collection[str], wanted: Collection[str]) -> tuple[str, str]:
    """What to take from the stored names' front, and what to put there; one of them is empty.

    Every prefix is counted by how many names it makes equal; of equal counts the shortest.
    """
    votes: Counter[tuple[str, str]] = Counter()
    for name in stored:
        votes.update((name[: -len(end)], "") for end in _ends(name) if end in wanted)
    for name in wanted:
        votes.update(("", name[: -len(end)]) for end in _ends(name) if end in stored)
    votes[("", "")] = sum(name in wanted for name in stored)
    return max(votes, key=lambda pair: (votes[pair], -len(pair[0]) - len(pair[1])))


def _ends(name: str) -> Iterator[str]:
    """A dotted name without its first part, its first two, and so on."""
    while "." in name:
        _, _, name = name.partition(".")
        yield name


def _candidates(name: str, removed: str, added: str) -> Iterator[str]:
    """What a stored name may be called in the model, the likeliest first."""
    if removed and name.startswith(removed):
        yield name[len(removed) :]
    if added:
        yield added + name
    yield name
