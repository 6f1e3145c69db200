"""The update of a step, made while the next step's forward runs.

In: a step's sums of gradients, started in the plan's order ("priority"), and the optimizer. Out:
before each block of the next forward the block's own sums are waited for, and its parameters are
updated; other parameters follow before their blocks. Each parameter gets the same gradient, the
same options and the same step as if all were updated at the end of the step, so the weights are
equal bit for bit.

That is so only where a parameter's update needs nothing of other parameters: not where gradients
are clipped by their norm or a step may be skipped (``why_not_deferred``). A caller that reads
parameters, optimizer states or the gradient's norm otherwise calls ``settle`` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from .gradients import Bucket, GradientReducer
from .optimizer import ELEMENTWISE, sum_of_all_squares
from .update import UpdateOptions

PER_PARAMETER = (*ELEMENTWISE, Adagrad)
"""Optimizers whose update of a parameter reads only the parameter's own gradient and state."""


def why_not_deferred(options: UpdateOptions, optimizer: Optimizer) -> str:
    """Return why updates cannot be deferred to the next step's forward; "" if they can."""
    if options != UpdateOptions(accumulate=options.accumulate):
        return "clipping, scaling of the loss and on_nan need all gradients before the update"
    if type(optimizer) not in PER_PARAMETER:
        return f"{type(optimizer).__name__} may need all gradients at once"
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    if any(len(own) > 1 for own in hooks):
        return "the optimizer has hooks, which are called once per step"
    return ""


class DeferredUpdate:
    """The update of one stage on one rank, made in the next step's forward, block by block. The
    rank must hold every parameter whole."""

    def __init__(
        self,
        reducer: GradientReducer,
        optimizer: Optimizer,
        *,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare deferred updates of the parameters that ``reducer`` sums; ``tell`` is called
        before each wait, to inform a watchdog."""
        assert reducer.can_defer
        self._reducer, self._optimizer, self._tell = reducer, optimizer, tell
        self._left: list[Bucket] = []
        self._options: list[dict[str, Any]] = []
        self.norm = DeferredNorm(self)

    def begin(self) -> None:
        """Defer the update of a step whose backward is done and whose gradient sums are running."""
        self.settle()
        order = {id(part.bucket): part.bucket for part in self._reducer.parts}
        self._left = list(order.values())
        self._options = [_options(group) for group in self._optimizer.param_groups]
        self.norm = DeferredNorm(self)

    def before_block(self, block: int) -> None:
        """Update the parameters that the forward reads in blocks up to and with number
        ``block``."""
        for bucket in [each for each in self._left if each.block <= block]:
            self._update(bucket)

    def settle(self) -> None:
        """Update all parameters that are not updated yet."""
        for bucket in list(self._left):
            self._update(bucket)

    def _update(self, bucket: Bucket) -> None:
        self._left.remove(bucket)
        self._tell()
        self._reducer.wait(bucket)
        own = bucket.with_gradient
        if own:
            with torch.no_grad():
                slots = [bucket.slots[parameter.name].detach() for parameter in own]
            self.norm.add(sum_of_all_squares(slots, slots[0].device))
            for parameter, slot in zip(own, slots, strict=True):
                parameter.gradient = slot
                parameter.publish()
            with self._as_of_the_step():
                self._optimizer.step()
            for parameter in own:
                parameter.zero_grad()
                parameter.refresh()

    @contextmanager
    def _as_of_the_step(self) -> Iterator[None]:
        """Context in which the optimizer has its options (learning rate etc.) of the deferred step:
        a scheduler may already have set the options of the next step."""
        groups = self._optimizer.param_groups
        now = [_options(group) for group in groups]
        for group, options in zip(groups, self._options, strict=True):
            group.update(options)
        try:
            yield
        finally:
            for group, options in zip(groups, now, strict=True):
                group.update(options)


class DeferredNorm:
    """Norm of the gradient under deferred updates; a read of it finishes all gradient sums."""

    def __init__(self, update: DeferredUpdate) -> None:
        self._update = update
        self._squares: Tensor | None = None

    def add(self, squares: Tensor) -> None:
        self._squares = squares if self._squares is None else self._squares + squares

    def value(self) -> Tensor:
        if self._update.norm is self:
            self._update.settle()
        squares = torch.zeros((), dtype=torch.float64) if self._squares is None else self._squares
        return squares.sqrt()

    host_value = value


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Copy a parameter group's options, also tensors, which a scheduler may change in place."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
