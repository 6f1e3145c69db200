"""What a recomputed layer computes again, sends again and keeps, on one of two ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
from one_stage import plan
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.passes.backward.recomputing import COSTLY, Recomputing
from autoparallel.passes.backward.replayed import MARK, SPARED
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.local.stage_program import BlockProgram, build_stage
from autoparallel.passes.programs.program import Program
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.kept_bytes import kept_parts, replay
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.evaluate.evaluate import at_microbatch
from autoparallel.planner.graph.layout import Mesh, local_shape
from autoparallel.planner.plan import Plan, Recompute
from autoparallel.planner.requests.request import Forced, Request
from examples.gpt import GPT, example_batch

aten = torch.ops.aten
ROWS, SEQ, WIDTH = 4, 128, 512
CLUSTER = parse_cluster("2xH100")


@dataclass
class Echo:
    """The first of the ranks, if all others had the same tensors; counts what it is asked."""

    mesh: Mesh
    asked: Counter[str] = field(default_factory=Counter)

    def size(self, axis: int) -> int:
        return self.mesh.shape[axis]

    def coordinate(self, axis: int) -> int:
        return 0

    def all_reduce(self, tensor: Tensor, axis: int, op: Literal["sum", "max"] = "sum") -> Tensor:
        self.asked["all_reduce"] += 1
        return tensor * self.size(axis) if op == "sum" else tensor.clone()

    def all_gather(self, tensor: Tensor, axis: int, dim: int) -> Tensor:
        self.asked["all_gather"] += 1
        return torch.cat([tensor] * self.size(axis), dim)

    def reduce_scatter(self, tensor: Tensor, axis: int, dim: int) -> Tensor:
        self.asked["reduce_scatter"] += 1
        return tensor.chunk(self.size(axis), dim)[0] * self.size(axis)

    def all_to_all(self, tensor: Tensor, axis: int, split_dim: int, concat_dim: int) -> Tensor:
        self.asked["all_to_all"] += 1
        return torch.cat(
            [tensor.chunk(self.size(axis), split_dim)[0]] * self.size(axis), concat_dim
        )

    def swap(self, tensor: Tensor, axis: int) -> Tensor:
        self.asked["swap"] += 1
        return tensor.clone()


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts those that cost much."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COSTLY:
            self.calls["attention" if "attention" in str(func) else "product"] += 1
        return func(*args, **(kwargs or {}))


@cache
def program() -> Program:
    with torch.device("meta"):
        model = GPT(n_layer=2, d_model=WIDTH, n_head=4, seq=SEQ, vocab=64, tied=False)
    return capture(model, example_batch(ROWS, SEQ), dtype="float64")


@cache
def planned() -> Plan:
    """Two ranks that share every layer, its products split by columns, then by rows."""
    forced = Forced(tp=2, dp=1, pp=1, num_microbatches=1, recompute="selective")
    request = Request(ROWS, forced=forced)
    return plan(program().graph, program().blocks, CLUSTER, request)


def layer(mode: Recompute) -> tuple[BlockProgram, Echo, Tensor]:
    """A layer of the model with weights, who talks for it, and its input."""
    own, blocks = planned(), program().blocks
    stage = own.stages[0]
    echo = Echo(stage.mesh)
    recomputed = tuple(replace(block, recompute=mode) for block in stage.blocks)
    own = replace(own, stages=(replace(stage, blocks=recomputed),))
    graph = at_microbatch(program().graph, own)
    built = build_stage(graph, blocks, own, stage_index=0, coordinates=(0,), communicator=echo)
    block = built.blocks[1]
    module = block.module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul(0.1))
    (key,) = block.inputs
    shape = local_shape(graph[key].spec.shape, built.layouts[key], echo.mesh.shape)
    data = torch.randn(shape, generator=generator, dtype=torch.float64)
    return block, echo, data.requires_grad_()


@dataclass(frozen=True)
class Ran:
    """One forward and backward: gradients, kernels and collectives of the backward."""

    gradients: list[Tensor]
    kernels: Counter[str]
    collectives: Counter[str]


def ran(mode: Recompute) -> Ran:
    block, echo, data = layer(mode)
    if mode == "none":
        outputs = block.module(data)
    else:
        contexts = {}
        if mode != "full":
            recomputing = Recomputing.of(mode)
            recomputing.mark(block.module)
            contexts["context_fn"] = recomputing.contexts
        outputs = checkpoint(block.module, data, use_reentrant=False, **contexts)
    echo.asked.clear()
    with Kernels() as kernels:
        torch.autograd.backward([each.square().sum() for each in outputs])
    found = [each.grad for each in (data, *block.module.parameters())]
    assert all(each is not None for each in found)
    return Ran([each for each in found if each is not None], kernels.calls, echo.asked)


@pytest.mark.parametrize("mode", ["selective", "attention", "full"])
def test_a_recomputed_layer_has_the_gradients_of_one_that_is_not(mode: Recompute) -> None:
    for own, expected in zip(ran(mode).gradients, ran("none").gradients, strict=True):
        assert torch.equal(own, expected)


def test_no_product_and_no_reduction_is_computed_twice_selectively() -> None:
    none, own = ran("none"), ran("selective")
    assert own.kernels == none.kernels
    assert own.collectives["all_reduce"] == none.collectives["all_reduce"]
    assert own.collectives["reduce_scatter"] == none.collectives["reduce_scatter"]


def test_recomputed_fully_all_is_computed_twice_but_the_last_product() -> None:
    """Queries, keys and values, their projection, the first of the MLP; not its second."""
    none, own = ran("none"), ran("full")
    assert own.kernels - none.kernels == Counter(product=5, attention=1)
    reductions = ("all_reduce", "reduce_scatter")
    again = sum(own.collectives[each] - none.collectives[each] for each in reductions)
    assert again == 1, "the projection's partial sums are reduced again, the MLP's are not"


def test_attention_alone_is_not_computed_twice_if_its_results_are_kept() -> None:
    none, own = ran("none"), ran("attention")
    assert own.kernels - none.kernels == Counter(product=5)


@pytest.mark.parametrize("mode", ["selective", "attention"])
def test_what_recomputation_keeps_is_what_is_predicted(mode: Recompute) -> None:
    block, _, data = layer(mode)
    recomputing = Recomputing.of(mode)
    recomputing.mark(block.module)
    forward, _ = recomputing.contexts()
    with forward:
        block.module(data)
        kept = [*forward.kept]
    found = sum({each.data_ptr(): each.untyped_storage().nbytes() for each in kept}.values())
    own, blocks = planned(), program().blocks
    graph, (stage,) = at_microbatch(program().graph, own), own.stages
    kind = blocks.kinds[block.kind]
    prices = Prices(stage.mesh, CLUSTER, stage.devices, "fp32", "adamw", rules)
    again = replay(kind, graph, prices)
    parts = {
        part
        for name in kind.nodes
        for part in kept_parts(graph[name], stage.layouts[name], graph, prices, of=again.kept[mode])
    }
    assert found == sum(size for _, size in parts)


def test_an_op_that_keeps_something_cannot_be_left_out() -> None:
    """A mark that is wrong is found in the forward, not by wrong gradients."""
    block, _, data = layer("selective")
    marked = next(n for n in block.module.graph.nodes if n.target is aten.gelu.default)
    marked.meta[MARK] = SPARED
    recomputing = Recomputing.of("selective")
    recomputing.mark(block.module)
    with pytest.raises(AssertionError, match="gelu"):
        checkpoint(block.module, data, use_reentrant=False, context_fn=recomputing.contexts)
