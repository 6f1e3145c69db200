"""What ``autoparallel simulate`` says: figures, memory by stage, lost time, the step drawn."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from autoparallel.actions.terminal import print_json, stdout_console
from autoparallel.analysis.facts import MEMORY_ORDER
from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.ops.compute import least_seconds
from autoparallel.cost_model.ops.memory import policy
from autoparallel.cost_model.simulator.timeline import Timeline
from autoparallel.cost_model.simulator.timeline_text import draw
from autoparallel.cost_model.simulator.trace import chrome_trace, rank_name
from autoparallel.options.words import bytes_text, count_text, percent_text, seconds_text
from autoparallel.passes.programs.program import Program
from autoparallel.planner.configured.configuration import (
    Configuration,
    ConfigurationPricer,
    PricedStep,
)
from autoparallel.planner.configured.layers import find_layers
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph import Graph
from autoparallel.planner.pricing.basis import DEFAULT, Basis
from autoparallel.planner.pricing.choices import input_specs
from autoparallel.planner.pricing.systems import SystemName, system
from autoparallel.planner.requests.pins import Pin
from autoparallel.planner.rules import work
from autoparallel.planner.summary import (
    SEPARATOR,
    RankSummary,
    offload_text,
    schedule_text,
    strategy_parts,
)
from autoparallel.planning.capture import captured_seq
from autoparallel.report.page import microbatches_text, of_text, over_text, section
from autoparallel.report.printing import plain_table

MIN_COLUMN_SHARE = 0.01
"""Categories of memory below this share of the peak on every rank are added up as "other"."""

MAX_TABLE_ROWS = 8
"""Stages of a large pipeline that are listed at each end."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A configuration with its price, its timeline, and the model's figures."""

    priced: PricedStep
    timeline: Timeline
    cluster: Cluster
    num_tokens: int
    has_tokens: bool
    flops: Mapping[str, float]
    """By family."""
    priced_as: SystemName = "run"
    """The system whose training is priced."""

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.timeline.step_seconds

    @property
    def model_flops_utilization(self) -> float:
        own = self.priced.configuration
        dtype = policy(own.precision, own.optimizer).compute_dtype
        return least_seconds(self.cluster, self.flops, dtype) / self.timeline.step_seconds


def simulated(
    program: Program,
    cluster: Cluster,
    configuration: Configuration,
    seq: int | None,
    *,
    basis: Basis = DEFAULT,
    pins: tuple[Pin, ...] = (),
) -> SimulatedStep:
    """Prices and simulates a configuration. Raises ``UsageError`` where it does not fit."""

    configuration = with_rows(program.graph, configuration)
    check_layers(program, configuration)
    priced = ConfigurationPricer(program.graph, program.blocks, basis, pins).price(
        cluster, configuration
    )
    per_rank = configuration.num_devices // configuration.pp
    timeline = replace(priced.timeline, replicas=(per_rank,) * configuration.pp)
    length = seq if seq is not None else captured_seq(program)
    rows = configuration.microbatch_size
    graph = program.graph.with_batch_size(rows) if program.graph.batch_dims else program.graph
    count = configuration.num_microbatches
    return SimulatedStep(
        priced, timeline, cluster, rows * count * (length or 1), length is not None,
        model_flops(graph, count),
    )  # fmt: skip


def with_rows(graph: Graph, configuration: Configuration) -> Configuration:
    """A model whose rows cannot be told apart has one micro-batch, as it was captured."""
    if graph.batch_dims:
        return configuration
    rows = configuration.microbatch_size * configuration.num_microbatches
    return replace(configuration, microbatch_size=rows, num_microbatches=1)


def check_layers(program: Program, configuration: Configuration) -> None:
    """Raises ``UsageError`` AP128 where layers, divided evenly, leave a stage without any."""
    stages, count = configuration.num_stages, len(find_layers(program.blocks))
    if configuration.layers is None and count < stages:
        raise UsageError(
            "AP128", f"{stages} stages need at least one layer each, but the model has {count} "
            "layers",
            fix=f"pp × chunks of at most {count}, with degrees whose product is "
            f"{configuration.num_devices}",
        )  # fmt: skip


