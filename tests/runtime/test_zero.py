"""Training under every ZeRO stage equals training on one process, in float64.

Each run takes two AdamW steps on real gloo processes and compares the loss, every gradient
and every weight, relative to the tensor's largest magnitude.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forced_plans import settled
from marks import slow
from processes import run_processes, set_torchrun_variables
from stages import (
    device_mesh_of,
    global_batch,
    reference,
    relative_error,
    stage_program,
    summed,
    weights,
    whole,
)
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from autoparallel.planner.graph.layout import Layout, Mesh, shard
from autoparallel.runtime.messages.communicator import ProcessCommunicator
from autoparallel.runtime.parameters import zero as zero_stages
from autoparallel.runtime.parameters.initial_values import materialize
from autoparallel.runtime.parameters.stage import StageModule
from autoparallel.runtime.step.executor import StageExecutor, StageVariant
from autoparallel.runtime.update.optimizer import build_optimizer, gradient_norm

TOLERANCE = 1e-9
LEARNING_RATE = 0.05


@dataclass(frozen=True)
class Case:
    mesh: Mesh
    zero: int
    num_microbatches: int = 1
    recompute: str = "none"
    schedule: str = "gpipe"
    layouts: dict[str, Layout] = field(default_factory=dict)
    shard_degree: int = 0


DP2 = Mesh(("dp",), (2,))
TP2 = Mesh(("tp",), (2,))
DP2_TP2 = Mesh(("dp", "tp"), (2, 2))
DP4 = Mesh(("dp",), (4,))

TWO_RANKS = {
    "dp=2, zero=0, 4 micro-batches": Case(DP2, 0, 4),
    "dp=2, zero=1": Case(DP2, 1),
    "dp=2, zero=2, 4 micro-batches": Case(DP2, 2, 4),
    "dp=2, zero=3, 4 micro-batches, 1F1B": Case(DP2, 3, 4, schedule="1f1b"),
    "dp=2, zero=2, recompute=selective": Case(DP2, 2, 2, "selective"),
    "dp=2, zero=3, a parameter split on dp": Case(
        DP2, 3, 2, layouts={"layers.0.up.weight": (shard(0),), "first.weight": (shard(0),)}
    ),
    "tp=2, recompute=full": Case(TP2, 0, 2, "full", "1f1b"),
}
MORE_ON_TWO_RANKS = {
    **{f"dp=2, zero={zero}": Case(DP2, zero) for zero in (0, 2, 3)},
    **{f"dp=2, zero={zero}, 4 micro-batches": Case(DP2, zero, 4) for zero in (1, 3)},
    **{
        f"dp=2, zero={zero}, 4 micro-batches, 1F1B": Case(DP2, zero, 4, schedule="1f1b")
        for zero in range(3)
    },
    "dp=2, zero=3, recompute=full": Case(DP2, 3, 2, "full", "1f1b"),
    "dp=2, zero=0, recompute=full": Case(DP2, 0, 2, "full"),
    "dp=2, zero=0, a parameter split on dp": Case(
        DP2, 0, 2, layouts={"layers.1.down.weight": (shard(1),)}
    ),
    "tp=2": Case(TP2, 0),
    "tp=2, recompute=selective": Case(TP2, 0, 2, "selective"),
}
FOUR_RANKS = {
    "dp=2, tp=2, zero=1": Case(DP2_TP2, 1, 2),
    "dp=2, tp=2, zero=3, recompute=full": Case(DP2_TP2, 3, 2, "full"),
    "dp=4, zero=3, shards that are empty": Case(DP4, 3, 2),
    "dp=4, zero=3 within 2": Case(DP4, 3, 4, schedule="1f1b", shard_degree=2),
    "dp=4, zero=2 within 2": Case(DP4, 2, 4, shard_degree=2),
}
MORE_ON_FOUR_RANKS = {
    "dp=2, tp=2, zero=0": Case(DP2_TP2, 0, 2),
    "dp=2, tp=2, zero=2": Case(DP2_TP2, 2, 4, schedule="1f1b"),
    "dp=2, tp=2, zero=3": Case(DP2_TP2, 3, 4, schedule="1f1b"),
    "dp=4, zero=1 within 2": Case(DP4, 1, 4, shard_degree=2),
    "dp=4, zero=3 within 2, one micro-batch": Case(DP4, 3, 1, shard_degree=2),
    "dp=4, zero=3 within 2, recompute": Case(DP4, 3, 2, "selective", shard_degree=2),
}


def order(schedule: str, num_microbatches: int) -> list[tuple[str, int]]:
    """Forwards and backwards as GPipe, or as the first of two 1F1B stages, runs them."""
    if schedule == "gpipe":
        return [("F", j) for j in range(num_microbatches)] + [
            ("B", j) for j in range(num_microbatches)
        ]
    actions: list[tuple[str, int]] = [("F", 0)]
    for j in range(num_microbatches):
        if j + 1 < num_microbatches:
            actions.append(("F", j + 1))
        actions.append(("B", j))
    return actions


def make_executor(case: Case) -> StageExecutor:
    """The whole model as one stage on all ranks."""
    device_mesh = device_mesh_of(case.mesh, case.zero, case.shard_degree)
    program = stage_program(
        case.mesh,
        case.mesh.coordinates(dist.get_rank()),
        ProcessCommunicator(device_mesh),
        recompute=case.recompute,
        layouts=case.layouts,
    )
    program = replace(program, shard_degree=case.shard_degree)
    stage = StageModule(program, device_mesh, zero=case.zero, precision="fp64")
    materialize(stage, weights())
    return StageExecutor(stage, StageVariant(case.num_microbatches))


def train(case: Case, num_steps: int = 2) -> None:
    """Run the case and compare it with one process."""
    expected = reference(num_steps, case.num_microbatches, LEARNING_RATE)
    executor = make_executor(case)
    parameters = executor.parameters
    optimizer = build_optimizer(parameters.values(), learning_rate=LEARNING_RATE)
    for step in range(num_steps):
        executor.begin_step(global_batch(case.num_microbatches, step))
        actions = order(case.schedule, case.num_microbatches)
        for index, (action, microbatch) in enumerate(actions):
            if action == "F":
                assert executor.forward(microbatch, {}) == {}
            else:
                executor.backward(microbatch, {}, last=index == len(actions) - 1)
        executor.finish_step()
        loss = summed(executor.mean_loss())
        assert relative_error(loss, expected.losses[step]) < TOLERANCE
        norm = gradient_norm(parameters.values(), device=torch.device("cpu")).value()
        squares = sum(float(g.square().sum()) for g in expected.gradients[step].values())
        assert abs(float(norm) - squares**0.5) < TOLERANCE * squares**0.5
        for name, parameter in parameters.items():
            error = relative_error(whole(parameter.master.grad), expected.gradients[step][name])
            assert error < TOLERANCE, f"gradient of {name} in step {step}: {error}"
        optimizer.step()
        for name, parameter in parameters.items():
            error = relative_error(whole(parameter.master.detach()), expected.weights[step][name])
            assert error < TOLERANCE, f"weight {name} after step {step}: {error}"


def run_cases(cases: dict[str, Case]) -> None:
    """Each case in turn, on one set of processes."""
    for name, case in cases.items():
        try:
            train(case)
        except Exception as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize("cases", [TWO_RANKS, slow(MORE_ON_TWO_RANKS)], ids=["few", "more"])
def test_data_and_tensor_parallel_training_on_two_ranks_equals_one_process(
    cases: dict[str, Case],
) -> None:
    run_processes(2, run_cases, cases)


@pytest.mark.parametrize("cases", [FOUR_RANKS, slow(MORE_ON_FOUR_RANKS)], ids=["few", "more"])
def test_zero_with_tensor_parallel_training_on_four_ranks_equals_one_process(
    cases: dict[str, Case],
) -> None:
    run_processes(4, run_cases, cases)


class CountCollectives(TorchDispatchMode):
    """Counts all-gathers, reduce-scatters and all-reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"_allgather_base_": 0, "alltoall_base_": 0, "allreduce_": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("c10d::")
        if name in self.counts:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(
    zero: int, num_microbatches: int, mesh: Mesh = DP2, degree: int = 0
) -> tuple[int, ...]:
    """All-gathers, reduce-scatters and all-reduces of one step, in GPipe's order."""
    executor = make_executor(Case(mesh, zero, num_microbatches, shard_degree=degree))
    with CountCollectives() as mode:
        executor.begin_step(global_batch(num_microbatches))
        for microbatch in range(num_microbatches):
            executor.forward(microbatch, {})
        for microbatch in range(num_microbatches):
            executor.backward(microbatch, {}, last=microbatch == num_microbatches - 1)
        executor.finish_step()
    return tuple(mode.counts.values())


