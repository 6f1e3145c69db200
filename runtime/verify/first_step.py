"""Comparison of a plan's first step with the plain model: loss, and norm of each gradient.

In: a trainer that has taken no step, the batch of its first step, and the plain model as a function
of weights. Out: the reason why nothing was compared, if any, or UsageError AP943 where the two
differ. The plan's step leaves nothing behind. Values that a program has built in and should not
have are found before it trains anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from ...passes.ops.collectives import local_tensor
from ...passes.ops.random_ops import step_key
from ...passes.tracing.counter_random import batch_dims, counter_random
from ...planner.errors import UsageError
from ...planner.graph.graph import Graph, Node
from ...planner.graph.layout import region_slices
from ...planner.ops.attention import is_attention
from ...planner.ops.attention_limits import is_packed, window_of
from ...planner.plan import Plan, Precision
from ..messages.shared_objects import on_first, share_value
from ..parameters.parameters import StageParameter
from ..parameters.stage import StageModule
from ..step.trainer import Trainer
from ..step.whole_weights import WholeWeights
from .reference import reference_split
from .verify import Piece, collect, collect_buffers

MOST_SECONDS = 10.0
"""Estimated time of the plain model's step above which it is run only if the user asks."""

MASKS = 4
"""Number of masks of all positions that a model writes for a window: causality, the window, both
together, and their copy for each sequence."""

TOLERANCES: dict[Precision, tuple[float, float, float]] = {
    "fp64": (1e-6, 1e-5, 1e-3),
    "fp32": (1e-3, 1e-2, 1e-3),
    "bf16": (5e-2, 2e-1, 5e-2),
    "fp16": (5e-2, 2e-1, 5e-2),
    "fp8": (5e-2, 2e-1, 5e-2),
}
"""Tolerances by precision: relative difference of the loss, relative difference of a gradient's
norm, and a floor.

A loss below the floor is compared relative to the floor, and a gradient's norm below that fraction
of the largest relative to the fraction: such small numbers are mostly rounding.
"""

Weights = Mapping[str, Tensor]
Inputs = Mapping[str, Tensor]
PlainLoss = Callable[[Weights, Inputs], Tensor]
"""Function from the plain model's weights and buffers by name, and a batch, to the loss."""


@dataclass(frozen=True, slots=True)
class FirstStep:
    """Results of a first step to compare: the loss, the norm of each parameter's gradient, and the
    norm of each buffer that the forward has changed."""

    loss: float
    norms: Mapping[str, float]
    buffers: Mapping[str, float]


def is_quick(plan: Plan, graph: Graph) -> bool:
    """Return whether, by the plan's prediction, one device can run the plan's step in
    ``MOST_SECONDS`` and in the memory that is free here. ``graph``: the captured model's, which
    lacks the masks of windows and documents that the model itself writes."""
    prediction, count = plan.prediction, len({d for s in plan.stages for d in s.devices})
    if prediction.step_seconds * count > MOST_SECONDS:
        return False
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
    else:
        free = psutil.virtual_memory().available // 2
    masks = (_mask_bytes(graph, node) for node in graph)
    return prediction.peak_memory_bytes * count + max(masks, default=0) < free


def _mask_bytes(graph: Graph, node: Node) -> int:
    """Return the bytes of an attention's mask, where the graph has a window or documents instead,
    and of the masks that it is made of."""
    if not (is_attention(node) and (window_of(node) or is_packed(node))):
        return 0
    query, key = (graph.spec(ref) for ref in node.inputs[:2])
    rows = graph.spec(node.inputs[3]).shape[0] if is_packed(node) else 1
    return MASKS * rows * query.shape[-2] * key.shape[-2]


def check_first_step(
    trainer: Trainer,
    inputs: Inputs,
    own: Callable[[], Tensor],
    plain: PlainLoss,
    buffers: Callable[[], Weights],
) -> str:
    """Compare the first step by the plan with the first step of the plain model, run on rank 0.

    ``own`` runs the plan's step on ``inputs``, the global batch, completes the gradients and
    returns the loss; ``plain`` computes the plain model's loss. ``buffers`` returns the plain
    model's buffers; it is called on rank 0. Returns the reason why nothing was compared, else "".
    Collective over all ranks.

    Raises UsageError AP943 where the two differ.
    """
    graph, key = trainer.program.graph, _next_key(trainer)
    whole = WholeWeights(trainer.model)
    weights = {name: whole.gather((name,), as_computed=False)[name].clone() for name in whole.names}

    fixed: dict[str, float] = {}

    def alone() -> FirstStep | str:
        try:
            own = {n: v for n, v in buffers().items() if n not in weights}
            for name, value in own.items():
                weights[name] = value.detach().clone()
                fixed[name] = float(value.abs().double().norm())
            return _plain_step(trainer, weights, inputs, plain, key)
        except Exception as error:  # noqa: BLE001 - of the model's own code; training goes on
            return f"the model alone ends with {type(error).__name__}: {error}"

    expected = on_first(alone)
    weights.clear()
    if why := share_value(expected if isinstance(expected, str) else ""):
        return why
    with _apart(trainer):
        loss = float(own())
        pieces = collect(trainer.model.all_parameters(), graph, _gradient)
        changed = collect_buffers(trainer, StageModule.next_buffer)

    def compared() -> None:
        assert isinstance(expected, FirstStep)
        found = FirstStep(
            loss,
            {name: _norm(held) for name, held in pieces.items()},
            {**fixed, **{name: _norm(held) for name, held in changed.items()}},
        )
        error = _difference(expected, found, trainer.plan.model.precision)
        if error is not None:
            raise error

    on_first(compared)
    return ""


