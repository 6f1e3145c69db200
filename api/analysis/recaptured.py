"""The model of a plan that is there, captured again and priced as it was planned.

In: a plan and where its file lies. Out: the target, its program, the graph as it is priced, and
what was measured for it. Loading a target runs its file, so it has to be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoparallel.cache.plan_cache import NO_CACHE, Cache
from autoparallel.options.plan_options import PlanOptions
from autoparallel.options.progress import Observe, ignore
from autoparallel.planner.plan import Plan
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import priced
from autoparallel.planning.plan_files import batch_seq, load_plan_target
from autoparallel.runtime.launch.membership import check_model
from autoparallel.target.trust import check_trusted

if TYPE_CHECKING:
    from autoparallel.passes.programs.program import Program
    from autoparallel.planner.graph import Graph
    from autoparallel.planner.plan import Mode
    from autoparallel.planner.pricing.basis import Basis
    from autoparallel.target.target import Target


@dataclass(frozen=True)
class Recaptured:
    """A plan with what it was made of; ``options`` are those of planning, as far as it says."""

    plan: Plan
    target: Target
    program: Program
    options: PlanOptions
    graph: Graph
    basis: Basis


def recaptured(
    plan: Plan,
    plan_path: str,
    *,
    trust: bool = False,
    profile: Mode | None = None,
    database: str | None = None,
    cache: Cache = NO_CACHE,
    observe: Observe = ignore,
) -> Recaptured:
    """The model of a plan. ``profile`` None uses measured times where the plan did.

    Raises as ``check_trusted``, loading and capturing do, and PlanError AP550 where the model is
    not the plan's any more.
    """

    check_trusted(plan, plan_path, trust=trust)
    target = load_plan_target(plan, plan_path)
    was_measured = plan.prediction.profile is not None
    options = PlanOptions(
        global_batch=plan.model.global_batch,
        seq=batch_seq(plan, target),
        precision=plan.model.precision,
        float32_ops=plan.model.float32_ops,
        gradient_dtype=plan.model.gradient_dtype,
        compiled=plan.compiled,
        optimizer=plan.model.optimizer,
        profile=profile or ("auto" if was_measured else "analytic"),
        database=database,
    )
    program = capture_target(target, options, observe, cache)
    check_model(program, plan)
    graph, basis = priced(program, target, plan.cluster, options)
    return Recaptured(plan, target, program, options, graph, basis)
