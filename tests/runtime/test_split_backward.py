"""Backwards in two halves: the gradients of one backward, nothing computed twice."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from stages import given_constants, relative_error
from test_random_plans import (
    DP2,
    DP2_TP2,
    NUM_MICROBATCHES,
    ROWS,
    TOLERANCE,
    TP2,
    Case,
    Truth,
    plan_for,
    truth,
)
from test_random_plans import Model as Transformer
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from autoparallel.cost_model.simulator.actions import Action, Schedule, Table, compute_only
from autoparallel.passes.backward.weight_gradients import HALVES, WeightGradients, defer
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.local.stage_program import build_stage
from autoparallel.passes.ops.eight_bits import eight_bit_linear
from autoparallel.passes.programs.constants import evaluate
from autoparallel.passes.programs.program import Program
from autoparallel.planner.schedules.check import check_schedule
from autoparallel.planner.schedules.messages import complete
from autoparallel.planner.schedules.schedules import build_schedule
from autoparallel.runtime.messages.communicator import ProcessCommunicator
from autoparallel.runtime.messages.exchange import Exchange
from autoparallel.runtime.messages.groups import build_meshes, stages_of_rank
from autoparallel.runtime.parameters.initial_values import materialize
from autoparallel.runtime.parameters.stage import StageModule
from autoparallel.runtime.parameters.tied_parameters import find_tied
from autoparallel.runtime.step.executor import StageExecutor, StageVariant
from autoparallel.runtime.step.pipeline import Hooks, PipelineRunner

aten = torch.ops.aten


class Op(nn.Module):
    """One op on parameters of its own."""

    def __init__(self, op, arguments: list[Tensor | int | tuple[int, ...] | None]) -> None:
        super().__init__()
        self.op, self.arguments = op, arguments
        self.weights = nn.ParameterList(a for a in arguments if isinstance(a, nn.Parameter))

    def graph(self) -> fx.GraphModule:
        body, weights = fx.Graph(), iter(range(len(self.weights)))
        arguments = [
            body.get_attr(f"weight_{next(weights)}")
            if isinstance(a, nn.Parameter)
            else body.placeholder("x")
            if isinstance(a, Tensor)
            else a
            for a in self.arguments
        ]
        body.output(body.call_function(self.op, tuple(arguments)))
        held = {f"weight_{i}": weight for i, weight in enumerate(self.weights)}
        return fx.GraphModule(held, body)

    @property
    def data(self) -> Tensor:
        (found,) = (
            a for a in self.arguments if isinstance(a, Tensor) and not isinstance(a, nn.Parameter)
        )
        return found


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(random(*shape))


GENERATOR = torch.Generator().manual_seed(0)
OPS = {
    "linear": (aten.linear.default, [random(2, 3, 4), weight(5, 4), weight(5)]),
    "linear without bias": (aten.linear.default, [random(2, 3, 4), weight(5, 4)]),
    "linear in eight bits": (eight_bit_linear, [random(2, 3, 4), weight(5, 4), weight(5)]),
    "mm": (aten.mm.default, [random(3, 4), weight(4, 5)]),
    "bmm": (aten.bmm.default, [random(2, 3, 4), weight(2, 4, 5)]),
    "addmm": (aten.addmm.default, [weight(5), random(3, 4), weight(4, 5)]),
    "embedding": (aten.embedding.default, [weight(7, 4), torch.tensor([[1, 2, 2], [0, 6, 1]])]),
    "padded embedding": (aten.embedding.default, [weight(7, 4), torch.tensor([[1, 2], [0, 6]]), 2]),
    "conv1d": (
        aten.conv1d.default,
        [random(2, 4, 9), weight(6, 2, 3), weight(6), [2], [1], [1], 2],
    ),
    "conv2d": (aten.conv2d.default, [random(2, 3, 6, 6), weight(4, 3, 3, 3), weight(4), [1, 2]]),
    "conv3d": (aten.conv3d.default, [random(1, 2, 4, 4, 4), weight(3, 2, 2, 2, 2)]),
}


@pytest.mark.parametrize("name", OPS)
def test_the_halves_of_an_op_are_its_backward(name: str) -> None:
    op, arguments = OPS[name]
    module = Op(op, arguments)
    x, graph = module.data, module.graph()
    x = x.clone().requires_grad_(x.is_floating_point())
    expected = op(*(x if a is module.data else a for a in arguments))
    upstream = random(*expected.shape)
    wanted = [*module.weights, *([x] if x.requires_grad else [])]
    gradients = torch.autograd.grad(expected, wanted, upstream)

    store = WeightGradients()
    assert defer(graph, store, 0, frozenset()) == {
        f"weight_{i}" for i in range(len(module.weights))
    }
    with store.collecting(0):
        result = graph(x)
        assert torch.equal(result, expected)
        result.backward(upstream)
    assert all(weight.grad is None for weight in module.weights)
    if x.requires_grad:
        assert torch.allclose(x.grad, gradients[-1], rtol=1e-13, atol=1e-13)
    store.run(0)
    for parameter, gradient in zip(module.weights, gradients, strict=False):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-13, atol=1e-13)
        parameter.grad = None


def test_every_op_that_is_put_off_is_tried() -> None:
    assert {op for op, _ in OPS.values()} == set(HALVES)


def test_the_halves_take_the_operations_of_one_backward() -> None:
    """Counted: the forward's products twice over, one half in each half."""
    op, arguments = OPS["linear"]
    module = Op(op, arguments)
    x, graph, store = module.data.clone().requires_grad_(), module.graph(), WeightGradients()
    defer(graph, store, 0, frozenset())
    counts = []
    result = graph(x)
    for half in (lambda: result.sum().backward(), lambda: store.run(0)):
        with FlopCounterMode(display=False) as counter, store.collecting(0):
            half()
        counts.append(counter.get_total_flops())
    assert counts == [2 * 6 * 4 * 5] * 2
    module.weights[0].grad = module.weights[1].grad = None


