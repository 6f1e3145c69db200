"""Compiled blocks: what is compiled, how often, and that it computes what the model does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from one_stage import plan
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.passes.backward.compiled_runs import WAITS, Run, compile_runs
from autoparallel.passes.backward.weight_gradients import WeightGradients
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.local.stage_program import StageProgram, build_stage
from autoparallel.passes.ops.collectives import Alone
from autoparallel.passes.ops.eight_bits import eight_bit_linear
from autoparallel.passes.ops.random_ops import Draws
from autoparallel.passes.programs.program import Program
from autoparallel.planner.errors import RunError
from autoparallel.planner.evaluate.evaluate import at_microbatch
from autoparallel.planner.plan import Recompute
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.runtime.parameters.compiling import BlockCompiler
from autoparallel.runtime.parameters.stage import StageBlock

ROWS, WIDTH, LAYERS = 4, 8, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.up(self.norm(x))
        shrunk: Tensor = self.down(grown.sigmoid() * grown)
        return x + shrunk


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def program() -> Program:
    with torch.device("meta"):
        model = Net()
    batch = {"x": torch.empty((ROWS, WIDTH), device="meta")}
    return capture(model, batch, dtype="float64")


def stage_program(mode: Recompute) -> StageProgram:
    """The whole model as the only stage of one device, with the same weights every time."""
    forced = Forced(dp=1, tp=1, pp=1, num_microbatches=1, recompute=mode)
    captured = program()
    request = Request(ROWS, forced=forced, precision="fp64")
    found = plan(captured.graph, captured.blocks, parse_cluster("cpu:1"), request)
    built = build_stage(
        at_microbatch(captured.graph, found),
        captured.blocks,
        found,
        stage_index=0,
        coordinates=(0,),
        communicator=Alone(),
    )
    generator = torch.Generator().manual_seed(0)
    for block in built.blocks:
        module = block.module.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return built


def trained(
    mode: Recompute, compiler: BlockCompiler | None, *, splits: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of all parameters, after a forward and a backward."""
    own = stage_program(mode)
    store = WeightGradients() if splits else None
    known = {"x": torch.randn((ROWS, WIDTH), generator=torch.Generator().manual_seed(1)).double()}
    modules = []
    for position, block in enumerate(own.blocks):
        deferring = None if store is None else (store, position)
        module = StageBlock(block, Draws(), deferring, (), compiler)
        outputs = module(*(known[key] for key in block.inputs))
        known.update(zip(block.outputs, outputs, strict=True))
        modules.append(module)
    assert own.loss is not None
    loss = known[own.loss]
    if store is None:
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        with store.collecting(0):
            loss.backward()  # type: ignore[no-untyped-call]
        store.run(0)
    gradients = [parameter.grad for each in modules for parameter in each.graph.parameters()]
    return loss.detach(), [gradient for gradient in gradients if gradient is not None]


@pytest.fixture(params=["counted", pytest.param("inductor", marks=pytest.mark.slow)])
def compilations(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], int]:
    """Count the calls of inductor, which ``counted`` replaces by one that runs the graph."""
    if request.param == "inductor":
        return lambda: int(counters["aot_autograd"]["total"])
    compiled: list[fx.GraphModule] = []

    def compile_nothing(graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
        compiled.append(graph)
        return graph

    monkeypatch.setattr(torch._inductor, "compile", compile_nothing)
    return lambda: len(compiled)


def test_equal_blocks_share_one_compilation(compilations: Callable[[], int]) -> None:
    """Three equal layers and what comes before and after them: three kinds of blocks."""
    kinds = {block.kind for block in program().blocks.blocks}
    compiler, before = BlockCompiler(), compilations()
    loss, gradients = trained("none", compiler)
    own = stage_program("none")
    compiled = [b for b in own.blocks if _num_runs(b.module)]
    assert len(compiled) >= LAYERS
    assert compilations() - before == len({b.kind for b in compiled}) <= len(kinds)
    assert len(compiler.compiled) == compilations() - before
    expected, truth = trained("none", None)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, truth, rtol=1e-10, atol=1e-12)
    trained("none", compiler)
    assert len(compiler.compiled) == compilations() - before


def _num_runs(module: fx.GraphModule) -> int:
    return len(_runs_of(module, in_parts=False))


def _is_product(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.linear.default


def _runs_of(module: fx.GraphModule, *, in_parts: bool) -> list[Run]:
    """What is to be compiled of a block, whose graph then calls it."""
    found: list[Run] = []

    def keep(run: Run) -> Callable[..., object]:
        found.append(run)

        def call(*inputs: Tensor) -> object:
            return run.module(*inputs)

        return call

    compile_runs(module, keep, in_parts=in_parts)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_compiled_blocks_have_the_gradients_of_eager_ones(mode: Recompute, splits: bool) -> None:
    loss, gradients = trained(mode, BlockCompiler(), splits=splits)
    expected, truth = trained(mode, None, splits=splits)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, truth, rtol=1e-10, atol=1e-12)


def test_where_products_are_kept_they_run_between_what_is_compiled() -> None:
    module = stage_program("selective").blocks[1].module
    runs = _runs_of(module, in_parts=True)
    assert runs
    assert not any("linear" in run.text for run in runs)
    assert sum(_is_product(node) for node in module.graph.nodes) == 2


def test_linear_layers_in_eight_bits_are_compiled_where_products_are() -> None:
    for mode, in_parts in (("none", False), ("selective", True)):
        module = stage_program(mode).blocks[1].module
        for node in module.graph.nodes:
            if _is_product(node):
                node.target = eight_bit_linear
        runs = _runs_of(module, in_parts=in_parts)
        found = [node.target for run in runs for node in run.module.graph.nodes]
        assert found.count(eight_bit_linear) == (0 if in_parts else 2), mode


def test_a_run_that_cannot_be_compiled_names_its_block_and_the_way_out() -> None:
    """A product of shapes that do not fit stands for what inductor has no kernel for."""
    own = stage_program("none").blocks[1]
    graph = own.module.graph
    product = next(node for node in graph.nodes if _is_product(node))
    product.args = (product.args[0], product.args[0], product.args[2])
    block = StageBlock(own, Draws(), compiler=BlockCompiler())
    with pytest.raises(RunError, match=f"block {own.name} cannot be compiled") as found:
        block(torch.randn((ROWS, WIDTH), dtype=torch.float64))
    assert found.value.code == "AP823"
    assert "--no-compile" in str(found.value)


def test_what_runs_beside_an_exchange_is_compiled_apart_from_what_follows_it() -> None:
    """Else it would be computed after the wait, as it is read there."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    others = graph.call_function(torch.ops.aten.relu.default, (x,))
    others = graph.call_function(torch.ops.aten.neg.default, (others,))
    waited = graph.call_function(torch.clone, (x,))
    waited.meta[WAITS] = True
    total = graph.call_function(torch.ops.aten.add.Tensor, (others, waited))
    graph.output(graph.call_function(torch.ops.aten.neg.default, (total,)))
    module = fx.GraphModule(nn.Module(), graph)
    assert [run.text.count("aten.") for run in _runs_of(module, in_parts=False)] == [2, 2]
    called = [node.name for node in module.graph.nodes if node.op == "call_function"]
    assert [name for name in called if "getitem" not in name] == ["compiled", "clone", "compiled_1"]
