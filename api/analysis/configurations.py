"""A hand-written configuration as a whole plan: its layouts solved, its step and memory priced.

In: a plan whose model and cluster are taken, the model's captured program, a configuration or
degrees. Out: the plan that it describes. Where recomputation or micro-batches are left open, the
fastest that fits is taken, of every power of two of rows per data-parallel rank with no, selective
and full recomputation; if nothing fits, the one that needs the least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.ops.compute import least_seconds
from autoparallel.cost_model.ops.memory import policy
from autoparallel.passes.programs.program import Program
from autoparallel.planner import rules
from autoparallel.planner.configured.configuration import (
    Configuration,
    ConfigurationPricer,
    PricedStep,
)
from autoparallel.planner.configured.layers import find_layers
from autoparallel.planner.errors import UsageError
from autoparallel.planner.evaluate import Staged
from autoparallel.planner.graph import Graph
from autoparallel.planner.plan import ModelInfo, Plan, Prediction, Recompute, SolverInfo, StagePlan
from autoparallel.planner.pricing.basis import DEFAULT, Basis
from autoparallel.planner.requests.pins import Pin
from autoparallel.planner.requests.request import Forced
from autoparallel.planner.schedules.schedules import parts_of_ranks
from autoparallel.planner.search.report_plan import model_flops
from autoparallel.planner.summary import RankSummary, schedule_text, summary_text

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


def configurations(like: Plan, degrees: Forced) -> Iterator[Configuration]:
    """Yield the configurations that degrees leave open, for the batch and cluster of a plan."""
    total = like.cluster.num_devices
    tp, pp, cp, ep = (getattr(degrees, name) or 1 for name in ("tp", "pp", "cp", "ep"))
    dp = degrees.dp or max(1, total // (tp * pp * cp))
    batch = like.model.global_batch
    counts = [degrees.num_microbatches] if degrees.num_microbatches else _counts(batch, dp)
    if not counts or any(batch % count or batch // count % dp for count in counts):
        raise UsageError(
            "AP124",
            f"a global batch of {batch} samples cannot be split over dp={dp}",
            fix="degrees whose dp divides the batch, or microbatches= of a multiple of dp rows",
        )
    for count in counts:
        for recompute in [degrees.recompute] if degrees.recompute else RECOMPUTE:
            yield Configuration.like(
                like,
                dp=dp,
                tp=tp,
                pp=pp,
                cp=cp,
                ep=ep,
                zero=degrees.zero or 0,
                recompute=recompute,
                microbatch_size=batch // count,
                num_microbatches=count,
                schedule=degrees.schedule or "1f1b",
                num_chunks=degrees.least_chunks,
                offload=degrees.offload or "none",
            )


def _counts(batch: int, parts: int) -> list[int]:
    """Numbers of micro-batches that give each data-parallel rank 1, 2, 4, … rows.

    >>> _counts(64, 8), _counts(6, 2), _counts(6, 4)
    ([8, 4, 2, 1], [3], [])
    """
    rows = [parts << bit for bit in range(batch.bit_length())]
    return [batch // size for size in rows if size <= batch and batch % size == 0]


def configured_plan(staged: Staged, like: Plan) -> Plan:
    """Return a staged configuration as a plan with its prices, for the model of ``like``."""
    found = staged.evaluation()
    stages: tuple[StagePlan, ...] = tuple(
        replace(stage, prediction=own)
        for stage, own in zip(staged.plan.stages, found.stages, strict=True)
    )
    ratio = like.prediction.step_seconds / found.step_seconds
    prediction = Prediction(
        found.step_seconds,
        found.bubble_fraction,
        like.prediction.tokens_per_second * ratio,
        like.prediction.model_flops_utilization * ratio,
        found.peak_memory_bytes,
        {},
    )
    return replace(
        staged.plan,
        model=like.model,
        stages=stages,
        prediction=prediction,
        alternatives=(),
        solver=SolverInfo(1.0, 0, {}),
        version=like.version,
        torch_version=like.torch_version,
    )


def simulated(
    program: Program,
    cluster: Cluster,
    configuration: Configuration,
    model: ModelInfo,
    *,
    basis: Basis = DEFAULT,
    pins: tuple[Pin, ...] = (),
) -> tuple[PricedStep, Plan]:
    """Price and simulate a configuration, and return its step and its plan.

    The plan has the name, settings and sequence length of ``model``, and the step's figures; the
    bytes of a pipeline rank are those of its first stage. Raises ``UsageError`` where the
    configuration does not fit the model or the cluster.
    """
    configuration = with_rows(program.graph, configuration)
    check_layers(program, configuration)
    pricer = ConfigurationPricer(program.graph, program.blocks, basis, pins)
    staged = pricer.staged(cluster, configuration)
    priced = pricer.step(configuration, staged, staged.costs)
    timeline = replace(priced.timeline, replicas=(configuration.mesh.size,) * configuration.pp)
    priced = replace(priced, timeline=timeline)
    held: list[dict[str, int]] = [{} for _ in priced.stages]
    ranks = parts_of_ranks(configuration.schedule, configuration.pp, configuration.num_chunks)
    for parts, own in zip(ranks, priced.memory_bytes, strict=True):
        held[parts[0]] = {name: round(size) for name, size in own.items()}
    peak = round(priced.peak_bytes)
    figures = staged.figures(timeline.step_seconds, timeline.bubble_fraction, peak)
    stages = tuple(
        replace(stage, prediction=replace(own, memory_bytes=memory))
        for stage, own, memory in zip(priced.plan.stages, figures.stages, held, strict=True)
    )
    rows = configuration.microbatch_size
    graph = program.graph.with_batch_size(rows) if program.graph.batch_dims else program.graph
    flops = {
        family: configuration.num_microbatches * count
        for family, count in model_flops(graph, program.blocks, rules).items()
    }
    dtype = policy(configuration.precision, configuration.optimizer).compute_dtype
    prediction = Prediction(
        timeline.step_seconds,
        timeline.bubble_fraction,
        priced.plan.model.global_batch * (model.seq or 1) / timeline.step_seconds,
        least_seconds(cluster, flops, dtype) / timeline.step_seconds,
        peak,
        {},
    )
    found = replace(priced.plan.model, target=model.target, settings=model.settings, seq=model.seq)
    return priced, replace(priced.plan, model=found, stages=stages, prediction=prediction)


def with_rows(graph: Graph, configuration: Configuration) -> Configuration:
    """Return the configuration, with one micro-batch if the rows of the model cannot be split."""
    if graph.batch_dims:
        return configuration
    rows = configuration.microbatch_size * configuration.num_microbatches
    return replace(configuration, microbatch_size=rows, num_microbatches=1)


def check_layers(program: Program, configuration: Configuration) -> None:
    """Raise ``UsageError`` AP128 where layers, divided evenly, leave a stage without any."""
    stages, count = configuration.num_stages, len(find_layers(program.blocks))
    if configuration.layers is None and count < stages:
        raise UsageError(
            "AP128",
            f"{stages} stages need at least one layer each, but the model has {count} layers",
            fix=f"pp × chunks of at most {count}, with degrees whose product is "
            f"{configuration.num_devices}",
        )


def configuration_summary(own: Configuration, num_layers: int) -> str:
    """Return a configuration of a model with ``num_layers`` layers in one line, as plans are.

    >>> configuration_summary(Configuration(dp=4, tp=2, zero=1, microbatch_size=8), 4)
    'dp=4 tp=2 · ZeRO 1 · 1 × 8'
    """
    recomputed = round(num_layers * own.recompute_share)
    ranks = [
        RankSummary(
            own.mesh,
            own.zero,
            num_layers if rank == 0 else 0,
            num_full=recomputed * (own.recompute == "full" and rank == 0),
            num_selective=recomputed * (own.recompute == "selective" and rank == 0),
        )
        for rank in range(own.pp)
    ]
    schedule = schedule_text(own.schedule, own.num_chunks, own.num_slices)
    return summary_text(ranks, schedule, own.num_microbatches, own.microbatch_size, own.offload)
