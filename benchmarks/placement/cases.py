"""Real models as problems for a placer: the tables that the planner itself searches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from one_stage import ranked

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.plan_options import PlanOptions
from autoparallel.placers.space import Problem
from autoparallel.planner.inter_op.inter_op import Pipeline, StageChoice
from autoparallel.planner.plan import Precision
from autoparallel.planner.requests.options import stage_numbers
from autoparallel.planner.search.branch_and_bound import PipelineProposal
from autoparallel.planner.search.candidates import candidate
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import request_of
from autoparallel.target.load import load_target

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the cluster it is placed on. Rows of a micro-batch None: the planner's own."""

    name: str
    model: str
    cluster: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    global_batch: int = 64
    micro_batch: int | None = None
    memory_limit_bytes: int | None = None
    precision: Precision = "bf16"


GPT = {"n_layer": 24, "d_model": 1024, "n_head": 16, "seq": 1024}
CASES = (
    Case("gpt-24 on 2x4xA100", "gpt", "2x4xA100", GPT),
    Case("gpt-24 on 8x1xA100", "gpt", "8x1xA100", GPT),
    Case("gpt-24 in 3 GB on 2x4xA100", "gpt", "2x4xA100", GPT, 64, 8, 3 * 10**9),
    Case(
        "gshard_moe-12 on 2x4xV100",
        "gshard_moe",
        "2x4xV100",
        {"n_layer": 12, "d_model": 256, "d_ff": 1024},
        precision="fp32",
    ),
    Case(
        "wide_resnet-28-10 on 2x4xA100",
        "wide_resnet",
        "2x4xA100",
        {"blocks": 4, "width": 10},
        precision="fp32",
    ),
    Case(
        "wide_resnet-28-10 on 8x1xV100",
        "wide_resnet",
        "8x1xV100",
        {"blocks": 4, "width": 10},
        precision="fp32",
    ),
    Case(
        "unet-4-64 on 8x1xV100", "unet", "8x1xV100", {"depth": 4, "channels": 64}, precision="fp32"
    ),
)


@dataclass(frozen=True, slots=True)
class Priced:
    """A case's problem under T and under the simulator, and its rows per micro-batch."""

    by_formula: Problem
    by_simulator: Problem
    rows: int


def problem_of(case: Case) -> Priced:
    """Captures and plans the model; the table is of the plan's own micro-batch."""
    target = load_target(str(EXAMPLES / f"{case.model}.py"), case.settings)
    options = PlanOptions(
        global_batch=case.global_batch,
        precision=case.precision,
        micro_batch=case.micro_batch,
        memory_limit_bytes=case.memory_limit_bytes,
        time_limit_seconds=600.0,
    )
    program = capture_target(target, options)
    cluster, request = parse_cluster(case.cluster), request_of(program, target, options)
    job, candidates = ranked(program.graph, program.blocks, cluster, request)
    rows = candidates[0].rows
    table, count = job.solvers.table(rows), job.num_microbatches(rows)
    numbers = tuple(stage_numbers(request, cluster, table.num_blocks))

    def simulated(stages: tuple[StageChoice, ...]) -> float:
        found = candidate(job, PipelineProposal(rows, Pipeline(stages, 0.0)))
        return math.inf if found is None else found.step_seconds

    return Priced(Problem(table, count, numbers), Problem(table, count, numbers, simulated), rows)
