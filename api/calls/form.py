"""Differences of a call from the example batch: numbers, flags, gradients of inputs.

In: the differences of the next call. Out: example batches with these differences, to capture.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from autoparallel.passes.programs.batch import Batch, LeafPath, fill_batch, leaf_at, path_text

SIMPLE = bool | int | float | str | None
"""Types of arguments, besides tensors, whose values may differ between calls."""


class Form(NamedTuple):
    """Differences of a call from the example batch: paths of inputs that require gradients
    (``wanted``), and (path, type, value) of each argument with another value (``fixed``).

    The type is compared too, since True equals 1.
    """

    wanted: frozenset[LeafPath] = frozenset()
    fixed: tuple[tuple[LeafPath, type, SIMPLE], ...] = ()

    def text(self) -> str:
        """Describe the differences of the call from the example batch."""
        fixed = [f"{path_text(path)}={value!r}" for path, _, value in self.fixed]
        return ", ".join([*fixed, *sorted(f"a gradient of {path_text(p)}" for p in self.wanted)])


PLANNED = Form()


@dataclass
class CallForm:
    """Holder of the form of ``forward``'s next call: its differences from the example batch."""

    forward: Callable[..., Any]
    form: Form = PLANNED

    def examples(self, make: Callable[..., Batch]) -> Callable[..., Batch]:
        """Wrap ``make``, which makes example batches, so that they have the next call's form."""

        def made(*args: Any) -> Batch:
            return self.apply_form(make(*args), self.form)

        return made

    def apply_form(self, batch: Batch, form: Form) -> Batch:
        """Return an example batch with the argument values and gradient flags of ``form``."""
        if form == PLANNED:
            return batch
        parameters = inspect.signature(self.forward).parameters
        names = list(parameters)
        fixed = {path: value for path, _, value in form.fixed}
        if isinstance(batch, Mapping):
            absent = [str(path[0]) for path in fixed if path[0] not in batch]
            defaults = {name: parameters[name].default for name in absent if name in parameters}
            batch = {**batch, **dict.fromkeys(absent), **defaults}
            changed: dict[LeafPath, Any] = dict(fixed)
        else:
            changed = {(_position(names, str(p[0])), *p[1:]): value for p, value in fixed.items()}
            last = max((int(path[0]) for path in changed), default=-1)
            rest = [parameters[name].default for name in names[len(batch) : last + 1]]
            batch = (*batch, *rest) if rest else batch
        for path in form.wanted:
            held: Tensor = leaf_at(batch, path)
            changed[path] = held.detach().requires_grad_()
        return fill_batch(batch, changed)


def _position(names: list[str], name: str) -> int:
    """Return the position of an argument; of ``args[2]`` it is the position of ``*args`` plus 2."""
    first, _, after = name.partition("[")
    return names.index(first) + int(after.rstrip("]") or 0)
