"""One device's training steps: the truth that a plan's run is held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ...passes.ops.random_ops import step_key
from ...passes.tracing.counter_random import counter_random
from ..data.rank_batch import microbatch_rows
from ..data.variants import Variant
from ..update.optimizer import BuildOptimizer, built

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Reference:
    """The loss of each step, the first step's gradients, weights and buffers after the last."""

    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def on_cpu(self) -> Reference:
        """The same, in the memory that pieces of ranks are gathered in."""
        held = (self.gradients, self.weights, self.buffers)
        return Reference(self.losses, *({n: t.cpu() for n, t in own.items()} for own in held))


def run_reference(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    loss: Callable[[nn.Module, Batch], torch.Tensor],
    build_optimizer: BuildOptimizer,
    seed: int = 0,
    split: Callable[[Batch], Sequence[Batch]] = lambda batch: (batch,),
    random_dims: Mapping[int, int] | None = None,
) -> Reference:
    """Train ``model`` for one step per batch, whole batches at once, on its own device.

    ``loss(model, batch)`` is the scalar loss. Tied parameters count once, by their first name.
    A parameter that gets no gradient has none in ``gradients``. Random calls (dropout) draw
    what a ``Trainer`` of the same ``seed`` draws. ``split`` cuts a batch into micro-batches
    whose gradients are averaged, where a plan accumulates over rows that see each other;
    ``random_dims`` then are the batch dimensions of the random calls.
    """
    parameters = dict(model.named_parameters())
    optimizer = built(build_optimizer, parameters.items())
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        parts, total = split(batch), 0.0
        for index, part in enumerate(parts):
            key = step_key(seed, step)
            with counter_random(key, microbatch=index, batch_dims=random_dims):
                value = loss(model, part) / len(parts)
            value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
        losses.append(total)
        if step == 0:
            gradients = {
                name: p.grad.detach().clone()
                for name, p in parameters.items()
                if p.grad is not None
            }
        optimizer.step()
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return Reference(tuple(losses), gradients, weights, buffers)


def reference_split(planned: Variant, batch: Batch) -> tuple[Batch, ...]:
    """The parts of a global batch that one device has to run apart to do the same as a plan.

    Those of each update (the whole batch, unless the schedule is asynchronous), or the
    micro-batches where rows see each other.
    """
    graph, count = planned.program.graph, planned.plan.num_microbatches
    if not graph.accumulation.mixing:
        count //= planned.schedule.per_update
    if count == 1:
        return (batch,)
    graph = graph.with_batch_size(planned.plan.model.global_batch // count)
    return tuple(
        {
            name: microbatch_rows(name, tensor, graph[name].spec, part, count)
            for name, tensor in batch.items()
        }
        for part in range(count)
    )
