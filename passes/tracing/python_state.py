"""Python values that a forward and a loss read: numbers, texts, functions, random generators.

In: a model and its loss function. Out: ``PythonState``, which reads all values that their code can
reach by the names that it uses: attributes of modules and of the objects that these hold, entries
of dicts and lists, globals, closures, attributes of classes. A change of any of them may change the
forward's computation (``call_trace`` finds out). ``restore`` undoes a forward's changes, so that it
can run again.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .call_trace import tracing_calls

MOST_READ = 100_000
"""Most Python values of a model that are read in all; a container beyond that, such as a dict with
a data set, is left out."""

_MODULE_INTERNALS = frozenset(nn.Module().__dict__)
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "autoparallel"}
_CONTAINERS = (list, dict, set, deque)
_ABSENT: Any = object()


@dataclass(slots=True)
class _Place:
    """Container (dict, list, closure or object) with the ``keys`` of values in it that the model's
    code uses. A value's name for the user is ``before``, its key and ``after``."""

    before: str
    held: Any
    keys: list[Any]
    after: str = ""

    def read(self) -> list[Any]:
        """Return the present values in the order of ``keys``; ``_ABSENT`` for a missing key."""
        held = self.held
        if isinstance(held, dict | types.MappingProxyType):
            return [held.get(key, _ABSENT) for key in self.keys]
        if isinstance(held, list):
            return [held[at] if at < len(held) else _ABSENT for at in self.keys]
        try:
            return [held.cell_contents]
        except ValueError:
            return [_ABSENT]

    def write(self, key: Any, value: Any) -> None:
        held = self.held
        if isinstance(held, types.CellType):
            held.cell_contents = value
        elif isinstance(held, types.MappingProxyType):
            return  # forwards seldom write to a class
        elif isinstance(held, list):
            if value is _ABSENT:
                del held[key:]
            else:
                held[key : key + 1] = [value]
        elif value is _ABSENT:
            held.pop(key, None)
        else:
            held[key] = value

    def name(self, key: Any) -> str:
        return f"{self.before}{key}{self.after}"


Reading = list[tuple[list[Any], list[Any]]]


class PythonState:
    """Reader of the Python values that the code of ``model`` and ``loss_fn`` uses. The containers
    that hold them are searched once."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> None:
        self._places: list[_Place] = []
        self._modules = list(model.modules())
        names: frozenset[str] = frozenset()
        while True:
            walk = _Walk(names)
            walk.start(model, loss_fn)
            if walk.names <= names:
                break
            names |= walk.names
        self._places = walk.places

    def read(self) -> Reading:
        """Return the present values in each container, each with a mark that changes when the value
        is modified in place."""
        return [
            (values, [_mark(each) for each in values])
            for values in (place.read() for place in self._places)
        ]

    def changes(self, before: Reading, now: Reading) -> list[str]:
        """Return the names, as shown to the user, of values that differ between two readings."""
        return [
            place.name(place.keys[at])
            for place, (values, marks), (new, new_marks) in zip(
                self._places, before, now, strict=True
            )
            if marks != new_marks or not all(map(_is_same, values, new))
            for at in range(len(new))
            if not _is_same(values[at], new[at]) or marks[at] != new_marks[at]
        ]

    def restore(self, reading: Reading) -> None:
        """Put back the values of ``reading`` that have been replaced since then."""
        for place, (values, _), current in zip(
            self._places, reading, (place.read() for place in self._places), strict=True
        ):
            for key, value, new in zip(place.keys, values, current, strict=True):
                if value is not new:
                    place.write(key, value)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Make every forward traced or captured in a ``with`` block begin with the same Python
        values and random states; afterwards these are as if there had been no forward."""
        reading, generators = self.read(), Generators.now()

        def begin() -> None:
            self.restore(reading)
            generators.restore()

        try:
            with tracing_calls(before=begin):
                yield
        finally:
            begin()

    def forget_fakes(self, reading: Reading) -> list[Replaced]:
        """Restore the values that a forward has replaced by fake tensors since ``reading``; return
        these replacements."""
        replaced = [each for each in self._replaced(reading) if isinstance(each.now, FakeTensor)]
        for each in replaced:
            each.take_away()
        made = [
            Replaced(_Place("", vars(module), [key]), key, _ABSENT, value)
            for module in self._modules
            for key, value in vars(module).items()
            if isinstance(value, FakeTensor)
        ]
        for each in made:
            each.take_away()
        return [*replaced, *made]

    def new_tensors(self, before: Reading) -> list[Replaced]:
        """Return the replacements of values that were no tensors in the reading ``before`` by
        tensors."""
        return [
            each
            for each in self._replaced(before)
            if isinstance(each.now, Tensor) and not isinstance(each.before, Tensor)
        ]

    def _replaced(self, before: Reading) -> Iterator[Replaced]:
        for place, (values, _) in zip(self._places, before, strict=True):
            for key, value, new in zip(place.keys, values, place.read(), strict=True):
                if new is not value:
                    yield Replaced(place, key, value, new)


