"""The page: the parts of a report in reading order, each a rich renderable.

Every part fits 80 columns. Colour only repeats what the words say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from autoparallel.analysis.facts import (
    AxisUse,
    KindSplit,
    axis_uses,
    busiest_rank,
    folded_names,
    fullest_rank,
    merged_alternatives,
    merged_communication,
    merged_splits,
    ordered_memory,
    rank_seconds,
    usable_bytes,
)
from autoparallel.cost_model.simulator.timeline import Timeline
from autoparallel.cost_model.simulator.timeline_text import draw
from autoparallel.options.words import (
    bytes_text,
    count_text,
    names_text,
    percent_text,
    ranks_text,
    seconds_text,
)
from autoparallel.planner.asynchronous import describe_updates
from autoparallel.planner.parameter_servers import describe_servers
from autoparallel.planner.plan import Plan, StagePlan, rows_text
from autoparallel.planner.summary import (
    SEPARATOR,
    mesh_text,
    offload_text,
    rank_summaries,
    schedule_text,
    servers_text,
    strategy_parts,
)
from autoparallel.planning.tf32 import families_text
from autoparallel.report.confidence import confidence, short_confidence
from autoparallel.report.drawing import legend, timeline_of
from autoparallel.report.goal import goal_lines, goal_title
from autoparallel.report.printing import plain_table, print_to_text
from autoparallel.report.served import server_lines
from autoparallel.report.stages import stages

BAR_WIDTH = 28
INDENT = 2
DRAWING_MARGIN = 12
MAX_WIDTH = 120
SHORT_STAGES, SHORT_RANKS = 4, 4
"""Stages, and ranks of the drawing, on one screen."""
MOST_RANKS = 16
SHORT_ALTERNATIVES, SHORT_CATEGORIES = 3, 3
SHORT_SHARE = 0.005
"""Share of the step below which parts are merged into one row."""


@dataclass(frozen=True, slots=True)
class Details:
    """Parts of a report beyond one screen, each in place of the short form.

    ``stages``: all of them; ``memory``: every category; ``candidates``: all, with the main
    difference; ``layouts``: of every parameter, and the collectives; ``sources``: of every figure.
    """

    stages: bool = False
    memory: bool = False
    candidates: bool = False
    layouts: bool = False
    sources: bool = False


ONE_SCREEN = Details()
EVERYTHING = Details(True, True, True, True, True)


def describe(plan: Plan, *, short: bool = False) -> str:
    """Return the report of ``plan`` as plain text, 80 columns wide: everything, or one screen."""
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
    """Print the report: what, where, how fast, how sure, what next.

    ``next_steps`` are commands and what they do; ``measured`` says what a run measured; ``notes``
    stand under the headline. ``timeline`` is drawn in place of the one that the plan tells.
    """
    width = min(console.width, MAX_WIDTH)
    parts: list[RenderableType] = [header(plan), headline(plan)]
    parts += [Text(note, style="yellow") for note in notes]
    if plan.goal is not None:
        parts.append(section(goal_title(plan.goal), goal_lines(plan)))
    if plan.servers is not None:
        parts.append(section("Parameter servers", server_lines(plan.servers)))
    parts.append(_where(plan, details))
    if details.layouts:
        parts.append(section("Sharding", splits(plan)))
    parts.append(section(*(memory(plan) if details.memory else short_memory(plan))))
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
    """Return the stages, and on one screen the uses of their meshes' axes."""
    table = stages(plan, limit=len(plan.stages) if details.stages else SHORT_STAGES)
    if details.layouts:
        return section("Stages", table)
    axes = dict.fromkeys(line for line in axis_lines(list(plan.stages)))
    return section("Stages", Group(table, *(Text(line, style="dim") for line in axes)))


def commands(next_steps: Sequence[tuple[str, str]], width: int) -> RenderableType:
    """Return commands, with descriptions if there is room."""
    longest = [max(map(len, column)) for column in zip(*next_steps, strict=True)]
    if sum(longest) + 2 > width:
        lines = (Text(command, style="cyan", overflow="fold") for command, _ in next_steps)
        return Group(*lines)
    table = plain_table(("", "left"), ("", "left"))
    table.show_header = False
    table.columns[1].no_wrap = True
    for command, what in next_steps:
        table.add_row(Text(command, style="cyan"), Text(what, style="dim"))
    return table


