"""Exchanges of rows that run beside other work, differentiably.

``send`` starts an exchange and ``arrived`` waits for it, so the exchange runs beside the work
between the two calls. In the backward ``arrived`` starts the exchange of the gradients and ``send``
waits for it: autograd runs the backward of later calls first, so the exchange runs beside the
backward of the same work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .collectives import Parts, Rank, UnderWay


@dataclass(slots=True, eq=False)
class Exchange:
    """Exchange of rows among ranks along mesh axes ``axes`` together, or of their gradients in the
    backward. ``under_way`` is the one that was started and not yet waited for; ``token`` is an
    empty tensor that stands for the rows in autograd until they have arrived."""

    rank: Rank
    parts: Parts
    axes: tuple[int, ...]
    under_way: UnderWay | None = None
    token: Tensor | None = None

    def start(self, rows: Tensor, parts: Parts) -> None:
        assert self.under_way is None
        self.under_way = self.rank.communicator.exchange(rows.contiguous(), parts, self.axes)

    def wait(self) -> Tensor:
        under_way, self.under_way = self.under_way, None
        assert under_way is not None
        return under_way.wait()


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.start(rows, exchange.parts)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        ctx.exchange.start(gradient, ctx.exchange.parts.back())
        return gradient.new_empty(0), None


def send(rank: Rank, rows: Tensor, parts: Parts, axes: tuple[int, ...]) -> Exchange:
    """Start to send consecutive rows to the ranks along mesh axes ``axes`` together, as many to
    each as ``parts`` says; ``arrived`` returns the received rows."""
    exchange = Exchange(rank, parts, axes)
    exchange.token = _Send.apply(rows, exchange)  # type: ignore[no-untyped-call]
    return exchange


def arrived(exchange: Exchange) -> Tensor:
    """Wait for an exchange and return the received rows, in rank order."""
    token, exchange.token = exchange.token, None
    rows: Tensor = _Arrived.apply(token, exchange)  # type: ignore[no-untyped-call]
    return rows