@dataclass(frozen=True)
class Replaced:
    """Record of a value that a forward has replaced: its container and key, the value ``before``
    and the value ``now``."""

    place: _Place
    key: Any
    before: Any
    now: Any

    def is_there(self) -> bool:
        """Return whether the container holds the new value at present."""
        return any(each is self.now for each in self.place.read())

    def is_free(self) -> bool:
        """Return whether the container holds the old value at present."""
        return any(each is self.before for each in self.place.read())

    def take_away(self) -> None:
        """Put the old value into the container in place of the new value."""
        self.place.write(self.key, self.before)

    def put_back(self) -> None:
        """Put the new value into the container in place of the old value."""
        self.place.write(self.key, self.now)


def _mark(value: Any) -> Any:
    if type(value) is Tensor:
        return None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, _CONTAINERS):
        return len(value)
    return None


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (*_SCALARS, np.generic)):
        return bool(one == other) or (one != one and other != other)
    if isinstance(one, types.MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    if isinstance(one, tuple | frozenset):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, np.ndarray)  # its mark decides


class _Walk:
    """Search for the Python values that can be reached from a model through attributes, globals and
    keys whose names are in ``known``; ``names`` collects the names that visited code reads."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        self.names: set[str] = set()
        self.places: list[_Place] = []
        self._seen: dict[int, Any] = {}
        self._globals: set[tuple[int, str]] = set()
        self._num_read = 0

    def start(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        """Start the search at a model's modules and at its loss function."""
        for path, module in model.named_modules():
            self._module(module, path or "the model")
        if loss_fn is not None:
            self._visit(loss_fn, "loss_fn")

    def _module(self, module: nn.Module, path: str) -> None:
        if not self._is_new(module):
            return
        self._class(type(module), methods=("forward",))
        held = vars(module)
        keys = [key for key in held if key not in _MODULE_INTERNALS]
        keys += _methods(type(module), held)
        self._place("", held, keys, f" of {path}", by_name=not _is_library(type(module).__module__))

    def _visit(self, value: Any, path: str) -> None:
        if isinstance(value, (*_SCALARS, Tensor, np.ndarray, np.generic)):
            return
        if isinstance(value, types.MethodType):
            self._visit(value.__func__, path)
            self._visit(value.__self__, path)
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, functools.partial):
            self._visit(value.func, path)
            self._visit(value.args, path)
            self._visit(value.keywords, path)
        elif isinstance(value, type):
            self._class(value, methods=())
        elif isinstance(value, dict) and self._is_new(value):
            self._place(path + "[", value, list(value), "]", by_name=False)
        elif isinstance(value, list) and self._is_new(value):
            self._place(path + "[", value, list(range(len(value))), "]", by_name=False)
        elif isinstance(value, tuple | set | frozenset | deque) and self._is_new(value):
            for each in value:
                self._visit(each, path)
        elif isinstance(value, nn.Module):
            self._module(value, path)
        elif isinstance(value, types.ModuleType):
            if not _is_library(value.__name__) and self._is_new(value):
                held = vars(value)
                keys = [key for key in held if not isinstance(held[key], _CONTAINERS)]
                self._place(f"{value.__name__}.", held, keys if _is_installed(held) else [*held])
        elif not _is_library(type(value).__module__ or "") or _is_namespace(value):
            self._object(value, path)

    def _object(self, value: Any, path: str) -> None:
        held = getattr(value, "__dict__", None)
        if not isinstance(held, dict) or not self._is_new(value):
            return
        self._class(type(value), methods=("__call__",))
        self._place(path + ".", held, [*held, *_methods(type(value), held)])

    def _class(self, cls: type, methods: Iterable[str]) -> None:
        """Visit the attributes of a class, and ``methods``, whose names occur in visited code."""
        self.names.update(methods)
        for base in cls.__mro__:
            if base in (nn.Module, object) or _is_library(base.__module__):
                if base is nn.Module:
                    break
                continue
            if self._is_new(base):
                self._place(f"{base.__name__}.", vars(base), list(vars(base)))

    def _function(self, wrapped: types.FunctionType, path: str) -> None:
        function = inspect.unwrap(wrapped)
        if not isinstance(function, types.FunctionType) or not self._is_new(function):
            return
        if _is_library(function.__module__ or ""):
            return
        read: set[str] = set()
        for code in function_codes(function.__code__):
            read.update(code.co_names)
            read.update(each for each in code.co_consts if isinstance(each, str))
        self.names |= read
        found = function.__globals__
        if _is_installed(found):  # their containers are caches
            read -= {name for name in read if isinstance(found.get(name), _CONTAINERS)}
        # several functions of a file may each read some of its globals
        names = [name for name in found if name in read and (id(found), name) not in self._globals]
        self._globals.update((id(found), name) for name in names)
        self._place("", found, names, by_name=False)
        closure = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, closure, strict=True):
            if self._is_new(cell):
                self._add(_Place("", cell, [name]))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(default, path)

    def _place(
        self, before: str, held: Any, keys: list[Any], after: str = "", *, by_name: bool = True
    ) -> None:
        """Record the values under ``keys`` of the container ``held``; with ``by_name``, only keys
        that occur as names in visited code. ``before`` and ``after`` frame the key in a value's
        name."""
        known = [key for key in keys if not by_name or key in self._known]
        self._add(_Place(before, held, known, after))

    def _add(self, place: _Place) -> None:
        self._num_read += len(place.keys)
        if not place.keys or self._num_read > MOST_READ:
            return
        self.places.append(place)
        for key, value in zip(place.keys, place.read(), strict=True):
            self._visit(_unbound(value), place.name(key))

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value  # keeps its id unique
        return True


