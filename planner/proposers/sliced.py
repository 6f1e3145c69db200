"""Candidates under TeraPipe: micro-batches pass the stages in slices of their sequences.

In: pipelines that hold all their micro-batches at once. Out: candidates with the cuts, layouts,
ZeRO stages and recomputation of the pipeline, and the slice lengths of the fastest step. A slice
runs another graph than a whole sequence, so stages are priced by ``evaluate``; values that
attention keeps of earlier slices are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..dims.sequence_places import find_places
from ..errors import PlanError, UsageError
from ..evaluate.evaluate import Evaluator, at_microbatch, priced_stages
from ..search.candidates import Candidate, edges
from ..search.context import SearchContext
from ..search.pool import CandidatePool
from ..search.report_plan import make_plan
from ..variants.slice_costs import MOST_UNITS, best_lengths, even_lengths

SCHEDULE = "terapipe"

MOST_PRICED = 2
"""Maximum number of pipelines that are priced in slices."""

MOST_NODES = 4096
"""Maximum nodes of a graph for slices that are not forced: each length is priced node by node."""


def sliced(context: SearchContext, pool: CandidatePool) -> Iterator[Candidate]:
    """Yield candidates of the pool's fastest pipelines under TeraPipe, in slices of sequences.

    If TeraPipe is forced, raises PlanError AP548 if slices would change the model's result,
    UsageError AP549 for more slices than positions, and for slices that no pipeline's layouts
    divide.
    """
    request, graph = context.request, context.structure.graph
    if SCHEDULE not in request.arranged_schedules:
        return
    is_forced = request.forced.schedule == SCHEDULE
    if not is_forced and len(graph.nodes) > MOST_NODES:
        return
    try:
        length = find_places(graph).length
    except PlanError:
        if is_forced:
            raise
        return
    slices = request.forced.slices
    if isinstance(slices, int) and slices > length:
        raise UsageError(
            "AP549",
            f"slices={slices} of sequences of {length} positions",
            where="--parallel",
            fix=f"at most {length} slices",
        )
    lengths = even_lengths(length, slices) if isinstance(slices, int) else None
    bases = [each for each in pool.ranked() if each.is_pipeline and _can_be_sliced(context, each)]
    if not is_forced:
        bases = [each for each in bases if _may_fit(context, each)]
    num_priced, undivided = 0, None
    for base in bases:
        if num_priced == MOST_PRICED:
            break
        if _least_seconds(base) >= pool.bar:
            num_priced += 1
            continue
        try:
            found = _in_slices(context, base, lengths)
        except UsageError as error:
            if lengths is None:
                raise
            undivided = error
            continue
        num_priced += 1
        yield found
    if undivided is not None and num_priced == 0:
        raise undivided


def _can_be_sliced(context: SearchContext, base: Candidate) -> bool:
    """Return whether the stages form a chain, and no mesh splits positions already."""
    has_cp = any("cp" in model.prices.mesh.axes for model, _ in base.answers)
    return not has_cp and edges(context, base.rows, base.stages) is None


def _may_fit(context: SearchContext, base: Candidate) -> bool:
    """Return whether all micro-batches can be in memory at once."""
    for stage, cost in zip(base.stages, base.costs, strict=True):
        lasting = cost.total_bytes - cost.memory_bytes["activations"]
        held = base.num_microbatches * cost.activation_bytes
        if lasting + held > context.limits_on(stage.devices).memory_bytes:
            return False
    return True


def _least_seconds(base: Candidate) -> float:
    """Return a lower bound of the step time: the busiest stage, plus a slice of each other stage.

    Masked pairs of attention, which slices skip, are counted nevertheless.
    """
    stages = [cost.forward_seconds + cost.backward_seconds for cost in base.costs]
    return base.num_microbatches * max(stages) + (sum(stages) - max(stages)) / MOST_UNITS


def _in_slices(
    context: SearchContext, base: Candidate, lengths: tuple[int, ...] | None
) -> Candidate:
    """Return a pipeline's candidate in slices of ``lengths``, by default of the best lengths."""
    graph, blocks = context.structure.graph, context.structure.blocks
    spent = context.budget.spent()
    plan = make_plan(context.structure, context.cluster, context.request, base, (), spent)
    plan = replace(plan, schedule=SCHEDULE, tiles=1)
    if lengths is None:
        lengths = best_lengths(
            at_microbatch(graph, plan),
            blocks,
            plan,
            lambda part, cut, of: priced_stages(
                part, cut, of, rules=context.rules, basis=context.basis
            ),
        )
    evaluator = Evaluator(graph, blocks, context.rules, context.basis)
    staged = evaluator.staged(replace(plan, slices=lengths), context.cluster)
    found = staged.evaluation()
    limits = [context.limits_on(stage.devices).memory_bytes for stage in base.stages]
    return replace(
        base,
        schedule=SCHEDULE,
        costs=tuple(staged.costs),
        slices=staged.slices,
        base=base,
        step_seconds=found.step_seconds,
        bubble_fraction=found.bubble_fraction,
        peak_bytes=float(found.peak_memory_bytes),
        is_complete=True,
        fits=found.peak_memory_bytes <= min(limits),
    )
