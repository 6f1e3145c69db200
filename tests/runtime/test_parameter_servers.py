"""Parameter servers on real processes, held to one device."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from one_device import loss_of
from processes import run_processes
from test_verification import captured, target

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.initialization.deferred_init import plain_build
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.tracing.counter_random import batch_dims
from autoparallel.passes.tracing.modes import promote_to_float64
from autoparallel.planner.plan import Plan, ServerPlan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.requests.request import Forced
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.servers.server import Server
from autoparallel.runtime.servers.server_trainer import ServerTrainer
from autoparallel.runtime.verify.reference import Reference, run_reference
from autoparallel.runtime.verify.verify import verify

SEQ, GLOBAL_BATCH, STEPS = 16, 12, 4


def grouped(named_parameters: Any) -> torch.optim.Optimizer:
    """Adam with two groups, told apart by the shapes of whole parameters."""
    pairs = list(named_parameters)
    matrices = [p for _, p in pairs if p.ndim > 1]
    vectors = [p for _, p in pairs if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 1e-2}]
    return torch.optim.AdamW(groups, lr=1e-3)


OPTIMIZERS = {"grouped": grouped, "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}


@dataclass(frozen=True)
class Case:
    servers: ServerPlan
    optimizer: str = "grouped"
    model: str = "gpt"


CASES = (
    Case(ServerPlan((0, 1), (2, 3), (2, 2))),
    Case(ServerPlan((0, 1), (2, 3), (3, 1), replicas=False), "momentum"),
    Case(ServerPlan((0, 1, 2, 3), (0, 1, 2, 3), (1, 1, 1, 1)), model="dropout"),
    Case(ServerPlan((0, 1, 2), (1, 3), (1, 2, 1))),
)


@cache
def plan_text(case: Case) -> str:
    _, program = captured(case.model, "fp32")
    forced = Forced(num_microbatches=sum(case.servers.shares))
    options = PlanOptions(global_batch=GLOBAL_BATCH, seq=SEQ, forced=forced)
    plan = plan_program(program, target(case.model), parse_cluster("cpu:1"), options)
    return dumps(replace(plan, cluster=parse_cluster("cpu:4"), servers=case.servers))


def double(plan: Plan) -> Plan:
    return replace(plan, model=replace(plan.model, precision="fp64"))


def batches(model: str) -> list[dict[str, torch.Tensor]]:
    graph = captured(model, "fp64")[1].graph.with_batch_size(GLOBAL_BATCH)
    return [random_batch(graph, seed=step) for step in range(STEPS)]


def reference(case: Case) -> Reference:
    program, given = captured(case.model, "fp64")[1], batches(case.model)
    model = plain_build(target(case.model).build_model, 0).double()
    with promote_to_float64():
        return run_reference(
            model,
            given,
            loss=loss_of(target(case.model), program),
            build_optimizer=OPTIMIZERS[case.optimizer],
            random_dims=batch_dims(program.graph),
        )


def trainer_of(case: Case, text: str) -> ServerTrainer:
    deferred, program = captured(case.model, "fp64")
    return ServerTrainer(
        program,
        double(loads(text)),
        deferred,
        device=torch.device("cpu"),
        build=OPTIMIZERS[case.optimizer],
    )


def verified(cases: tuple[tuple[Case, str], ...]) -> list[dict[str, float]]:
    found = []
    for case, text in cases:
        trainer = trainer_of(case, text)
        result = verify(trainer, batches(case.model), partial(reference, case))
        trainer.finish()
        found.append({d.quantity: max(d.relative, 0.0) for d in result.differences})
        assert result.passed, result.failures
        assert max(d.relative for d in result.differences) < 1e-11
    return found


@pytest.mark.parametrize("case", [slow(CASES[0]), CASES[1], slow(CASES[2]), slow(CASES[3])])
def test_bsp_trains_as_one_device_does(case: Case) -> None:
    run_processes(4, verified, ((case, plan_text(case)),), timeout_seconds=60)


def survived(
    cases: tuple[tuple[Case, str, int], ...],
) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights where a rank is killed while it computes its second backward."""
    ((case, text, victim),) = cases
    trainer = trainer_of(case, text)
    rank = dist.get_rank()
    if rank == victim:
        doom(trainer)
    losses = [float(trainer.step(batch).loss) for batch in batches(case.model)]
    trainer.finish()
    weights = {n: p.local.tolist() for n, p in trainer.model.parameters.items()}
    return losses, weights


