"""Measurement of a whole block: all its ops, one after the other, as a training step runs them.

In: a graph at the rows of one rank, a block. Out: seconds of its forward and its backward on one
device, without collectives. Several copies with weights and inputs of their own are run forward in
order and backward in reverse, as the equal layers of a model are; each copy adds gradients to its
own parameters. On a CPU every rank measures the same block at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from ...cost_model.cluster.detect import available_memory_bytes
from ...cost_model.profile.measure import median_interval
from ...cost_model.profile.records import Measurement
from ...passes.local.localize import BlockInterface, localize_block, reference_layouts, value_key
from ...passes.ops.collectives import Alone, Rank
from ...passes.programs.inputs import random_batch
from ...planner.costs.whole_block import ONE_DEVICE, block_inputs
from ...planner.errors import MachineError
from ...planner.graph.graph import Block, Graph, Ref, TensorSpec
from ...planner.graph.layout import INVARIANT
from ..messages.shared_objects import gather_values

Value = TypeVar("Value")

MOST_COPIES = 4
LEAST_RUNS, ENOUGH_RUNS, MOST_RUNS = 2, 4, 40
"""Numbers of rounds in which all copies of a block run: the least for a median, the number that the
time should allow, and the largest."""

MEMORY_SHARE = 0.4
STATE_COPIES = 8
"""Estimated bytes in use (with gradients and activations) per byte of a block's inputs and
weights."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of a block to be measured: a module with weights of its own, its inputs, and for each
    output the gradient that its backward starts from."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]

    def forward(self) -> tuple[Tensor, ...]:
        return tuple(self.module(*self.inputs))

    def backward(self, outputs: Sequence[Tensor]) -> None:
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, self.gradients, strict=True)
            if gradient is not None
        ]
        if pairs:
            torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])


def measure_block(
    graph: Graph, block: Block, *, device: torch.device, accumulates: bool, seconds: float
) -> Measurement:
    """Measure a block (a part of ``graph``) on this device: return the median seconds of its
    forward and its backward. The measurement takes about ``seconds``.

    If ``accumulates``, gradients are added to existing gradients, as from the second micro-batch
    on. Several copies of the block run in turn, so that caches are cold; of a slow block there are
    fewer. Raises RuntimeError if memory does not suffice.
    """
    start = time.perf_counter()
    most = _num_copies(graph, block, device)
    copies = [_copy(graph, block, device)]
    _round(copies, device)
    once = sum(_round(copies, device))
    count = max(1, min(most, int(seconds / (ENOUGH_RUNS * max(once, 1e-9)))))
    copies += [_copy(graph, block, device) for _ in range(count - 1)]
    if count > 1:
        _round(copies, device)
    forward: list[float] = []
    backward: list[float] = []
    while len(forward) < LEAST_RUNS or (
        time.perf_counter() - start < seconds and len(forward) < MOST_RUNS
    ):
        if not accumulates:
            _forget(copies)
        found = _round(copies, device)
        forward.append(found[0] / len(copies))
        backward.append(found[1] / len(copies))
    medians = [median_interval(each) for each in (forward, backward)]
    return Measurement(
        medians[0][0], medians[1][0], len(forward), max(spread for _, spread in medians)
    )


def measure_everywhere(
    graph: Graph, block: Block, *, device: torch.device, accumulates: bool, seconds: float
) -> Measurement | str:
    """Run ``measure_block`` on every rank at once; return the median of the ranks' times. If any
    rank fails, return the text of its error instead. Collective over all ranks."""
    own: Measurement | str
    try:
        own = measure_block(graph, block, device=device, accumulates=accumulates, seconds=seconds)
    except (MachineError, RuntimeError, ValueError, TypeError, IndexError) as error:
        own = f"{type(error).__name__}: {error}".split("\n")[0]
    answers = gather_values(own)
    found = [answer for answer in answers if isinstance(answer, Measurement)]
    if len(found) < len(answers):
        return next(answer for answer in answers if isinstance(answer, str))
    return median_of_ranks(found)


def median_of_ranks(found: Sequence[Measurement]) -> Measurement:
    """Combine several ranks' measurements: median times, least number of repeats, largest
    spread."""
    return Measurement(
        median(each.forward_seconds for each in found),
        median(each.backward_seconds for each in found),
        min(each.repeats for each in found),
        max(each.spread for each in found),
    )


