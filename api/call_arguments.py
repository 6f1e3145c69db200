"""What a model is called with: a script's arguments as the inputs of the captured program.

In: the signature of the model's ``forward``, the example batch that it was captured with, the
program's inputs. Out: for each call the tensors by input name. Arguments may be given by
position, by name or left to their defaults, as the model's own signature has it. Those that are
no tensors are settings: the program was captured with theirs, so others are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from autoparallel.passes.programs.program import BatchKey
from autoparallel.planner.errors import UsageError
from autoparallel.targets import Batch


class CallArguments:
    """How calls of one model are read.

    ``extra`` says that a batch may have entries which ``forward`` does not take: they are for
    the loss.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        example: Batch,
        inputs: Mapping[str, BatchKey],
        *,
        extra: bool,
    ) -> None:
        self._signature = inspect.signature(forward)
        self._has_extra = extra
        self._inputs = inputs
        if isinstance(example, Mapping):
            self._example = self._named((), self._taken(example))
            self._name_of = {key: key for key in example}
        else:
            self._example = self._named(tuple(example), {})
            self._name_of = dict(enumerate(self._example))

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The program's inputs of a call.

        Raises TypeError as the model itself would for arguments that it does not take, and
        UsageError AP920 for a call in another form than the example batch's.
        """
        taken = self._taken(kwargs)
        named = self._named(args, taken)
        self._check(named)
        values = {**{name: kwargs[name] for name in kwargs.keys() - taken.keys()}, **named}
        return {name: values[self._name_of[key]] for name, key in self._inputs.items()}

    def _taken(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Those of ``kwargs`` that ``forward`` takes; all of them unless others are allowed."""
        parameters = self._signature.parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if takes_all or not self._has_extra:
            return dict(kwargs)
        return {name: value for name, value in kwargs.items() if name in parameters}

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument of a call by name, defaults included; ``*args`` by their number."""
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

    def _check(self, named: Mapping[str, Any]) -> None:
        for name in [*named, *(name for name in self._example if name not in named)]:
            given, planned = named.get(name), self._example.get(name)
            if isinstance(given, Tensor) and isinstance(planned, Tensor):
                continue
            if isinstance(given, Tensor) or isinstance(planned, Tensor) or given != planned:
                raise UsageError(
                    "AP920",
                    f"in training the model is called with {name}={_text(given)}",
                    why=f"it was planned with {name}={_text(planned)}, and the plan's "
                    "program is fixed to that",
                    fix="call it as in example_batch, or pass parallelize an example_batch of "
                    "this form; in evaluation any arguments are possible",
                )


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
