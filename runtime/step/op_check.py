"""The op that made a value that is not finite, or whose backward did.

In: the graph of a block. Out: a callable that runs it op by op, as the graph itself would, with the
same collectives, and remembers the first op whose result is not finite although all that it read
is; and the first gradient, in the order of the backward, that is not finite. So a mask of
infinities, or what adds one, is no such op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...passes.local.localize import MADE_BY
from ...planner.graph import Node


class Found(NamedTuple):
    """An op, and the micro-batch in which it made the value."""

    op: str
    microbatch: int


class OpCheck:
    """What was found in one stage's blocks; ``forward`` by the number of the run of a block."""

    def __init__(self, microbatch: Callable[[], int]) -> None:
        self._microbatch = microbatch
        self.forward: Found | None = None
        self.backward: Found | None = None

    def begin(self) -> None:
        """Forget what was found in the forward: the next block begins."""
        self.forward = None

    def checked(self, graph: fx.GraphModule) -> Callable[..., tuple[Tensor, ...]]:
        """What runs ``graph`` op by op."""

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            outputs: tuple[Tensor, ...] = _Checking(graph, self).run(*inputs)
            return tuple(outputs)

        return run

    def see(self, node: fx.Node, read: tuple[Any, ...], made: Any) -> None:
        """An op has run: what it read, and what it made."""
        microbatch = self._microbatch()
        is_bad = self.forward is None and not all(map(_is_finite, values_of(made)))
        if is_bad and all(map(_is_finite, values_of(read))):
            self.forward = Found(words(node), microbatch)
        for tensor in values_of(made):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                hook = partial(self._see_gradient, node, microbatch)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _see_gradient(self, node: fx.Node, microbatch: int, gradient: Tensor) -> None:
        if self.backward is None and not _is_finite(gradient):
            users = [words(user) for user in node.users if user.op != "output"]
            op = " or ".join(dict.fromkeys(users)) or f"what reads the result of {words(node)}"
            self.backward = Found(op, microbatch)


class _Checking(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, check: OpCheck) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self._check = check

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if n.op in ("call_function", "call_module", "call_method"):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self._check.see(n, (*args, *kwargs.values()), made)
        return made


def values_of(value: Any) -> Iterator[Any]:
    """The tensors and numbers in nested tuples and lists."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from values_of(part)
    elif isinstance(value, Tensor | float):
        yield value


def words(node: fx.Node) -> str:
    """An op in words: its name, the module path that called it, the user's file and line.

    Conversions between layouts, and ops that were compiled together, have only a name.
    """
    made_by = node.meta.get(MADE_BY)
    if not isinstance(made_by, Node):
        return str(node.name)
    places = ", ".join(part for part in (made_by.module, made_by.source) if part)
    return f"{made_by.op or made_by.name}{f' ({places})' if places else ''}"


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    return bool(torch.isfinite(value.detach()).all())