def _gradient(parameter: StageParameter) -> Tensor | None:
    """Return this rank's part of a gradient, which a backward of the script's own loss has left
    with the optimizer's parameter."""
    own, given = parameter.gradient, parameter.master.grad
    return local_tensor(given) if own is None and given is not None else own


def _norm(pieces: Sequence[Piece]) -> float:
    """Return the norm of a whole tensor from ranks' parts of it, which may overlap."""
    regions = [region for region, _ in pieces]
    shape = [max(stop for _, stop in bounds) for bounds in zip(*regions, strict=True)]
    whole = pieces[0][1].new_zeros(shape)
    for region, value in pieces:
        whole[region_slices(region)] = value
    return float(whole.abs().double().norm())


def _plain_step(
    trainer: Trainer, weights: Weights, inputs: Inputs, plain: PlainLoss, key: int
) -> FirstStep:
    graph = trainer.program.graph
    trained = {node.name for node in graph.parameters if node.spec.requires_grad}
    leaves = {
        name: value.requires_grad_() if name in trained else value
        for name, value in weights.items()
    }
    parameters = {node.name for node in graph.parameters}
    before = {name: value.clone() for name, value in leaves.items() if name not in parameters}
    parts, total = reference_split(trainer.model.planned, inputs), 0.0
    with torch.enable_grad():
        for index, part in enumerate(parts):
            dims = batch_dims(graph)
            with counter_random(key, microbatch=index, batch_dims=dims):
                loss = plain(leaves, part) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    norms = {
        name: float(leaves[name].grad.norm()) if leaves[name].grad is not None else 0.0  # type: ignore[union-attr]
        for name in trained & leaves.keys()
    }
    buffers = {
        name: float(leaves[name].abs().double().norm())
        for name, value in before.items()
        if not torch.equal(leaves[name], value)  # equal if the model assigns a new tensor
    }
    return FirstStep(total, norms, buffers)


def _difference(plain: FirstStep, own: FirstStep, precision: Precision) -> UsageError | None:
    """Compare two first steps within the tolerances of ``precision``; return the error (AP943) that
    names the loss, gradients and buffers that differ, or None."""
    of_loss, of_norm, small = TOLERANCES[precision]
    largest = max(plain.norms.values(), default=0.0)
    relative = {
        name: abs(own.norms.get(name, 0.0) - norm) / max(norm, small * largest, 1e-30)
        for name, norm in plain.norms.items()
    }
    wrong = sorted((n for n, d in relative.items() if not d <= of_norm), key=lambda n: -relative[n])
    other_buffers = [
        name
        for name, norm in plain.buffers.items()
        if not abs(own.buffers.get(name, 0.0) - norm) <= of_norm * max(norm, small)
    ]
    loss_differs = not abs(own.loss - plain.loss) <= of_loss * max(abs(plain.loss), small)
    both_undefined = own.loss != own.loss and plain.loss != plain.loss
    if both_undefined or not (wrong or loss_differs or other_buffers):
        return None
    lines = [f"the loss is {own.loss:.6g}, that of the model alone {plain.loss:.6g}"]
    lines += [
        f"the norm of the gradient of {name} is {own.norms.get(name, 0.0):.6g}, alone "
        f"{plain.norms[name]:.6g}"
        for name in wrong[:3]
    ]
    lines += [
        f"the norm of {name} is {own.buffers.get(name, 0.0):.6g}, alone {plain.buffers[name]:.6g}"
        for name in other_buffers[:3]
    ]
    return UsageError(
        "AP943",
        "the first step by the plan is not that of the model alone"
        + (f": {len(wrong)} of {len(relative)} gradients differ" if wrong else ""),
        why="; ".join(lines),
        fix="report it with the model; autoparallel verify names the first block that differs, "
        "and check_first_step=False (--no-check-first-step) trains all the same",
    )


def _next_key(trainer: Trainer) -> int:
    """Return the key of the random numbers of the next step, on every rank."""
    drawn = trainer.runner.draws()
    return step_key(0, 0) if drawn is None else step_key(drawn["seed"], drawn["steps_begun"])


@contextmanager
def _apart(trainer: Trainer) -> Iterator[None]:
    """Context to run a step in; it restores gradients, hooks, buffers and the count of steps."""
    runner, parameters = trainer.runner, trainer.model.all_parameters()
    begun, held = runner.batches_begun, _taken(parameters)
    buffers = [
        (buffer, buffer.clone())
        for stage in trainer.model.stages.values()
        for buffer in map(stage.buffer, stage.program.updates)
    ]
    try:
        with runner.uncounted():
            yield
    finally:
        for parameter, (gradient, hooks) in zip(parameters, held, strict=True):
            parameter.zero_grad()
            parameter.master.grad = gradient
            for name, value in hooks.items():
                setattr(parameter.master, name, value)
        runner.batches_begun = begun
        for stage in trainer.model.stages.values():
            stage.forget_buffers()
        for buffer, before in buffers:
            buffer.copy_(before)


def _taken(parameters: Sequence[StageParameter]) -> list[tuple[Tensor | None, dict[str, object]]]:
    """Take the gradients and hooks off the parameters; return them."""
    taken = []
    for parameter in parameters:
        master = parameter.master
        names = ("_backward_hooks", "_post_accumulate_grad_hooks")
        hooks = {name: value for name in names if (value := getattr(master, name, None))}
        taken.append((master.grad, dict(hooks)))
        for name in hooks:
            setattr(master, name, None)
        master.grad = None
    return taken
