"""Steps of a plain model on one device: what the runs of its plans are held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autoparallel.passes.capture.export import call_model, find_loss
from autoparallel.passes.initialization.deferred_init import plain_build
from autoparallel.passes.programs.program import Program
from autoparallel.passes.tracing.modes import promote_to_float64
from autoparallel.runtime.verify.reference import Reference, run_reference
from autoparallel.target.target import Target

Batches = Sequence[Mapping[str, torch.Tensor]]


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW, for the plan's run and for one device."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def loss_of(target: Target, program: Program) -> Callable[[torch.nn.Module, Any], torch.Tensor]:
    """The loss of the plain module on a batch by the names that plans have for its tensors."""

    def loss(module: torch.nn.Module, inputs: Any) -> torch.Tensor:
        batch = program.batch(inputs)
        return find_loss(call_model(module, batch), batch, target.loss_fn)

    return loss


def reference_of(target: Target, program: Program, batches: Batches, **how: Any) -> Reference:
    """A step of the plain module per batch, in float64; ``how`` as ``run_reference`` takes it."""
    module = plain_build(target.build_model, 0).double()
    loss = loss_of(target, program)
    with promote_to_float64():
        return run_reference(module, batches, loss=loss, build_optimizer=build_optimizer, **how)