def doom(trainer: ServerTrainer) -> None:
    """This process is killed in the middle of a push of the second iteration: half a block has
    left, or the other servers have not yet got it."""

    def killed(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if trainer.worker is not None:
        worker, push = trainer.worker, trainer.worker._push

        def push_or_die(block: int) -> None:
            if worker._clock == 1 and block <= 1:
                killed()
            push(block)

        worker._push = push_or_die  # type: ignore[method-assign]
    elif trainer.server is not None:
        server, apply = trainer.server, trainer.server._apply

        def apply_or_die(piece: Any, request: Any, gradient: torch.Tensor) -> bool:
            if request.clock == 1 and request.part == 0 and request.block == 1:
                killed()
            return apply(piece, request, gradient)

        server._apply = apply_or_die  # type: ignore[method-assign]


DEATHS = (
    slow(ServerPlan((0, 1, 2), (2, 3), (1, 1, 1)), 1),  # a worker
    (ServerPlan((0, 1), (2, 3), (2, 1)), 2),  # a server
    slow(ServerPlan((0, 1, 2, 3), (0, 1, 2, 3), (1, 1, 1, 1)), 3),  # both in one
)


@pytest.mark.parametrize(("servers", "victim"), DEATHS)
def test_bsp_goes_on_exactly_when_a_worker_or_server_is_killed(
    servers: ServerPlan, victim: int
) -> None:
    """Every rank that is left has the losses and weights of one device."""
    case = Case(servers)
    found = run_processes(
        4, survived, ((case, plan_text(case), victim),), may_die=(victim,), timeout_seconds=90
    )
    assert found[victim] is None
    expected = reference(case)
    assert found[0][0] == pytest.approx(expected.losses, rel=1e-12)
    for rank in servers.workers:
        if rank != victim:
            for name, values in found[rank][1].items():
                weight = torch.tensor(values, dtype=torch.float64)
                assert torch.allclose(weight, expected.weights[name], rtol=1e-11, atol=1e-13)


LEAD_STEPS = 8


def lead_of(server: Server) -> int:
    """The pushes by which the fastest worker is ahead of the slowest, at any piece."""
    leads = [0]
    for piece in server.pieces.values():
        clocks = [piece.clocks.clock(worker) for worker in piece.clocks.workers]
        leads.append(max(clocks) - min(clocks))
    return max(leads)


def stale(cases: tuple[tuple[Case, str, int | None], ...]) -> tuple[list[float], int]:
    """A worker's losses on one batch, again and again, and the greatest lead at a server.

    Rank 1 waits for rank 0, or is killed in its second iteration: under ssp it begins each step
    when rank 0 has made the next one; without a bound it begins when rank 0 has made four steps,
    of which the servers have at least three pushes.
    """
    ((case, text, victim),) = cases
    trainer = trainer_of(case, text)
    rank, leads = dist.get_rank(), [0]
    if rank == victim:
        doom(trainer)
    if trainer.server is not None:
        server, apply = trainer.server, trainer.server._apply

        def recorded(piece: Any, request: Any, gradient: torch.Tensor) -> bool:
            is_new = apply(piece, request, gradient)
            leads.append(lead_of(server))
            return is_new

        server._apply = recorded  # type: ignore[method-assign]
    losses = []
    if trainer.worker is not None:
        (batch, *_) = batches(case.model)
        store = dist.distributed_c10d._get_default_store()
        lead = 2 if case.servers.consistency == "ssp" else 4
        for step in range(LEAD_STEPS):
            if rank == 1 and step + lead <= LEAD_STEPS and (step == 0 or lead == 2):
                store.wait([f"{step + lead} steps"])
            losses.append(float(trainer.step(batch).loss))
            if rank == 0:
                store.set(f"{step + 1} steps", "")
    trainer.finish()
    return losses, max(leads)


STALE = {
    "ssp": ServerPlan((0, 1), (2,), (1, 1), "ssp", 1, replicas=False),
    "asp": ServerPlan((0, 1), (2,), (1, 1), "asp", replicas=False),
}


@pytest.mark.parametrize("consistency", STALE)
def test_stale_workers_learn_and_keep_their_bound(consistency: str) -> None:
    """A worker may begin an iteration 1 ahead under ssp, so it pushes at most 2 ahead; the fast
    one does. Without a bound it goes further ahead than that."""
    case = Case(STALE[consistency], "momentum")
    first, second, server = run_processes(
        3, stale, ((case, plan_text(case), None),), timeout_seconds=60
    )
    for losses, _ in (first, second):
        assert len(losses) == LEAD_STEPS
        assert losses[-1] < 0.98 * losses[0]
    if consistency == "ssp":
        assert server[1] == 2
    else:
        assert server[1] > 2


@pytest.mark.parametrize("consistency", STALE)
def test_stale_workers_end_their_steps_when_another_one_is_killed(consistency: str) -> None:
    case = Case(STALE[consistency], "momentum")
    first, second, _ = run_processes(
        3, stale, ((case, plan_text(case), 1),), may_die=(1,), timeout_seconds=60
    )
    assert second is None
    assert len(first[0]) == LEAD_STEPS
    assert first[0][-1] < 0.98 * first[0][0]
