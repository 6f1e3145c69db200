"""Capture of equal layers: a few are run, and the others are only named.

Of each group of equal layers (``repeats``) the first two and the last are captured in full, between
two marks that record the values that entered and left. A layer between them with an equivalent call
leaves a single op in the graph, ``autoparallel::repeat``, from the tensors it is called with to the
tensors it would return; ``repeat_graph`` puts the nodes in its place. The code around the layers
runs in full, with every layer's own number.

Named layers are empty while the export runs: they have no submodules and no parameters. If a layer
is called unlike any captured layer, reads its own number, or has side effects, it cannot be named:
it is captured, or if it is empty, there is a ``RepeatError``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .call_effects import Result, call_key, call_result, state_of, watch_counts
from .repeats import Repeat

if TYPE_CHECKING:
    from ..tracing.counter_random import counter_random

REPEATS = ("autoparallel.repeat.default", "autoparallel.repeat_one.default")
"""Ops that stand for the call of a layer that is not captured: with several results, and with
one."""

MARK = "autoparallel.mark.default"
NUM_CAPTURED = 2
"""Number of equivalent calls that are captured before a further call is replaced by a single op."""

NUM_SHOWN = 3
"""Number of first layers of a group that are never hidden: one more than ``NUM_CAPTURED``, as the
first layer may be called with other arguments than the rest."""


def _repeat(tensors: list[Tensor], call: int, made: str) -> list[Tensor]:
    return [
        torch.empty_strided(shape, stride, dtype=dtype, device=tensors[0].device)
        for shape, stride, dtype in _forms(made)
    ]


def _repeat_one(tensors: list[Tensor], call: int, made: str) -> Tensor:
    return _repeat(tensors, call, made)[0]


@cache
def _forms(made: str) -> list[tuple[list[int], list[int], torch.dtype]]:
    return [(shape, stride, getattr(torch, name)) for shape, stride, name in json.loads(made)]


def _mark(tensors: list[Tensor], call: int, entered: bool) -> Tensor:
    return torch.empty(0, device=tensors[0].device)


_OPS = {
    "repeat(Tensor[] tensors, int call, str made) -> Tensor[]": _repeat,
    "repeat_one(Tensor[] tensors, int call, str made) -> Tensor": _repeat_one,
    "mark(Tensor[] tensors, int call, bool entered) -> Tensor": _mark,
}
_library: Any = torch.library.Library("autoparallel", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _function in _OPS.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")


class RepeatError(Exception):
    """Error that tells to capture all layers in full, though some look equal. ``is_hidden``:
    another try may succeed in which no layer is emptied of its parameters and submodules first."""

    def __init__(self, text: str, *, is_hidden: bool = False) -> None:
        super().__init__(text)
        self.is_hidden = is_hidden


@dataclass(slots=True)
class Call:
    """Call of one of several equal layers during an export; calls with equal ``key`` compute the
    same. It is captured in full or replaced by a single op. A replaced call equals the captured
    call number ``like``; ``same`` tells which tensor arguments are the very tensors of that call,
    and the op takes only the others. ``first_draw`` is the number of the layer's first random call,
    ``draws`` their count. ``result`` is None if an op cannot replace the call."""

    path: str
    key: Any
    is_captured: bool
    first_draw: int
    draws: int = 0
    result: Result | None = None
    like: int = -1
    same: tuple[bool, ...] = ()


_Value = tuple[Tensor, int]
"""Tensor with its version counter, which every in-place write increases."""


@dataclass
class _Kind:
    """Record of all calls of equal layers with the same key. ``first`` is the index of the first
    captured call, ``given`` its tensor arguments."""

    captured: list[Call] = field(default_factory=list)
    is_clean: bool = True
    first: int = -1
    given: tuple[_Value, ...] = ()


class Repeats:
    """State of one export: the groups of equal layers of the model, and all calls of these layers
    in order. ``is_hidden``: layers that ops will replace are emptied of submodules, parameters and
    buffers during the export."""

    def __init__(self, model: nn.Module, groups: Sequence[Repeat], *, is_hidden: bool) -> None:
        self.calls: list[Call] = []
        self.marks: list[Tensor] = []
        self._model = model
        self._groups = groups
        self._is_hidden = is_hidden
        self._kinds: dict[Any, _Kind] = {}
        self._draws: counter_random | None = None
        self._readers: set[int] = set()

    def start(self, draws: counter_random) -> None:
        """Begin a new forward: forget earlier calls. ``draws`` is the mode that counts random
        calls."""
        for held in (self.calls, self.marks, self._kinds, self._readers):
            held.clear()
        self._draws = draws

    @contextmanager
    def active(self) -> Iterator[None]:
        """Capture the first calls of equal layers, and replace later calls by single ops, within a
        ``with`` block."""
        with ExitStack() as undo:
            for number, group in enumerate(self._groups):
                for place, path in enumerate(group.members):
                    layer = self._model.get_submodule(path)
                    is_last = place == len(group.members) - 1
                    is_hidden = self._is_hidden and place >= NUM_SHOWN and not is_last
                    forward = self._forward(number, path, layer, is_hidden=is_hidden)
                    layer.forward = forward
                    undo.callback(vars(layer).pop, "forward")
                    if is_hidden:
                        undo.callback(vars(layer).update, _hide(layer))
            yield

    def _forward(
        self, number: int, path: str, layer: nn.Module, *, is_hidden: bool
    ) -> Callable[..., Any]:
        plain, group = layer.forward, self._groups[number]
        may_name = path != group.members[-1]

        @wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            flat, structure = tree_flatten((args, kwargs))
            with torch._C.DisableTorchFunction():  # shapes are queried below all modes
                key = (number, call_key(flat, structure))
                given = tuple((each, each._version) for each in flat if isinstance(each, Tensor))
            kind = self._kinds.setdefault(key, _Kind(is_clean=key[1] is not None))
            usable = kind.is_clean and number not in self._readers
            if may_name and usable and len(kind.captured) >= NUM_CAPTURED:
                return self._name(path, key, kind, given)
            if is_hidden:
                raise RepeatError(f"{path} is called in a way of its own", is_hidden=usable)
            if not usable:
                return plain(*args, **kwargs)
            call = Call(path, key, True, self._count)
            if not kind.captured:
                kind.first, kind.given = len(self.calls), given
            with watch_counts(layer, group.counts) as reads:
                output = self._capture(call, layer, plain, args, kwargs)
            if reads:
                self._readers.add(number)
                call.result = None
            if call.result is None or any(not _equal(call, each) for each in kind.captured):
                kind.is_clean = False
            kind.captured.append(call)
            return output

        return forward

    @property
    def _count(self) -> int:
        assert self._draws is not None
        return self._draws.count

    def _capture(
        self, call: Call, layer: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call the layer's forward ``plain`` between two ops that mark its begin and end. Set
        ``call.result`` if a single op can replace later calls."""
        number, given = len(self.calls), _tensors((args, kwargs))
        self.calls.append(call)
        before = state_of(layer, args, kwargs)
        self.marks.append(torch.ops.autoparallel.mark.default(given, number, True))
        output = plain(*args, **kwargs)
        made, result = call_result(output, given, layer)
        if result is not None and state_of(layer, args, kwargs) == before:
            self.marks.append(torch.ops.autoparallel.mark.default(made, number, False))
            call.result, call.draws = result, self._count - call.first_draw
        return output

    def _name(self, path: str, key: Any, kind: _Kind, given: tuple[_Value, ...]) -> Any:
        """Replace a layer's call by a single op; return the op's result in the form of the layer's.
        ``kind``: record of the captured calls with the same ``key``; ``given``: tensor
        arguments."""
        assert self._draws is not None
        result, draws = kind.captured[0].result, kind.captured[0].draws
        assert result is not None
        same = [
            one is other and version == before
            for (one, version), (other, before) in zip(given, kind.given, strict=True)
        ]
        same[0] = same[0] and not all(same)  # an op without tensors would not be traced
        number, call = len(self.calls), Call(path, key, False, self._count, draws, result)
        call.like, call.same = kind.first, tuple(same)
        self.calls.append(call)
        self._draws.count += draws
        others = [one for (one, _), is_same in zip(given, same, strict=True) if not is_same]
        ops = torch.ops.autoparallel
        if len(_forms(result.forms)) == 1:
            made = [ops.repeat_one.default(others, number, result.forms)]
        else:
            made = ops.repeat.default(others, number, result.forms)
        held = {"made": made, "given": [one for one, _ in given]}
        leaves = [held[of][at] if of in held else at for of, at in result.leaves]
        return tree_unflatten(leaves, result.structure)


def _equal(one: Call, other: Call) -> bool:
    return one.result == other.result and one.draws == other.draws


def _tensors(tree: Any) -> list[Tensor]:
    return [value for value in tree_flatten(tree)[0] if isinstance(value, Tensor)]


def _hide(layer: nn.Module) -> dict[str, Any]:
    """Remove a layer's submodules, parameters and buffers; return them for a later restore."""
    names = ("_modules", "_parameters", "_buffers")
    held = {name: vars(layer)[name] for name in names}
    vars(layer).update({name: {} for name in names})
    return held
