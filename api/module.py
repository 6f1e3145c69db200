"""A module that trains by a plan: what ``parallelize`` makes of a model under torchrun.

Its parameters are this rank's shards, as DTensors under the model's own names, so that
optimizers, clipping and checkpoints are the stock ones. Called with the global batch, it
returns the loss; ``backward()`` on it leaves every shard's complete gradient in ``grad``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planning import PlanOptions
from autoparallel.targets import LossFn, Target

if TYPE_CHECKING:
    from autoparallel.runtime.trainer import Trainer


JOINED: WeakSet[ParallelModule] = WeakSet()
"""The modules of this process that have a plan."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a module is planned from. ``rng_state`` is the generator's where the model is yet
    to be built; None where ``target`` returns a model that has its weights."""

    target: Target
    cluster: str
    options: PlanOptions
    rng_state: Tensor | None = None


class ParallelModule(nn.Module):
    """A model under torchrun. It is planned when first used, by all ranks together.

    For a plan with no pipeline the ordinary loop works::

        optimizer = torch.optim.AdamW(model.parameters())
        loss = model(**batch)        # the global batch, the same on every rank
        loss.backward()
        optimizer.step()

    ``autoparallel.Step`` works for every plan.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job: Job | None = job
        self._trainer: Trainer | None = None

    def join(
        self,
        *,
        plan: Plan | None = None,
        loss_fn: LossFn | None = None,
        build_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        timeout_seconds: float | None = None,
        buckets: Sequence[int] = (),
    ) -> Trainer:
        """Plan (unless ``plan`` is given) and become this rank's shards. Collective; once.

        From then on the process is watched: see ``runtime.watched_script``.

        Raises UsageError AP145 where a module that has a plan is given another or a loss.
        """
        from autoparallel.joining import join_training
        from autoparallel.runtime.watched_script import watch_script

        self._tell = watch_script(os.environ, timeout_seconds).watchdog.progress
        if self._trainer is not None:
            if plan is not None or loss_fn is not None or buckets:
                raise UsageError(
                    "AP145",
                    "this module is planned already",
                    why="it was called, or its parameters were read, before",
                    fix="give loss_fn and the plan to parallelize, or make the Step first",
                )
            if build_optimizer is not None:
                self._trainer.use_optimizer(build_optimizer)
            return self._trainer
        assert self._job is not None
        job = self._job
        if loss_fn is not None:
            job = replace(job, target=replace(job.target, loss_fn=loss_fn))
        self._trainer = join_training(job, plan, build_optimizer, self._tell, buckets)
        self._job = None
        for name, parameter in self._trainer.parameters.items():
            _register(self, name, parameter.master)
        for name, buffer in self._trainer.changing_buffers().items():
            _register(self, name, buffer)
        JOINED.add(self)
        return self._trainer

    @property
    def plan(self) -> Plan:
        """The plan that this module trains by."""
        return self.join().plan

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, under the model's own names."""
        self.join()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's shards, for ``torch.distributed.checkpoint``."""
        self.join()
        return super().state_dict(*args, **kwargs)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The loss of the global batch, given as it is to the model (and the loss).

        Raises UsageError AP146 for a plan with a pipeline, whose backwards start before its
        last forward is done.
        """
        trainer = self.join()
        if trainer.plan.has_pipeline:
            raise UsageError(
                "AP146",
                "a plan with a pipeline has no loss to call backward on",
                why="its backwards start while other micro-batches are still in their forward",
                fix="step = autoparallel.Step(model); loss = step(batch), "
                'or plan without one: parallel="pp=1"',
            )
        batch: Any = kwargs if kwargs else args
        if args and kwargs:
            raise UsageError(
                "AP147",
                "the batch is given partly by position and partly by name",
                fix="give all of it by name: model(**batch)",
            )
        (executor,) = trainer.executors.values()
        return executor.differentiable_loss(trainer.fitted(trainer.inputs(batch)), self._tell)


def _register(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Register under a dotted name, making the modules on the way."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor)