def count_every_zero(num_microbatches: int, group_bytes: int) -> list[tuple[int, ...]]:
    zero_stages.GROUP_BYTES, zero_stages.TINY_BYTES = group_bytes, 0
    return [count_collectives(zero, num_microbatches)[:2] for zero in range(4)]


@pytest.mark.parametrize(("groups", "group_bytes"), [(5, 0), (2, 1_000_000)])
def test_each_zero_stage_gathers_and_reduces_as_often_as_it_says(
    groups: int, group_bytes: int
) -> None:
    """Four blocks and the shared parameter: five groups one by one, two of small blocks."""
    num_microbatches = 3
    for counts in run_processes(2, count_every_zero, num_microbatches, group_bytes):
        assert counts == [
            (0, 0),
            (groups, groups),
            (groups, groups * num_microbatches),
            (2 * groups * num_microbatches, groups * num_microbatches),
        ]


def count_on_four(num_microbatches: int, degree: int) -> list[tuple[int, ...]]:
    zero_stages.GROUP_BYTES, zero_stages.TINY_BYTES = 0, 0
    return [count_collectives(zero, num_microbatches, DP4, degree) for zero in (1, 2, 3)]


def test_shards_are_summed_over_groups_once_a_step() -> None:
    """Five groups of parameters; all other collectives are as often as over all ranks."""
    every = run_processes(4, count_on_four, 3, 0)
    within = run_processes(4, count_on_four, 3, 2)
    for counts, without in zip(within, every, strict=True):
        for own, other in zip(counts, without, strict=True):
            assert own == (*other[:2], other[2] + 5)


