"""Pipelines with equal ranks: the bases of interleaved and replicated candidates.

In: the candidates so far. Out: pipelines of one stage per rank, a chain of stages on equal meshes,
ordered by the work of their busiest rank. If a schedule of several stages per rank is forced and no
such pipeline exists, pipelines are made with the mesh of each stage on all ranks, and at other
micro-batch sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..graph.layout import Mesh
from ..inter_op.inter_op import Pipeline, total_seconds
from ..requests.options import microbatch_rows
from ..schedules.held import most_held
from ..search.branch_and_bound import PipelineProposal
from ..search.candidates import Candidate, Chosen, build_simulated, candidate, edges, models_of
from ..search.context import SearchContext
from ..search.pool import CandidatePool
from ..stage.branches import stage_depths

MOST_BASES = 4
"""Maximum number of pipelines that serve as bases of other candidates."""


def groups_of_bases(context: SearchContext, pool: CandidatePool) -> Iterator[list[Candidate]]:
    """Yield the bases: pipelines to be cut further or replicated. If plans of one stage per rank
    are not allowed and the caller, who found no candidate, continues, yield further bases."""
    bases = alike_pipelines(context, pool)
    yield bases
    if not context.request.allows_one_stage:
        of_one_mesh = list(with_one_mesh(context, pool))
        yield of_one_mesh
        yield list(at_other_sizes(context, bases or of_one_mesh))


def alike_pipelines(context: SearchContext, pool: CandidatePool) -> list[Candidate]:
    """Return the pool's best pipelines with equal ranks, by micro-batch size, length and mesh."""
    below = pool.step_seconds if context.request.allows_one_stage else float("inf")
    by_kind: dict[object, tuple[float, int, Candidate]] = {}
    for number, each in enumerate(pool.ranked()):
        if not each.is_pipeline or not is_alike(context, each):
            continue
        busiest = max(cost.forward_seconds + cost.backward_seconds for cost in each.costs)
        work = each.num_microbatches * busiest
        kind = each.rows, len(each.stages), each.answers[0][0].prices.mesh
        if work < below:
            by_kind.setdefault(kind, (work, number, each))
    ordered = sorted(by_kind.values(), key=lambda entry: entry[:2])
    return [each for *_, each in ordered[:MOST_BASES]]


def is_alike(context: SearchContext, made: Candidate) -> bool:
    """Return whether all stages of a candidate are on one mesh and form a chain."""
    meshes = {model.prices.mesh for model, _ in made.answers}
    return len(meshes) == 1 and edges(context, made.rows, made.stages) is None


def with_one_mesh(context: SearchContext, pool: CandidatePool) -> Iterator[Candidate]:
    """Yield the pool's pipelines of equally large stages, solved again with one mesh for all."""
    seen: set[object] = set()
    for each in pool.ranked():
        sizes = {stage.num_devices for stage in each.stages}
        if not each.is_pipeline or len(sizes) > 1:
            continue
        for mesh in dict.fromkeys(model.prices.mesh for model, _ in each.answers):
            key = each.rows, each.stages, mesh
            if key not in seen:
                seen.add(key)
                made = _on_mesh(context, each, mesh)
                if made is not None and is_alike(context, made):
                    yield made


def _on_mesh(context: SearchContext, pipeline: Candidate, mesh: Mesh) -> Candidate | None:
    """Solve a pipeline again with each stage on ``mesh``.

    Return None if a stage does not fit in memory.
    """
    chosen: list[Chosen] = []
    number = len(pipeline.stages)
    for stage, depth in zip(pipeline.stages, stage_depths(None, number), strict=True):
        solver = context.solver(pipeline.rows, mesh, stage.first_device)
        held = context.held(context.in_flight_schedule, number, pipeline.rows, depth)
        run = context.at(pipeline.rows).run(stage.start, stage.stop)
        answer = solver.best(run, pipeline.num_microbatches, most_held(held))
        if answer is None:
            return None
        chosen.append((solver, answer))
    schedule, stages = context.in_flight_schedule, pipeline.stages
    return build_simulated(context, pipeline.rows, schedule, stages, models_of(chosen))


def at_other_sizes(context: SearchContext, bases: list[Candidate]) -> Iterator[Candidate]:
    """Yield the pipelines ``bases`` at other micro-batch sizes, more micro-batches first."""
    every = set(microbatch_rows(context.structure.graph, context.request, context.cluster))
    for base in bases:
        for rows in sorted(every - {base.rows}, key=lambda rows: (rows > base.rows, -rows)):
            made = candidate(context, PipelineProposal(rows, Pipeline(base.stages, _seconds(base))))
            if made is not None and not is_alike(context, made):
                made = _on_mesh(context, made, base.answers[0][0].prices.mesh)
            if made is not None:
                yield made


def _seconds(base: Candidate) -> float:
    """Return the estimated step time T of the pipeline ``base``."""
    return total_seconds([cost.warmup_and_steady(base.num_microbatches) for cost in base.costs])
