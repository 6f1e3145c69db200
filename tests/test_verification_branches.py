"""Plans whose stages form a graph, or take hosts out of order, held to one device in float64.

Stages of different branches run at the same time on devices of their own; what joins them
waits for all. Losses, every gradient and every weight after two AdamW steps agree to 1e-9.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from kept_captures import capture_once
from marks import slow
from one_device import build_optimizer, reference_of
from processes import run_processes

from autoparallel.cost_model.cluster.cluster import Cluster, Device, Host, Link
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.initialization.deferred_init import Deferred
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.planner.dims.batch import rows_apart
from autoparallel.planner.inter_op.heterogeneous import HostOrder, in_given_ranks
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.requests.request import Forced
from autoparallel.planner.stage.branches import stage_edges, stage_starts
from autoparallel.planner.stage.structure import Structure
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.reference import Reference
from autoparallel.runtime.verify.verify import Verification, verify
from autoparallel.target.load import load_target
from autoparallel.target.target import Target

BATCH = 8


def slow_wires(peaks: tuple[float, ...], sizes: tuple[int, ...] = ()) -> Cluster:
    """Hosts of these FLOP/s and devices; the network is so slow that only stages pay."""
    wire = Link("wire", alpha_seconds=1e-4, bytes_per_second=1e8)
    hosts = tuple(
        Host(Device(f"cpu{peak:g}", "cpu", 2**34, 2**34, 1e12, {"float32": peak}), size, wire)
        for peak, size in zip(peaks, sizes or (1,) * len(peaks), strict=True)
    )
    return Cluster("slow wires", hosts, wire)


@dataclass(frozen=True)
class Case:
    model: str
    peaks: tuple[float, ...]
    forced: Forced
    sizes: tuple[int, ...] = ()

    @property
    def cluster(self) -> Cluster:
        return slow_wires(self.peaks, self.sizes)


OUT_OF_ORDER = "arms on hosts out of order"
UNEQUAL = "a host of two devices and one of one"
BY_ROWS = "towers by rows"

CASES = {
    "towers": Case("examples/two_towers.py", (1e9,) * 3, Forced(pp=3)),
    "arms": Case(
        "tests/models/three_arms.py", (1e7,) * 5, Forced(pp=5, num_microbatches=4, schedule="1f1b")
    ),
    "arms, gpipe": Case(
        "tests/models/three_arms.py", (1e7,) * 5, Forced(pp=5, num_microbatches=4, schedule="gpipe")
    ),
    OUT_OF_ORDER: Case("tests/models/three_arms.py", (1e7,) * 5, Forced(pp=5, num_microbatches=2)),
    "a slow host first": Case(
        "tests/models/three_arms.py", (1e6, 1e8), Forced(pp=2, num_microbatches=4)
    ),
    UNEQUAL: Case(
        "tests/models/three_arms.py", (1e7, 3e7), Forced(pp=2, num_microbatches=4), (2, 1)
    ),
    BY_ROWS: Case("examples/two_towers.py", (1e9,), Forced(dp=2), (2,)),
}


@cache
def target(model: str) -> Target:
    return load_target(model, {})


@cache
def captured(model: str, precision: str) -> tuple[Deferred, Program]:
    found = target(model)
    rows = BATCH if model == CASES["towers"].model else 2
    return capture_once(found, found.example_batch(rows, None), precision)


@cache
def planned(name: str) -> Plan:
    case = CASES[name]
    _, program = captured(case.model, "fp32")
    options = PlanOptions(global_batch=BATCH, forced=case.forced)
    cluster = case.cluster
    found = plan_program(program, target(case.model), cluster, options)
    if name != OUT_OF_ORDER:
        return found
    return in_given_ranks(found, HostOrder((3, 1, 4, 0, 2), cluster, (3, 1, 4, 0, 2)), cluster)


def edges(name: str) -> set[tuple[int, int]] | None:
    _, program = captured(CASES[name].model, "fp32")
    structure = Structure(program.graph, program.blocks)
    found = stage_edges(structure, stage_starts(planned(name)))
    return None if found is None else {(source, target) for source, target, _ in found}


def batches(model: str) -> list[dict[str, torch.Tensor]]:
    program = captured(model, "fp64")[1].with_batch_size(BATCH)
    return [random_batch(program.graph, seed=step) for step in range(2)]


@cache
def reference(model: str) -> Reference:
    return reference_of(target(model), captured(model, "fp64")[1], batches(model))


def verified(model: str, text: str) -> Verification:
    """On a rank."""
    plan = loads(text, "test")
    plan = replace(plan, model=replace(plan.model, precision="fp64"))
    deferred, program = captured(model, "fp64")
    trainer = Trainer(program, plan, deferred, device=torch.device("cpu"), build=build_optimizer)
    return verify(trainer, batches(model), lambda: reference(model))


SLOW = ("arms, gpipe", "a slow host first", "towers", OUT_OF_ORDER)


@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in CASES])
def test_stages_that_form_a_graph_equal_one_device(name: str) -> None:
    case = CASES[name]
    text = dumps(planned(name))
    found = run_processes(
        case.cluster.num_devices, verified, case.model, text, timeout_seconds=280
    )[0]
    assert found.passed, found.failures[:5]
    assert found.tolerance == 1e-9
    assert {d.quantity for d in found.differences} == {"loss", "gradient", "weight"}
    assert found.worst("weight") > 0.0


def test_towers_have_devices_of_their_own_and_do_not_wait_for_each_other() -> None:
    assert edges("towers") == {(0, 2), (1, 2)}


@pytest.mark.parametrize("name", ["arms", "arms, gpipe"])
def test_arms_have_devices_of_their_own(name: str) -> None:
    assert edges(name) == {(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)}


def test_unequal_hosts_are_stages_of_unequal_size() -> None:
    stages = planned(UNEQUAL).stages
    assert {stage.devices for stage in stages} == {(0, 1), (2,)}


def test_towers_are_split_by_rows_until_the_rows_meet() -> None:
    (stage,) = planned(BY_ROWS).stages
    _, program = captured(CASES[BY_ROWS].model, "fp32")
    dims = rows_apart(program.graph)
    made = [
        (dim, str(layout.outputs[0][0]))
        for name, layout in stage.layouts.items()
        if program.graph[name].kind == "op" and (dim := dims.get(name, (None,))[0]) is not None
    ]
    assert len(made) > 40
    assert all(placement == f"S({dim})" for dim, placement in made)


def test_stages_may_be_on_any_ranks() -> None:
    devices = [stage.devices for stage in planned(OUT_OF_ORDER).stages]
    assert devices == [(3,), (1,), (4,), (0,), (2,)]


def test_the_fast_host_has_most_of_the_model_whatever_its_rank() -> None:
    plan = planned("a slow host first")
    assert sorted(stage.devices for stage in plan.stages) == [(0,), (1,)]
    work = {stage.devices[0]: len(stage.blocks) for stage in plan.stages}
    assert work[1] > work[0]