def _round(copies: Sequence[_Copy], device: torch.device) -> tuple[float, float]:
    """Run the forward of each copy once, then the backward of each; return the seconds of all
    forwards together, and of all backwards together."""
    times = [_now(device)]
    outputs = [copy.forward() for copy in copies]
    times.append(_now(device))
    for copy in reversed(copies):
        copy.backward(outputs.pop())
    times.append(_now(device))
    return times[1] - times[0], times[2] - times[1]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _forget(copies: Sequence[_Copy]) -> None:
    for copy in copies:
        copy.module.zero_grad(set_to_none=True)
        for tensor in copy.inputs:
            tensor.grad = None


def _num_copies(graph: Graph, block: Block, device: torch.device) -> int:
    """Return how many copies of a block are to be measured: ``MOST_COPIES``, or fewer if more do
    not fit in memory. Raise RuntimeError if none fits."""
    refs = block_inputs(graph, block)
    needed = STATE_COPIES * sum(graph.spec(ref).num_bytes for ref in refs)
    free = _free_bytes(device) * MEMORY_SHARE
    if needed > free:
        raise RuntimeError(f"it needs about {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB may be used")
    return max(1, min(MOST_COPIES, int(free / max(needed, 1))))


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    return available_memory_bytes() / dist.get_world_size()


def _copy(graph: Graph, block: Block, device: torch.device) -> _Copy:
    module, keys, outputs = _module(graph, block)
    module.to_empty(device=device)
    with torch.no_grad():
        for held in (*module.parameters(), *module.buffers()):
            if held.is_floating_point():
                held.normal_(std=0.02)
            else:
                held.zero_()
    batch = random_batch(graph, seed=0)
    inputs = tuple(_value(graph, name, index, batch, device) for name, index in keys)
    with torch.no_grad():
        made = module(*inputs)
    gradients = tuple(
        torch.randn_like(value) if spec.requires_grad and value.is_floating_point() else None
        for value, spec in zip(made, outputs, strict=True)
    )
    return _Copy(module, inputs, gradients)


def _module(
    graph: Graph, block: Block
) -> tuple[fx.GraphModule, list[tuple[str, int]], list[TensorSpec]]:
    """Return the module that computes a block on one rank, the values that it reads (node name and
    output index) except parameters and buffers, and the shapes and dtypes of its outputs."""
    whole = (INVARIANT,)
    refs = block_inputs(graph, block)
    held = {ref.name: whole for ref in refs if graph[ref.name].kind in ("parameter", "buffer")}
    taken = [ref for ref in refs if ref.name not in held]
    used = _outputs(graph, block)
    interface = BlockInterface(
        block.nodes,
        {value_key(ref): whole for ref in taken},
        held,
        {value_key(ref): whole for ref in used},
    )
    module = localize_block(
        graph,
        interface,
        layouts=reference_layouts(graph, 1),
        rank=Rank(ONE_DEVICE, (0,), Alone()),
    )
    return module, [(ref.name, ref.index) for ref in taken], [graph.spec(ref) for ref in used]


def _outputs(graph: Graph, block: Block) -> list[Ref]:
    """Return the outputs of a block that are used outside of it: by other blocks, as the loss, or
    as new values of buffers."""
    own = set(block.nodes)
    kept = {graph.loss, *graph.updates.values()}
    needed = {
        ref
        for node in graph.nodes
        if node.name not in own
        for ref in node.inputs
        if ref.name in own
    }
    refs = (Ref(name, at) for name in block.nodes for at in range(len(graph[name].outputs)))
    return [ref for ref in refs if ref in needed or ref in kept]


def _value(
    graph: Graph, name: str, index: int, batch: dict[str, Tensor], device: torch.device
) -> Tensor:
    """Make a value for a block to read: output ``index`` of node ``name``. It is the tensor of
    ``batch`` if the node is a model input, else noise (floating), zeros (integer) or true
    (bool)."""
    node = graph[name]
    if name in batch:
        return batch[name].to(device)
    spec = node.outputs[index]
    dtype = getattr(torch, spec.dtype)
    if dtype == torch.bool:
        return torch.ones(spec.shape, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=dtype, device=device)
    value = torch.randn(spec.shape, device=device).to(dtype)
    return value.requires_grad_(spec.requires_grad)