def model_flops(graph: Graph, num_microbatches: int) -> Mapping[str, float]:
    """FLOPs forward and backward of micro-batches by family, nothing recomputed."""
    total = Counter[str]()
    for node in graph.nodes:
        if node.kind == "op":
            found = work(node, input_specs(node, graph), node.outputs)
            flops = found.flops_forward + found.flops_backward
            total[found.family] += num_microbatches * flops
    return total


def show(step: SimulatedStep, name: str, trace: str | None, *, is_json: bool) -> None:
    """Print the page or the figures as JSON, and write the trace that was asked for."""
    if trace is not None:
        write_trace(step, trace)
    if is_json:
        print_json(summary(step))
        return
    print_page(step, name, stdout_console())
    if trace is not None:
        typer.echo(f"\nwritten to {trace}; open it in https://ui.perfetto.dev", err=True)


def write_trace(step: SimulatedStep, path: str) -> None:
    """Writes the timeline as a Chrome trace. Raises ``UsageError`` AP101 if it cannot."""
    timeline = step.timeline
    names = [rank_name(rank, count) for rank, count in enumerate(timeline.replicas)]
    try:
        with Path(path).open("w") as file:
            json.dump(chrome_trace(timeline, names), file)
    except OSError as error:
        raise UsageError("AP101", f"cannot write {path}", why=str(error.strerror)) from error


def summary(step: SimulatedStep) -> dict[str, Any]:
    """The figures for programs; lists have one entry per stage or pipeline rank."""
    timeline, priced, own = step.timeline, step.priced, step.priced.configuration
    return {
        "priced_as": step.priced_as,
        "configuration": {
            "dp": own.dp, "tp": own.tp, "cp": own.cp, "ep": own.ep, "pp": own.pp,
            "etp": own.etp, "compiled": own.compiled, "fuses_products": own.fuses_products,
            "chunks": own.num_chunks, "slices": own.num_slices,
            "zero": own.zero, "recompute": own.recompute, "schedule": own.schedule,
            "microbatches": own.num_microbatches, "micro_batch": own.rank_rows,
        },
        "step_seconds": timeline.step_seconds,
        "tokens_per_second": step.tokens_per_second,
        "model_flops_utilization": step.model_flops_utilization,
        "bubble_fraction": timeline.bubble_fraction,
        "fits": priced.fits,
        "usable_bytes": priced.usable_bytes,
        "memory_bytes": [dict(rank) for rank in priced.memory_bytes],
        "stage_seconds": [
            {"forward": stage.forward_seconds, "backward": stage.backward_seconds,
             **stage.seconds._asdict(), "receive_forward": stage.receive_seconds[0],
             "receive_backward": stage.receive_seconds[1]}
            for stage in priced.stages
        ],
        "exposed_seconds": [each._asdict() for each in timeline.exposed],
        "slowdown_seconds": list(timeline.slowdown_seconds),
        "replicas": list(timeline.replicas),
    }  # fmt: skip


def print_page(step: SimulatedStep, name: str, console: Console) -> None:
    """The page, at most 100 columns wide."""
    width = min(console.width, 100)
    parts: list[RenderableType] = [headline(step, name), section(*memory(step))]
    parts.append(section("Exposed communication by pipeline rank", lost(step.timeline)))
    drawn = Text("\n".join(draw(step.timeline, width - 14)))
    parts.append(section(f"Timeline of a step: {seconds_text(step.timeline.step_seconds)}", drawn))
    parts.append(Text(f"\n{legend(drawn.plain)}", style="dim"))
    with console.capture() as captured:
        for part in parts:
            console.print(part, width=width)
    lines = captured.get().splitlines()
    console.file.write("".join(f"{line.rstrip()}\n" for line in lines))


