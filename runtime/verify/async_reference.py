"""One process that applies an asynchronous schedule's update rule: what its run is held to.

In: the plain model and global batches. Out: a ``Reference``, as of ``run_reference``. The rule is
taken from the papers, not from the action table. Of S stages, with w[s](v) the weights of stage
s after v updates of a step, the gradient of update u, counted from 0, is taken at

=============  =====================================================================
pipedream      w[s](max(0, u - (S - 1 - s)))
pipedream-2bw  w[s](max(0, u - 1))
ampnet         the forward at w[s](max(0, u - (S - 1 - s))), the backward with w[s](u)
=============  =====================================================================

and makes w[s](u + 1) of w[s](u) by the optimizer. Sources: Harlap et al. 2018
(arXiv:1806.03377), section 3.3; Narayanan et al. 2021 (arXiv:2006.09503), section 3.1; Gaunt et
al. 2017 (arXiv:1705.09786), section 3, with the order of 1F1B. The pipeline drains at the end of
a step, so the next one begins with all updates made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ...cost_model.simulator.actions import Weights
from ...passes.ops.random_ops import step_key
from ...passes.tracing.counter_random import counter_random
from ..update.optimizer import BuildOptimizer, built
from .reference import Batch, Reference

if TYPE_CHECKING:
    from ..step.trainer import Trainer


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """What a schedule does to the weights; ``stage_of`` are the stages of parameters by name."""

    weights: Weights
    num_updates: int
    num_stages: int
    stage_of: Mapping[str, int]

    def forward_version(self, name: str, update: int) -> int:
        """How many updates the weights have that a parameter has in the forward."""
        is_buffered = self.weights == "double-buffered"
        delay = 1 if is_buffered else self.num_stages - 1 - self.stage_of.get(name, 0)
        return max(0, update - delay)

    def backward_version(self, name: str, update: int) -> int:
        return update if self.weights == "latest" else self.forward_version(name, update)


def update_rule(trainer: Trainer) -> UpdateRule | None:
    """What the asynchronous schedule of a trainer does to the weights; None for others."""
    schedule, plan = trainer.schedule, trainer.plan
    if not schedule.is_asynchronous:
        return None
    blocks = iter(trainer.program.blocks.blocks)
    stage_of: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        for block in itertools.islice(blocks, len(stage.blocks)):
            stage_of.update(dict.fromkeys(block.parameters, index))
    count = plan.num_microbatches // schedule.per_update
    return UpdateRule(schedule.weights, count, len(plan.stages), stage_of)


def run_replay(
    model: nn.Module,
    batches: Sequence[Batch],
    rule: UpdateRule,
    *,
    loss: Callable[[nn.Module, Batch], Tensor],
    build_optimizer: BuildOptimizer,
    seed: int = 0,
    split: Callable[[Batch], Sequence[Batch]] = lambda batch: (batch,),
    random_dims: Mapping[int, int] | None = None,
) -> Reference:
    """Train ``model`` by ``rule``, a step per batch, on its own device.

    Arguments as of ``run_reference``; ``split`` cuts a batch into as many equal parts for each
    update. ``gradients`` are those of the first step's last update.
    """
    replay = _Replay(model, rule, loss, build_optimizer, random_dims)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        losses.append(replay.step(split(batch), step_key(seed, step)))
        gradients = gradients or replay.gradients()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return Reference(tuple(losses), gradients, weights, buffers)


class _Replay:
    def __init__(
        self,
        model: nn.Module,
        rule: UpdateRule,
        loss: Callable[[nn.Module, Batch], Tensor],
        build_optimizer: BuildOptimizer,
        random_dims: Mapping[int, int] | None,
    ) -> None:
        self._model, self._rule, self._loss = model, rule, loss
        self._random_dims = random_dims
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._optimizer = built(build_optimizer, self._parameters.items())

    def step(self, parts: Sequence[Batch], key: int) -> float:
        """All updates of a step; the mean of the parts' losses."""
        rule, total = self._rule, 0.0
        each = len(parts) // rule.num_updates
        history = {0: self._copies()}
        for update in range(rule.num_updates):
            self._optimizer.zero_grad(set_to_none=True)
            for index in range(update * each, (update + 1) * each):
                self._bring(history, rule.forward_version, update)
                with counter_random(key, microbatch=index, batch_dims=self._random_dims):
                    value = self._loss(self._model, parts[index]) / each
                self._bring(history, rule.backward_version, update)
                value.backward()  # type: ignore[no-untyped-call]
                total += float(value.detach()) / rule.num_updates
            self._bring(history, lambda name, made: made, update)
            self._optimizer.step()
            history[update + 1] = self._copies()
            history.pop(update - rule.num_stages, None)
        return total

    def gradients(self) -> dict[str, Tensor]:
        """Of the last update."""
        return {
            name: p.grad.detach().clone()
            for name, p in self._parameters.items()
            if p.grad is not None
        }

    def _copies(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._parameters.items()}

    def _bring(
        self,
        history: Mapping[int, Mapping[str, Tensor]],
        version: Callable[[str, int], int],
        update: int,
    ) -> None:
        """Writes a version over the weights, unseen by autograd: a backward reads what is there."""
        for name, parameter in self._parameters.items():
            parameter.data.copy_(history[version(name, update)][name])
