"""The stages of a script, as each rank runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ...passes.backward.recomputing import COSTLY
from .mesh import Mesh
from .weights import Split, Weight, Weights, join, own

MICRO_BATCHES = 1


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks of the model on a mesh of devices, in row-major order.

    ``parameters``, ``buffers``, ``inputs`` and ``constants`` map each name to its split: the
    dimension that a mesh axis splits. ``updates`` maps buffers to results of ``forward``, their new
    values: the mean of micro-batches for ``means``; ``updates_once``: all of a step are equal.
    """

    forward: Callable[..., dict[str, Tensor]]
    devices: tuple[int, ...]
    mesh: dict[str, int]
    parameters: dict[str, Split]
    inputs: dict[str, Split] = field(default_factory=dict)
    constants: dict[str, Split] = field(default_factory=dict)
    buffers: dict[str, Split] = field(default_factory=dict)
    updates: dict[str, str] = field(default_factory=dict)
    updates_once: bool = False
    means: tuple[str, ...] = ()
    zero: int = 0
    degree: int = 0
    weight: type[Weight] = Weight
    loss: str = ""
    loss_terms: tuple[str, ...] = ()
    """Axes whose ranks each have a term of the loss."""


@dataclass(frozen=True)
class Draw:
    """Keys of random numbers: seed, number of batch, micro-batch and the block's first op."""

    seed: int = 0
    batch: int = 0
    microbatch: int = 0
    first: int = 0

    def of(self, first: int) -> Draw:
        """Return the same state for a block whose first random op has the number ``first``."""
        return replace(self, first=first)


class StageRank:
    """Part of a stage on a rank: a step is ``begin``, forwards and backwards, ``complete``."""

    def __init__(
        self,
        stage: Stage,
        mesh: Mesh,
        model: torch.nn.Module,
        constants: dict[str, Tensor],
        device: torch.device,
    ) -> None:
        self.stage, self.mesh, self.device = stage, mesh, device
        whole = dict(model.named_parameters(remove_duplicate=False))
        self.weights = {
            name: stage.weight(
                whole[name].detach().to(device),
                split,
                mesh,
                trained=whole[name].requires_grad,
                zero=stage.zero,
                degree=stage.degree,
            )
            for name, split in stage.parameters.items()
        }
        held = {**dict(model.named_buffers(remove_duplicate=False)), **constants}
        self.buffers = {
            name: own(held[name].to(device), split, mesh) for name, split in stage.buffers.items()
        }
        self.constants = {
            name: own(constants[name].to(device), split, mesh)
            for name, split in stage.constants.items()
        }

    def begin(self, batch: dict[str, Tensor], counts: dict[str, Tensor], draw: Draw) -> None:
        """Start a step on a global batch; losses divide by ``counts``, made of all its rows."""
        self.batch, self.counts, self.draw = batch, counts, draw
        self.old, self.changes = dict(self.buffers), dict[str, Tensor]()
        self.losses: dict[int, Tensor] = {}
        self.received: dict[int, dict[str, Tensor]] = {}
        self.made: dict[int, dict[str, Tensor]] = {}

    def inputs(self, microbatch: int) -> dict[str, Tensor]:
        """Return this rank's part of each input that the stage reads in a micro-batch."""
        return {
            name: own(rows_of(self.batch[name], name, microbatch), split, self.mesh).to(self.device)
            for name, split in self.stage.inputs.items()
        }

    def forward(self, microbatch: int, received: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run a micro-batch; return results by key. ``received`` has other stages' results."""
        values = {**self.constants, **self.counts, **self.inputs(microbatch), **received}
        # A block that runs again in the backward reads the buffers of its own forward.
        unchanged = (
            self.old if self.stage.updates_once else {n: self.old[n] for n in self.stage.means}
        )
        weights = Weights(self.weights, {**self.buffers, **unchanged})
        draw = replace(self.draw, microbatch=microbatch)
        with self.device:
            made = self.stage.forward(values, weights, self.mesh, draw)
        for name, key in self.stage.updates.items():
            new = made[key].detach()
            if name in self.stage.means and new.dtype != torch.bool:
                total = self.changes.get(name, 0) + (new - self.old[name])
                self.changes[name] = total
                is_real = new.is_floating_point()
                mean = total / MICRO_BATCHES if is_real else total // MICRO_BATCHES
                new = self.old[name] + mean
            self.buffers[name] = new
        self.received[microbatch], self.made[microbatch] = received, made
        if self.stage.loss:
            loss = made[self.stage.loss].detach()
            self.losses[microbatch] = loss if self.counts_loss else torch.zeros_like(loss)
        return made

    @property
    def counts_loss(self) -> bool:
        """Return whether this rank's loss is added to the sum over ranks."""
        alone = self.mesh.shape.keys() - set(self.stage.loss_terms)
        return all(self.mesh.coordinate(axis) == 0 for axis in alone)

    def backward(
        self, microbatch: int, gradients: dict[str, Tensor], scale: float
    ) -> dict[str, Tensor]:
        """Run the backward of the loss times ``scale``; return gradients of received values."""
        made, received = self.made.pop(microbatch), self.received.pop(microbatch)
        gradients = dict(gradients)
        if self.stage.loss:
            loss = torch.full_like(made[self.stage.loss], scale / MICRO_BATCHES)
            gradients[self.stage.loss] = gradients.get(self.stage.loss, 0) + loss
        keys = [key for key in made if key in gradients and made[key].requires_grad]
        with self.device:
            torch.autograd.backward([made[key] for key in keys], [gradients[key] for key in keys])
        return {
            key: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for key, leaf in received.items()
            if leaf.requires_grad
        }

    def whole(self, name: str) -> Tensor:
        """Return a parameter or buffer of the stage, whole. Collective over its ranks."""
        if name in self.weights:
            return self.weights[name].whole(self.weights[name].master)
        return join(self.buffers[name], self.stage.buffers[name], self.mesh)

    def complete(self) -> None:
        """Sum the gradients over the ranks of the stage."""
        for weight in self.weights.values():
            weight.complete()


BATCH_DIMS: dict[str, int] = {}


def rows_of(tensor: Tensor, name: str, microbatch: int) -> Tensor:
    """Return the rows of a micro-batch; all rows of a tensor without a dimension of the batch."""
    dim = BATCH_DIMS.get(name)
    return tensor if dim is None else tensor.chunk(MICRO_BATCHES, dim)[microbatch]


def keeping_products(block: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Run a block under activation checkpointing that saves the results of its matrix products."""

    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        is_kept = op in COSTLY
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts, **options)
