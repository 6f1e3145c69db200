"""Short searches for tests that run a plan, or show it, and do not ask how it was found.

In: nothing. Out: within ``searches_are_brief()`` the planner looks at pipelines of one stage per
rank by its dynamic program, at branches, unequal shares and interleaving, and at Chimera and
TeraPipe only where they are forced. It does not search on around the fastest plan, and proves no
bound. A plan's memory is estimated as within ``memory_follows_rules()``: by the rules of ops, not
by a run of its stages. The tests of ``tests/planner`` search in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from autoparallel.passes.memory import stage_memory
from autoparallel.planner.find_plan import Proposer, SearchMethod
from autoparallel.planner.proposers.interleaved import interleaved
from autoparallel.planner.proposers.pipelines import dynamic_program, parallel_branches
from autoparallel.planner.proposers.replicated import replicated
from autoparallel.planner.proposers.sliced import sliced
from autoparallel.planner.proposers.uneven_shares import uneven_shares
from autoparallel.planner.search.candidates import Candidate
from autoparallel.planner.search.context import SearchContext
from autoparallel.planner.search.pool import CandidatePool
from autoparallel.planning import objectives as goals

VARIABLE = "AUTOPARALLEL_TEST_BRIEF_SEARCH"
"""The variable that makes the searches of processes brief that are forked from this one."""


def _where_forced(propose: Proposer, schedule: str) -> Proposer:
    """Return a proposer that makes candidates only for a request that forces ``schedule``."""

    def proposed(context: SearchContext, pool: CandidatePool) -> Iterator[Candidate]:
        if context.request.forced.schedule == schedule:
            yield from propose(context, pool)

    return proposed


BRIEF: tuple[Proposer, ...] = (
    dynamic_program,
    parallel_branches,
    uneven_shares,
    interleaved,
    _where_forced(replicated, "chimera"),
    _where_forced(sliced, "terapipe"),
)


@contextmanager
def searches_are_brief() -> Iterator[None]:
    """Make the searches of this process brief until the context ends."""
    with pytest.MonkeyPatch.context() as patch:
        method = partial(SearchMethod, BRIEF, is_bounded=False)
        patch.setattr(goals, "SearchMethod", method)
        patch.setenv(VARIABLE, "1")
        with memory_follows_rules():
            yield


@contextmanager
def memory_follows_rules() -> Iterator[None]:
    """Estimate the memory of this process's plans by the rules of ops until the context ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_memory, "runs_stages", lambda plan, blocks: False)
        yield
