"""How sure a plan is: the sources of its figures, how far from the best, and what it took."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from autoparallel.planner.plan import Plan
from autoparallel.report.facts import memory_source, planning_seconds
from autoparallel.report.words import percent_text, seconds_text, shares_text


def source_lines(plan: Plan) -> list[Text]:
    """What part of the predicted time is measured; how that splits; what was measured on."""
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
    """How far from the best the plan can be, by the bound that was found."""
    if plan.solver.stopped:
        return f"{plan.solver.stopped} ended the search: the best so far; {_gap_text(plan)}"
    return _gap_text(plan)


def _gap_text(plan: Plan) -> str:
    solver = plan.solver
    if "learning" in solver.seconds:
        return "the best that placers that learn found (--search rl)"
    if solver.bound_seconds <= 0:
        return "the best of those tried; how far from the best there is, is not known"
    if solver.gap <= 1e-9:
        return "the best of the space searched, under this cost model"
    return (
        f"within {percent_text(solver.gap)} of the best possible in the space searched, "
        "under this cost model"
    )


def simplest_text(plan: Plan) -> str:
    """Of how many equally fast plans it is the simplest; "" for the fastest."""
    why = plan.solver.simplest
    if why is None:
        return ""
    more = 1 - why.fastest_seconds / plan.prediction.step_seconds
    return (
        f"the simplest of {why.num_equal} plans within {percent_text(why.tolerance)}; the fastest"
        f" takes {percent_text(more)} less: {why.fastest} (--tolerance 0)"
    )


def _layouts_text(plan: Plan) -> str:
    """What the integer programs prove of the stages as they are."""
    of = "the stages as they are cut, on their meshes"
    if plan.num_chunks > 1:
        of = "the pipeline of one stage per rank that was cut again"
    gap = plan.solver.layouts_gap or 0.0
    return f"within {percent_text(gap)} of the best for {of}"


def certainty(plan: Plan) -> RenderableType:
    """Where the figures come from, the solver's gap, and where planning time went."""
    lines: list[Text] = []
    lines += source_lines(plan)
    lines.append(Text(f"devices and links: autoparallel cluster {plan.cluster.name}"))
    solver = plan.solver
    lines.append(Text(f"memory: {memory_source(plan)}"))
    solved = f"{solver.num_problems} problems solved"
    if solver.solver != "highs":
        solved += f", integer programs by {solver.solver}"
    lines.append(Text(f"plan: {gap_text(plan)} ({solved})"))
    if simplest_text(plan):
        lines.append(Text(f"choice: {simplest_text(plan)}"))
    if solver.layouts_gap is not None and solver.layouts_gap < solver.gap:
        lines.append(Text(f"layouts: {_layouts_text(plan)}"))
    if plan.replicated_ops:
        costs = [
            f"{op} {seconds_text(plan.replicated_seconds.get(op, 0.0))}"
            for op in plan.replicated_ops
        ]
        lines.append(
            Text(
                f"ops without a rule, whole on every rank, per step: {', '.join(costs)}",
                style="yellow",
            )
        )
    lines += [Text(line, style="yellow") for line in plan.undivided]
    total, phases = planning_seconds(plan)
    spent = ", ".join(f"{name} {seconds_text(value)}" for name, value in phases.items())
    lines.append(
        Text(f"planned in {seconds_text(total)}" + (f": {spent}" if spent else ""), style="dim")
    )
    return Group(*lines)
