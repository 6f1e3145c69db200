"""A candidate: one complete configuration of a training step, priced and simulated.

A candidate has one stage per pipeline rank, or several (chunks), or stages with a replica each
(Chimera), or micro-batches in slices of their sequence (TeraPipe). All are the same type, so that
one pool ranks them and one function turns the winner into a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..inter_op.inter_op import StageChoice
from ..intra_op.intra_op import StageAnswer
from ..pricing.slice_costs import SliceShares
from ..pricing.stage_cost import StageCost
from ..pricing.stage_model import StageModel
from ..pricing.whole_stage import BRIEF, together
from ..summary import RankSummary, schedule_text, summary_text


@dataclass(frozen=True)
class Candidate:
    """A simulated configuration.

    ``stages`` are in the order of the model; stages on the same devices are one pipeline rank's,
    ``num_chunks`` each. ``costs`` are what the stages cost under the schedule. ``rows`` are the
    samples of a micro-batch. ``slices`` are those of TeraPipe. ``base`` is the pipeline of one
    stage per rank whose layouts a candidate of another kind has. ``is_complete``: every
    micro-batch of its step was simulated although there are very many.
    """

    rows: int
    num_microbatches: int
    schedule: str
    stages: tuple[StageChoice, ...]
    answers: tuple[tuple[StageModel, StageAnswer], ...]
    costs: tuple[StageCost, ...]
    step_seconds: float
    bubble_fraction: float
    peak_bytes: float
    num_chunks: int = 1
    slices: SliceShares | None = None
    base: Candidate | None = None
    fits: bool = True
    is_complete: bool = False

    @property
    def is_pipeline(self) -> bool:
        """Whether there are several stages, one per rank, under a schedule without replicas or
        slices: what other kinds of candidates are made of."""
        return self.base is None and len(self.stages) > 1

    @property
    def layouts_gap(self) -> float:
        """How much lower the pipeline time T could be if every stage's layouts were optimal.

        Of a candidate with a ``base`` it is that of the base.
        """
        if self.base is not None:
            return self.base.layouts_gap
        figures = [cost.once_and_slowest(self.num_microbatches) for cost in self.costs]
        gaps = [answer.gap for _, answer in self.answers]
        return 1 - gap_adjusted_seconds(figures, gaps) / pipeline_seconds(figures)

    @property
    def spent_seconds(self) -> dict[str, float]:
        """Seconds of a step by what they go to, on the busiest stage, and the bubble."""
        busiest = max(self.costs, key=lambda cost: cost.forward_seconds + cost.backward_seconds)
        seconds = busiest.seconds
        count = self.num_microbatches * self.num_chunks
        communication = seconds.forward_communication + seconds.backward_communication
        states = seconds.forward_states + seconds.backward_states
        return {
            "compute": count * sum(busiest.compute_seconds),
            "communication": count * (communication + states),
            "gradient synchronization": seconds.gradient_sync * self.num_chunks,
            "optimizer": seconds.optimizer * self.num_chunks,
            "bubble": self.bubble_fraction * self.step_seconds,
        }

    @property
    def summary(self) -> str:
        """The configuration in one line."""
        ranks: dict[int, RankSummary] = {}
        for (model, answer), choice in zip(self.answers, self.stages, strict=True):
            mesh, zero = model.prices.mesh, answer.setting.zero
            before = ranks.get(choice.first_device, RankSummary(mesh, zero, 0))
            num_full, num_selective = map(sum, answer.setting.rung)
            ranks[choice.first_device] = RankSummary(
                mesh, zero, before.num_blocks + choice.stop - choice.start,
                before.num_full + num_full, before.num_selective + num_selective, answer.shares,
            )  # fmt: skip
        num_slices = len(self.slices.lengths) if self.slices is not None else 0
        schedule = schedule_text(self.schedule, self.num_chunks, num_slices)
        return summary_text(list(ranks.values()), schedule, self.num_microbatches, self.rows)


def pipeline_seconds(stages: Sequence[tuple[float, float]]) -> float:
    """T = Σ q + max m."""
    return sum(once for once, _ in stages) + max(slowest for _, slowest in stages)


def gap_adjusted_seconds(stages: Sequence[tuple[float, float]], gaps: Sequence[float]) -> float:
    """T if every stage took less by its gap.

    >>> gap_adjusted_seconds([(1.0, 4.0), (2.0, 8.0)], [0.0, 0.25])
    8.5
    """
    return pipeline_seconds(
        [(q * (1 - gap), m * (1 - gap)) for (q, m), gap in zip(stages, gaps, strict=True)]
    )


def rank_bytes(stages: Sequence[StageChoice], costs: Sequence[StageCost]) -> dict[int, float]:
    """By the first device of each pipeline rank the bytes on one of its devices, for all of its
    stages together."""
    ranks: dict[int, list[StageCost]] = {}
    for choice, cost in zip(stages, costs, strict=True):
        ranks.setdefault(choice.first_device, []).append(cost)
    return {
        rank: sum(together([cost.memory_bytes for cost in of_rank], once=BRIEF).values())
        for rank, of_rank in ranks.items()
    }
