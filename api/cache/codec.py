"""Codec from values of the cache to bytes, without pickle.

In: frozen dataclasses and named tuples of a given list, tuples, lists, dicts, numpy arrays of
numbers, texts, numbers. Out: bytes. ``decode`` returns an equal value, every float bit for bit. A
decoded value contains only numbers and texts in classes of the list, so a foreign file can give a
wrong value but run no code. A damaged file is detected by zlib's checksum, JSON, or a class that
does not match. An object that occurs several times is written once, and shared again when read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np

from autoparallel.planner.errors import AutoparallelError

FASTEST = 1
"""zlib level: three quarters of the best level's savings, in a tenth of its time."""

PLAIN = (str, int, float, bool, type(None))
DTYPES = ("<f8", "<i8", "|b1")


class CodecError(Exception):
    """Error of a value that cannot be written or bytes that cannot be read; not shown to users."""


@dataclass(frozen=True)
class TextCodec:
    """Codec between a value and bytes: ``write`` gives the value's text, ``read`` parses it and
    raises ``ValueError`` for a wrong text."""

    write: Callable[[Any], str]
    read: Callable[[str], Any]

    def encode(self, value: Any) -> bytes:
        """Return a value as bytes: its text, compressed."""
        return zlib.compress(self.write(value).encode(), FASTEST)

    def decode(self, blob: bytes) -> Any:
        """Return the value that ``encode`` wrote. Raises ``CodecError`` for other bytes."""
        try:
            return self.read(zlib.decompress(blob).decode())
        except (zlib.error, ValueError, AutoparallelError) as error:
            raise CodecError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class NamedType:
    """Type whose values are stored by name: ``name`` maps a value to its name, ``find`` back."""

    type: type
    name: Callable[[Any], str]
    find: Callable[[str], Any]


