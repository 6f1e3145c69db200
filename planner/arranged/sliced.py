"""TeraPipe: a plan whose micro-batches go through the stages in slices of their sequences.

In: what ``search.plan`` takes, with ``schedule=terapipe`` forced. Out: a plan with ``slices``.
Cuts, layouts, ZeRO stages and recomputation are those that the search finds for GPipe, which
holds as many activations; what attention keeps of earlier slices is not counted. The step is
priced by ``evaluate`` under the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .. import rules as default_rules
from ..errors import UsageError
from ..evaluate import Evaluator, at_microbatch, priced_stages
from ..graph import Blocks, Graph
from ..plan import Plan
from ..price_sources import with_sources
from ..pricing.basis import DEFAULT, Basis
from ..pricing.prices import Rules
from ..pricing.slice_costs import best_lengths, even_lengths
from ..requests.request import Request
from ..sequence_places import find_places
from .forced_chunks import check_memory
from .priced import priced


def plan(
    graph: Graph,
    blocks: Blocks,
    request: Request,
    found: Callable[[Request], Plan],
    *,
    rules: Rules = default_rules,
    basis: Basis = DEFAULT,
) -> Plan:
    """The fastest plan found that fits; ``found`` searches.

    Raises as ``search.plan`` does; PlanError AP548 for a model that slices would change,
    UsageError AP549 for more slices than positions or a degree cp.
    """
    length, asked = find_places(graph).length, request.forced.slices
    if isinstance(asked, int) and asked > length:
        raise UsageError(
            "AP549", f"slices={asked} of sequences of {length} positions", where="--parallel",
            fix=f"at most {length} slices",
        )  # fmt: skip
    if (request.forced.cp or 1) > 1:
        raise UsageError(
            "AP549", "cp and schedule=terapipe both split the positions of sequences",
            where="--parallel", fix="remove cp",
        )  # fmt: skip
    forced = replace(request.forced, schedule="gpipe", slices=None)
    base = replace(found(replace(request, forced=forced)), schedule="terapipe")
    if isinstance(asked, int):
        lengths = even_lengths(length, asked)
    else:
        lengths = best_lengths(
            at_microbatch(graph, base), blocks, base,
            lambda part, cut, own: priced_stages(part, cut, own, rules=rules, basis=basis),
        )  # fmt: skip
    base = replace(base, slices=lengths)
    best = priced(base, Evaluator(graph, blocks, rules, basis))
    check_memory(best, request, "the stages")
    return with_sources(best, graph, blocks, basis=basis, rules=rules)
