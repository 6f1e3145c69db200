"""The fixed part of a script: copies of this package's definitions, with all that they use.

In: names that a script uses. Out: the imports and the source of all that they need, in the order of
``MODULES``. The rank of ``passes`` is a mesh in a script, whose methods are the collectives:
``RENAMED`` replaces the words.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

MODULES = (
    "autoparallel.runtime.script_parts.mesh",
    "autoparallel.passes.ops.random_ops",
    "autoparallel.runtime.script_parts.ops",
    "autoparallel.passes.ops.local_loss",
    "autoparallel.passes.ops.batch_norm",
    "autoparallel.passes.ops.experts",
    "autoparallel.passes.local.local_indexing",
    "autoparallel.passes.local.local_functions",
    "autoparallel.runtime.script_parts.weights",
    "autoparallel.runtime.script_parts.stages",
    "autoparallel.runtime.script_parts.zero",
    "autoparallel.runtime.script_parts.training",
    "autoparallel.runtime.script_parts.pipeline",
    "autoparallel.runtime.script_parts.main",
)
"""Modules with definitions; the first definition of a name counts."""

RENAMED = (
    (r"\b(ctx\.)?rank\.communicator\b", r"\1mesh"),
    (r"\b(ctx\.)?rank\b(?=[:,.)\]])", r"\1mesh"),
    (r"\bctx\.rank\b", "ctx.mesh"),
    (r"\bcommunicator\b", "mesh"),
    (r"\bRank\b", "Mesh"),
    (r"\baxes: tuple\[int, \.\.\.\]", "axes: tuple[str, ...]"),
    (r"\baxis: int\b", "axis: str"),
    (r"\bactivation: str\b", "activation: Callable[[Tensor], Tensor]"),
)
"""Replacements in definitions of ``passes``."""

REMOVED = (
    (r"  # type: ignore\[[\w, -]+\]", ""),
    (r"  # noqa: [^\n]*", ""),
)


@dataclass(frozen=True)
class _Module:
    """Definitions of a module by name, each with its source, and its imports by name."""

    name: str
    definitions: dict[str, str] = field(default_factory=dict)
    uses: dict[str, frozenset[str]] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parts:
    """Import lines, and definitions by module."""

    imports: tuple[str, ...]
    sections: Mapping[str, tuple[str, ...]]


def collect(wanted: Iterable[str], given: Iterable[str]) -> Parts:
    """Collect the definitions that ``wanted`` need, except names that are ``given``."""
    pending, known = list(wanted), set(given)
    found: dict[tuple[str, str], str] = {}
    imports: set[str] = set()
    while pending:
        name = pending.pop()
        if name in known:
            continue
        known.add(name)
        owner = next((m for m in map(_read, MODULES) if name in m.definitions), None)
        if owner is None:
            continue
        found[owner.name, name] = owner.definitions[name]
        for used in owner.uses[name]:
            if used in owner.imports:
                imports.add(owner.imports[used])
            pending.append(used)
    sections = {
        module: tuple(
            dict.fromkeys(
                found[module, name] for name in _read(module).definitions if (module, name) in found
            )
        )
        for module in MODULES
    }
    return Parts(tuple(sorted(imports)), {name: each for name, each in sections.items() if each})


def taken_names() -> frozenset[str]:
    """Return the names that functions of blocks, and the model's module, must not have."""
    names = {"batches", "constants", "count", "itertools", "transformers"}
    for module in map(_read, MODULES):
        names |= {*module.definitions, *module.imports}
    return frozenset(names).union(dir(builtins), keyword.kwlist)


def can_copy(function: Callable[..., object]) -> bool:
    """Return whether a function of this package can be copied into a script."""
    return any(function.__name__ in _read(module).definitions for module in MODULES)


@cache
def _read(module_name: str) -> _Module:
    module = importlib.import_module(module_name)
    text = inspect.getsource(module)
    lines = text.splitlines()
    found = _Module(module_name)
    previous_name = ""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            _add_imports(found, node)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            _add(found, node.name, lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for each in ast.walk(targets[0]) if isinstance(each, ast.Name)]
            for name in names:
                _add(found, name, lines[node.lineno - 1 : node.end_lineno])
            previous_name = names[0]
            continue
        elif isinstance(node, ast.Expr) and previous_name:  # the note of a constant
            own = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            found.definitions[previous_name] += "\n" + own
        previous_name = ""
    return found


def _add_imports(found: _Module, node: ast.Import | ast.ImportFrom) -> None:
    """Add the imports of a script: all from outside this package."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            as_name = f" as {alias.asname}" if alias.asname else ""
            found.imports[alias.asname or alias.name.split(".")[0]] = (
                f"import {alias.name}{as_name}"
            )
    elif not node.level and node.module != "__future__" and "autoparallel" not in str(node.module):
        for alias in node.names:
            found.imports[alias.asname or alias.name] = f"from {node.module} import {alias.name}"


def _add(found: _Module, name: str, lines: list[str]) -> None:
    if name == "_":  # a nameless registration with torch
        return
    source = "\n".join(lines)
    renamed = RENAMED if ".passes." in found.name else ()
    for pattern, replacement in (*renamed, *REMOVED):
        source = re.sub(pattern, replacement, source)
    found.definitions[name] = source
    found.uses[name] = frozenset(_free_names(ast.parse(source)))


def _free_names(tree: ast.AST) -> set[str]:
    """Return the names that a definition reads and does not make."""
    names = [each for each in ast.walk(tree) if isinstance(each, ast.Name)]
    made = {each.id for each in names if isinstance(each.ctx, ast.Store)}
    made |= {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
    return {each.id for each in names} - made
