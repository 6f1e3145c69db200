"""The page and the figures of ``autoparallel simulate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from autoparallel.actions.terminal import print_json, stdout_console
from autoparallel.actions.trained_as import TrainedAs
from autoparallel.cost_model.simulator.timeline import Timeline
from autoparallel.cost_model.simulator.trace import chrome_trace, rank_name
from autoparallel.planner.configured.configuration import PricedStep
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.pricing.systems import system
from autoparallel.report import Details, print_report


def show(
    priced: PricedStep, plan: Plan, trained: TrainedAs, trace: str | None, *, is_json: bool
) -> None:
    """Print the report or the figures as JSON, and write the trace that was asked for."""
    if trace is not None:
        write_trace(priced.timeline, trace)
    if is_json:
        print_json(summary(priced, plan, trained))
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
    """List the parts of a configuration that a plan does not hold."""
    own, found = priced.configuration, []
    if trained.name != "run":
        found.append(f"priced as {system(trained.name).title} trains")
    if own.compiled:
        found.append(f"{'fused' if own.fuses_products else 'compiled'} kernels")
    if own.folded:
        found.append(f"experts on ep={own.ep} ranks of {', '.join((*own.folded, 'dp'))}")
    return found


def write_trace(timeline: Timeline, path: str) -> None:
    """Write the timeline as a Chrome trace. Raises ``UsageError`` AP101 where that fails."""
    names = [rank_name(rank, count) for rank, count in enumerate(timeline.replicas)]
    try:
        with Path(path).open("w") as file:
            json.dump(chrome_trace(timeline, names), file)
    except OSError as error:
        raise UsageError("AP101", f"cannot write {path}", why=str(error.strerror)) from error


def summary(priced: PricedStep, plan: Plan, trained: TrainedAs) -> dict[str, Any]:
    """Return the figures as JSON values; lists have one entry per stage or pipeline rank."""
    timeline, own = priced.timeline, priced.configuration
    return {
        "priced_as": trained.name,
        "configuration": {
            "dp": own.dp,
            "tp": own.tp,
            "cp": own.cp,
            "ep": own.ep,
            "pp": own.pp,
            "etp": own.etp,
            "compiled": own.compiled,
            "fuses_products": own.fuses_products,
            "chunks": own.num_chunks,
            "slices": own.num_slices,
            "zero": own.zero,
            "recompute": own.recompute,
            "schedule": own.schedule,
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