def headline(step: SimulatedStep, name: str) -> RenderableType:
    """What was simulated, and its figures."""
    own, timeline = step.priced.configuration, step.timeline
    rank = RankSummary(
        own.mesh, own.zero, 1, int(own.recompute == "full"), int(own.recompute == "selective")
    )
    schedule = schedule_text(own.schedule, own.num_chunks, own.num_slices)
    parts = [*strategy_parts([rank] * own.pp, schedule), *offload_text(own.offload)]
    if own.compiled:
        parts.append(f"{'fused' if own.fuses_products else 'compiled'} kernels")
    if own.folded:
        parts.append(f"experts on ep={own.ep} ranks of {', '.join((*own.folded, 'dp'))}")
    parts.append(microbatches_text(own.num_microbatches, own.microbatch_size, own.rank_rows))
    figures = [
        ("step", seconds_text(timeline.step_seconds)),
        ("tokens/s" if step.has_tokens else "samples/s", count_text(step.tokens_per_second)),
        ("MFU", percent_text(step.model_flops_utilization)),
        ("bubble", percent_text(timeline.bubble_fraction)),
        ("memory", of_text(step.priced.peak_bytes, step.priced.usable_bytes)),
    ]
    line = "  ".join(f"{label} {value}" for label, value in figures)
    title = f"{Path(name).name}, {own.precision}, {own.optimizer}, on {step.cluster.name}"
    if step.priced_as != "run":
        title += f", as {system(step.priced_as).title} trains"
    text = Text.assemble(
        title, "\n\n", (SEPARATOR.join(parts), "bold cyan"), "\n", (line, "bold")
    )  # fmt: skip
    over = over_text(step.priced.peak_bytes, step.priced.usable_bytes)
    return text if over is None else Text.assemble(text, "\n", over)


def memory(step: SimulatedStep) -> tuple[str, Table]:
    """A row per pipeline rank, a column per category that takes 1 % of the peak on any rank."""
    ranks = step.priced.memory_bytes
    least = MIN_COLUMN_SHARE * step.priced.peak_bytes
    columns = {name for rank in ranks for name, value in rank.items() if value >= least}
    names = [name for name in MEMORY_ORDER if name in columns]
    names += sorted(columns - set(names))
    unit = bytes_text(step.priced.peak_bytes).split()[1]
    scale = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    titles = ["", *(SHORT.get(name, name) for name in names), "other", "total"]
    table = plain_table(*((title, "right") for title in titles))
    for rank in shown(len(ranks)):
        if rank is None:
            table.add_row("…")
            continue
        values = [ranks[rank].get(name, 0.0) / scale for name in names]
        total = sum(ranks[rank].values()) / scale
        figures = (*values, total - sum(values), total)
        table.add_row(str(rank), *(f"{figure:.2f}" for figure in figures))
    return f"Peak memory of a device by pipeline rank, {unit}", table


SHORT = {
    "parameters": "params", "gradients": "grads", "optimizer": "optim", "activations": "activ",
    "recomputation": "recomp", "communication": "messages", "communicators": "comm",
    "fragmentation": "frag",
}  # fmt: skip


def lost(timeline: Timeline) -> Table:
    """A row per pipeline rank: communication that no compute hides, and what it slows down."""
    table = plain_table(
        ("", "right"), ("in stage", "right"), ("send/receive", "right"), ("gradient sync", "right"),
        ("gather", "right"), ("total", "right"), ("slowdown", "right"),
    )  # fmt: skip
    step = timeline.step_seconds
    for rank in shown(len(timeline.exposed)):
        if rank is None:
            table.add_row("…")
            continue
        own, total = timeline.exposed[rank], timeline.exposed_seconds[rank]
        table.add_row(
            str(rank),
            *(seconds_text(value) if value else "—" for value in own),
            f"{seconds_text(total)} {percent_text(total / step if step else 0.0):>6}",
            seconds_text(timeline.slowdown_seconds[rank])
            if timeline.slowdown_seconds[rank] > 1e-12
            else "—",
        )
    return table


def shown(count: int) -> list[int | None]:
    """The rows of a table of ``count``: all, or both ends and None for what is left out.

    >>> shown(3), shown(20)[7:9]
    ([0, 1, 2], [7, None])
    """
    if count <= 2 * MAX_TABLE_ROWS:
        return list(range(count))
    return [*range(MAX_TABLE_ROWS), None, *range(count - MAX_TABLE_ROWS, count)]


LEGEND = {
    "F": "F forward", "B": "B backward", "f": "f b odd chunks", "W": "W weight gradient",
    "s": "s optimizer", "r": "r gradient sync", "g": "g gather", ".": ". bubble",
}  # fmt: skip


def legend(drawing: str) -> str:
    """What the drawing's letters mean, of those that it has."""
    rows = "".join(line.partition("  ")[2] for line in drawing.splitlines())
    return "  ".join(text for letter, text in LEGEND.items() if letter in rows)
