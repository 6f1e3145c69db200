"""One architecture of the zoo: captured, planned four ways, each plan run and compared.

``python benchmarks/zoo/one.py NAME [PLAN ...]`` prints one line of JSON per name. A name is a
folder of ``tests/zoo`` or a model file. The ranks are forked from this process, which has
captured the model already, and a rank that a plan does not need stays idle, so one set of
processes runs every plan.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.capture.export import call_model, find_loss
from autoparallel.passes.initialization.deferred_init import Deferred, plain_build
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.passes.tracing.modes import promote_to_float64
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.graph.expert_dims import experts_of_layers
from autoparallel.planner.ops import has_rule
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Forced
from autoparallel.planning.capture import capture_program, record_target
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.reference import Reference, run_reference
from autoparallel.runtime.verify.verify import verify
from autoparallel.target.load import load_target
from autoparallel.target.target import Target

CONFIGS = Path(__file__).resolve().parents[2] / "tests" / "zoo"
PLANS = ("dp=2", "tp=2", "pp=2", "own")
EXPERT_PLANS = (
    "dp=4,ep=4,zero=3",
    "dp=2,ep=2,pp=2",
    "dp=2,tp=2,ep=2",
    "dp=2,tp=2,ep=4",
    "dp=2,cp=2,ep=4",
)
"""Plans on four devices of models with layers of experts, in addition to ``PLANS``."""
NUM_RANKS = 4
GLOBAL_BATCH = 8
SEQ = 16
STEPS = 2
PLAN_SECONDS = 10.0
RUN_SECONDS = 150.0


@dataclass
class Result:
    """What became of one architecture; ``plans`` says of each plan what its run gave."""

    name: str
    num_nodes: int = 0
    num_ops: int = 0
    missing: tuple[str, ...] = ()
    rescalable: bool = False
    capture_seconds: float = 0.0
    plan_seconds: float = 0.0
    seconds: float = 0.0
    error: str = ""
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)


def run_one(name: str, parallels: Sequence[str] = ()) -> Result:
    """The result of one architecture; what fails is in it, and never raised."""
    result = Result(name)
    began = time.perf_counter()
    try:
        _run(result, parallels)
    except Exception as error:  # noqa: BLE001 - a table of what fails must hold every failure
        result.error = _text(error)
    result.seconds = time.perf_counter() - began
    return result


def _run(result: Result, parallels: Sequence[str]) -> None:
    target = load_target(target_name(result.name), {})
    seq = SEQ if target.takes_seq else None
    began = time.perf_counter()
    deferred = record_target(target)
    program = capture_program(
        target, deferred, global_batch=GLOBAL_BATCH, seq=seq, precision="fp64"
    )
    result.capture_seconds = time.perf_counter() - began
    _describe(result, program)
    plans = {}
    for parallel in parallels or (*PLANS, *_expert_plans(program)):
        began = time.perf_counter()
        try:
            plans[parallel] = _plan(program, target, parallel, seq)
            result.plans[parallel] = {"error": "its run was not reached"}
        except Exception as error:  # noqa: BLE001
            result.plans[parallel] = {"error": _text(error)}
        if parallel == "own":
            result.plan_seconds = time.perf_counter() - began
    if plans:
        result.plans |= run_ranks(target, deferred, program, plans)


def _expert_plans(program: Program) -> list[str]:
    """Return the plans of ``EXPERT_PLANS`` whose ``ep`` divides the model's numbers of experts."""
    numbers = experts_of_layers(program.graph)
    degrees = {plan: parse_parallel(plan).ep or 1 for plan in EXPERT_PLANS if numbers}
    return [plan for plan, ep in degrees.items() if all(each % ep == 0 for each in numbers)]


def target_name(name: str) -> str:
    """What ``load_target`` takes for a name of the zoo."""
    return name if name.endswith(".py") else f"hf:{CONFIGS / name}"


def _describe(result: Result, program: Program) -> None:
    operations = [node for node in program.graph if node.kind == "op"]
    ops = {node.op for node in operations}
    result.num_nodes, result.num_ops = len(operations), len(ops)
    result.missing = tuple(sorted(op for op in ops if not has_rule(op)))
    result.rescalable = bool(program.graph.batch_dims)


def _plan(program: Program, target: Target, parallel: str, seq: int | None) -> Plan:
    forced = Forced() if parallel == "own" else parse_parallel(parallel)
    devices = NUM_RANKS if parallel == "own" or "," in parallel else 2
    options = PlanOptions(
        global_batch=GLOBAL_BATCH,
        seq=seq,
        precision="fp64",
        forced=forced,
        time_limit_seconds=PLAN_SECONDS,
    )
    return plan_program(program, target, parse_cluster(f"cpu:{devices}"), options)


