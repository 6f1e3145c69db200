"""The messages of errors, read from the code that raises them.

In: the sources of the packages. Out: the class and the messages of each code, in which ``…`` stands
for every value that is known only when the error is raised.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("cost_model", "planner", "passes", "runtime", "api")
RAISERS = {
    "running_user_code": ("UsageError", 1),
    "refuse_gradient": ("UsageError", 1),
    "Choices": ("UsageError", 1),
    "choice_error": ("UsageError", 1),
    "_give_up": ("HangError", 1),
    "_Damage": ("PlanError", 2),
}
"""Functions that raise an error by its code: its class, and which argument is the message."""

_CODE = re.compile(r"AP\d{3}")


@dataclass(frozen=True, slots=True)
class RaisedError:
    """An error code: the class that it is raised with, and its messages."""

    class_name: str
    messages: list[str] = field(default_factory=list)


def read_errors(root: Path) -> dict[str, RaisedError]:
    """Return every code of the packages below ``root`` with its class and messages."""
    errors: dict[str, RaisedError] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            for code, class_name, messages in _errors_of(ast.parse(path.read_text())):
                error = errors.setdefault(code, RaisedError(class_name))
                error.messages.extend(text for text in messages if text not in error.messages)
    return dict(sorted(errors.items()))


def _errors_of(module: ast.Module) -> Iterator[tuple[str, str, list[str]]]:
    """Yield code, class and messages of each call in a module that makes an error."""
    scopes: list[ast.AST] = [module]
    scopes += [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    innermost = {node: scope for scope in scopes for node in ast.walk(scope)}
    for call, scope in innermost.items():
        if not isinstance(call, ast.Call) or len(call.args) < 2:
            continue
        code = call.args[0]
        if isinstance(code, ast.Constant) and _CODE.fullmatch(str(code.value)):
            name = _name_of(call)
            class_name, position = RAISERS.get(name, (name, 1))
            messages = list(_texts(call.args[position], scope, module))
            if name in ("Choices", "choice_error"):
                messages = ["… is not one of …"]
            yield code.value, class_name, messages or _first_sentence(scope)


def _name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _first_sentence(scope: ast.AST) -> list[str]:
    """Return the first sentence of a function's docstring, for messages that no text shows."""
    docstring = ast.get_docstring(scope) if isinstance(scope, ast.FunctionDef) else None
    return [docstring.partition("\n\n")[0].replace("\n", " ").rstrip(".")] if docstring else []


def _texts(node: ast.expr, scope: ast.AST, module: ast.Module) -> Iterator[str]:
    """Yield the texts that an expression can be."""
    match node:
        case ast.Constant(value=str(text)) if text:
            yield text
        case ast.JoinedStr(values=parts):
            pieces = (part.value if isinstance(part, ast.Constant) else "…" for part in parts)
            text = "".join(map(str, pieces))
            if re.search("[a-z]", text):
                yield text
        case ast.IfExp(body=body, orelse=other):
            yield from _texts(body, scope, module)
            yield from _texts(other, scope, module)
        case ast.BinOp(left=left, right=right):
            for begin in _texts(left, scope, module):
                for end in _texts(right, scope, module):
                    yield begin + end
        case ast.Name(id=name):
            yield from _texts_of_name(name, scope, module)


def _texts_of_name(name: str, scope: ast.AST, module: ast.Module) -> Iterator[str]:
    """Yield the texts that a name of a function can be: as assigned, or as given by callers."""
    for assignment in ast.walk(scope):
        if isinstance(assignment, ast.Assign) and ast.unparse(assignment.targets[0]) == name:
            yield from _texts(assignment.value, scope, module)
    if not isinstance(scope, ast.FunctionDef):
        return
    parameters = [argument.arg for argument in scope.args.args]
    for call in ast.walk(module):
        if isinstance(call, ast.Call) and _name_of(call) == scope.name and name in parameters:
            for argument in call.args[parameters.index(name) :][:1]:
                if not isinstance(argument, ast.Name):
                    yield from _texts(argument, module, module)
