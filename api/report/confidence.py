"""Confidence in a plan: the sources of its figures, its optimality gap, the planning time."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from autoparallel.analysis.facts import memory_source, planning_seconds
from autoparallel.options.words import percent_text, seconds_text, shares_text
from autoparallel.planner.plan import Plan


def source_lines(plan: Plan) -> list[Text]:
    """Return the shares of the predicted time by source, and the measurements' environment."""
    prediction, profile = plan.prediction, plan.prediction.profile
    if not prediction.sources:
        return []
    error = profile.interpolation_error if profile is not None else 0.0
    lines = [Text(f"times: {shares_text(prediction.sources, error)}")]
    lines += [
        Text(f"  {part}: {shares_text(shares)}", style="dim")
        for part, shares in prediction.sources_of.items()
        if shares and len(prediction.sources) > 1
    ]
    if profile is not None:
        where = f"driver {profile.driver}" if profile.driver else f"{profile.threads} thread(s)"
        lines.append(Text(f"measured on {profile.device}, {where}, torch {profile.torch}"))
        if profile.mismatch:
            lines.append(Text(profile.mismatch, style="yellow"))
    return lines


def gap_text(plan: Plan) -> str:
    """Describe the optimality gap, and the cause of an early end of the search."""
    if plan.solver.stopped:
        return f"{_gap_text(plan)}; the search was ended early by {plan.solver.stopped}"
    return _gap_text(plan)


def _gap_text(plan: Plan) -> str:
    solver = plan.solver
    if "learning" in solver.seconds:
        return "unknown (the best plan of the learned placers, --search rl)"
    if solver.bound_seconds <= 0:
        return "unknown (the best plan found; no lower bound was computed)"
    if solver.gap <= 1e-9:
        return "0 % (optimal in the search space under this cost model)"
    bound = f"lower bound of the search space: {seconds_text(solver.bound_seconds)}"
    return f"at most {percent_text(solver.gap)} ({bound})"


def simplest_text(plan: Plan) -> str:
    """Describe the number of equally fast plans and the fastest; "" if it is this plan."""
    why = plan.solver.simplest
    if why is None:
        return ""
    more = 1 - why.fastest_seconds / plan.prediction.step_seconds
    return (
        f"the simplest of {why.num_equal} plans within {percent_text(why.tolerance)} of the "
        f"fastest, which takes {percent_text(more)} less: {why.fastest} (--tolerance 0)"
    )


def _layout_gap_text(plan: Plan) -> str:
    """Describe the optimality gap of the layouts for the stages as they are."""
    gap = plan.solver.layouts_gap or 0.0
    measured = "measured before interleaving" if plan.num_chunks > 1 else "for these stages"
    return f"at most {percent_text(gap)} ({measured})" if gap > 1e-9 else f"0 % ({measured})"


def confidence(plan: Plan) -> RenderableType:
    """Return the sources of the figures, the optimality gap, and the planning time by phase."""
    lines: list[Text] = []
    lines += source_lines(plan)
    lines.append(Text(f"devices and links: autoparallel cluster {plan.cluster.name}"))
    solver = plan.solver
    lines.append(Text(f"memory: {memory_source(plan)}"))
    solved = f"{solver.num_problems} subproblems solved"
    if solver.solver != "highs":
        solved += f", integer programs by {solver.solver}"
    lines.append(Text(f"optimality gap: {gap_text(plan)}; {solved}"))
    if simplest_text(plan):
        lines.append(Text(f"choice: {simplest_text(plan)}"))
    if solver.layouts_gap is not None and solver.layouts_gap < solver.gap:
        lines.append(Text(f"layout gap: {_layout_gap_text(plan)}"))
    if plan.replicated_ops:
        costs = [
            f"{op} {seconds_text(plan.replicated_seconds.get(op, 0.0))}"
            for op in plan.replicated_ops
        ]
        lines.append(
            Text(
                f"replicated ops (no sharding rule), per step: {', '.join(costs)}",
                style="yellow",
            )
        )
    lines += [Text(line, style="yellow") for line in plan.unsharded_ops]
    total, phases = planning_seconds(plan)
    spent = ", ".join(f"{name} {seconds_text(value)}" for name, value in phases.items())
    said = f"planning time: {seconds_text(total)}" + (f" ({spent})" if spent else "")
    if plan.solver.is_reused:
        said += "; the plan is reused: its search seconds are those of the search that made it"
    lines.append(Text(said, style="dim"))
    return Group(*lines)


def short_confidence(plan: Plan) -> RenderableType:
    """Return the sources of times, the gap, and the reason for this plan, in short."""
    lines = [*source_lines(plan)[:1], Text(f"optimality gap: {gap_text(plan)}")]
    lines += [Text(f"choice: {simplest_text(plan)}")] if simplest_text(plan) else []
    return Group(*lines)
