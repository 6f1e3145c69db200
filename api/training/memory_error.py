"""Error of a rank that ran out of memory: held and predicted bytes, and a fix.

In: an error of a training step, the plan, and the tensors of the rank. Out: DeviceMemoryError AP803
with held and predicted bytes by category, and a suggested plan that needs less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from autoparallel.analysis.facts import bytes_of, grouped_bytes, usable_bytes
from autoparallel.options.words import bytes_text, seconds_text
from autoparallel.passes.ops.collectives import local_tensor
from autoparallel.planner.errors import DeviceMemoryError
from autoparallel.planner.plan import Plan
from autoparallel.runtime.launch.process import Worker, describe, is_out_of_memory
from autoparallel.runtime.step.trainer import RankTrainer

STATES = {
    "parameters": ("parameters", "master"),
    "gradients": ("gradients",),
    "optimizer states": ("optimizer",),
    "buffers": ("buffers",),
}
"""Persistent tensors by the name shown, with their categories in a plan and in ``held_by``. All
other bytes count as ``OTHER``."""
OTHER = "activations and the rest"
LESS = 0.9
"""Factor from the predicted or available bytes to the suggested limit: a tenth less, because the
prediction was too low by an unknown amount."""


def held_by(trainer: RankTrainer) -> Mapping[str, Iterable[Tensor]]:
    """Return by category the tensors that a rank's trainer keeps between steps, and its
    gradients."""
    found: dict[str, list[Tensor]] = {
        "parameters": [],
        "master": [],
        "gradients": [],
        "optimizer": [],
        "buffers": [],
    }
    for parameter in trainer.model.all_parameters():
        is_copied = parameter.leaf is None or parameter.has_copy
        is_master = is_copied and parameter.spec.requires_grad
        found["master" if is_master else "parameters"].append(parameter.local)
        copies = (parameter.leaf, parameter.shard, parameter.host_shard)
        found["parameters"] += [local_tensor(each.detach()) for each in copies if each is not None]
        gradients = [
            parameter.gradient,
            None if parameter.held.grad is None else local_tensor(parameter.held.grad),
        ]
        found["gradients"] += [each for each in gradients if each is not None]
    optimizer = trainer.optimizer
    for states in () if optimizer is None else optimizer.state.values():
        found["optimizer"] += [each for each in states.values() if isinstance(each, Tensor)]
    for stage in trainer.model.stages.values():
        found["buffers"] += list(stage.buffers())
    return found


@contextmanager
def explained_memory_errors(
    plan: Plan,
    worker: Worker,
    held: Callable[[], Mapping[str, Iterable[Tensor]]],
    peak_bytes: Callable[[], int],
) -> Iterator[None]:
    """Turn out-of-memory errors inside the context into DeviceMemoryError AP803, with used bytes.

    ``held`` returns the rank's persistent tensors by category; ``peak_bytes`` returns the peak of
    the device, or of the process on a CPU.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error) or plan.servers is not None:
            raise
        doing = worker.watchdog.last.what
        total = peak_bytes()
        found = describe(error, worker.rank, worker.world_size)
        # The names of the tensors allocate nothing on the device; the error may come during any op.
        states = {name: storage_bytes(tensors) for name, tensors in held().items()}
        why = f"{found.why}\n{comparison(plan, worker.rank, states, total)}"
        raise DeviceMemoryError(
            found.code,
            f"{found.what} ({doing})",
            why=why,
            where=found.where,
            fix=next_plan(plan, worker.rank, total),
        ) from error


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``; shared storages count once.

    >>> import torch
    >>> whole = torch.zeros(8)
    >>> storage_bytes([whole, whole[:4], torch.zeros(2)])
    40
    """
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def comparison(plan: Plan, rank: int, states: Mapping[str, int], total_bytes: int) -> str:
    """Compare allocated and predicted bytes of ``rank`` as text, in a line per category.

    ``states`` are the bytes of persistent tensors by category; ``total_bytes`` is the rank's peak.
    """
    stages = [index for index, stage in enumerate(plan.stages) if rank in stage.devices]
    predicted = grouped_bytes(bytes_of(plan, stages), STATES, OTHER)
    held = grouped_bytes(states, STATES, OTHER)
    held[OTHER] = max(0, total_bytes - sum(held[name] for name in STATES))
    lines = [f"       {'':26}{'held':>10}  {'predicted':>10}"]
    lines += [
        _line(name, held[name], expected)
        for name, expected in predicted.items()
        if name == OTHER or held[name] or expected
    ]
    return "\n".join([*lines, _line("total", total_bytes, sum(predicted.values()))])


def _line(name: str, held: int, expected: int) -> str:
    return f"       {name:<26}{bytes_text(held):>10}  {bytes_text(expected):>10}"


def next_plan(plan: Plan, rank: int, total_bytes: int) -> str:
    """Suggest a memory limit for planning again, and the fastest alternative that keeps it."""
    stage = next(stage for stage in plan.stages if rank in stage.devices)
    available = min(total_bytes, usable_bytes(plan, stage)) or plan.prediction.peak_memory_bytes
    limit = LESS * min(plan.prediction.peak_memory_bytes, available)
    fitting = [each for each in plan.alternatives if each.peak_memory_bytes <= limit]
    text = f"plan again with --memory-limit {limit / 2**20:.0f}MiB"
    if fitting:
        best = min(fitting, key=lambda each: each.step_seconds)
        text += (
            f"; the fastest alternative in this plan that keeps it is {best.summary} "
            f"({seconds_text(best.step_seconds)} a step, {bytes_text(best.peak_memory_bytes)})"
        )
    else:
        text += "; no alternative in this plan keeps it"
    return text
