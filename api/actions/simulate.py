"""``autoparallel simulate``: price one configuration written by the user, and draw its step."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import typer

from autoparallel.actions.terminal import stdout_console, with_lora
from autoparallel.actions.trained_as import TrainedAs, trained_as
from autoparallel.analysis.configurations import simulated
from autoparallel.cache.plan_cache import plan_cache
from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.simulator.timeline import Timeline
from autoparallel.cost_model.simulator.trace import chrome_trace, rank_name
from autoparallel.options.outputs import writing
from autoparallel.options.parse import parse_parallel, parse_settings
from autoparallel.options.plan_options import PlanOptions
from autoparallel.options.progress import progress
from autoparallel.options.results import say_json
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.configured.configuration_pricer import PricedStep
from autoparallel.planner.costs.basis import system
from autoparallel.planner.costs.precision import check_precision
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import ModelInfo, Plan
from autoparallel.planner.requests.options import check_degrees, fix_of_split
from autoparallel.planner.requests.request import Forced, check_schedule_name
from autoparallel.planner.schedules.schedules import ScheduleInfo, find_schedule
from autoparallel.planning.capture import capture_target, captured_seq
from autoparallel.planning.document_lengths import with_lengths
from autoparallel.planning.plan import (
    basis_for,
    find_cluster,
    places_experts,
    without_copies,
)
from autoparallel.planning.routing import loads_of
from autoparallel.planning.tf32 import with_choice
from autoparallel.report import Details, print_report
from autoparallel.target.load import load_target

OWN_DEGREES = ("schedule", "chunks", "cp", "slices", "etp")
"""Names in ``--parallel`` that ``simulate`` reads itself, without ``parse_parallel``."""


def simulate(
    target: str,
    *,
    cluster: str,
    parallel: str,
    options: PlanOptions,
    layers_per_stage: str | None,
    overlap: bool,
    slowdown: float | None,
    priced_as: str,
    recompute_parts: str | None,
    dispatcher: str | None,
    imbalance: float,
    scaling: str | None,
    kernels: str | None,
    lora: str | None,
    trace: str | None,
    settings: list[str] | None,
    json: bool,
) -> None:
    """Print the predicted step time, memory and timeline of the configuration in ``parallel``."""
    own, rest = split_parallel(parallel)
    options = replace(options, forced=parse_parallel(rest))
    loaded = load_target(target, parse_settings(with_lora(settings, lora)))
    layers = parse_layers(layers_per_stage)
    found = find_cluster(cluster)
    check_precision(found, options.precision)
    trained = trained_as(
        priced_as,
        options,
        slowdown=slowdown if overlap else inf,
        dispatcher=dispatcher,
        imbalance=imbalance,
        scaling=scaling,
        kernels=kernels,
        parts=recompute_parts,
    )
    configuration = trained.configured(configured(options, own, found, layers, trained))
    found = with_choice(found, options.tf32)
    with plan_cache() as cache, progress() as observe:
        program = capture_target(loaded, options, observe, cache.values)
        program = with_lengths(program, options.lengths)
        observe("simulate", 0, 1)
        basis = replace(basis_for(found, options, loaded), assumptions=trained.assumptions)
        if options.routing is not None:
            loads = loads_of(program, options.routing)
            loads = loads if trained.name == "run" else loads.without_copies()
            basis = replace(basis, assumptions=replace(trained.assumptions, loads=loads))
        seq = options.seq if options.seq is not None else captured_seq(program)
        model = ModelInfo(
            loaded.name, loaded.settings, "", 0, 0, seq, options.precision, options.optimizer
        )
        simulate_by = partial(simulated, program, found, configuration, model, pins=options.pins)
        priced, plan = simulate_by(basis=basis)
        if places_experts(plan):
            alone = simulate_by(basis=without_copies(basis))
            priced, plan = min((alone, (priced, plan)), key=lambda own: own[0].step_seconds)
        observe("simulate", 1, 1)
    show(priced, plan, trained, trace, is_json=json)


def split_parallel(text: str) -> tuple[dict[str, str], str]:
    """Split the text of ``--parallel``: return the values of schedule, chunks, cp, slices and etp
    by name, and all other ``name=value`` pairs as text.

    >>> split_parallel("dp=2,pp=4,schedule=bfs,chunks=2")
    ({'schedule': 'bfs', 'chunks': '2'}, 'dp=2,pp=4')
    """
    own: dict[str, str] = {}
    rest = []
    for item in text.split(","):
        name, _, value = (part.strip().lower() for part in item.partition("="))
        if name not in OWN_DEGREES:
            rest.append(item)
        elif name in own or not value:
            fault = "is given twice" if name in own else "has no value"
            raise UsageError("AP112", f"--parallel: {name!r} {fault}", where=f"--parallel {text}")
        else:
            own[name] = value
    return own, ",".join(rest)


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Parse the text of ``--layers-per-stage``.

    >>> parse_layers("7,8,8,7")
    (7, 8, 8, 7)
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(
            "AP112",
            f"--layers-per-stage {text!r} is not a list of whole numbers above 0",
            fix="for example: --layers-per-stage 7,8,8,7",
        )
    return tuple(int(part) for part in parts)


def configured(
    options: PlanOptions,
    own: dict[str, str],
    cluster: Cluster,
    layers: tuple[int, ...] | None,
    trained: TrainedAs,
) -> Configuration:
    """Return the configuration (degrees, schedule, micro-batches, …) that the options ask for.

    ``own`` has the values of ``OWN_DEGREES`` by name, ``layers`` the number of layers per stage;
    ``trained`` is about the training program. Raises UsageError for a conflict.
    """
    forced = options.forced
    if forced.servers is not None:
        raise UsageError(
            "AP112",
            "--parallel: simulate draws the steps of stages, not of parameter servers",
            where="--parallel",
            fix=f"autoparallel plan ... --parallel servers={forced.servers} prices them",
        )
    if forced.allreduce is not None or forced.gradients is not None:
        raise UsageError(
            "AP112",
            "--parallel: simulate sums gradients by the library, in backward order",
            where="--parallel",
            fix="leave allreduce and gradients out, or plan with them",
        )
    info = trained_schedule(own.get("schedule", "1f1b"))
    chunks = degree(own, "chunks") if "chunks" in own else info.chunks[0]
    slices = degree(own, "slices")
    if slices > 1 and info.name != "terapipe":
        raise UsageError(
            "AP112",
            f"--parallel: slices={slices} without schedule=terapipe",
            fix="schedule=terapipe, or leave slices out",
        )
    etp = degree(own, "etp") if "etp" in own else None
    completed = Configuration.completed(
        forced,
        cluster.num_devices,
        cp=degree(own, "cp"),
        etp=etp,
        schedule=info.name,
        num_chunks=chunks,
        num_slices=slices,
        layers=layers,
        precision=options.precision,
        optimizer=options.optimizer,
        gradient_dtype=options.gradient_dtype,
    )
    tp = completed.tp
    sends = trained.assumptions.sends_tokens
    if etp is not None and (etp not in ((1,) if trained.name == "run" else (1, tp)) or not sends):
        raise UsageError(
            "AP112",
            f"--parallel: etp={etp} beside tp={tp}",
            where="--parallel",
            why="tokens are sent to whole experts; other programs may share each by all tp ranks",
            fix=f"etp=1, --as megatron with etp=1 or etp={tp}, or leave etp out",
        )
    degrees = {name: getattr(completed, name) for name in ("dp", "tp", "pp", "cp")}
    check_degrees(replace(forced, **degrees, ep=completed.data_ep), cluster)
    rows, count = microbatches(options, replace(forced, dp=completed.dp))
    sends_split = sends and trained.name != "run" and tp > 1 and completed.ep > 1
    return replace(
        completed,
        sequence_parallel=True if sends_split else None,
        microbatch_size=rows,
        num_microbatches=count,
    )


def trained_schedule(name: str) -> ScheduleInfo:
    """Return the pipeline schedule called ``name``. Raises UsageError AP150 and AP122 if no
    schedule that can train has this name."""
    check_schedule_name(name)
    return find_schedule(name)


def degree(own: dict[str, str], name: str) -> int:
    text = own.get(name, "1")
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(
            "AP112", f"--parallel: {name}={text} is not a whole number above 0", where="--parallel"
        )
    return int(text)


def microbatches(options: PlanOptions, forced: Forced) -> tuple[int, int]:
    """Return the number of samples in a micro-batch of all ranks, and the number of micro-batches.

    By default a micro-batch has one sample per data-parallel rank. Raises UsageError AP124 if the
    micro-batches do not divide the global batch.
    """
    parts = forced.row_parts
    batch, asked = options.global_batch, forced.num_microbatches
    rows = batch // asked if asked else parts
    if options.micro_batch is not None:
        rows = options.micro_batch * parts
    count = asked or max(1, batch // rows)
    if rows * count != batch or rows % parts:
        raise UsageError(
            "AP124",
            f"{count} micro-batches of {rows} samples are not a global batch of {batch}"
            if rows * count != batch
            else f"micro-batches of {rows} samples cannot be split over {parts} replicas",
            fix=fix_of_split(batch, forced, options.micro_batch),
        )
    return rows, count


def show(
    priced: PricedStep, plan: Plan, trained: TrainedAs, trace: str | None, *, is_json: bool
) -> None:
    """Print a simulated step as a report or as JSON, and write its trace if ``trace`` is given."""
    if trace is not None:
        write_trace(priced.timeline, trace)
    if is_json:
        say_json("simulate", summary(priced, plan, trained))
        return
    details = Details(memory=True)
    print_report(
        plan,
        stdout_console(),
        details,
        notes=notes(priced, trained),
        timeline=priced.timeline,
    )
    if trace is not None:
        typer.echo(f"\nwritten to {trace}; open it in https://ui.perfetto.dev", err=True)


def notes(priced: PricedStep, trained: TrainedAs) -> list[str]:
    """Return a line per choice of a simulation that its plan does not record: training system,
    fused kernels, ranks over which experts are also split."""
    own, found = priced.configuration, []
    if trained.name != "run":
        found.append(f"priced as {system(trained.name).title} trains")
    if own.compiled:
        found.append(f"{'fused' if own.fuses_products else 'compiled'} kernels")
    if own.folded:
        found.append(f"experts on ep={own.ep} ranks of {', '.join((*own.folded, 'dp'))}")
    return found


def write_trace(timeline: Timeline, path: str) -> None:
    """Write the timeline as a Chrome trace. Raises ``UsageError`` AP101 if that fails."""
    names = [rank_name(rank, count) for rank, count in enumerate(timeline.replicas)]
    with writing(path, "--trace"), Path(path).open("w") as file:
        json.dump(chrome_trace(timeline, names), file)


OWN_CHOICES = "dp tp cp ep pp etp compiled fuses_products zero shard recompute schedule"
"""Fields of ``Configuration`` that the JSON document contains under the same names."""


def summary(priced: PricedStep, plan: Plan, trained: TrainedAs) -> dict[str, Any]:
    """Return the results of a simulated step as JSON values: configuration, seconds, bytes. Lists
    have an entry per stage or per pipeline rank."""
    timeline, own = priced.timeline, priced.configuration
    return {
        "priced_as": trained.name,
        "configuration": {
            **{name: getattr(own, name) for name in OWN_CHOICES.split()},
            "chunks": own.num_chunks,
            "slices": own.num_slices,
            "microbatches": own.num_microbatches,
            "micro_batch": own.rank_rows,
        },
        "step_seconds": timeline.step_seconds,
        "tokens_per_second": plan.prediction.tokens_per_second,
        "model_flops_utilization": plan.prediction.model_flops_utilization,
        "bubble_fraction": timeline.bubble_fraction,
        "fits": priced.fits,
        "usable_bytes": priced.usable_bytes,
        "memory_bytes": [dict(rank) for rank in priced.memory_bytes],
        "stage_seconds": [
            {
                "forward": stage.forward_seconds,
                "backward": stage.backward_seconds,
                **stage.seconds._asdict(),
                "receive_forward": stage.receive_seconds[0],
                "receive_backward": stage.receive_seconds[1],
            }
            for stage in priced.stages
        ],
        "exposed_seconds": [each._asdict() for each in timeline.exposed],
        "slowdown_seconds": list(timeline.slowdown_seconds),
        "replicas": list(timeline.replicas),
    }
