"""Verification: a plan on real processes against one device.

In: a plan, the program and the deferred model captured in the dtype to verify in, and a function
that trains the plain model (run on rank 0 alone). Out: the same ``Verification`` on every rank: the
loss of each step, every gradient of the first step, and every weight and every buffer that training
changes after the last step, in the order of time. Collective over all ranks.

The measure is the largest absolute difference over the reference tensor's largest magnitude.
Tensors that are zero but for rounding (a key bias under softmax has a gradient of exactly zero)
would be noise over noise, so magnitudes below ``NOISE`` times the largest of all compared tensors
are replaced by that product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import torch
from torch import Tensor

from ...planner.graph.graph import Graph
from ...planner.graph.layout import Region, region_slices
from ..messages.shared_objects import Pulse, gather_on_first
from ..parameters.parameters import StageParameter
from ..parameters.stage import StageModule
from ..step.trainer import RankTrainer
from .reference import Reference

NOISE = 1e-6
"""Fraction of the largest magnitude of all tensors; a smaller tensor is compared relative to it."""

GRADIENT_NOISE = {torch.float64: 1e-13, torch.float32: 1e-6}
"""Fraction of the largest gradient below which gradients are rounding noise, such as of a key bias
before a softmax."""

Quantity = Literal["loss", "gradient", "weight", "buffer"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of one tensor from the reference: ``relative`` is the largest absolute difference
    of an element over the largest magnitude in the reference tensor."""

    quantity: Quantity
    name: str
    block: str
    relative: float


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of ``verify``; ``differences`` has all compared tensors, in the model's order."""

    dtype: str
    tolerance: float
    differences: tuple[Difference, ...]

    @property
    def failures(self) -> tuple[Difference, ...]:
        """The differences above the tolerance (NaN included), first block first."""
        return tuple(d for d in self.differences if not d.relative <= self.tolerance)

    @property
    def passed(self) -> bool:
        return not self.failures

    def worst(self, quantity: Quantity) -> float:
        """Return the largest relative difference of "loss", "gradient", "weight" or "buffer"; NaN
        if any is."""
        found = [d.relative for d in self.differences if d.quantity == quantity]
        return next((value for value in found if value != value), max(found, default=0.0))


Piece = tuple[Region, torch.Tensor]
"""A rank's part of a tensor: its index ranges (start, stop) by dimension, and its values."""


def compare(
    quantity: Quantity,
    reference: Mapping[str, torch.Tensor],
    actual: Mapping[str, Sequence[Piece]],
    blocks: Mapping[str, str],
    *,
    gradients: Mapping[str, torch.Tensor] | None = None,
) -> list[Difference]:
    """Compare every reference tensor with the parts of it that ranks hold; return the differences.

    All ranks' parts are compared, so replicas that drifted apart are seen. A tensor that the parts
    do not cover differs by infinity. Tiny tensors are compared relative to the largest of
    ``reference`` (``NOISE``); ``blocks`` maps names to blocks. ``gradients`` are of the reference's
    update: where a gradient is rounding noise (``GRADIENT_NOISE``), so is an adaptive optimizer's
    step, which is compared relative to the largest magnitude.
    """
    largest = max((_magnitude(tensor) for tensor in reference.values()), default=0.0)
    moving = max((_magnitude(tensor) for tensor in (gradients or {}).values()), default=0.0)
    differences = []
    for name, expected in reference.items():
        scale = torch.full_like(expected, max(_magnitude(expected), NOISE * largest))
        if gradients is not None and name in gradients and expected.dtype in GRADIENT_NOISE:
            noise = gradients[name].abs() <= GRADIENT_NOISE[expected.dtype] * moving
            scale[noise] = largest
        relative = _largest_error(expected, actual.get(name, ()), scale)
        differences.append(Difference(quantity, name, blocks.get(name, ""), relative))
    return differences


def _largest_error(expected: torch.Tensor, pieces: Sequence[Piece], scale: torch.Tensor) -> float:
    """Return the largest absolute error of the ranks' parts, over ``scale`` element by element
    (over 1 where the scale is 0); infinity if the parts do not cover the tensor ``expected``."""
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    covered = torch.zeros(expected.shape, dtype=torch.bool)
    errors = []
    for region, values in pieces:
        box = region_slices(region)
        if values.shape != expected[box].shape:
            return float("inf")
        covered[box] = True
        errors.append(_magnitude((values.to(expected.dtype) - expected[box]) / scale[box]))
    if not bool(covered.all()):
        return float("inf")
    return next((error for error in errors if error != error), max(errors, default=0.0))


