"""In which block and collective a thread is, told from its stack."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from script_ranks import group_of_one
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.passes.ops.collectives import Alone, Parts, Rank, Running
from autoparallel.passes.ops.ring import ring_attention
from autoparallel.planner.graph.layout import Mesh
from autoparallel.runtime.messages.communicator import (
    BackwardPosition,
    ProcessCommunicator,
    describe_stack,
)


def here() -> str:
    """Return the whereabouts of the caller's thread."""
    return describe_stack(sys._getframe())


class Asked(Tensor):
    """A tensor that notes where it is used."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(here())
        return super().__torch_function__(func, types, args, kwargs or {})


class Pickled:
    """An object that notes where it is sent."""

    def __init__(self) -> None:
        self.seen = ""

    def __reduce__(self) -> Any:
        self.seen = here()
        return SimpleNamespace, ()


class Block:
    """Runs a function as a block of a stage does."""

    def __init__(self, name: str) -> None:
        self.block_name = name

    def forward(self, function: Any) -> Any:
        return function()


def test_outside_of_blocks_and_collectives_nothing_is_told() -> None:
    assert here() == ""
    assert describe_stack(None) == ""


def test_the_innermost_block_and_the_outermost_call_of_a_collective_are_told() -> None:
    sent = Pickled()
    with group_of_one():
        Block("layers.0").forward(
            lambda: Block("layers.1").forward(lambda: dist.all_gather_object([None], sent))
        )
    assert sent.seen == "in block layers.1, all_gather_object"


def test_the_collective_of_a_stage_is_told_with_its_axis() -> None:
    with group_of_one():
        mesh = DeviceMesh("cpu", torch.tensor([[0]]), mesh_dim_names=("dp", "tp"))
        Asked.seen.clear()
        ProcessCommunicator(mesh).all_reduce(torch.ones(2).as_subclass(Asked), 1)
    assert "all_reduce over tp" in Asked.seen


class FSDPParamGroup:
    """Named as the class of torch that shards parameters."""

    def __init__(self, *names: str) -> None:
        self.modules = [SimpleNamespace(), *map(Block, names)]

    def wait_for_unshard(self) -> str:
        return here()

    def post_backward(self) -> str:
        return here()


def test_blocks_whose_parameters_are_gathered_or_gradients_scattered_are_told() -> None:
    group = FSDPParamGroup("layers.0", "layers.1")
    assert group.wait_for_unshard() == ("in block layers.0, layers.1, all-gather of its parameters")
    assert group.post_backward() == ("in block layers.0, layers.1, reduce-scatter of its gradients")


class Executor:
    """Runs backwards of a stage whose last begun block is known."""

    def __init__(self, block: str) -> None:
        position = BackwardPosition()
        position.block = block
        self.stage = SimpleNamespace(backward_position=position)

    def _run_backward(self, function: Any) -> Any:
        return function()


def test_in_a_backward_the_block_that_began_last_is_told() -> None:
    assert Executor("layers.2")._run_backward(here) == "in the backward of block layers.2"
    assert Executor("")._run_backward(here) == ""
    recomputed = Executor("layers.2")._run_backward(lambda: Block("layers.1").forward(here))
    assert recomputed == "in the backward of block layers.1"


def test_a_message_of_ring_attention_is_told_as_such() -> None:
    """A rank of two, whose own message is the one that it waits for."""

    class Asking(Alone):
        seen = ""

        def size(self, axis: int) -> int:
            return 2

        def exchange(self, rows: Tensor, parts: Parts, axes: tuple[int, ...]) -> Running:
            return Running(rows, work=SimpleNamespace(wait=self.note))

        def note(self) -> None:
            self.seen = here()

    asking, query = Asking(), torch.randn(1, 1, 4, 8)
    rank = Rank(Mesh(("cp",), (2,)), (0,), asking)
    Block("layers.0").forward(lambda: ring_attention(rank, query, query, query, ring=(0,)))
    assert asking.seen == "in block layers.0, ring attention over cp"