def run_ranks(
    target: Target, deferred: Deferred, program: Program, plans: Mapping[str, Plan]
) -> dict[str, dict[str, Any]]:
    """Every plan run by ``NUM_RANKS`` forked processes and compared with one device."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_rank, args=(rank, Path(folder), target, deferred, program, plans)
            )
            for rank in range(NUM_RANKS)
        ]
        for process in ranks:
            process.start()
        _wait(ranks, time.monotonic() + RUN_SECONDS)
        found: dict[str, dict[str, Any]] = {}
        for file in Path(folder).glob("*.json"):
            for parallel, outcome in json.loads(file.read_text()).items():
                if parallel not in found or _severity(outcome) > _severity(found[parallel]):
                    found[parallel] = outcome
        return found


def _severity(outcome: Mapping[str, Any]) -> int:
    """An error counts more than an answer, and more still if it does not follow another's."""
    if "error" not in outcome:
        return 0
    return 1 if "Connection closed by peer" in outcome["error"] else 2


def _wait(ranks: Sequence[Any], deadline: float) -> None:
    """Until every rank has ended; when one fails or time is up, the others are ended."""
    while any(process.is_alive() for process in ranks):
        failed = any(process.exitcode not in (None, 0) for process in ranks)
        if failed:
            deadline = min(deadline, time.monotonic() + 3.0)
        if time.monotonic() > deadline:
            for process in ranks:
                process.kill()
        time.sleep(0.02)
    for process in ranks:
        process.join()


def _rank(
    rank: int,
    folder: Path,
    target: Target,
    deferred: Deferred,
    program: Program,
    plans: Mapping[str, Plan],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=RUN_SECONDS),
    )
    graph = program.graph.with_batch_size(GLOBAL_BATCH)
    batches = [random_batch(graph, seed=step, dtype="float64") for step in range(STEPS)]
    held: list[Reference] = []

    def reference() -> Reference:
        if not held:
            held.append(_reference(target, program, batches))
        return held[0]

    outcomes: dict[str, dict[str, Any]] = {}
    for parallel, plan in plans.items():
        try:
            outcomes[parallel] = _verified(plan, program, deferred, batches, reference)
        except BaseException as error:  # noqa: BLE001
            outcomes[parallel] = {"error": f"rank {rank}: {_text(error)}"}
            _write(folder, rank, outcomes)
            os._exit(1)
        _write(folder, rank, outcomes)
    dist.barrier()
    os._exit(0)


def _write(folder: Path, rank: int, outcomes: Mapping[str, Any]) -> None:
    part = folder / f"{rank}.part"
    part.write_text(json.dumps(outcomes))
    part.rename(folder / f"{rank}.json")


def _build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Plain gradient descent: its steps are as exact as the gradients are."""
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def _reference(
    target: Target, program: Program, batches: Sequence[Mapping[str, torch.Tensor]]
) -> Reference:
    def loss(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        batch = program.batch(inputs)
        return find_loss(call_model(module, batch), batch, target.loss_fn)

    module = plain_build(target.build_model, 0).double()
    with promote_to_float64():
        return run_reference(module, batches, loss=loss, build_optimizer=_build_optimizer)


def _verified(
    plan: Plan, program: Program, deferred: Deferred, batches: Any, reference: Any
) -> dict[str, Any]:
    began = time.perf_counter()
    plan = replace(plan, model=replace(plan.model, precision="fp64"))
    trainer = Trainer(program, plan, deferred, device=torch.device("cpu"), build=_build_optimizer)
    found = verify(trainer, batches, reference)
    worst = max(difference.relative for difference in found.differences)
    return {
        "passed": found.passed,
        "worst": worst,
        "num_compared": len(found.differences),
        "failures": [asdict(failure) for failure in found.failures[:5]],
        "stages": [
            f"{dict(zip(s.mesh.axes, s.mesh.shape, strict=True))} zero={s.zero}"
            for s in plan.stages
        ],
        "microbatches": plan.num_microbatches,
        "seconds": time.perf_counter() - began,
    }


def _text(error: BaseException) -> str:
    if isinstance(error, AutoparallelError):
        return " ".join(str(error).split())
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    return " ".join(f"{type(error).__name__}: {error} ({place})".split())[:600]


def main(arguments: Sequence[str]) -> None:
    """Names and plans (those with ``=``, and ``own``) to lines of JSON."""
    torch.set_num_threads(1)
    parallels = [text for text in arguments if ("=" in text or text == "own")]
    for name in arguments:
        if name not in parallels:
            with contextlib.redirect_stdout(sys.stderr):
                result = run_one(name, parallels)
            print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
