"""Pool of the candidates that a search has found, and the choice among them.

In: candidates as proposers make them. Out: the step to beat, the pipelines worth refining, and at
the end the winner and the others. Candidates that do not fit in memory are listed separately; a
candidate that the request does not allow as a plan (a pipeline of one stage per rank if several are
forced) can be the base of others, but never wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .branch_and_bound import PipelineProposal
from .candidates import Candidate, candidates, complete_simulation, is_whole
from .context import SearchContext


class CandidatePool:
    """Candidates of a search: ``known`` fit in memory, ``rejected`` do not. ``proposals``:
    pipelines of the dynamic program that were simulated. ``is_open``: untried plans may fit."""

    def __init__(self, context: SearchContext) -> None:
        self.context = context
        self.proposals: list[PipelineProposal] = []
        self.known: list[Candidate] = []
        self.rejected: list[Candidate] = []
        self.best: Candidate | None = None
        self.is_open = False  # some stages may yet fit

    @property
    def step_seconds(self) -> float:
        """Return the step time of the fastest candidate, even if it may not win."""
        return self.best.step_seconds if self.best is not None else float("inf")

    @property
    def cutoff(self) -> float:
        """Return the pipeline time T above which further proposals need not be simulated."""
        return (
            self.step_seconds if len(self.proposals) >= self.context.request.top else float("inf")
        )

    @property
    def bar(self) -> float:
        """Return the step time of the fastest candidate that may win (``allowed``)."""
        return min((each.step_seconds for each in self.allowed), default=float("inf"))

    @property
    def allowed(self) -> list[Candidate]:
        """Return the candidates that may win."""
        return [each for each in self.known if self.is_allowed(each)]

    def is_allowed(self, candidate: Candidate) -> bool:
        """Return whether the request allows a candidate as a plan."""
        return self.context.request.allows_one_stage or not candidate.is_pipeline

    def add(self, candidate: Candidate) -> None:
        """Add a candidate to the fitting or the rejected candidates."""
        if not candidate.fits:
            self.rejected.append(candidate)
            return
        self.known.append(candidate)
        if self.best is None or _order(candidate) < _order(self.best):
            self.best = candidate

    def add_all(self, candidates: Iterable[Candidate]) -> None:
        """Add candidates one by one, so that an iterator may look at the pool in between."""
        for candidate in candidates:
            self.add(candidate)

    def simulate(self, proposal: PipelineProposal) -> Iterator[Candidate]:
        """Yield the candidates of a dynamic program's pipeline, unless it was simulated before."""
        if proposal.seconds < float("inf") and proposal not in self.proposals:
            self.proposals.append(proposal)
            yield from candidates(self.context, proposal, below=self.step_seconds)

    def best_proposals(self) -> list[PipelineProposal]:
        """Return the simulated proposals in ascending order of their time T."""
        return sorted(self.proposals, key=lambda proposal: proposal.seconds)

    def ranked(self) -> list[Candidate]:
        """Return the fitting candidates, the fastest first."""
        return sorted(self.known, key=_order)

    def ranked_allowed(self) -> list[Candidate]:
        """Return the candidates that may win, the fastest first."""
        return sorted(self.allowed, key=_order)

    def settle(self) -> None:
        """Simulate the whole step of the fastest allowed candidate; repeat until the fastest is not
        extrapolated."""
        while True:
            first = min(self.allowed, key=_order, default=None)
            if first is None or is_whole(first) or first.is_complete:
                return
            self.replace(first, complete_simulation(self.context, first))

    def replace(self, one: Candidate, other: Candidate) -> None:
        """Replace the candidate ``one`` by ``other``."""
        self.known = [other if each is one else each for each in self.known]
        self.best = min(self.known, key=_order)


def _order(candidate: Candidate) -> tuple[float, float, float]:
    """Return the sort key of candidates: step seconds, then peak bytes, then ``layouts_gap``."""
    seconds = float(f"{candidate.step_seconds:.10g}")
    return seconds, candidate.peak_bytes, round(candidate.layouts_gap, 9)
