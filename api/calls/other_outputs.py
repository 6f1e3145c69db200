"""Outputs that the plan's program does not compute: they are computed at their first use.

In: a call of a model that trains by a plan. Out: lazy tensors. When they are read, the model's own
forward computes them with the random numbers of the program's last forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from autoparallel.passes.programs.outputs import OutputForm, output_tensors
from autoparallel.passes.tracing.counter_random import batch_dims, counter_random
from autoparallel.planner.dims.batch import meeting, meeting_text
from autoparallel.planner.errors import UsageError
from autoparallel.runtime.messages.pending_results import arriving_tensor

if TYPE_CHECKING:
    from autoparallel.adoption.state import ParallelState


def merge_outputs(
    made: Sequence[Tensor], form: OutputForm, again: OtherOutputs
) -> Callable[[int], Tensor]:
    """Return a function from the index of a tensor output to the output. Differentiable outputs are
    ``made`` already; ``again`` computes the others at their first use."""
    tensors = [leaf for leaf in form.leaves if leaf.kind == "tensor"]
    places = [at for at, leaf in enumerate(tensors) if leaf.is_differentiable]
    found = dict(zip(places, made, strict=True))
    return lambda at: found[at] if at in found else again.leaf(at)


class OtherOutputs:
    """Outputs besides the loss, which the model's own forward computes at their first use.

    The forward uses the random numbers of the program's last forward. The first use must come
    before the weights or the call's arguments change.
    """

    def __init__(
        self,
        adopted: ParallelState,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        is_share: bool,
    ) -> None:
        assert adopted.calls is not None
        assert adopted.outputs is not None
        self._adopted, self._form = adopted, adopted.outputs
        self._args, self._kwargs = args, dict(kwargs)
        self._key = adopted.calls.step_key
        self._versions = self._weight_versions()
        self._is_share = is_share
        self._made: list[Tensor] | None = None

    def leaf(self, position: int) -> Tensor:
        """Return a tensor, computed at its first use, for tensor output number ``position``."""
        return arriving_tensor(_Leaf(self, position), torch.empty(0))

    def value(self, position: int) -> Tensor:
        if self._made is None:
            self._made = self._run()
        return self._made[position]

    def _weight_versions(self) -> list[int]:
        """Return the version counters of the weights and of the call's arguments."""
        parameters = self._adopted.joined.model.parameters.values()
        given = tree_flatten((self._args, self._kwargs))[0]
        return [
            *(parameter.local._version for parameter in parameters),
            *(
                value._version
                for value in given
                if isinstance(value, Tensor) and not value.is_inference()
            ),
        ]

    def _run(self) -> list[Tensor]:
        trainer = self._adopted.joined
        if self._weight_versions() != self._versions:
            raise UsageError(
                "AP927",
                "an output of the model is used after its weights or its inputs have changed",
                why="outputs other than the loss are computed only when they are used",
                fix="use them before optimizer.step()",
            )
        graph, count = trainer.program.graph, trainer.plan.num_microbatches
        if self._is_share and batch_dims(graph):
            raise UsageError(
                "AP928",
                "outputs other than the loss cannot be computed for a part of the batch",
                why="their random numbers depend on the whole batch",
                fix="give every rank the global batch where its outputs are used",
            )
        if count > 1 and (node := meeting(graph)):
            raise UsageError(
                "AP928",
                "outputs other than the loss cannot be computed under this plan",
                why=f"{meeting_text(node)}, and the plan has {count} micro-batches",
                fix='plan with parallel="microbatches=1"',
            )
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(counter_random(self._key, batch_dims=batch_dims(graph)))
            outputs = self._adopted.run_own(self._args, self._kwargs, keeps_buffers=False)
        form = self._form
        taken = next((at for at, leaf in enumerate(form.leaves) if leaf.kind == "loss"), 0)
        refuse = refuse_gradient(
            "AP928",
            "a gradient through an output of the model other than its loss",
            f"output {taken} of {len(form.leaves)}, a scalar, is taken for the loss, and a model "
            "that returns its loss is differentiated by that alone",
            "if the script computes the loss from the outputs, parallelize(..., loss=None); else "
            "add the term to the loss in the model, or parallelize with loss_fn",
        )
        return [refuse(value) for value in output_tensors(outputs, form)]


@dataclass(frozen=True, slots=True)
class _Leaf:
    again: OtherOutputs
    position: int

    def value(self) -> Tensor:
        return self.again.value(self.position)

    def host_value(self) -> Tensor:
        return self.value()


class _RefuseGradient(torch.autograd.Function):
    """Identity function whose backward raises an error."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, error: UsageError) -> Tensor:
        ctx.error = error
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error


def refuse_gradient(code: str, what: str, why: str, fix: str) -> Callable[[Tensor], Tensor]:
    """Return a function on tensors: the backward through its result raises UsageError ``code``."""
    error = UsageError(code, what, why=why, fix=fix)

    def refuse(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        with torch.enable_grad():
            anchor = torch.zeros((), requires_grad=True)
            refused: Tensor = _RefuseGradient.apply(anchor, tensor, error)  # type: ignore[no-untyped-call]
        return refused

    return refuse