def section(title: str, body: RenderableType) -> RenderableType:
    """Return a title over its indented body, after an empty line."""
    return Group(
        Text(""), Text(title, style="bold"), Padding(body, (0, 0, 0, INDENT), expand=False)
    )


def header(plan: Plan) -> RenderableType:
    """Return the model, the batch and the cluster of the plan."""
    model = plan.model
    name = model.target.rsplit("/", 1)[-1] if model.target.endswith(".py") else model.target
    settings = " ".join(f"{key}={value}" for key, value in model.settings.items())
    batch = f"batch {model.global_batch}" + (f" × {model.seq} tokens" if model.seq else "")
    first = Text.assemble(
        (name, "bold"),
        f"  {count_text(model.num_parameters)} parameters",
        f"  {settings}" if settings else "",
    )
    second = Text(
        f"{batch}, {precision_text(plan)}, {'compiled' if plan.compiled else 'eager'}, "
        f"{model.optimizer}, on {plan.cluster.name}"
        f" ({device_text(plan)})",
        style="dim",
    )
    return Group(first, second)


def precision_text(plan: Plan) -> str:
    """Return the precision, and for fp32 on devices with TF32 the ops that compute in TF32."""
    found = plan.model.precision
    if found != "fp32" or plan.tf32 is None:
        return found
    return f"{found} (TF32 {families_text(plan.tf32)})" if plan.tf32 else f"{found} (no TF32)"


def of_text(used: float, limit: float) -> str:
    """Write two sizes, the unit once if equal.

    >>> of_text(55 * 2**30, 72 * 2**30)
    '55.0 of 72.0 GiB'
    """
    first, second = bytes_text(used), bytes_text(limit)
    same = first.split()[1] == second.split()[1]
    return f"{first.split()[0] if same else first} of {second}"


def over_text(used: float, limit: float) -> Text | None:
    """Return the excess of the needed memory over the limit; None if it fits."""
    if used <= limit:
        return None
    return Text(f"does not fit: {bytes_text(used - limit)} too much", style="bold red")


def device_text(plan: Plan) -> str:
    """Return the devices by name: ``8 × H100``."""
    counts: dict[str, int] = {}
    for host in plan.cluster.hosts:
        counts[host.device.name] = counts.get(host.device.name, 0) + host.num_devices
    return ", ".join(f"{count} × {name}" for name, count in counts.items())


def headline(plan: Plan) -> RenderableType:
    """Return the answer in two lines: the configuration, and its figures."""
    prediction = plan.prediction
    used = usable_bytes(plan, plan.stages[fullest_rank(plan)[0][0]])
    unit = "tokens" if plan.model.seq else "samples"
    figures = [
        ("step", seconds_text(prediction.step_seconds)),
        (f"{unit}/s", count_text(prediction.tokens_per_second)),
        ("MFU", percent_text(prediction.model_flops_utilization)),
        ("bubble", percent_text(prediction.bubble_fraction)),
        ("memory", of_text(prediction.peak_memory_bytes, used)),
    ]
    if not plan.has_pipeline:
        figures = [figure for figure in figures if figure[0] != "bubble"]
    line = Text("  ").join(
        Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in figures
    )
    meaning = (
        [Text(text, style="yellow")]
        if (text := describe_updates(plan) or describe_servers(plan))
        else []
    )
    over = over_text(prediction.peak_memory_bytes, used)
    more = [] if over is None else [over]
    return Group(Text(""), Text(configuration_text(plan), style="bold cyan"), *meaning, line, *more)