def _methods(cls: type, held: Mapping[str, Any]) -> list[str]:
    """Return the names that class ``cls`` defines, without names hidden by attributes (``held``) of
    the object itself."""
    bases = [base for base in cls.__mro__ if not _is_library(base.__module__)]
    return [*{name: None for base in bases for name in vars(base) if name not in held}]


def _unbound(value: Any) -> Any:
    """Return the plain function behind a class method, a static method or a property."""
    if isinstance(value, classmethod | staticmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _is_installed(names: Mapping[str, Any]) -> bool:
    """Return whether the module whose globals are ``names`` belongs to an installed distribution,
    so that it is not the user's own code."""
    return "site-packages" in str(names.get("__file__", ""))


def _is_namespace(value: Any) -> bool:
    return type(value).__name__ in ("SimpleNamespace", "Namespace")


def function_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code object of a function, and of each function defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from function_codes(constant)


@dataclass(frozen=True)
class Generators:
    """States of Python's and NumPy's global random generators at one time."""

    python: Any
    numpy: dict[str, Any]

    @classmethod
    def now(cls) -> Generators:
        """Return the states of both generators at present."""
        return cls(random.getstate(), np.random.get_state(legacy=False))

    def restore(self) -> None:
        """Reset both generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def is_same(self, other: Generators) -> bool:
        """Return whether no random number was drawn between these two states."""
        if self.python != other.python:
            return False
        one, another = self.numpy["state"], other.numpy["state"]
        return one["pos"] == another["pos"] and bool((one["key"] == another["key"]).all())
