"""Memory of a training step: the bytes of a rank's tensors at their peak.

In: a step to run, and which tensors are parameters, gradients, optimizer states. Out: a
``MemoryReport``. On a CPU every storage is counted from the op that makes it until it is freed
(``passes.memory.storages``), in the allocator's multiples; on a GPU the allocator's own peak is
read beside (``torch.cuda.max_memory_allocated``). Memory that gloo or a kernel allocates for itself
is not seen on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from autoparallel.cost_model.ops.memory import allocated_bytes
from autoparallel.passes.memory.storages import LiveBytes
from autoparallel.passes.ops.collectives import local_tensor
from autoparallel.runtime.parameters.stage import StageModule
from autoparallel.runtime.parameters.zero import _parameter_groups, partial_sums
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.training.memory_error import held_by

Tensors = Mapping[str, Iterable[Tensor]]
"""Tensors in memory, by category ("parameters", "gradients", …)."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of one rank in a step, in bytes. ``peak_bytes`` is the peak, ``by_category`` its
    division into parameters, activations etc.; ``between_bytes`` are in use when the step is done.
    ``allocator_peak_bytes`` is the peak of the device's allocator, None on a CPU."""

    peak_bytes: int
    by_category: Mapping[str, int]
    between_bytes: int
    allocator_peak_bytes: int | None = None


def measure_peak(
    step: Callable[[], object],
    held: Callable[[], Tensors] = dict,
    *,
    device: torch.device | None = None,
    watch: Callable[[LiveBytes], AbstractContextManager[object]] = nullcontext,
    resizes: bool = True,
) -> MemoryReport:
    """Run ``step`` once and report its memory.

    ``held`` returns the tensors that exist before and after the step, by category; they count even
    if the step does not use them. ``watch(live)`` is a context around the step, which may
    categorize tensors. Do not measure the first step, in which the optimizer makes its states.
    ``resizes``: the memory of tensors may be freed and allocated again in the step, as by
    ``fully_shard``.

    >>> weight = torch.ones(1000, requires_grad=True)
    >>> def step():
    ...     weight.exp().sum().backward()
    >>> found = measure_peak(step, lambda: {"parameters": [weight]})
    >>> found.by_category["parameters"], found.by_category["activations"]
    (4032, 4032)
    """
    is_cuda = device is not None and device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    step_bytes = allocated_bytes(1, "cuda" if is_cuda else "cpu")
    live = LiveBytes(step_bytes=step_bytes, resizes=resizes)
    with live, live.saving():
        _mark(live, held())
        with watch(live):
            step()
        _mark(live, held())
    return MemoryReport(
        live.peak_bytes,
        {name: size for name, size in sorted(live.peak_by_category.items()) if size},
        live.num_bytes,
        torch.cuda.max_memory_allocated(device) if is_cuda else None,
    )


def _mark(live: LiveBytes, held: Tensors) -> None:
    for category, tensors in held.items():
        live.mark(tensors, category)


def gathered_copies(stage: StageModule) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield for each sharded parameter its gathered tensor (without memory while not gathered), and
    its whole gradient if that is summed but not yet reduced, else None."""
    for group in _parameter_groups(stage) if stage.is_fully_sharded else ():
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                summed = parameter.unsharded_accumulated_grad
                whole = parameter._unsharded_param
                yield whole, whole.grad if summed is None else summed


def states_of(trainer: Trainer) -> dict[str, int]:
    """Return the bytes that this rank's parameters, gradients and other states take now, by
    category.

    ``parameters`` are the tensors that blocks compute with, gathered tensors included, ``master``
    the tensors that the optimizer updates; ``gradients`` include whole gradients that ZeRO 1 has
    not reduced yet. Shared memory counts once. A running reduce-scatter is waited for.
    """
    for stage in trainer.model.stages.values():
        if stage.reductions is not None:
            stage.reductions.finish()
    tensors = {name: list(found) for name, found in held_by(trainer).items()}
    for stage in trainer.model.stages.values():
        for whole, gradient in gathered_copies(stage):
            tensors["parameters"].append(whole)
            tensors["gradients"] += [] if gradient is None else [gradient]
        tensors["gradients"] += partial_sums(stage)
    seen: set[int] = set()
    found: dict[str, int] = {}
    for category in ("master", "parameters", "gradients", "optimizer"):
        storages = [local_tensor(each.detach()).untyped_storage() for each in tensors[category]]
        new = {each._cdata: each.nbytes() for each in storages if each._cdata not in seen}
        found[category], seen = sum(new.values()), seen | new.keys()
    return found


def states_before_last_backward(trainer: Trainer, inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """Run a step; return the bytes of this rank's states (see ``states_of``) at the start of the
    step's last backward, when parameters, gradients and optimizer states all exist. Collective over
    all ranks; ``trainer`` has one stage on this rank and several micro-batches, as with one
    micro-batch no gradients would exist yet."""
    (executor,) = trainer.runner.executors.values()
    found: dict[str, int] = {}
    run = executor.backward

    def backward(unit: int, gradients: Mapping[str, Tensor], *, last: bool) -> dict[str, Tensor]:
        if last:
            found.update(states_of(trainer))
        return run(unit, gradients, last=last)

    executor.backward = backward  # type: ignore[method-assign]
    try:
        trainer.step(inputs)
    finally:
        del executor.backward
    return found


@contextmanager
def _gathered(stages: Iterable[StageModule], live: LiveBytes) -> Iterator[None]:
    """Count parameters gathered by ZeRO in the context as category "gathered", not as
    activations."""

    def mark(block: nn.Module, _: object) -> None:
        live.mark((each for each in block.parameters()), "gathered", over=False)

    blocks = [block for stage in stages for block in stage.blocks]
    handles = [block.register_forward_pre_hook(mark) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def measure_step(trainer: Trainer, inputs: Mapping[str, Tensor]) -> MemoryReport:
    """Run a trainer's step on the global batch ``inputs``; return this rank's memory in it.
    Collective over all ranks."""

    def held() -> Tensors:
        return {**held_by(trainer), "batch": list(inputs.values())}

    return measure_peak(
        lambda: trainer.step(inputs),
        held,
        device=trainer.device,
        watch=partial(_gathered, trainer.model.stages.values()),
        resizes=any(stage.zero for stage in trainer.model.stages.values()),
    )