def configuration_text(plan: Plan) -> str:
    """Return the plan in one line: degrees, ZeRO, recomputation, schedule, micro-batches."""
    schedule = schedule_text(plan.schedule, plan.num_chunks, len(plan.slices))
    parts = [*strategy_parts(rank_summaries(plan), schedule), *offload_text(plan.offload)]
    if plan.servers is not None:
        parts = [servers_text(plan.servers)]
    size = plan.microbatch_size
    of_ranks = {size // stage.mesh.row_parts for stage in plan.stages}
    is_equal = len(of_ranks) == 1 and not any(stage.shares for stage in plan.stages)
    text = microbatches_text(plan.num_microbatches, size, of_ranks.pop() if is_equal else size)
    return SEPARATOR.join((*parts, text))


def microbatches_text(count: int, size: int, rank_rows: int) -> str:
    """Describe micro-batches and a rank's samples of each.

    >>> microbatches_text(1, 32, 32), microbatches_text(16, 4, 1)
    ('1 micro-batch of 32', '16 micro-batches of 4 (1 a rank)')
    """
    of_rank = f" ({rank_rows} a rank)" if rank_rows != size else ""
    return f"{count} micro-batch{'es' if count > 1 else ''} of {size}{of_rank}"


def splits(plan: Plan) -> RenderableType:
    """Return the uses of each mesh's axes, and the layouts of each kind of block."""
    parts: list[RenderableType] = []
    for mesh in dict.fromkeys(stage.mesh for stage in plan.stages):
        members = {i: stage for i, stage in enumerate(plan.stages) if stage.mesh == mesh}
        if len(members) < len(plan.stages):
            noun = "stage" if len(members) == 1 else "stages"
            parts.append(
                Text(f"{noun} {ranks_text(tuple(members))}: {mesh_text(mesh)}", style="cyan")
            )
        parts.extend(Text(line, style="dim") for line in axis_lines(list(members.values())))
        for kind in merged_splits(plan, list(members.values())):
            count = f"  ×{len(kind.blocks)}" if len(kind.blocks) > 1 else ""
            name = names_text(kind.blocks) or "shared"
            parts.append(Text.assemble((name, "bold"), count))
            parts.append(Padding(_groups(kind), (0, 0, 0, 2), expand=False))
    return Group(*parts)


def axis_lines(members: list[StagePlan]) -> list[str]:
    """Return a line per mesh axis: the number of ops that are split on it, and its use.

    The stage with the most kinds of ops is counted.
    """
    uses: dict[str, tuple[AxisUse, int]] = {}
    for stage in members:
        for use in axis_uses(stage):
            if use.axis not in uses or use.num_ops > uses[use.axis][0].num_ops:
                uses[use.axis] = (use, stage.zero)
    lines = [_axis_line(use, zero) for use, zero in uses.values()]
    for stage in members:
        if stage.shares:
            lines.append(
                f"samples of a micro-batch by rank of {stage.mesh.axes[0]}, in proportion to "
                f"speed: {rows_text(stage.shares)}"
            )
    return lines


def _axis_line(use: AxisUse, zero: int) -> str:
    reason = f": {AXIS_REASONS[use.axis]}" if use.axis in AXIS_REASONS and use.num_split else ""
    noun = "op" if use.num_sums == 1 else "ops"
    sums = f"; {use.num_sums} {noun} with partial sums" if use.num_sums else ""
    states = f"; {ZERO_WORDS[zero]}" if use.axis == "dp" and zero else ""
    swaps = "; causal attention balanced by swapping queries" if use.num_balanced else ""
    split = f"{use.axis}={use.size} shards {use.num_split} of {use.num_ops} ops"
    return f"{split}{reason}{sums}{swaps}{states}"


AXIS_REASONS = {
    "dp": "each rank has its own samples of the batch",
    "ep": "each rank has its own experts and its own samples of the batch",
    "cp": "each rank has its own positions of the sequences",
    "tp": "each rank has its own part of the weights",
}

ZERO_WORDS = (
    "",
    "optimizer states sharded over it",
    "optimizer states and gradients sharded over it",
    "optimizer states, gradients and parameters sharded over it",
)


def _groups(kind: KindSplit) -> RenderableType:
    table = plain_table(("", "left"), ("", "left"))
    table.show_header = False
    table.columns[0].no_wrap = True
    for text, names in kind.groups.items():
        table.add_row(text, ", ".join(folded_names(names)))
    return table


def memory(plan: Plan) -> tuple[str, RenderableType]:
    """Return the fullest rank's memory by category, against its device's."""
    stages, found = fullest_rank(plan)
    stage = plan.stages[stages[0]]
    limit = usable_bytes(plan, stage)
    values = {name: float(size) for name, size in ordered_memory(found).items()}
    total = sum(values.values())
    where = f"rank {stage.devices[0]}" + (f", {stages_text(stages)}" if plan.has_pipeline else "")
    title = f"Peak memory ({where}): {of_text(total, limit)}"
    return title, bars(values, bytes_text, MEMORY_STYLES)


def short_memory(plan: Plan) -> tuple[str, RenderableType]:
    """Return the fullest rank's memory: the largest categories in a line."""
    title, _ = memory(plan)
    found = sorted(ordered_memory(fullest_rank(plan)[1]).items(), key=lambda each: -each[1])
    shown = [f"{name} {bytes_text(size)}" for name, size in found[:SHORT_CATEGORIES]]
    rest = sum(size for _, size in found[SHORT_CATEGORIES:])
    return title, Text(", ".join([*shown, *([f"other {bytes_text(rest)}"] if rest else [])]))


MEMORY_STYLES = {
    "parameters": "blue",
    "gradients": "magenta",
    "optimizer": "cyan",
    "activations": "yellow",
}


def stages_text(stages: Sequence[int]) -> str:
    """Name stages, the first two and the last of many.

    >>> stages_text((1,)), stages_text((0, 2)), stages_text((1, 5, 9, 13))
    ('stage 1', 'stages 0 and 2', 'stages 1, 5, … 13')
    """
    if len(stages) > 3:
        return f"stages {stages[0]}, {stages[1]}, … {stages[-1]}"
    return f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}"


