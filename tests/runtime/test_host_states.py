"""Gradients, and parameters under ZeRO 3, in host memory: steps equal one device's."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from processes import run_processes
from test_offloading import LateQueue, Number
from test_verification import check_verified, num_devices, planned, verify_all
from torch import Tensor

from autoparallel.runtime.messages.device_queue import Event, queue_of
from autoparallel.runtime.parameters.offloading import HostSums

TWO = (
    ("llama", "dp=2,zero=3,microbatches=2,offload=parameters"),
    ("gpt", "dp=2,zero=2,microbatches=4,offload=gradients"),
    ("llama", "dp=2,zero=3,microbatches=1,offload=gradients,recompute=full"),
    ("gpt", "tp=2,microbatches=2,offload=gradients"),
    ("gpt-tied", "pp=2,microbatches=4,schedule=1f1b,offload=gradients"),
    ("dropout", "pp=2,microbatches=4,schedule=zb-h1,offload=gradients"),
)
FOUR = (
    ("llama", "dp=4,zero=3,shard=2,microbatches=2,offload=parameters"),
    ("llama", "dp=4,zero=2,shard=2,microbatches=4,offload=gradients"),
    ("gpt", "dp=2,tp=2,zero=3,microbatches=2,offload=parameters,recompute=selective"),
    ("gpt-tied", "dp=2,pp=2,zero=3,microbatches=4,offload=parameters"),
    ("mixtral", "dp=4,zero=3,microbatches=2,offload=parameters"),
    ("dropout", "dp=2,pp=2,zero=3,microbatches=4,schedule=zb-h1,offload=parameters"),
    ("gpt", "dp=4,zero=3,microbatches=2,offload=parameters,recompute=none-offloaded"),
)


def verified(cases: Sequence[tuple[str, str]]) -> None:
    plans = [(model, planned(model, parallel)) for model, parallel in cases]
    found = run_processes(num_devices(cases[0][1]), verify_all, plans, timeout_seconds=280)
    for (model, parallel), own in zip(cases, found[0], strict=True):
        assert own.passed, (model, parallel)
        check_verified(own)


def test_states_in_host_memory_on_two_ranks_equal_one_device() -> None:
    verified(TWO)


@pytest.mark.slow
def test_states_in_host_memory_on_four_ranks_equal_one_device() -> None:
    verified(FOUR)


@dataclass(eq=False)
class SumQueue(LateQueue):
    """Late queue that also adds, when something waits."""

    sums: set[int] = field(default_factory=set)

    def add(self, pairs: list[tuple[Tensor, Tensor]]) -> Event:
        self.sums.add(len(self.copies))
        self.copies.append(pairs)
        return Number(self, len(self.copies))

    def finish(self, number: int) -> None:
        for at in range(self.num_done, number):
            for source, target in self.copies[at]:
                target.copy_(target + source if at in self.sums else source)
            self.copies[at] = []
        self.num_done = max(self.num_done, number)


def summed(sums: HostSums, device: str = "cpu") -> tuple[list[Tensor], list[Tensor], int]:
    """Sums of three micro-batches' gradients of five blocks of two parameters, the right sums, and
    the most blocks whose gradients are alive at once."""
    generator = torch.Generator().manual_seed(1)
    totals: dict[str, Tensor | None] = {}
    expected: dict[str, Tensor] = {}
    alive: list[tuple[int, weakref.ref[Tensor]]] = []
    most = 0
    for _ in range(3):
        for block in reversed(range(5)):
            for name in (f"{block}.weight", f"{block}.bias"):
                own = torch.randn((3, 4), generator=generator, dtype=torch.float64)
                expected[name] = expected.get(name, torch.zeros(())) + own
                gradient = own.to(device, copy=True)
                alive.append((block, weakref.ref(gradient)))
                totals[name] = sums.add(name, block, gradient, totals.get(name))
                del gradient, own
            most = max(most, len({at for at, ref in alive if ref() is not None}))
    sums.finish()
    assert not any(ref() is not None for _, ref in alive)
    return [each for each in totals.values() if each is not None], [*expected.values()], most


def test_late_sums_are_waited_for_and_hold_the_gradients_of_two_blocks() -> None:
    found, expected, most = summed(HostSums(SumQueue()))  # type: ignore[arg-type]
    assert most == 2
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_queue_of_a_device_adds_in_host_memory(device: str) -> None:
    found, expected, _ = summed(HostSums(queue_of(torch.device(device))), device)
    for own, other in zip(found, expected, strict=True):
        assert own.device.type == "cpu"
        assert torch.equal(own, other)


def test_memory_of_sums_is_used_again() -> None:
    sums = HostSums(SumQueue())  # type: ignore[arg-type]
    first, second = summed(sums)[0], summed(sums)[0]
    assert [own.data_ptr() for own in first] == [own.data_ptr() for own in second]
