"""A piece of the weights on a server: the elements that it holds of one block, and their optimizer.

In: gradients, by iteration and part of the batch. Out: weights at an iteration. Under bsp the
gradients of an iteration are summed in the order of the parts, so the sum does not depend on which
comes first, and the weights before the last update stay: whoever takes over the part of a lost
worker computes with them. Otherwise each gradient is an update of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...cost_model.simulator.consistency import Clocks
from ...planner.errors import UsageError
from ...planner.server_shards import Shard
from ..update.optimizer import ELEMENTWISE, BuildOptimizer, built, default_optimizer


class ServedPiece:
    """``weights`` are the elements of ``shards``, one after the other."""

    def __init__(
        self,
        weights: Tensor,
        shards: Sequence[Shard],
        clocks: Clocks,
        *,
        shapes: Mapping[str, torch.Size],
        build: BuildOptimizer | None,
        optimizer: str,
    ) -> None:
        """``shapes`` are those of all parameters that are trained. Raises as
        ``served_optimizer``."""
        self.weights, self.clocks = weights, clocks
        self.previous = weights.clone() if clocks.bound == 0 else weights
        self.gradient = torch.zeros_like(weights)
        self.version = 0
        self._parts = clocks.workers
        self._pending: dict[int, Tensor] = {}
        slices: dict[str, list[nn.Parameter]] = {}
        start = 0
        for shard in shards:
            stop = start + shard.size
            part = nn.Parameter(weights[start:stop])
            part.grad = self.gradient[start:stop]
            slices.setdefault(shard.parameter, []).append(part)
            start = stop
        self._optimizer = served_optimizer(slices, shapes, build, name=optimizer)

    def push(self, clock: int, part: int, gradient: Tensor) -> bool:
        """Take the gradient of a part of iteration ``clock``; False for one that it had before."""
        if part in self.clocks.workers:  # a lost worker's push may still come from its home
            if clock != self.clocks.clock(part):
                return False
            self.clocks.push(part)
        if self.clocks.bound != 0:
            self._update((gradient,))
            return True
        self._pending[part] = gradient
        if len(self._pending) == len(self._parts):
            self.previous.copy_(self.weights)
            self._update([self._pending[each] for each in self._parts])
            self._pending.clear()
        return True

    def _update(self, gradients: Sequence[Tensor]) -> None:
        self.gradient.copy_(gradients[0])
        for other in gradients[1:]:
            self.gradient.add_(other)
        self._optimizer.step()
        self.version += 1

    def is_ready(self, clock: int, worker: int) -> bool:
        """Whether a worker may begin iteration ``clock`` with these weights.

        Pulls and pushes come by channels of their own: the worker's last push is waited for, as
        its clock is late until then.
        """
        if self.clocks.bound == 0:
            return self.version >= clock
        return self.clocks.may_begin(worker) and self.clocks.clock(worker) >= clock

    def read(self, clock: int) -> Tensor:
        """Under bsp the weights of iteration ``clock``, else the newest."""
        if self.clocks.bound == 0 and clock < self.version:
            assert clock == self.version - 1
            return self.previous
        return self.weights


def served_optimizer(
    slices: Mapping[str, Sequence[nn.Parameter]],
    shapes: Mapping[str, torch.Size],
    build: BuildOptimizer | None,
    *,
    name: str,
) -> Optimizer:
    """The optimizer of parts of parameters, in the groups that the whole parameters are in.

    It is made of stand-ins for all parameters, in their shapes but without memory, which are then
    replaced by the parts that are held. Raises UsageError AP955 for optimizers that do not step
    each element by itself.
    """
    first = next(part for parts in slices.values() for part in parts)
    stand_ins = {
        each: nn.Parameter(torch.zeros((), dtype=first.dtype).expand(shape))
        for each, shape in shapes.items()
    }
    if build is None:
        optimizer = default_optimizer(stand_ins.values(), name)
    else:
        optimizer = built(build, stand_ins.items())
    if type(optimizer) not in ELEMENTWISE:
        kinds = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise UsageError(
            "AP955", f"parameter servers cannot run the optimizer {type(optimizer).__name__}",
            why="a server holds parts of parameters, and only optimizers that step each element "
            "by itself do the same with parts as with whole parameters",
            where="build_optimizer", fix=f"one of {kinds}; or a plan without servers",
        )  # fmt: skip
    names = {id(parameter): each for each, parameter in stand_ins.items()}
    for group in optimizer.param_groups:
        held: Iterable[str] = [names[id(parameter)] for parameter in group["params"]]
        group["params"] = [part for each in held for part in slices.get(each, ())]
    return optimizer
