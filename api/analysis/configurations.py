"""Hand-written configurations: enumerated, priced, and turned into plans.

In: a plan (for its model and cluster), its captured program, and degrees or configurations. Out:
the configurations that complete the degrees (samples per data-parallel rank by powers of two, with
no, selective and full recomputation), each with its priced step; the fastest that fits; and the
plan of a priced step. Baselines, ``compare``, ``simulate`` and exports share this file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.ops.compute import least_seconds
from autoparallel.cost_model.ops.memory import policy
from autoparallel.passes.programs.program import Program
from autoparallel.planner import ops as rules
from autoparallel.planner.configured.configuration import Configuration, find_layers
from autoparallel.planner.configured.configuration_pricer import ConfigurationPricer, PricedStep
from autoparallel.planner.costs.basis import DEFAULT, Basis
from autoparallel.planner.errors import AutoparallelError, UsageError
from autoparallel.planner.graph.graph import Graph
from autoparallel.planner.plan import ModelInfo, Plan, Prediction, Recompute
from autoparallel.planner.requests.features import PLAIN_MODES
from autoparallel.planner.requests.pins import Pin
from autoparallel.planner.requests.request import Forced
from autoparallel.planner.schedules.schedules import parts_of_ranks
from autoparallel.planner.search.report_plan import model_flops
from autoparallel.planner.summary import RankSummary, schedule_text, summary_text


def configurations(like: Plan, degrees: Forced) -> Iterator[Configuration]:
    """Yield configurations with these ``degrees`` for the global batch and cluster of ``like``.

    Raises ``UsageError`` AP124 if the global batch cannot be split over the degrees.
    """
    model = like.model
    own = Configuration.completed(
        degrees,
        like.cluster.num_devices,
        precision=model.precision,
        gradient_dtype=model.gradient_dtype,
        optimizer=model.optimizer,
        compiled=like.compiled,
    )
    if own.dp * own.cp == 1:  # there are no ranks to shard states over
        own = replace(own, zero=0, shard=None)
    modes = PLAIN_MODES if degrees.recompute is None else (degrees.recompute,)
    yield from divided(own, model.global_batch, modes, count=degrees.num_microbatches)


def divided(
    own: Configuration,
    batch: int,
    modes: Sequence[Recompute] = PLAIN_MODES,
    *,
    count: int | None = None,
) -> Iterator[Configuration]:
    """Yield the configuration ``own`` with each division of ``batch`` samples into micro-batches.

    There are ``count`` micro-batches, or every number that gives a data-parallel rank 1, 2, 4, …
    samples; each with every recomputation in ``modes``. Raises ``UsageError`` AP124 if none.

    >>> [each.num_microbatches for each in divided(Configuration(dp=8), 64, ("none",))]
    [8, 4, 2, 1]
    >>> [each.microbatch_size for each in divided(Configuration(dp=2), 6, ("none", "full"))]
    [2, 2]
    """
    if count is None:
        sizes = [own.dp << bit for bit in range(batch.bit_length())]
    else:
        sizes = [batch // count] if batch % count == 0 else []
    sizes = [size for size in sizes if batch % size == 0 and size % own.dp == 0]
    if not sizes:
        raise UsageError(
            "AP124",
            f"a global batch of {batch} samples cannot be split over dp={own.dp}",
            fix="degrees whose dp divides the batch, or microbatches= of a multiple of dp rows",
        )
    for size in sizes:
        for mode in modes:
            yield replace(own, recompute=mode, microbatch_size=size, num_microbatches=batch // size)


@dataclass
class PricedConfigurations:
    """Configurations of one model that were priced on a cluster, one after another.

    Pricing stops at ``until`` (as ``time.process_time()``), but prices at least one configuration;
    ``is_cut_short`` then says that candidates were skipped. ``error`` is the last error of pricing.
    """

    pricer: ConfigurationPricer
    cluster: Cluster
    until: float = inf
    steps: list[PricedStep] = field(default_factory=list)
    is_cut_short: bool = False
    error: AutoparallelError | None = None

    def price(self, candidates: Iterable[Configuration]) -> Iterator[PricedStep]:
        """Price each configuration and yield the result; skip candidates that raise an error."""
        remaining = iter(candidates)
        while True:
            try:
                candidate = next(remaining, None)
                if candidate is None:
                    return
                if self.steps and time.process_time() > self.until:
                    self.is_cut_short = True
                    return
                step = self.pricer.price(self.cluster, candidate)
            except AutoparallelError as error:
                self.error = error
                continue
            self.steps.append(step)
            yield step

    @property
    def fitting(self) -> list[PricedStep]:
        """Return the priced configurations whose memory fits, the fastest first."""
        fitting = (step for step in self.steps if step.fits)
        return sorted(fitting, key=lambda step: step.step_seconds)

    @property
    def best(self) -> PricedStep:
        """Return the fastest configuration that fits memory; if none fits, that of least memory."""
        fitting = self.fitting
        return fitting[0] if fitting else min(self.steps, key=lambda step: step.peak_bytes)


def simulated(
    program: Program,
    cluster: Cluster,
    configuration: Configuration,
    model: ModelInfo,
    *,
    basis: Basis = DEFAULT,
    pins: tuple[Pin, ...] = (),
) -> tuple[PricedStep, Plan]:
    """Price and simulate a training step of a configuration; return the priced step and its plan.

    ``model`` (name, batch, precision) is stored in the plan; ``basis`` is the source of op times,
    and ``pins`` are layouts that the user forces. Raises ``UsageError`` if the configuration does
    not suit the model or the cluster.
    """
    configuration = with_rows(program.graph, configuration)
    check_layers(program, configuration)
    pricer = ConfigurationPricer(program.graph, program.blocks, basis, pins)
    priced = pricer.price(cluster, configuration)
    replicas = (configuration.mesh.size,) * configuration.pp
    priced = replace(priced, timeline=replace(priced.timeline, replicas=replicas))
    return priced, described_plan(priced, program, model)


def described_plan(step: PricedStep, program: Program, model: ModelInfo) -> Plan:
    """Return the plan of a priced configuration, with predicted seconds and bytes.

    The bytes of a pipeline rank are stored with the rank's first stage. The plan's name, settings,
    fingerprint and sequence length are taken from ``model``.
    """
    own, timeline = step.configuration, step.timeline
    held: list[dict[str, int]] = [{} for _ in step.stages]
    ranks = parts_of_ranks(own.schedule, own.pp, own.num_chunks)
    for parts, memory in zip(ranks, step.memory_bytes, strict=True):
        held[parts[0]] = {name: round(size) for name, size in memory.items()}
    peak = round(step.peak_bytes)
    figures = step.staged.figures(timeline.step_seconds, timeline.bubble_fraction, peak)
    stages = tuple(
        replace(stage, prediction=replace(found, memory_bytes=memory))
        for stage, found, memory in zip(step.plan.stages, figures.stages, held, strict=True)
    )
    graph = program.graph
    graph = graph.with_batch_size(own.microbatch_size) if graph.batch_dims else graph
    flops = {
        family: own.num_microbatches * count
        for family, count in model_flops(graph, program.blocks, rules).items()
    }
    dtype = policy(own.precision, own.optimizer).compute_dtype
    prediction = Prediction(
        timeline.step_seconds,
        timeline.bubble_fraction,
        step.plan.model.global_batch * (model.seq or 1) / timeline.step_seconds,
        least_seconds(step.plan.cluster, flops, dtype) / timeline.step_seconds,
        peak,
        {},
    )
    made = step.plan.model
    model = replace(
        model,
        num_parameters=made.num_parameters,
        global_batch=made.global_batch,
        gradient_dtype=made.gradient_dtype,
    )
    return replace(step.plan, model=model, stages=stages, prediction=prediction)


def with_rows(graph: Graph, configuration: Configuration) -> Configuration:
    """Return ``configuration``, with a single micro-batch if the graph has no batch dimension."""
    if graph.batch_dims:
        return configuration
    rows = configuration.microbatch_size * configuration.num_microbatches
    return replace(configuration, microbatch_size=rows, num_microbatches=1)


def check_layers(program: Program, configuration: Configuration) -> None:
    """Raise ``UsageError`` AP128 if the model has fewer layers than stages."""
    stages, count = configuration.num_stages, len(find_layers(program.blocks))
    if configuration.layers is None and count < stages:
        raise UsageError(
            "AP128",
            f"{stages} stages need at least one layer each, but the model has {count} layers",
            fix=f"pp × chunks of at most {count}, with degrees whose product is "
            f"{configuration.num_devices}",
        )


def configuration_summary(own: Configuration, num_layers: int) -> str:
    """Return a one-line summary of a configuration, in the format of plan summaries.

    >>> configuration_summary(Configuration(dp=4, tp=2, zero=1, microbatch_size=8), 4)
    'dp=4 tp=2 · ZeRO 1 · 1 × 8'
    """
    recomputed = round(num_layers * own.recompute_share)
    ranks = [
        RankSummary(
            own.mesh,
            own.zero,
            num_layers if rank == 0 else 0,
            modes=(own.recompute,) * (recomputed if rank == 0 else 0),
            ep=own.ep,
            shard_degree=own.shard_degree,
        )
        for rank in range(own.pp)
    ]
    schedule = schedule_text(own.schedule, own.num_chunks, own.num_slices)
    return summary_text(ranks, schedule, own.num_microbatches, own.microbatch_size, own.offload)
