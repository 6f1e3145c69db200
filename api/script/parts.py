"""Fixed part of a script: copies of this package's definitions, with their dependencies.

In: names that a script uses. Out: the source and imports of the definitions that they need, in the
order of ``MODULES``. The rank of ``passes`` becomes a mesh in a script, whose methods are the
collectives; ``RENAMED`` makes these replacements.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

MODULES = (
    "autoparallel.runtime.script_parts.mesh",
    "autoparallel.passes.ops.random_ops",
    "autoparallel.runtime.script_parts.ops",
    "autoparallel.passes.ops.lower_right",
    "autoparallel.passes.ops.windowed",
    "autoparallel.passes.ops.local_loss",
    "autoparallel.passes.ops.batch_norm",
    "autoparallel.passes.ops.collectives",
    "autoparallel.passes.ops.attention_parts",
    "autoparallel.passes.ops.ring",
    "autoparallel.passes.ops.halo",
    "autoparallel.passes.ops.experts",
    "autoparallel.passes.local.local_indexing",
    "autoparallel.passes.local.local_functions",
    "autoparallel.runtime.script_parts.weights",
    "autoparallel.passes.backward.recomputing",
    "autoparallel.runtime.script_parts.stages",
    "autoparallel.runtime.script_parts.zero",
    "autoparallel.runtime.script_parts.training",
    "autoparallel.runtime.script_parts.data_parallel",
    "autoparallel.runtime.script_parts.pipeline",
    "autoparallel.runtime.script_parts.main",
)
"""Modules from which definitions are copied; a name's first definition is taken."""

RENAMED = (
    (r"\b(ctx\.)?rank\.communicator\b", r"\1mesh"),
    (r"\b(ctx\.)?rank\b(?=[:,.)\]])", r"\1mesh"),
    (r"\bctx\.rank\b", "ctx.mesh"),
    (r"\bcommunicator\b", "mesh"),
    (r"\bRank\b", "Mesh"),
    (r"\b(axes|gathered|sent): tuple\[int, \.\.\.\]", r"\1: tuple[str, ...]"),
    (r"\baxis: int\b", "axis: str"),
    (r"\bactivation: str\b", "activation: Callable[[Tensor], Tensor]"),
)
"""Replacements (pattern, text) in definitions copied from ``passes``."""

REMOVED = (
    (r"  # type: ignore\[[\w, -]+\]", ""),
    (r"  # noqa: [^\n]*", ""),
)


@dataclass(frozen=True, slots=True)
class Parts:
    """Code copied from this package into a script: import lines, and definitions by module."""

    imports: frozenset[str]
    sections: Mapping[str, tuple[str, ...]]


def collect(wanted: Iterable[str], given: Iterable[str]) -> Parts:
    """Collect the definitions ``wanted`` and all that they call, except names in ``given``."""
    known, pending, found = _definitions(), list(wanted), set[str]()
    while pending:
        name = pending.pop()
        if name in known and name not in found and name not in given:
            found.add(name)
            pending += known[name].uses
    sections: dict[str, dict[str, None]] = {}
    for name, each in known.items():
        if name in found:
            sections.setdefault(each.module, {})[each.text] = None
    imports = frozenset(line for name in found for line in known[name].imports)
    return Parts(imports, {module: tuple(texts) for module, texts in sections.items()})


def taken_names() -> frozenset[str]:
    """Return the names that scripts use themselves, which block functions and models must avoid."""
    names = {"batches", "constants", "count", "itertools", "transformers"}
    imported = {line.split()[-1] for each in _definitions().values() for line in each.imports}
    return frozenset(names | imported).union(_definitions(), dir(builtins), keyword.kwlist)


def can_copy(function: Callable[..., object]) -> bool:
    """Return whether a function of this package can be copied into a script."""
    return function.__name__ in _definitions()


@dataclass(frozen=True, slots=True)
class _Definition:
    """Source text of a function, class or constant, the names that it reads, its imports."""

    module: str
    text: str
    uses: frozenset[str]
    imports: frozenset[str]


@cache
def _definitions() -> dict[str, _Definition]:
    """Return all top-level definitions in ``MODULES`` by name; a constant's includes its note."""
    found: dict[str, _Definition] = {}
    for module in MODULES:
        source = inspect.getsource(importlib.import_module(module))
        lines, body = source.splitlines(), ast.parse(source).body
        imports: dict[str, str] = {}
        for node, following in zip(body, [*body[1:], None], strict=True):
            imports |= _imports(node)
            names = _defined_names(node)
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            is_noted = isinstance(node, ast.Assign | ast.AnnAssign)
            last = following if is_noted and isinstance(following, ast.Expr) else node
            text = "\n".join(lines[first - 1 : last.end_lineno])
            for pattern, replacement in (*(RENAMED if ".passes." in module else ()), *REMOVED):
                text = re.sub(pattern, replacement, text)
            uses = _free_names(ast.parse(text)) if names else frozenset()
            needed = frozenset(imports[name] for name in uses & imports.keys())
            for name in names:
                found.setdefault(name, _Definition(module, text, uses, needed))
    return found


def _defined_names(node: ast.stmt) -> set[str]:
    """Return the names that a top-level statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name} - {"_"}  # a nameless registration with torch
    if isinstance(node, ast.Assign | ast.AnnAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
    return set()


def _imports(node: ast.stmt) -> dict[str, str]:
    """Return the lines that import names from other packages, by imported name."""
    is_own = isinstance(node, ast.ImportFrom) and (node.level or "autoparallel" in str(node.module))
    if is_own or not isinstance(node, ast.Import | ast.ImportFrom):
        return {}
    start = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
    return {
        each.asname or each.name.split(".")[0]: f"{start}import {ast.unparse(each)}"
        for each in node.names
    }


def _free_names(tree: ast.AST) -> frozenset[str]:
    """Return the names that a definition reads but does not define."""
    names = [each for each in ast.walk(tree) if isinstance(each, ast.Name)]
    made = {each.id for each in names if isinstance(each.ctx, ast.Store)}
    made |= {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
    return frozenset({each.id for each in names} - made)
