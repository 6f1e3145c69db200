"""Results of a step that are still on their way: who reads one waits for it, nobody else.

In: the collective that brings a number to every rank, under way. Out: a tensor that waits for
it when it is read. So a step has no wait for all ranks: the first stage begins the next step
while the last one's loss travels.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .watchdog import BETWEEN_STEPS


class Arrival:
    """Numbers that are sent to every rank; ``value`` waits for all of them and sums them."""

    def __init__(
        self,
        parts: Sequence[Tensor],
        works: Sequence[dist.Work | None],
        *,
        tell: Callable[[], None] | None = None,
        told: Callable[[], None] | None = None,
    ) -> None:
        """``tell`` is called before a wait, ``told`` after it."""
        self._parts = tuple(parts)
        self._works = [work for work in works if work is not None]
        self._tell, self._told = tell, told

    def value(self) -> Tensor:
        """The sum of the parts, once they are here."""
        self.end()
        first, *others = self._parts
        return sum(others, start=first)

    def end(self) -> None:
        """Waits until all has arrived, whoever reads it."""
        if not self._works:
            return
        if self._tell is not None:
            self._tell()
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._told is not None:
            self._told()


class Pending(Protocol):
    """A tensor's value, which is made or waited for when it is first read."""

    def value(self) -> Tensor: ...


class ArrivingTensor(Tensor):
    """A tensor whose value comes later: the first use of any kind waits for it.

    What is made of it is an ordinary tensor.
    """

    arrival: Pending

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = {name: _arrived(value) for name, value in (kwargs or {}).items()}
        return function(*(_arrived(value) for value in args), **named)


def arriving(arrival: Pending, like: Tensor) -> Tensor:
    """A tensor, on the device of ``like``, that waits for ``arrival`` when it is used."""
    tensor = like.detach().as_subclass(ArrivingTensor)
    tensor.arrival = arrival
    return tensor


def shared_sum(
    loss: Tensor | None,
    sources: Sequence[int],
    *,
    device: torch.device,
    progress: Callable[[str, tuple[int, ...]], None] | None = None,
) -> Tensor:
    """The sum of the parts of a loss that the ranks ``sources`` have, on every rank.

    ``loss`` is this rank's part, None where it has none. All ranks call it; it returns at once.
    """
    parts: list[Tensor] = []
    works: list[dist.Work | None] = []
    for source in sources:
        part = torch.zeros((), dtype=torch.float64, device=device)
        if loss is not None:
            part.copy_(loss.detach())
        parts.append(part)
        works.append(dist.broadcast(part, src=source, async_op=True))
    others = tuple(source for source in sources if source != dist.get_rank())
    names = " and ".join(f"rank {source}" for source in others)
    words = f"waiting for the loss of {names}" if names else "waiting until the loss has gone"
    arrival = Arrival(parts, works)
    if progress is not None:
        tell, told = partial(progress, words, others), partial(progress, BETWEEN_STEPS, ())
        arrival = Arrival(parts, works, tell=tell, told=told)
    end_before_exit("loss", arrival)
    return arriving(arrival, parts[0])


def _arrived(value: Any) -> Any:
    """``value`` with the tensors in it that were on their way."""
    if isinstance(value, ArrivingTensor):
        return value.arrival.value()
    if type(value) in (list, tuple):
        return type(value)(_arrived(part) for part in value)
    return value


def end_before_exit(kind: str, arrival: Arrival) -> None:
    """A collective that nobody waits for until the end would abort the process, in gloo's threads.

    The one of the same ``kind`` before is ended here: by now every rank that this one exchanges
    messages with has begun it, as it has sent what belongs to a later step.
    """
    if not _LATEST:
        atexit.register(_end_all)
    if kind in _LATEST:
        _LATEST[kind].end()
    _LATEST[kind] = arrival


def _end_all() -> None:
    for arrival in _LATEST.values():
        arrival.end()


_LATEST: dict[str, Arrival] = {}
"""The last step's, of any trainer."""
