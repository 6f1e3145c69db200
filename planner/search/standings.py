"""What a search has found so far: drafts, candidates, the fastest.

In: drafts and candidates as they are found. Out: the best step, what is worth looking for, and
in the end the candidates, the winner first.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..pricing.step import KnownSteps
from .candidates import candidates, completed, is_whole
from .job import Job
from .quests import Draft
from .report_plan import Candidate


@dataclass(frozen=True, slots=True)
class Explored:
    """What following some micro-batch sizes came to: drafts with what they take when simulated,
    the fastest first.

    ``steps`` are those that were simulated. ``is_open``: something may yet fit; ``excess_bytes``
    by how much the rest does not.
    """

    drafts: tuple[tuple[float, Draft], ...]
    steps: KnownSteps
    is_open: bool
    excess_bytes: list[float]


class Standings:
    """Drafts (each kept once, ``drawn`` by the candidates that were made of it), and candidates,
    refined or not."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.drafts: list[Draft] = []
        self.known: list[Candidate] = []
        self.drawn: dict[int, Draft] = {}
        self.best: list[Candidate] = []
        self._whole: set[int] = set()

    @property
    def step_seconds(self) -> float:
        """Of the fastest."""
        return self.best[0].step_seconds if self.best else float("inf")

    @property
    def cutoff(self) -> float:
        """What takes as long is not sought."""
        return self.step_seconds if len(self.drafts) >= self.job.request.top else float("inf")

    def keep(self, draft: Draft) -> None:
        """Takes in a draft and simulates it."""
        if draft.seconds == float("inf") or draft in self.drafts:
            return
        self.drafts.append(draft)
        for found in candidates(self.job, draft, below=self.step_seconds):
            self.drawn[id(found)] = draft
            self.offer(found)

    def offer(self, found: Candidate) -> None:
        """Takes in a candidate."""
        self.known.append(found)
        self.best = sorted([*self.best, found], key=_rank)[:1]

    def best_drafts(self) -> list[Draft]:
        """The drafts, that of the least T first."""
        return sorted(self.drafts, key=lambda draft: draft.seconds)

    def by_speed(self) -> list[Candidate]:
        """The candidates, the fastest first."""
        return sorted(self.known, key=lambda each: each.step_seconds)

    def lost(self, draft: Draft) -> set[str] | None:
        """The schedules under which a draft cannot be the best, whatever its stages' gaps hide.

        None if it is none of any.
        """
        bar = self.step_seconds * (1 - self.job.request.gap)
        least: dict[str, float] = {}
        for found in self.known:
            if self.drawn.get(id(found)) == draft:
                gap = max(answer.gap for _, answer in found.answers)
                own = found.step_seconds * (1 - gap)
                least[found.schedule] = min(own, least.get(found.schedule, own))
        lost = {name for name, own in least.items() if own >= bar}
        return None if len(lost) == len(least) else lost

    def settle(self) -> None:
        """Simulates the whole step of the best, of the next if that is then faster, and so on."""
        whole = None
        while whole is not self.best[0]:
            best = self.best[0]
            count = best.num_microbatches
            if id(best) in self._whole or is_whole(len(best.stages), count):
                return
            whole = completed(self.job, best)
            self._whole.add(id(whole))
            if id(best) in self.drawn:
                self.drawn[id(whole)] = self.drawn.pop(id(best))
            self.known = [whole if each is best else each for each in self.known]
            self.best = sorted(self.known, key=_rank)[:1]

    def ranked(self) -> list[Candidate]:
        """The winner, its whole step simulated, then the others."""
        self.settle()
        winner = self.best[0]
        return [winner, *(c for c in self.known if c is not winner)]


def _rank(found: Candidate) -> tuple[float, float, float]:
    """The fastest first; of equally fast ones that which holds least, then the better proven."""
    return float(f"{found.step_seconds:.10g}"), found.peak_bytes, round(found.layouts_gap, 9)
