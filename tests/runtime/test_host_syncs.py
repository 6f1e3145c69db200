"""A step's host waits for its device only to read the figures of the step before.

The device is the CPU, told apart from the host by its queue and by what was copied: of a GPU each
of the calls counted here would wait until all is done that the GPU was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from marks import slow
from one_device import build_optimizer
from processes import run_processes
from schedule_cases import Case
from strict_cases import MODELS, ROWS, planned
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoparallel.passes.programs.inputs import random_batch
from autoparallel.planner.plan_file import loads
from autoparallel.runtime.messages import device_queue
from autoparallel.runtime.messages.device_queue import (
    PASSED,
    Event,
    HostCopy,
    Waitable,
    packed_copies,
)
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.update.update import UpdateOptions

STEPS = 7  # Batches are compared in steps 1, 2, 4 and 8, and read in the next one.

CASES = (
    Case("chain", "1f1b", 4),
    Case("chain", "1f1b", 4, "dp=2,zero=0"),
    Case("chain", "1f1b", 4, "dp=2,zero=2"),
    Case("chain", "1f1b", 4, "dp=2,zero=3"),
    Case("chain", "1f1b", 4, "tp=2"),
)

WAITING = {
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.cpu,
    Tensor.nonzero,
    torch.nonzero,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.masked_select,
    torch.equal,
}
"""What gives Python a value of a GPU's tensor, or a tensor whose shape depends on one."""


@dataclass
class Waits(TorchFunctionMode):
    """Counts, by name, what a host would wait for while it is entered."""

    host: set[int] = field(default_factory=set)
    found: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if function in WAITING and not all(self.is_host(each) for each in given):
            self.found[function.__name__] += 1
        if function in (torch.tensor, torch.as_tensor) and (kwargs or {}).get("device") is not None:
            self.found["torch.tensor on the device"] += 1
        return function(*args, **(kwargs or {}))

    def is_host(self, tensor: Tensor) -> bool:
        return type(tensor) in PLAIN and tensor.untyped_storage().data_ptr() in self.host


@dataclass
class Dispatched(TorchDispatchMode):
    """Counts scalars that are read, and uses of host memory but by a queue, and by views."""

    waits: Waits

    VIEWS = ("slice", "detach", "alias", "view", "select", "as_strided", "unsqueeze", "narrow")

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if not all(each in PLAIN for each in types):
            return NotImplemented  # the parts of a DTensor come here one by one
        name = function.__name__.partition(".")[0]
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_host = [self.waits.is_host(each) for each in given]
        if name == "_local_scalar_dense" and not all(on_host):
            self.waits.found[name] += 1
        is_mixed = any(on_host) and not all(on_host)  # of host memory alone is the host's work
        if is_mixed and name not in self.VIEWS and not COPYING[0]:
            self.waits.found[f"{name} of host memory"] += 1
        return function(*args, **(kwargs or {}))


PLAIN = (Tensor, nn.Parameter)
COPYING = [False]
"""Whether a queue is at work."""


@dataclass
class Read:
    """An event of a figure that is there once the host has waited for it."""

    queue: CountingQueue
    step: int
    was_read: bool = False

    def query(self) -> bool:
        return self.was_read

    def synchronize(self) -> None:
        self.was_read = True
        self.queue.reads.append((self.queue.step, self.step))


@dataclass(eq=False)
class CountingQueue:
    """A queue whose device is behind; ``reads`` are pairs of steps: when, and of which."""

    device: torch.device
    runs_behind: bool = True
    step: int = 0
    reads: list[tuple[int, int]] = field(default_factory=list)
    copies: Counter[int] = field(default_factory=Counter)
    host: set[int] = field(default_factory=set)
    kept: list[Tensor] = field(default_factory=list)  # so that no other has its memory

    def mark(self, event: Event | None = None) -> Event:
        return PASSED

    def to_device(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        def copy(tensor: Tensor) -> Tensor:
            self.copies[self.step] += 1
            return tensor.clone()

        COPYING[0] = True
        made = packed_copies(parts, lambda count, dtype: torch.empty(count, dtype=dtype), copy)
        COPYING[0] = False
        return made

    def to_host(self, tensor: Tensor, work: Waitable | None) -> HostCopy | None:
        if work is not None:
            work.wait()
        copy = tensor.detach().clone()
        self.host.add(copy.untyped_storage().data_ptr())
        self.kept.append(copy)
        return HostCopy(copy, Read(self, self.step))


def trained(text: str, options: Mapping[str, Any], build: Any = None) -> tuple[Any, ...]:
    """On a rank: what the host would wait for in the last steps, its reads, copies and losses."""
    device_queue.QUEUES["cpu"] = CountingQueue
    device_queue.queue_of.cache_clear()
    cpu = torch.device("cpu")
    queue: Any = device_queue.queue_of(cpu)
    deferred, program = MODELS.captured("chain", "fp32")
    trainer = Trainer(program, loads(text, "test"), deferred, device=cpu, build=build)
    trainer.use_update(UpdateOptions(**options))
    batches = [random_batch(program.with_batch_size(ROWS).graph, seed=s) for s in range(STEPS)]
    waits = Waits(queue.host)
    queue.host.update(t.untyped_storage().data_ptr() for b in batches for t in b.values())
    before, losses = None, []
    for queue.step, batch in enumerate(batches):
        if queue.step < STEPS - 2:
            result = trainer.step(batch)
        else:
            with waits, Dispatched(waits):
                result = trainer.step(batch)
        losses.append(None if before is None else before.read().loss)
        before = result
    assert before is not None
    return dict(waits.found), queue.reads, dict(queue.copies), losses[1:]


def plain(text: str, options: Mapping[str, Any]) -> list[float]:
    """On a rank: the losses where the device is the host."""
    deferred, program = MODELS.captured("chain", "fp32")
    trainer = Trainer(program, loads(text, "test"), deferred, device=torch.device("cpu"))
    trainer.use_update(UpdateOptions(**options))
    batches = [random_batch(program.with_batch_size(ROWS).graph, seed=s) for s in range(STEPS)]
    return [trainer.step(batch).read().loss for batch in batches][:-1]


def both(text: str, options: Mapping[str, Any]) -> tuple[Any, ...]:
    return plain(text, options), trained(text, options)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case",
    [CASES[0], *map(slow, CASES[1:])],
    ids=lambda case: case.parallel,
)
def test_a_host_waits_only_for_the_figures_of_the_step_before(case: Case) -> None:
    text = planned(case)
    assert text is not None
    options = {"max_norm": 0.5}
    for expected, (waits, reads, copies, losses) in run_processes(
        2, both, text, options, backend="gloo", timeout_seconds=240.0
    ):
        assert waits == {}
        late = [(at, of) for at, of in reads if at >= STEPS - 2]
        assert late
        assert {at - of for at, of in late} == {1}
        assert copies.get(STEPS - 1, 0) <= 2  # of all micro-batches at once, and what is counted
        assert losses == pytest.approx(expected, rel=1e-5)


def reads_in_a_step(text: str) -> dict[str, int]:
    waits, *_ = trained(text, {"on_nan": "skip"}, build_optimizer)
    return waits


def test_what_is_counted_is_there_where_the_host_decides_on_an_update() -> None:
    """AdamW that is not fused: whether to step is read before each update."""
    text = planned(CASES[1])
    assert text is not None
    for waits in run_processes(2, reads_in_a_step, text, backend="gloo"):
        assert waits["_local_scalar_dense"] >= 2
