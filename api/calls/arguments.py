"""Arguments of a script's call as inputs of the captured program.

In: the signature of the model's ``forward``, the example batch that was captured, and the program's
inputs. Out: for each call the tensors by input name. Arguments may be given by position, by name,
or left to defaults, as the signature allows. Arguments other than tensors are fixed in a capture; a
call with other values needs another capture.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from autoparallel.calls.form import SIMPLE
from autoparallel.passes.programs.batch import (
    Example,
    InputPlace,
    LeafPath,
    is_same,
    parts,
    path_text,
)
from autoparallel.planner.errors import UsageError


class _Absent:
    """Type of the marker ``_ABSENT``, the value of an argument that a call does not pass."""

    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


class CallArguments:
    """Reader of the arguments of a call of the model as inputs of the captured program.

    ``example`` is the batch that the model was captured with, ``inputs`` the place of each input in
    it. With ``extra`` a batch may have entries that only the loss function reads.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        example: Example,
        inputs: Mapping[str, InputPlace],
        *,
        extra: bool,
    ) -> None:
        self._signature = inspect.signature(forward)
        self._has_extra = extra
        self._inputs = inputs
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in self._signature.parameters.values())
        self._is_dict = isinstance(example.batch, Mapping)
        if self._is_dict:
            self._example = self._arguments((), example.batch)
            self._name_of: dict[str | int, str] = {key: key for key in example.batch}
        else:
            self._example = self._arguments(tuple(example.batch), {})
            self._name_of = dict(enumerate(self._example))
        self._leaves = dict(parts(self._example))

    def read(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], tuple[tuple[LeafPath, type, Any], ...]]:
        """Return the program's inputs by name, and the path, type and value of each argument (a
        number, text or None) that differs from the example batch.

        Raises TypeError, as the model would, for arguments that it does not take, and UsageError
        AP920 for a call whose arguments have another structure than the example batch.
        """
        given = self._arguments(args, kwargs)
        found: dict[LeafPath, Any] = {}
        changed: list[tuple[LeafPath, type, Any]] = []
        for name in [*given, *(name for name in self._example if name not in given)]:
            leaves = self._checked(name, given)
            found |= leaves
            fixed = ((path, leaf) for path, leaf in leaves.items() if not isinstance(leaf, Tensor))
            changed += [(p, type(leaf), leaf) for p, leaf in fixed if not self._is_planned(p, leaf)]
        places = self._inputs.items()
        inputs = {name: place.taken(found[self._path(name)]) for name, place in places}
        return inputs, tuple(changed)

    def _may_be(self, path: LeafPath, leaf: Any) -> bool:
        """Return whether a training call may pass ``leaf``, no tensor, at ``path``: the example
        batch's value or, in an argument that may change, any number, text or None."""
        is_simple = isinstance(leaf, SIMPLE) and self._can_change(str(path[0]))
        return is_simple or (not isinstance(leaf, Tensor) and self._is_planned(path, leaf))

    def _can_change(self, name: str) -> bool:
        """Return whether an example batch could have an entry for ``forward``'s argument
        ``name``."""
        known = self._signature.parameters.get(name)
        if known is None:
            is_further = self._is_variadic(name)
            return is_further and (name in self._example if "[" in name else self._is_dict)
        is_named = known.kind in (known.POSITIONAL_OR_KEYWORD, known.KEYWORD_ONLY)
        return is_named and (self._is_dict or known.kind == known.POSITIONAL_OR_KEYWORD)

    def _is_variadic(self, name: str) -> bool:
        """Return whether an argument name, such as ``args[2]``, is of ``*args`` or ``**kwargs``."""
        return name not in self._signature.parameters and (self._takes_all or "[" in name)

    def _is_planned(self, path: LeafPath, leaf: Any) -> bool:
        """Return whether ``leaf`` has the type and value that the example batch has at ``path``."""
        planned = self._leaves.get(path, _ABSENT)
        return type(leaf) is type(planned) and is_same(leaf, planned)

    def text(self, name: str) -> str:
        """Return the argument that holds a program input, as Python code: ``x['ids']``."""
        return path_text(self._path(name))

    def _path(self, name: str) -> LeafPath:
        """Return the path to a program input: its argument's name, then keys and indices in it."""
        path = self._inputs[name].path
        return self._name_of[path[0]], *path[1:]

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call by name, including defaults and entries for the loss."""
        parameters = self._signature.parameters
        is_taken = self._takes_all or not self._has_extra
        taken = {name: kwargs[name] for name in kwargs if is_taken or name in parameters}
        rest = {name: value for name, value in kwargs.items() if name not in taken}
        return {**rest, **self._named(args, taken)}

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``forward``'s arguments by name, with defaults; ``*args`` as ``args[0]``, …."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                named.update({f"{name}[{i}]": part for i, part in enumerate(value)})
            elif kind is inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            else:
                named[name] = value
        return named

    def _checked(self, name: str, arguments: Mapping[str, Any]) -> dict[LeafPath, Any]:
        """Return the tensors and other values in the argument ``name`` by their paths in it.

        Raises UsageError AP920 if its structure differs from the example batch, or if a value
        differs that is neither a tensor nor a number, text or None.
        """
        # A forward can tell None among *args or **kwargs from an argument that is not there.
        absent = _ABSENT if self._is_variadic(name) else None
        given, planned = arguments.get(name, absent), self._example.get(name, absent)
        leaves, others = dict(parts(given)), dict(parts(planned))
        if leaves.keys() != others.keys() or not all(
            isinstance(leaves[path], Tensor)
            if isinstance(other, Tensor)
            else self._may_be((name, *path), leaves[path])
            for path, other in others.items()
        ):
            is_key = self._is_dict or name in self._example
            how = f"with {name!r} in it" if is_key else f"a dict of arguments with {name!r} in it"
            raise UsageError(
                "AP920",
                f"in training the model is called with {name}={_text(given)}",
                why=f"it was planned with {name}={_text(planned)}, and the plan's "
                "program is fixed to that",
                fix="call it as in example_batch, or pass parallelize an example_batch of "
                f"this form, {how}; in evaluation any arguments are possible",
            )
        return {(name, *path): leaf for path, leaf in leaves.items()}


def _text(value: Any) -> str:
    def described(leaf: Any) -> Any:
        return _ShapeText(leaf) if isinstance(leaf, Tensor) else leaf

    text = repr(tree_map(described, value))
    return text if len(text) <= 90 else f"{text[:87]}..."


class _ShapeText:
    """Stand-in for a tensor in an error message, printed as the tensor's shape."""

    def __init__(self, tensor: Tensor) -> None:
        self._text = f"a tensor of shape {tuple(tensor.shape)}"

    def __repr__(self) -> str:
        return self._text