def gradients_of(case: Case, is_async: bool) -> dict[str, torch.Tensor]:
    """Each rank's gradients of one step."""
    zero_stages.ASYNC_ON_CPU = is_async
    executor = make_executor(case)
    executor.begin_step(global_batch(case.num_microbatches))
    actions = order(case.schedule, case.num_microbatches)
    for index, (action, microbatch) in enumerate(actions):
        if action == "F":
            executor.forward(microbatch, {})
        else:
            executor.backward(microbatch, {}, last=index == len(actions) - 1)
    executor.finish_step()
    return {
        name: whole(parameter.master.grad)
        for name, parameter in executor.parameters.items()
        if parameter.master.grad is not None
    }


def compare_async(cases: dict[str, Case]) -> None:
    zero_stages.GROUP_BYTES, zero_stages.TINY_BYTES = 0, 0
    for name, case in cases.items():
        expected, found = gradients_of(case, False), gradients_of(case, True)
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert torch.equal(value, found[key]), f"{name}: {key}"


def test_collectives_beside_compute_change_no_bit() -> None:
    run_processes(2, compare_async, {k: c for k, c in TWO_RANKS.items() if c.zero})


class RecordOrder(TorchDispatchMode):
    """The order in which collectives begin, products are computed and sums are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = {"_allgather_base_": "gather", "alltoall_base_": "reduce", "mm": "product"}
        name = func.name().split("::")[1].split(".")[0]
        if name in names:
            self.events.append(names[name])
        return func(*args, **(kwargs or {}))


def order_of_step(_: None) -> tuple[list[str], list[str]]:
    """What a step of ZeRO 3 does forward and backward, each group a block."""
    zero_stages.GROUP_BYTES, zero_stages.TINY_BYTES = 0, 0
    mode, finish = RecordOrder(), zero_stages.PendingReductions.finish

    def recorded(pending: zero_stages.PendingReductions) -> None:
        if pending._reduction is not None:
            mode.events.append("wait")
        finish(pending)

    zero_stages.PendingReductions.finish = recorded  # type: ignore[method-assign]
    executor = make_executor(Case(DP2, 3))
    with mode:
        executor.begin_step(global_batch(1))
        executor.forward(0, {})
        count = len(mode.events)
        executor.backward(0, {}, last=True)
        executor.finish_step()
    return mode.events[:count], mode.events[count:]


def test_zero_3_gathers_a_group_ahead_and_waits_for_a_sum_after_the_next_products() -> None:
    for forward, backward in run_processes(2, order_of_step, None):
        before = [forward[:i].count("gather") for i, e in enumerate(forward) if e == "product"]
        assert before[0] == 3  # what all blocks share, the first block's and the second's
        between = "".join(event[0] for event in backward).split("r")[1:]
        assert len(between) == 5
        assert all("p" in each[: each.index("w")] for each in between[:3])


class Squared(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)).square().mean()


def looked_at(zero: int) -> tuple[float, float]:
    """On a rank: the loss after an update before which the model was run without gradients, and
    that of the plain model."""
    torch.manual_seed(0)
    x, plain = torch.randn(4, 8), Squared()
    set_torchrun_variables()
    model = autoparallel.parallelize(
        copy.deepcopy(plain),
        example_batch=(x,),
        parallel=settled(f"dp=2,zero={zero}"),
        profile="analytic",
    )
    losses = []
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(x).backward()
        with torch.no_grad():
            each(x)
        optimizer.step()
        losses.append(each(x).item())
    return losses[0], losses[1]


@pytest.mark.parametrize("zero", [1, slow(2), 3])
def test_weights_gathered_before_an_update_are_not_used_after_it(zero: int) -> None:
    for found, expected in run_processes(2, looked_at, zero):
        assert found == pytest.approx(expected, rel=1e-5)


class Distilled(torch.nn.Module):
    """A trained model whose outputs are compared with a model that has no gradient.

    Its blocks are gathered in one group, and the teacher's are the last of it.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.student = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.teacher = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.teacher.requires_grad_(how != "frozen")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = z = x
        for layer in self.student:
            y = layer(y).tanh()
        with torch.no_grad() if self.how == "no_grad" else torch.enable_grad():
            for layer in self.teacher:
                z = layer(z).tanh()
        z = z.detach() if self.how == "detached" else z
        return (y - z).square().mean()


def _losses(how: str, *, is_parallel: bool) -> list[float]:
    torch.manual_seed(0)
    model, x = Distilled(how), torch.linspace(-1, 1, 64).reshape(8, 8)
    if is_parallel:
        model = autoparallel.parallelize(
            model, example_batch=(x,), parallel=settled("dp=2,zero=3"), profile="analytic"
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _distilled(how: str) -> list[float]:
    set_torchrun_variables()
    return _losses(how, is_parallel=True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["no_grad", "frozen", "detached"])
def test_a_group_is_gathered_though_its_last_blocks_have_no_gradient(how: str) -> None:
    alone = _losses(how, is_parallel=False)
    for found in run_processes(2, _distilled, how):
        assert found == pytest.approx(alone, rel=1e-5)
