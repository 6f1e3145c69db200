"""Activations in host memory: steps equal one device's, and the device holds two blocks' values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from any_tiles import cut_all
from processes import run_processes
from test_compiling import ROWS, WIDTH, stage_program
from test_verification import captured, check_verified, num_devices, target, verify_all
from torch import Tensor

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.ops.random_ops import Draws
from autoparallel.planner.errors import PlanError
from autoparallel.planner.evaluate.evaluate import at_microbatch, walked_stages
from autoparallel.planner.plan import Plan, Recompute
from autoparallel.planner.plan_file import dumps
from autoparallel.planner.requests.features import MODES
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.messages.device_queue import Event, queue_of
from autoparallel.runtime.parameters.compiling import BlockCompiler
from autoparallel.runtime.parameters.offloading import OffloadedValues, Offloader, share_window
from autoparallel.runtime.parameters.stage import StageBlock
from autoparallel.script.source import check_writable

OFFLOADED: tuple[Recompute, ...] = ("none-offloaded", "attention-offloaded")

TWO = (
    ("llama", "dp=2,zero=3,microbatches=2"),
    ("llama", "pp=2,microbatches=4,schedule=1f1b"),
    ("gpt", "tp=2,microbatches=2"),
    ("dropout", "pp=2,microbatches=4,schedule=zb-h1"),
)
FOUR = (
    ("llama", "dp=2,tp=2,zero=1,microbatches=2"),
    ("llama", "tp=2,pp=2,microbatches=4"),
    ("gpt-tied", "pp=2,dp=2,zero=3,microbatches=4"),
    ("mixtral", "dp=4,zero=2,microbatches=2"),
    ("gpt2", "pp=2,dp=2,microbatches=4,schedule=interleaved"),
)


def planned(model: str, parallel: str, modes: Sequence[Recompute]) -> Plan:
    """The plan of ``model`` under forced degrees, its blocks in ``modes`` in turn."""
    _, program = captured(model, "fp32")
    options = PlanOptions(global_batch=16, seq=16, forced=parse_parallel(parallel))
    cluster = parse_cluster(f"cpu:{num_devices(parallel)}")
    plan, left = plan_program(program, target(model), cluster, options), cycle(modes)
    stages = tuple(
        replace(s, blocks=tuple(replace(block, recompute=next(left)) for block in s.blocks))
        for s in plan.stages
    )
    return replace(plan, stages=stages)


def verified(cases: Sequence[tuple[str, str, Sequence[Recompute]]]) -> None:
    plans = [(model, dumps(planned(model, *rest))) for model, *rest in cases]
    found = run_processes(num_devices(cases[0][1]), verify_all, plans, timeout_seconds=280)
    for own in found[0]:
        check_verified(own)


def test_offloaded_steps_on_two_ranks_equal_one_device() -> None:
    """Blocks in every mode, and all blocks in one."""
    cases = [(*case, MODES[::-1]) for case in TWO]
    verified([*cases, (*TWO[1], ("none-offloaded",)), (*TWO[1], ("attention-offloaded",))])


@pytest.mark.slow
def test_offloaded_steps_on_four_ranks_equal_one_device() -> None:
    verified([(*case, modes) for case in FOUR for modes in (MODES, ("attention-offloaded",))])


@pytest.mark.slow
def test_tiles_of_offloaded_blocks_equal_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_all(monkeypatch.setattr)
    case = "llama", "dp=2,microbatches=2", ("attention-offloaded", "attention")
    plans = [("llama", dumps(replace(planned(*case), tiles=4)))]
    check_verified(run_processes(2, verify_in_tiles, plans, timeout_seconds=280)[0][0])


def verify_in_tiles(cases: list[tuple[str, str]]) -> list[object]:
    cut_all(setattr)
    return list(verify_all(cases))


@dataclass
class Number:
    """Event of the copies up to a number."""

    queue: LateQueue
    number: int

    def query(self) -> bool:
        return self.queue.num_done >= self.number

    def synchronize(self) -> None:
        self.queue.finish(self.number)


@dataclass(eq=False)
class LateQueue:
    """Queue whose copies are done when something waits for them, in their order."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    runs_behind: bool = True
    copies: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    num_done: int = 0
    look: Callable[[], None] = field(default=lambda: None)

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> Event:
        for _, copied in pairs:
            copied.fill_(255)  # not a number
        self.copies.append(pairs)
        self.look()
        return Number(self, len(self.copies))

    def wait_for(self, event: Event) -> None:
        self.look()
        event.synchronize()

    def finish(self, number: int) -> None:
        for pairs in self.copies[self.num_done : number]:
            for source, copied in pairs:
                copied.copy_(source)
        self.num_done = max(self.num_done, number)