def time(plan: Plan, *, least: float = 0.0) -> tuple[str, RenderableType]:
    """Return the parts of the step's time on the busiest rank; parts below the share ``least`` are
    added up."""
    stages = busiest_rank(plan)
    values = rank_seconds(plan, stages)
    small = [name for name in values if values[name] < least * plan.prediction.step_seconds]
    if len(small) > 1:
        rest = sum(values.pop(name) for name in small)
        values["rest"] = rest
    where = f" of the slowest rank ({stages_text(stages)})" if plan.has_pipeline else ""
    title = f"Step time{where}: {seconds_text(plan.prediction.step_seconds)}"
    return title, bars(
        values, seconds_text, {"compute": "green", "waiting for other stages": "red"}
    )


def communications(plan: Plan) -> RenderableType:
    """Return the seconds of each stage's collectives in a step, hidden and exposed."""
    table = plain_table(
        ("stages", "left"),
        ("collectives", "left"),
        ("beside", "left"),
        ("total", "right"),
        ("hidden", "right"),
        ("exposed", "right"),
    )
    for members, each in merged_communication(plan):
        table.add_row(
            ranks_text(members),
            each.what,
            each.beside,
            seconds_text(each.seconds),
            seconds_text(each.hidden_seconds),
            seconds_text(each.exposed_seconds),
        )
    return table if table.row_count else Text("none within the stages")


def bars(
    values: Mapping[str, float], text: Callable[[float], str], styles: Mapping[str, str]
) -> RenderableType:
    """Return a row per value: its name, its figure, its share, and a bar."""
    total = sum(values.values()) or 1.0
    table = plain_table(("", "left"), ("", "right"), ("", "right"), ("", "left"))
    table.show_header = False
    for name, value in values.items():
        table.add_row(
            name, text(value), percent_text(value / total), bar(value / total, styles.get(name, ""))
        )
    return table


def bar(fraction: float, style: str) -> Text:
    """Draw a bar of eighths of a character, at least an eighth for a positive value."""
    eighths = max(round(fraction * BAR_WIDTH * 8), 1 if fraction > 0 else 0)
    full, rest = divmod(eighths, 8)
    return Text("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else ""), style=style)


def alternatives(plan: Plan, *, all_of_them: bool) -> tuple[str, RenderableType]:
    """Return other plans: how much slower they are and, with ``all_of_them``, the main
    difference."""
    table = plain_table(
        ("configuration (micro-batches × size)", "left"),
        ("step", "right"),
        ("", "right"),
        ("memory", "right"),
    )
    best = plan.prediction.step_seconds
    others = merged_alternatives(plan.alternatives)
    shown = others if all_of_them else others[:SHORT_ALTERNATIVES]
    for other in shown:
        slower = other.step_seconds / best - 1 if best and other.step_seconds else 0.0
        table.add_row(
            other.summary,
            seconds_text(other.step_seconds) if other.step_seconds else "—",
            f"{slower:+.1%}".replace("%", " %") if other.step_seconds else "",
            bytes_text(other.peak_memory_bytes) if other.peak_memory_bytes else "—",
        )
        if all_of_them:
            table.add_row(Text(f"  {other.reason}", style="dim"), "", "", "")
    some = f" ({len(shown)} of {len(others)}, --candidates shows all)"
    return "Alternatives" + (some if len(shown) < len(others) else ""), table
