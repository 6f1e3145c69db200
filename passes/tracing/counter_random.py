"""The mode that turns a forward's random calls into counted calls (see ``random_ops``).

Dropout in all its forms, attention with dropout and the functions of ``distributions`` are replaced
and numbered in call order. A model is captured under it, so that the graph's nodes carry their
numbers, and one device's reference runs under it, so that it draws the same numbers.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...planner.errors import CaptureError
from ...planner.graph.graph import Graph
from ..ops import random_ops  # registers the ops
from .distributions import DISTRIBUTIONS
from .locate import uncounted_error, user_source

_MULTIHEAD = functional.multi_head_attention_forward
_DROPOUT = functional.dropout
_ATTENTION = functional.scaled_dot_product_attention


class counter_random(TorchFunctionMode):  # noqa: N801
    """Mode that replaces torch's random calls by counter-based ones, numbered from 0 in a forward.
    ``key`` is the training step's (``step_key``), ``microbatch`` the number of the forward's
    micro-batch. ``batch_dims`` maps the number of a random call to its tensor's batch dimension."""

    def __init__(
        self, key: int = 0, *, microbatch: int = 0, batch_dims: Mapping[int, int] | None = None
    ) -> None:
        super().__init__()
        self.key = key
        self.microbatch = microbatch
        self.batch_dims = batch_dims or {}
        self.count = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            raise _refused(f"{func.__name__} with a generator")
        replacement = _REPLACEMENTS.get(func)
        if replacement is None:
            return func(*args, **kwargs)
        if kwargs.get("out") is not None:
            raise _refused(f"{func.__name__} with out=")
        return replacement(self, *args, **kwargs)

    def dropped(self, x: Tensor, p: float) -> Tensor:
        """Return the dropout of ``x`` at rate ``p``, as the forward's next random call."""
        result: Tensor = torch.ops.autoparallel.counter_dropout(x, p, **self._next(x))
        return result

    def uniform(self, like: Tensor) -> Tensor:
        """Return random numbers in [0, 1) like ``like``, as the forward's next random call."""
        if like.is_complex():
            raise _refused("a function of complex numbers")
        options = self._next(like)
        result: Tensor = torch.ops.autoparallel.counter_uniform(like.detach(), **options)
        return result

    def _next(self, x: Tensor) -> dict[str, Any]:
        number, self.count = self.count, self.count + 1
        options: dict[str, Any] = {"number": number, "key": self.key}
        if self.microbatch and number in self.batch_dims:
            dim = self.batch_dims[number]
            options["start"] = [0] * x.dim()
            options["start"][dim] = self.microbatch * x.shape[dim]
        return options


def _refused(function: str) -> CaptureError:
    """Return error AP211 for a random ``function`` that cannot be made counter-based, at the user's
    current line."""
    return uncounted_error(function, user_source("".join(traceback.format_stack())))


def batch_dims(graph: Graph) -> dict[int, int]:
    """Return the batch dimension of each random call of a graph, by the call's number."""
    return {
        node.kwargs["number"]: dim
        for node in graph
        if node.op in (random_ops.DROPOUT, random_ops.UNIFORM)
        for dim in graph.batch_dims.get(node.name, ())
        if dim is not None
    }


def _dropout(
    mode: counter_random,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool = True,
) -> Tensor:
    if not (training and train and p):
        return _DROPOUT(input, p, False)
    dropped = mode.dropped(input, p)
    return input.copy_(dropped) if inplace else dropped


def _channels(batched_dims: int | None) -> Callable[..., Tensor]:
    """Return a function for dropout of whole channels; an input with fewer dimensions than
    ``batched_dims`` is a single row without batch dimension."""

    def drop(
        mode: counter_random,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool = True,
    ) -> Tensor:
        if not (training and train and p):
            return _DROPOUT(input, p, False)
        kept = 1 if batched_dims is not None and input.dim() < batched_dims else 2
        shape = (*input.shape[:kept], *(1,) * (input.dim() - kept))
        ones = torch.ones(shape, dtype=input.dtype, device=input.device)
        kept_channels = mode.dropped(ones, p)
        return input.mul_(kept_channels) if inplace else input * kept_channels

    return drop


def _attention(
    mode: counter_random,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Compute attention; if it has dropout, by separate ops, with counter-based dropout of the
    attention weights."""
    if not dropout_p:
        return _ATTENTION(query, key, value, attn_mask, 0.0, is_causal, **options)
    if options.get("enable_gqa"):
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scale = options.get("scale")
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        rows, columns = scores.shape[-2:]
        attn_mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return mode.dropped(torch.softmax(scores, -1), dropout_p) @ value


def _multihead(mode: counter_random, *args: Any, **kwargs: Any) -> Any:
    """Call the function behind ``nn.MultiheadAttention`` with counter-based replacements of the
    dropout and attention that it calls, as no mode sees these inner calls."""
    with _patched(
        functional,
        dropout=lambda *a, **k: _dropout(mode, *a, **k),
        scaled_dot_product_attention=lambda *a, **k: _attention(mode, *a, **k),
    ):
        return _MULTIHEAD(*args, **kwargs)


@contextmanager
def _patched(module: Any, **changes: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


_REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    functional.dropout: _dropout,
    torch.dropout: _dropout,
    functional.dropout1d: _channels(3),
    functional.dropout2d: _channels(None),
    functional.dropout3d: _channels(5),
    torch.feature_dropout: _channels(None),
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _multihead,
    **DISTRIBUTIONS,
}