@dataclass(eq=False)
class Watched(Offloader):
    """Counts the blocks whose values the device holds."""

    made: list[weakref.ref[OffloadedValues]] = field(default_factory=list)
    most: int = 0

    def begin(self, *given: Any) -> OffloadedValues:
        found = super().begin(*given)
        self.made.append(weakref.ref(found))
        return found

    def num_held(self) -> int:
        values = [ref() for ref in self.made]
        held = [own for own in values if own and any(each is not None for each in own._device)]
        return len(held)

    def look(self) -> None:
        self.most = max(self.most, self.num_held())


def trained(
    mode: Recompute,
    offloader: Offloader | None,
    compiler: BlockCompiler | None = None,
    device: str = "cpu",
) -> list[Tensor]:
    """The loss and gradients of two micro-batches, both forwards before both backwards."""
    own = stage_program(mode)
    modules = [
        StageBlock(block, Draws(), compiler=compiler, offloader=offloader).to(device)
        for block in own.blocks
    ]
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(2):
        known = {"x": torch.randn((ROWS, WIDTH), generator=generator).double().to(device)}
        if offloader is not None:
            offloader.last = None
        for module in modules:
            outputs = module(*(known[key] for key in module.inputs))
            known.update(zip(module.outputs, outputs, strict=True))
        assert own.loss is not None
        losses.append(known[own.loss])
    del known, outputs
    for loss in losses:
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for module in modules for parameter in module.parameters()]
    return [*(each.detach() for each in losses), *(each for each in gradients if each is not None)]


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoparallel.runtime.parameters.offloading.LEAST_BYTES", 1)


@pytest.mark.parametrize("mode", OFFLOADED)
def test_late_copies_are_waited_for_and_hold_two_blocks(mode: Recompute) -> None:
    queue = LateQueue()
    offloader = Watched(queue)  # type: ignore[arg-type]
    queue.look = offloader.look
    found, expected = trained(mode, offloader), trained("none", None)
    assert len(found) == len(expected) > 10
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)
    assert offloader.most == 2
    sent = sum(source.numel() for pairs in queue.copies for source, _ in pairs)
    assert sent > offloader.num_sent_bytes > 0, "all is sent, and some of it is fetched"
    assert offloader.num_held() == 0, "after the backward nothing is left on the device"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", OFFLOADED)
def test_the_queue_of_a_device_copies_beside_its_work(mode: Recompute, device: str) -> None:
    offloader = Offloader(queue_of(torch.device(device)))
    found, expected = trained(mode, offloader, device=device), trained("none", None, device=device)
    assert offloader.num_sent_bytes
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)


def test_stages_of_a_rank_share_the_window() -> None:
    first, second = (Offloader(LateQueue()) for _ in range(2))  # type: ignore[arg-type]
    share_window((None, first, None, second))
    kept = [torch.ones(4), torch.ones(4), torch.ones(4)]
    for offloader, tensor in zip((first, second, first), kept, strict=True):
        values = offloader.begin(torch.nn.Module(), (), ())
        values.keep(tensor)
        offloader.send(values)
    assert [len(each._sending) for each in (first, second)] == [1, 1]
    assert first.is_sending(values)
    share_window(())


def test_host_memory_is_used_again() -> None:
    offloader = Offloader(LateQueue())  # type: ignore[arg-type]
    trained("none-offloaded", offloader)
    before = sum(map(len, offloader._free.values()))
    trained("none-offloaded", offloader)
    assert sum(map(len, offloader._free.values())) == before > 0


def test_compiled_blocks_are_offloaded() -> None:
    offloader = Offloader(LateQueue())  # type: ignore[arg-type]
    found, expected = trained("none-offloaded", offloader, BlockCompiler()), trained("none", None)
    assert offloader.num_sent_bytes
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


@cache
def priced(mode: Recompute) -> float:
    """The bytes of a micro-batch in host memory that the planner prices, of one device."""
    plan = replace(planned("llama", "dp=1,microbatches=2", (mode,)))
    _, program = captured("llama", "fp32")
    (walk,) = walked_stages(at_microbatch(program.graph, plan), program.blocks, plan)
    return sum(block.host_bytes for block in walk.found)


def test_host_bytes_are_priced() -> None:
    assert priced("none-offloaded") > 2 * priced("attention-offloaded") > 0
    assert priced("none") == priced("attention") == 0


def test_scripts_refuse_offloaded_blocks_and_say_what_to_deny() -> None:
    with pytest.raises(PlanError, match="none-offloaded") as error:
        check_writable(planned("gpt", "dp=1", ("none-offloaded",)))
    assert error.value.code == "AP366"
