"""Report of a plan: its parts in reading order, each a rich renderable.

Every part fits 80 columns. Colour only repeats information that the words give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from autoparallel.analysis.facts import (
    BUBBLE,
    STEP,
    THROUGHPUT,
    UTILIZATION,
    batch_text,
    configuration_text,
    device_text,
    fullest_rank,
    memory_source,
    model_name,
    precision_text,
    unit_of,
)
from autoparallel.analysis.sharding import axis_lines
from autoparallel.cost_model.simulator.timeline import Timeline
from autoparallel.cost_model.simulator.timeline_text import draw
from autoparallel.options.words import (
    bytes_text,
    count_text,
    percent_text,
    ranks_text,
    seconds_text,
    shares_text,
)
from autoparallel.planner.plan import GoalReport, Plan, ServerPlan, Tried
from autoparallel.planner.variants.asynchronous import describe_updates
from autoparallel.planner.variants.parameter_servers import describe_servers
from autoparallel.report.drawing import legend, timeline_of
from autoparallel.report.printing import INDENT, lines_text, list_table, print_to_text, section
from autoparallel.report.tables import (
    alternatives,
    communications,
    memory,
    of_text,
    splits,
    stages,
    time,
)

DRAWING_MARGIN = 12
MAX_WIDTH = 120
SHORT_STAGES, SHORT_RANKS = 4, 4
"""Number of stages, and of ranks in the drawing, in the short report."""
MOST_RANKS = 16
SHORT_SHARE = 0.005
"""Share of the step below which parts of its seconds are merged into one row."""


@dataclass(frozen=True, slots=True)
class Details:
    """Flags for the parts of a report that are shown in full instead of the short form.

    ``stages``: all stages; ``memory``: all categories; ``candidates``: all, with the main
    difference; ``layouts``: of all parameters, with collectives; ``sources``: of all predictions.
    """

    stages: bool = False
    memory: bool = False
    candidates: bool = False
    layouts: bool = False
    sources: bool = False


ONE_SCREEN = Details()
EVERYTHING = Details(True, True, True, True, True)


def describe(plan: Plan, *, short: bool = False) -> str:
    """Return the report of ``plan`` as plain text of 80 columns; if ``short``, on one screen."""
    return print_to_text(
        lambda console: print_report(plan, console, ONE_SCREEN if short else EVERYTHING)
    )


def print_report(
    plan: Plan,
    console: Console,
    details: Details = EVERYTHING,
    *,
    next_steps: Sequence[tuple[str, str]] = (),
    measured: str = "",
    notes: Sequence[str] = (),
    timeline: Timeline | None = None,
) -> None:
    """Print the report of a plan.

    ``next_steps`` are commands with their purposes; ``measured`` describes a run's measurement;
    ``notes`` are printed under the headline. ``timeline`` replaces the drawing made from the plan.
    """
    width = min(console.width, MAX_WIDTH)
    parts: list[RenderableType] = [header(plan), headline(plan)]
    parts += [Text(note, style="yellow") for note in notes]
    if plan.goal is not None:
        parts.append(section(GOAL_TITLES[plan.goal.objective], goal_lines(plan, plan.goal)))
    if plan.servers is not None:
        parts.append(section("Parameter servers", server_lines(plan.servers)))
    parts.append(_where(plan, details))
    if details.layouts:
        parts.append(section("Sharding", splits(plan)))
    parts.append(section(*memory(plan, is_short=not details.memory)))
    parts.append(section(*time(plan, least=0.0 if details.sources else SHORT_SHARE)))
    if details.layouts:
        title = "Communication of a step, hidden and exposed"
        parts.append(section(title, communications(plan)))
    most = len(plan.stages) if details.stages else SHORT_RANKS
    timeline = timeline if timeline is not None else timeline_of(plan)
    if timeline is not None:
        drawn = "\n".join(draw(timeline, width - DRAWING_MARGIN, limit=min(most, MOST_RANKS)))
        shown = Group(Text(drawn), Text(legend(drawn), style="dim"))
        parts.append(section("Timeline of a step (F forward, B backward)", shown))
    if details.sources:
        parts.append(section("Confidence", confidence(plan)))
    elif plan.prediction.sources:
        parts.append(section("How sure", short_confidence(plan)))
    if measured:
        parts.append(Padding(Text(measured), (0, 0, 0, INDENT)))
    if plan.alternatives:
        parts.append(section(*alternatives(plan, all_of_them=details.candidates)))
    if next_steps:
        parts.append(section("Next", commands(next_steps, width - INDENT)))
    with console.capture() as captured:
        for part in parts:
            console.print(part, width=width)
    lines = captured.get().splitlines()
    console.file.write("".join(f"{line.rstrip()}\n" for line in lines))


def _where(plan: Plan, details: Details) -> RenderableType:
    """Return the table of stages; in the short report also the purpose of each mesh axis."""
    table = stages(plan, limit=len(plan.stages) if details.stages else SHORT_STAGES)
    if details.layouts:
        return section("Stages", table)
    axes = dict.fromkeys(axis_lines(plan.stages))
    return section("Stages", Group(table, *(Text(line, style="dim") for line in axes)))


def commands(next_steps: Sequence[tuple[str, str]], width: int) -> RenderableType:
    """Return commands, with their purposes if the width suffices."""
    longest = [max(map(len, column)) for column in zip(*next_steps, strict=True)]
    if sum(longest) + 2 > width:
        lines = (Text(command, style="cyan", overflow="fold") for command, _ in next_steps)
        return Group(*lines)
    table = list_table("left", "left")
    table.columns[1].no_wrap = True
    for command, what in next_steps:
        table.add_row(Text(command, style="cyan"), Text(what, style="dim"))
    return table


def header(plan: Plan) -> RenderableType:
    """Return the model, batch and cluster of the plan."""
    model = plan.model
    settings = " ".join(f"{key}={value}" for key, value in model.settings.items())
    first = Text.assemble(
        (model_name(plan), "bold"),
        f"  {count_text(model.num_parameters)} parameters",
        f"  {' '.join(settings.split())}" if settings else "",
    )
    second = Text(
        f"{batch_text(plan)}, {precision_text(plan)}, {'compiled' if plan.compiled else 'eager'}, "
        f"{model.optimizer}, on {plan.cluster.name}"
        f" ({device_text(plan)})",
        style="dim",
    )
    return Group(first, second)


def headline(plan: Plan) -> RenderableType:
    """Return the configuration in a line, and its main figures in another."""
    memory, unit = fullest_rank(plan), unit_of(plan)
    figures = {"step": STEP, f"{unit}/s": THROUGHPUT, "MFU": UTILIZATION}
    texts = {name: figure.text(plan) for name, figure in figures.items()}
    if plan.has_pipeline:
        texts["bubble"] = BUBBLE.text(plan)
    texts["memory"] = of_text(plan.prediction.peak_memory_bytes, memory.limit_bytes)
    line = Text("  ").join(
        Text.assemble((f"{name} ", "dim"), (text, "bold")) for name, text in texts.items()
    )
    lines = [Text(""), Text(configuration_text(plan), style="bold cyan")]
    if meaning := describe_updates(plan) or describe_servers(plan):
        lines.append(Text(meaning, style="yellow"))
    lines.append(line)
    if memory.excess_bytes > 0:
        over = f"does not fit: {bytes_text(memory.excess_bytes)} too much"
        lines.append(Text(over, style="bold red"))
    return Group(*lines)


GOAL_TITLES = {
    "time": "Cost",
    "cost": "Objective: most tokens per dollar",
    "memory": "Objective: least memory",
    "devices": "Objective: fewest devices",
}

SHOWN_PARTS = 12
"""Maximum number of listed parts of the cluster."""


def goal_lines(plan: Plan, goal: GoalReport) -> RenderableType:
    """Describe the result of a search by cost, devices or memory: the chosen devices, tokens per
    dollar, deadline, and the other choices that were tried."""
    unit = unit_of(plan)
    lines = [f"chosen: {goal.chosen}"]
    if goal.dollars_per_hour is not None and goal.tokens_per_dollar is not None:
        lines.append(
            f"{count_text(goal.tokens_per_dollar)} {unit} per dollar at "
            f"${goal.dollars_per_hour:,.2f} an hour"
        )
    if goal.deadline_step_seconds is not None:
        lines.append(f"deadline: {seconds_text(goal.deadline_step_seconds)} per step")
    lines += [_tried_line(each, goal, unit) for each in goal.tried[:SHOWN_PARTS]]
    left = len(goal.tried) - SHOWN_PARTS
    lines += [f"and {left} more (--json has all)"] if left > 0 else []
    return lines_text(lines)


def _tried_line(tried: Tried, goal: GoalReport, unit: str) -> str:
    if not tried.step_seconds:
        return f"  {tried.name}: {tried.reason}"
    value = ""
    if tried.value is not None and goal.objective == "memory":
        value = f", {bytes_text(tried.value)}"
    elif tried.value is not None:
        value = f", {count_text(tried.value)} {unit} per dollar"
    reason = f"; {tried.reason}" if tried.reason else ""
    return f"  {tried.name}: step {seconds_text(tried.step_seconds)}{value}{reason}"


def server_lines(servers: ServerPlan) -> RenderableType:
    """Describe the workers and parameter servers, their shares, and the staleness bound."""
    count = len(servers.servers)
    shares = ", ".join(map(str, servers.shares))
    lines = [
        f"workers on ranks {ranks_text(servers.workers)}: {shares} micro-batches of a step",
        f"servers on ranks {ranks_text(servers.servers)}: each 1/{count} of all weights and "
        "optimizer states",
    ]
    if servers.replicas:
        lines.append("each server holds a replica of another one's part")
    if servers.consistency == "ssp":
        lines.append(
            f"staleness {servers.staleness}: a worker is at most {servers.staleness} iterations "
            "ahead of the slowest"
        )
    return lines_text(lines)


def source_lines(plan: Plan) -> list[Text]:
    """Return the shares of predicted time by source, and the environment of the measurements."""
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
    """Describe the optimality gap, and the cause if the search ended early."""
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
    """Describe the fastest plan if a simpler, nearly equal plan was chosen; "" otherwise."""
    why = plan.solver.simplest
    if why is None:
        return ""
    more = 1 - why.fastest_seconds / plan.prediction.step_seconds
    return (
        f"the simplest of {why.num_equal} plans within {percent_text(why.tolerance)} of the "
        f"fastest, which takes {percent_text(more)} less: {why.fastest} (--tolerance 0)"
    )


def _layout_gap_text(plan: Plan) -> str:
    """Describe the optimality gap of the layouts: a bound on the share of time that they lose."""
    gap = plan.solver.layouts_gap or 0.0
    measured = "measured before interleaving" if plan.num_chunks > 1 else "for these stages"
    return f"at most {percent_text(gap)} ({measured})" if gap > 1e-9 else f"0 % ({measured})"


def confidence(plan: Plan) -> RenderableType:
    """Describe the sources of predictions, the optimality gap, and the planning time by phase."""
    solver, simplest = plan.solver, simplest_text(plan)
    solved = f"{solver.num_problems} subproblems solved"
    if solver.solver != "highs":
        solved += f", integer programs by {solver.solver}"
    lines = [
        f"devices and links: autoparallel show cluster {plan.cluster.name}",
        f"memory: {memory_source(plan)}",
        f"optimality gap: {gap_text(plan)}; {solved}",
    ]
    if simplest:
        lines.append(f"choice: {simplest}")
    if solver.layouts_gap is not None and solver.layouts_gap < solver.gap:
        lines.append(f"layout gap: {_layout_gap_text(plan)}")
    warnings = [*filter(None, [plan.undivided_batch]), *plan.unsharded_ops]
    if plan.replicated_ops:
        costs = [
            f"{op} {seconds_text(plan.replicated_seconds.get(op, 0.0))}"
            for op in plan.replicated_ops
        ]
        warnings.insert(0, f"replicated ops (no sharding rule), per step: {', '.join(costs)}")
    return Group(
        *source_lines(plan),
        *map(Text, lines),
        *(Text(line, style="yellow") for line in warnings),
        Text(_planning_text(plan), style="dim"),
    )


def _planning_text(plan: Plan) -> str:
    """Describe the time that planning took, by phase."""
    phases = {name: value for name, value in plan.solver.seconds.items() if name != "total"}
    total = plan.solver.seconds.get("total", sum(phases.values()))
    spent = ", ".join(f"{name} {seconds_text(value)}" for name, value in phases.items())
    text = f"planning time: {seconds_text(total)}" + (f" ({spent})" if spent else "")
    if plan.solver.is_reused:
        text += "; the plan is reused: its search seconds are those of the search that made it"
    return text


def short_confidence(plan: Plan) -> RenderableType:
    """Return the lines of the short report on the plan's reliability: shares of time by source,
    optimality gap, and the reason if a simpler plan than the fastest was chosen."""
    lines = [*source_lines(plan)[:1], Text(f"optimality gap: {gap_text(plan)}")]
    lines += [Text(f"choice: {simplest_text(plan)}")] if simplest_text(plan) else []
    lines += [Text(plan.undivided_batch, style="yellow")] if plan.undivided_batch else []
    return Group(*lines)