def _magnitude(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
"""Largest relative difference that counts as rounding, by dtype."""

CHUNK_BYTES = 256_000_000
TINY = torch.finfo(torch.float64).tiny


def verify(
    trainer: RankTrainer,
    batches: Sequence[Mapping[str, Tensor]],
    reference: Callable[[], Reference],
    pulse: Pulse | None = None,
) -> Verification:
    """Run one step per batch by the plan; compare losses, gradients and weights with
    ``reference()``. ``batches`` are global, by input name, the same on every rank. A long
    ``reference`` reports its progress through ``pulse``."""
    losses: list[float] = []
    graph = trainer.program.graph
    gradients: dict[str, list[Piece]] = {}
    for step, batch in enumerate(batches):
        losses.append(float(trainer.step(batch).loss))
        if step == 0:
            trainer.settle()
            gradients = collect(trainer.model.all_parameters(), graph, attrgetter("gradient"))
    trainer.settle()
    weights = collect(trainer.model.all_parameters(), graph, attrgetter("value"))
    buffers = collect_buffers(trainer)

    def compared() -> Verification:
        return _compared(trainer, reference(), losses, gradients, weights, buffers)

    return (pulse or Pulse()).value(compared)


def _compared(
    trainer: RankTrainer,
    truth: Reference,
    losses: Sequence[float],
    gradients: Mapping[str, Sequence[Piece]],
    weights: Mapping[str, Sequence[Piece]],
    buffers: Mapping[str, Sequence[Piece]],
) -> Verification:
    blocks, updates = _block_names(trainer), trainer.program.graph.updates
    step_losses = [
        Difference("loss", f"step {step}", "", abs(found - expected) / max(abs(expected), TINY))
        for step, (expected, found) in enumerate(zip(truth.losses, losses, strict=True))
    ]
    differences = [
        *step_losses[:1],
        *compare("gradient", _in_order(truth.gradients, blocks), gradients, blocks),
        *step_losses[1:],
        *compare(
            "weight",
            _in_order(truth.weights, blocks),
            weights,
            blocks,
            gradients=_in_order(truth.gradients, blocks),
        ),
        *compare("buffer", _in_order(truth.buffers, updates), buffers, blocks),
    ]
    dtype = trainer.program.dtype
    return Verification(dtype, TOLERANCE[dtype], tuple(differences))


def _in_order(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names if name in tensors}


def _block_names(trainer: RankTrainer) -> dict[str, str]:
    """Map each parameter of the graph to its block, in the order of the blocks."""
    return {name: b.name for b in trainer.program.blocks.blocks for name in b.parameters}


def collect(
    parameters: Sequence[StageParameter],
    graph: Graph,
    read: Callable[[StageParameter], Tensor | None],
) -> dict[str, list[Piece]]:
    """Call ``read`` on every rank's parameters and gather the results; return them by name on rank
    0, {} elsewhere. Collective."""
    collected: dict[str, list[Piece]] = {}
    for names in _chunks(graph):
        wanted = frozenset(names)
        own = [
            (parameter.name, (parameter.region, values.detach().cpu().clone()))
            for parameter in parameters
            if parameter.name in wanted and (values := read(parameter)) is not None
        ]
        for pieces in gather_on_first(own):
            for name, piece in pieces:
                collected.setdefault(name, []).append(piece)
    return collected


def collect_buffers(
    trainer: RankTrainer,
    read: Callable[[StageModule, str], Tensor] = StageModule.buffer,
) -> dict[str, list[Piece]]:
    """Gather every rank's part of the buffers that training changes; return them by name on rank 0.
    Collective."""
    own: dict[str, Piece] = {}
    for stage in trainer.model.stages.values():
        for name in stage.program.updates:
            own[name] = (stage.buffer_regions[name], read(stage, name).detach().cpu().clone())
    collected: dict[str, list[Piece]] = {}
    for pieces in gather_on_first(own):
        for name, piece in pieces.items():
            collected.setdefault(name, []).append(piece)
    return collected


def _chunks(graph: Graph) -> Iterator[list[str]]:
    """Yield the parameters' names in lists, each of tensors of about ``CHUNK_BYTES`` together."""
    names: list[str] = []
    size = 0
    for node in graph.parameters:
        names.append(node.name)
        size += node.spec.numel * 8
        if size > CHUNK_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names
