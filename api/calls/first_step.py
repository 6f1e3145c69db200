"""Comparison of a run's first step with the model alone on one device.

In: a trainer before its first step, and the model. Out: a check that runs before the first batch.
If the user requested it and it is impossible, rank 0 says why.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from autoparallel.calls.form import PLANNED, Form
from autoparallel.calls.modes import in_modes_of_training
from autoparallel.passes.capture.export import call_model, find_loss
from autoparallel.passes.programs.outputs import differentiable_outputs
from autoparallel.runtime.data.batches import mark_inputs
from autoparallel.runtime.messages.shared_objects import share_value
from autoparallel.runtime.parameters.parameters import COMPUTE_DTYPES
from autoparallel.runtime.verify.first_step import check_first_step, is_quick

if TYPE_CHECKING:
    from autoparallel.calls.following import LiveCaptures
    from autoparallel.runtime.step.trainer import Trainer
    from autoparallel.target.target import Batch

VARIABLE = "AUTOPARALLEL_CHECK_FIRST_STEP"
"""Variable that turns the first step's comparison on (1) or off (0) if no option does."""


def compare_first_step(
    trainer: Trainer,
    following: LiveCaptures,
    model: Callable[[], nn.Module],
    *,
    asked: bool | None,
    run: Callable[[Mapping[str, Tensor]], Tensor] | None = None,
    form: Callable[[], Form] = lambda: PLANNED,
    as_plain: Callable[[], AbstractContextManager[Any]] = nullcontext,
    done: Callable[[], None] = lambda: None,
) -> None:
    """Make a trainer compare its first step with a step of ``model()``, which gets its weights.

    ``following`` holds the model's captured programs. ``run`` runs a step by the plan and returns
    the loss; ``form`` returns the ``Form`` of its call; inside ``as_plain()`` a call of the model
    runs its own forward. ``done`` is called after the comparison. ``asked`` None compares only a
    step that takes one device at most 10 s. Collective over all ranks.
    """
    if asked is None and VARIABLE in os.environ:
        asked = os.environ[VARIABLE] == "1"
    if asked is None:
        asked = share_value(is_quick(trainer.plan, trainer.program.graph))
    if not asked:
        return
    alone = cache(model)

    def check(given: Mapping[str, Tensor]) -> None:
        inputs = mark_inputs({name: value.detach() for name, value in given.items()}, given)
        is_asynchronous = trainer.schedule.is_asynchronous
        whole = None if is_asynchronous else trainer.runner.batches.whole(inputs)
        if is_asynchronous:
            why = "an asynchronous schedule updates weights within a step"
        elif whole is None:
            why = "the batch has fewer rows than planned"
        else:
            # A loss is compared on the rows that each rank has, but outputs on all rows: a loss of
            # a rank's own outputs would have other gradients.
            step = partial(trainer.runner.backward, inputs) if run is None else partial(run, whole)
            with in_modes_of_training(), following.undo_changes():
                why = check_first_step(
                    trainer,
                    whole,
                    step,
                    following.once(_plain_loss(trainer, following, alone, form, as_plain)),
                    lambda: dict(alone().named_buffers()),
                )
            done()
        if why and asked and trainer.model.rank == 0:
            sys.stderr.write(f"autoparallel: the first step is not compared: {why}\n")

    trainer.runner.before_first = check


def _plain_loss(
    trainer: Trainer,
    following: LiveCaptures,
    model: Callable[[], nn.Module],
    form: Callable[[], Form],
    as_plain: Callable[[], AbstractContextManager[Any]],
) -> Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]:
    """Return a function that computes the loss of the model on one device, without the plan.

    Its arguments are the weights and the program's inputs, by name. Without a loss it returns a
    weighted sum of the outputs.
    """
    program, tied = trainer.program, trainer.program.graph.tied
    dtype = COMPUTE_DTYPES[trainer.plan.model.precision]

    def plain(weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        tensors = {name: _cast(value, dtype) for name, value in inputs.items()}
        batch = following.as_called(program.batch(tensors), form())
        given = {name: _cast(value, dtype) for name, value in weights.items()}
        # A stage that lacks a tied weight holds nothing under any of its names.
        given |= {name: given[first] for name, first in tied.items() if first in given}
        given = {f"model.{name}": value for name, value in given.items()}
        with as_plain():
            outputs = functional_call(_Alone(model()), given, (batch,))
        if program.returned:
            return projection(differentiable_outputs(outputs))
        return find_loss(outputs, batch, following.loss_fn)

    return plain


class _Alone(nn.Module):
    """Module whose forward takes a batch and calls ``model`` with the batch's entries."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Any:
        return call_model(self.model, batch)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def projection(outputs: Sequence[Tensor]) -> Tensor:
    """Return a weighted sum of all elements of a model's outputs, a scalar in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        flat = torch.view_as_real(output) if output.is_complex() else output
        flat = flat.reshape(-1).to(torch.float64)
        weights = torch.cos(torch.arange(flat.numel(), dtype=torch.float64, device=flat.device))
        total = total.to(flat.device) + (flat * weights).sum() / math.sqrt(max(flat.numel(), 1))
    return total
