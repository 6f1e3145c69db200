"""The candidates that a search has found, and which of them is chosen.

In: candidates as proposers make them. Out: the step to beat, the pipelines that are worth
refining, and at the end the winner with all others. A candidate that does not fit in memory is
kept apart; one that the request does not allow as a plan (a pipeline of one stage per rank where
several are forced) is kept, as others are made of it, but never wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .branch_and_bound import PipelineProposal
from .candidates import Candidate, candidates, completed, is_whole
from .context import SearchContext


class CandidatePool:
    """Candidates: ``known`` fit in memory, ``rejected`` do not. ``proposals``: the pipelines of the
    dynamic program that were simulated."""

    def __init__(self, context: SearchContext) -> None:
        self.context = context
        self.proposals: list[PipelineProposal] = []
        self.known: list[Candidate] = []
        self.rejected: list[Candidate] = []
        self.best: Candidate | None = None
        self.is_open = False  # whether some stages may yet fit

    @property
    def step_seconds(self) -> float:
        """Of the fastest candidate, whether it may win or not."""
        return self.best.step_seconds if self.best is not None else float("inf")

    @property
    def cutoff(self) -> float:
        """Pipelines that take as long are not sought."""
        return (
            self.step_seconds if len(self.proposals) >= self.context.request.top else float("inf")
        )

    @property
    def bar(self) -> float:
        """The step of the fastest candidate that may win."""
        return min((each.step_seconds for each in self.allowed), default=float("inf"))

    @property
    def allowed(self) -> list[Candidate]:
        """The candidates that may win."""
        return [each for each in self.known if self.is_allowed(each)]

    def is_allowed(self, candidate: Candidate) -> bool:
        """Return whether the request allows a candidate as a plan."""
        return self.context.request.allows_one_stage or not candidate.is_pipeline

    def add(self, candidate: Candidate) -> None:
        """Take in a candidate."""
        if not candidate.fits:
            self.rejected.append(candidate)
            return
        self.known.append(candidate)
        if self.best is None or _order(candidate) < _order(self.best):
            self.best = candidate

    def add_all(self, candidates: Iterable[Candidate]) -> None:
        """Take in candidates as they are made: what is known says which are worth making."""
        for candidate in candidates:
            self.add(candidate)

    def simulate(self, proposal: PipelineProposal) -> Iterator[Candidate]:
        """The candidates of a pipeline of the dynamic program that was not simulated before."""
        if proposal.seconds < float("inf") and proposal not in self.proposals:
            self.proposals.append(proposal)
            yield from candidates(self.context, proposal, below=self.step_seconds)

    def best_proposals(self) -> list[PipelineProposal]:
        """The proposals, that of the least T first."""
        return sorted(self.proposals, key=lambda proposal: proposal.seconds)

    def ranked(self) -> list[Candidate]:
        """The candidates, the fastest first."""
        return sorted(self.known, key=_order)

    def hopeless_schedules(self, proposal: PipelineProposal) -> set[str] | None:
        """The schedules under which a proposal cannot be the fastest, even if its layouts' gaps
        were closed; None if it cannot be under any."""
        bar = self.step_seconds * (1 - self.context.request.gap)
        least: dict[str, float] = {}
        for each in self.known:
            if each.base is None and (each.rows, each.stages) == proposal.key:
                gap = max(answer.gap for _, answer in each.answers)
                seconds = each.step_seconds * (1 - gap)
                least[each.schedule] = min(seconds, least.get(each.schedule, seconds))
        hopeless = {name for name, seconds in least.items() if seconds >= bar}
        return None if len(hopeless) == len(least) else hopeless

    def settle(self) -> None:
        """Simulate the whole step of the fastest candidate that may win, of the next if that is
        then faster, and so on."""
        while True:
            first = min(self.allowed, key=_order, default=None)
            if first is None or is_whole(first) or first.is_complete:
                return
            self.replace(first, completed(self.context, first))

    def replace(self, one: Candidate, other: Candidate) -> None:
        """Put a candidate in the place of another."""
        self.known = [other if each is one else each for each in self.known]
        self.best = min(self.known, key=_order)


def _order(candidate: Candidate) -> tuple[float, float, float]:
    """The fastest first; of equally fast ones that which holds least, then the better proven."""
    seconds = float(f"{candidate.step_seconds:.10g}")
    return seconds, candidate.peak_bytes, round(candidate.layouts_gap, 9)
