"""One device's training steps: the truth that a plan's run is held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Reference:
    """The loss of each step, the first step's gradients, and the weights after the last."""

    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def run_reference(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    loss: Callable[[nn.Module, Batch], torch.Tensor],
    build_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
) -> Reference:
    """Train ``model`` for one step per batch, whole batches at once, on its own device.

    ``loss(model, batch)`` is the scalar loss. Tied parameters count once, by their first name.
    A parameter that gets no gradient has none in ``gradients``.
    """
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer([p for p in parameters.values() if p.requires_grad])
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        value = loss(model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        losses.append(float(value.detach()))
        if step == 0:
            gradients = {
                name: p.grad.detach().clone()
                for name, p in parameters.items()
                if p.grad is not None
            }
        optimizer.step()
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    return Reference(tuple(losses), gradients, weights)