def test_what_the_weights_do_not_need_is_freed_in_the_first_half() -> None:
    """Of ``down(gelu(up(x)))`` the second half keeps both inputs and both gradients, no more."""
    body = fx.Graph()
    x = body.placeholder("x")
    up = body.call_function(aten.linear.default, (x, body.get_attr("up")))
    middle = body.call_function(aten.gelu.default, (up,))
    body.output(body.call_function(aten.linear.default, (middle, body.get_attr("down"))))
    graph = fx.GraphModule({"up": weight(8, 4), "down": weight(4, 8)}, body)
    store = WeightGradients()
    defer(graph, store, 0, frozenset())
    saved: list[torch.UntypedStorage] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = graph(random(3, 4).requires_grad_())
    with store.collecting(0):
        result.backward(random(3, 4))
    kept = [t for d in store._waiting[0] for t in (d.data, d.gradient)]
    assert sorted(tuple(t.shape) for t in kept) == [(3, 4), (3, 4), (3, 8), (3, 8)]
    assert len({t.untyped_storage().data_ptr() for t in kept}) == 4
    store.run(0)
    assert not store._waiting


@dataclass(frozen=True)
class Delayed:
    """A plan, and by how many of its stage's input backwards each weight backward comes later."""

    case: Case
    delay: int


CASES = (
    Delayed(Case(0, (DP2_TP2,), 0), 1),
    Delayed(Case(1, (DP2_TP2,), 1), 0),
    Delayed(Case(2, (DP2_TP2,), 2, "selective"), 1),
    Delayed(Case(3, (DP2_TP2,), 3, "full"), 1),
    Delayed(Case(6, (DP2, TP2), 3), 1),
    Delayed(Case(7, (TP2, DP2), 1, "full", "gpipe"), 0),
    Delayed(Case(8, (DP2, DP2), 2, "selective"), 1),
)


def split(schedule: Schedule, delay: int) -> Schedule:
    """Every backward in halves, the second after ``delay`` more first halves; tested alike."""
    rows: list[tuple[Action, ...]] = []
    for row in schedule.table:
        actions: list[Action] = []
        waiting: list[Action] = []
        for action in compute_only(row):
            if action.kind != "B":
                actions.append(action)
                continue
            actions.append(action._replace(kind="I"))
            waiting.append(action._replace(kind="W"))
            if len(waiting) > delay:
                actions.append(waiting.pop(0))
        rows.append((*actions, *waiting))
    orders: Table = tuple(rows)
    found = replace(schedule, table=complete(orders)[1])
    check_schedule(found)
    return found


def train_step(delayed: Delayed, program: Program, expected: Truth) -> None:
    case = delayed.case
    plan = plan_for(case, program)
    rank = dist.get_rank()
    (index,) = stages_of_rank(plan, rank)
    own, device_mesh = plan.stages[index], build_meshes(plan)[index]
    stage_program = build_stage(
        program.graph,
        program.blocks,
        plan,
        stage_index=index,
        coordinates=own.mesh.coordinates(own.devices.index(rank)),
        communicator=ProcessCommunicator(device_mesh),
    )
    stage = StageModule(
        stage_program, device_mesh, zero=own.zero, precision="fp64", splits_backward=True
    )
    assert len(stage.deferred) > 8
    materialize(stage, {**expected.weights, **program.literals})
    executor = StageExecutor(
        stage,
        StageVariant(NUM_MICROBATCHES),
        given_constants(evaluate(program, stage_program.constants)),
    )
    whole = build_schedule(case.schedule, len(plan.stages), NUM_MICROBATCHES)
    schedule = split(whole, delayed.delay)
    exchange = Exchange(
        [(*stage_program.receives, *stage_program.sends)],
        schedule=schedule,
        stages=plan.stages,
        rank=rank,
        device=stage.device,
    )
    parameters = {index: stage.by_name}
    tied = find_tied(parameters)
    runner = PipelineRunner(
        schedule,
        {index: executor},
        exchange,
        hooks=Hooks(lambda: tied.sum(parameters)),
    )
    for _ in range(2):
        loss = runner.step(expected.batch)
        assert relative_error(loss, expected.loss) < TOLERANCE
        expected.check(executor.parameters, delayed)


def run_cases(cases: tuple[Delayed, ...], program: Program, expected: Truth) -> None:
    for case in cases:
        try:
            train_step(case, program, expected)
        except Exception as error:
            raise AssertionError(str(case)) from error


@pytest.mark.slow
def test_split_backwards_under_random_plans_have_the_gradients_of_one_process() -> None:
    with torch.device("meta"):
        model = Transformer()
    batch = {
        key: torch.empty(2, 8, dtype=torch.int64, device="meta") for key in ("tokens", "labels")
    }
    program = replace(capture(model, batch, dtype="float64"), model=nn.Module())
    run_processes(4, run_cases, CASES, program.with_batch_size(ROWS), truth(program))