@dataclass(frozen=True)
class Codec:
    """Codec between objects of ``classes`` and bytes; values of types in ``names`` become names."""

    classes: tuple[type, ...]
    names: tuple[NamedType, ...] = ()
    _numbers: dict[type, int] = field(init=False, repr=False)
    _fields: tuple[tuple[str, ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_numbers", {each: n for n, each in enumerate(self.classes)})
        object.__setattr__(self, "_fields", tuple(_fields_of(each) for each in self.classes))

    def encode(self, value: Any) -> bytes:
        """Return a value as bytes. Raises ``CodecError`` for other types."""
        writing = _Writer(self._numbers, self._fields, self.names)
        root = writing.form(value)
        shape = [list(self._names), writing.objects, writing.shapes, root]
        text = json.dumps(shape, separators=(",", ":"), check_circular=False).encode()
        head = len(text).to_bytes(8, "little")
        return zlib.compress(b"".join((head, text, *writing.parts)), FASTEST)

    def decode(self, blob: bytes) -> Any:
        """Return the value that ``encode`` wrote. Raises ``CodecError`` for other bytes."""
        try:
            data = zlib.decompress(blob)
            size = int.from_bytes(data[:8], "little")
            names, objects, shapes, root = json.loads(data[8 : 8 + size])
            if names != list(self._names):
                raise CodecError("written for other classes")
            arrays = _arrays(shapes, data, 8 + size)
            reading = _Reader(_constructors(self.classes), arrays, self.names)
            for number, parts in objects:
                reading.add(number, parts)
            return reading.value(root)
        except CodecError:
            raise
        except (zlib.error, ValueError, TypeError, LookupError, AttributeError) as error:
            raise CodecError(f"{type(error).__name__}: {error}") from error

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(each.__name__ for each in self.classes)


def _fields_of(owner: type) -> tuple[str, ...]:
    """Return the names of the arguments that construct a class."""
    if is_dataclass(owner):
        return tuple(each.name for each in fields(owner) if each.init)
    named: tuple[str, ...] = owner._fields  # type: ignore[attr-defined]
    return named


class _Writer:
    """Writer of a value as JSON data, a list of the objects in it (parts first), and its arrays."""

    def __init__(
        self,
        numbers: Mapping[type, int],
        fields_of: Sequence[tuple[str, ...]],
        names: Sequence[NamedType],
    ) -> None:
        self.numbers, self.fields_of = numbers, fields_of
        self.named = {each.type: (at, each) for at, each in enumerate(names)}
        self.objects: list[Any] = []
        self.shapes: list[Any] = []
        self.parts: list[bytes] = []
        self.known: dict[int, int] = {}
        self.held: list[Any] = []

    def form(self, value: Any) -> Any:
        """Return a value as JSON data: numbers and texts unchanged, tuples as lists, and every
        other value as a dict with one key, its kind."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is tuple:
            return [self.form(each) for each in value]
        if kind in self.numbers:
            return {"o": self._object(value, self.numbers[kind])}
        if kind is list:
            return {"l": [self.form(each) for each in value]}
        if isinstance(value, dict):
            return {"d": [[self.form(key), self.form(each)] for key, each in value.items()]}
        if kind is np.ndarray:
            return {"a": self._array(value)}
        if isinstance(value, np.floating | np.integer | np.bool_):
            return value.item()
        if kind in self.named:
            at, own = self.named[kind]
            return {"n": [at, own.name(value)]}
        raise CodecError(f"a {kind.__name__} cannot be kept")

    def _object(self, value: Any, number: int) -> int:
        place = self.known.get(id(value))
        if place is None:
            own = [getattr(value, name) for name in self.fields_of[number]]
            parts = [each if type(each) in PLAIN else self.form(each) for each in own]
            place = self.known[id(value)] = len(self.objects)
            self.objects.append((number, parts))
            self.held.append(value)  # or another object might get its id
        return place

    def _array(self, value: np.ndarray[Any, Any]) -> int:
        name = value.dtype.str
        if name not in DTYPES:
            raise CodecError(f"an array of {name} cannot be kept")
        self.shapes.append([name, value.shape])
        self.parts.append(np.ascontiguousarray(value).tobytes())
        return len(self.shapes) - 1


class _Reader:
    """Reader of a value that ``_Writer`` wrote; it constructs the objects in their stored order."""

    def __init__(
        self, makers: Sequence[Callable[..., Any]], arrays: list[Any], names: Sequence[NamedType]
    ) -> None:
        self.makers, self.arrays, self.names = makers, arrays, names
        self.objects: list[Any] = []

    def add(self, number: int, parts: list[Any]) -> None:
        value = self.value
        own = [value(part) if type(part) in (list, dict) else part for part in parts]
        self.objects.append(self.makers[number](*own))

    def value(self, form: Any) -> Any:
        kind = type(form)
        if kind is list:
            return tuple([self.value(each) for each in form])
        if kind is not dict:
            return form
        ((what, inner),) = form.items()
        if what == "o":
            return self.objects[inner]
        if what == "d":
            return {self.value(key): self.value(each) for key, each in inner}
        if what == "l":
            return [self.value(each) for each in inner]
        if what == "a":
            return self.arrays[inner]
        if what == "n":
            return self.names[inner[0]].find(inner[1])
        raise CodecError(f"an unknown form {what!r}")


def _constructors(classes: Sequence[type]) -> list[Callable[..., Any]]:
    return [_constructor(each) for each in classes]


def _constructor(owner: type) -> Callable[..., Any]:
    """Return a function that constructs a class from its fields in order."""
    if is_dataclass(owner) and any(each.kw_only for each in fields(owner)):
        names = _fields_of(owner)
        return lambda *parts: owner(**dict(zip(names, parts, strict=True)))
    return owner


def _arrays(shapes: Sequence[Any], data: bytes, start: int) -> list[Any]:
    """Read consecutive arrays from ``data``, beginning at ``start``."""
    found = []
    for name, shape in shapes:
        if name not in DTYPES:
            raise CodecError(f"an array of {name}")
        dtype = np.dtype(name)
        count = int(np.prod(shape, dtype=np.int64))
        flat = np.frombuffer(data, dtype, count, start)
        found.append(flat.reshape(shape).copy())
        start += count * dtype.itemsize
    return found
