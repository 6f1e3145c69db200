"""Recomputation with which all stages of a pipeline rank fit in memory together.

In: the stages of a rank, each with its layouts, ZeRO stage and micro-batches in flight; the bytes
of a device. Out: for each stage the number of recomputed blocks, such that all stages fit and the
additional time is least. Every stage has a list of policies (``stage.recompute_policy``) with
their seconds and bytes. With a price λ per byte every stage chooses independently; λ is raised
until all fit (Lagrangian relaxation), then each stage in turn undoes recomputation as far as memory
allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..plan import Recompute
from ..schedules.held import HalfPairs, held_bytes, most_held
from ..stage.recompute_policy import (
    NO_RECOMPUTE,
    USUAL_MODES,
    RecomputePolicy,
    recomputing,
    uniform_policy,
)
from ..stage.stage_cost import PolicyCosts, StageCost, StageTable
from ..stage.stage_problem import StageOptions
from ..stage.structure import Run
from ..stage.terms import Floats

PRICES = (0.0, *np.geomspace(1e-3, 1e6, 64).tolist())
"""Prices per byte to try, in multiples of the seconds of the rank's stages / its memory bytes."""


@dataclass(frozen=True)
class RankStage:
    """Stage of a pipeline rank: its costs under given layouts, its blocks, its ZeRO stage.

    ``held`` are its micro-batches in flight (``schedules.held``); ``splits``: the schedule splits
    backwards.
    """

    table: StageTable
    run: Run
    zero: int
    held: HalfPairs
    num_microbatches: int
    splits: bool

    def setting(self, policy: RecomputePolicy) -> StageOptions:
        """Return the options of the stage under a recomputation policy."""
        return StageOptions(
            self.num_microbatches,
            self.zero,
            policy,
            most_held(self.held),
            halves=self.held if self.splits else (),
        )

    def cost(self, policy: RecomputePolicy) -> StageCost:
        """Return the cost of the stage under a recomputation policy."""
        return self.table.price(self.run, self.setting(policy))

    def policies(self, modes: tuple[Recompute, ...] = USUAL_MODES) -> PolicyCosts:
        """Return the costs of every recomputation policy that uses ``modes``."""
        return self.table.policy_costs(self.run, splits=self.splits, modes=modes)

    def bytes_by_policy(self, modes: tuple[Recompute, ...]) -> tuple[Floats, Floats]:
        """Return, by policy of ``modes``, bytes held while the rank's other stages run, and
        transient bytes."""
        plain = self.cost(NO_RECOMPUTE)
        late_bytes = self.table.weight_grads(self.run)[1] if self.splits else 0.0
        states = sum(
            size
            for name, size in plain.memory_bytes.items()
            if name not in ("activations", "transient", "reserve")
        )
        costs = self.policies(modes)
        kept = plain.activation_bytes + costs.kept_bytes
        lasting = [states + held_bytes(self.held, own, late_bytes) for own in kept.tolist()]
        return np.array(lasting), costs.transient_bytes[self.zero]


def recomputed_to_fit(
    stages: Sequence[RankStage], limit_bytes: float, modes: Sequence[Recompute]
) -> tuple[RecomputePolicy, ...]:
    """Return a recomputation policy among ``modes`` for each stage of a rank, so that together they
    fit; if that is impossible, with the least bytes.

    If ``modes`` has a single mode, it applies to every block.
    """
    if len(modes) == 1:
        (mode,) = modes
        return tuple(uniform_policy(mode, stage.run.class_counts[0]) for stage in stages)
    options = [_Options.of(stage, modes) for stage in stages]
    reserve = max(stage.cost(NO_RECOMPUTE).memory_bytes["reserve"] for stage in stages)

    def total(chosen: Sequence[int]) -> float:
        own = list(zip(options, chosen, strict=True))
        transient = max(option.transient[at] for option, at in own)
        return float(reserve + transient + sum(option.lasting[at] for option, at in own))

    work = sum(stage.cost(NO_RECOMPUTE).objective(stage.num_microbatches) for stage in stages)
    unit = work / limit_bytes
    chosen: list[int] = []
    for price in PRICES:
        chosen = [option.cheapest(price * unit) for option in options]
        if total(chosen) <= limit_bytes:
            break
    else:
        chosen = [int((option.lasting + option.transient).argmin()) for option in options]
    for at, option in enumerate(options):
        for other in np.argsort(option.seconds, kind="stable").tolist():
            if option.seconds[other] >= option.seconds[chosen[at]]:
                break
            if total([*chosen[:at], other, *chosen[at + 1 :]]) <= limit_bytes:
                chosen[at] = other
                break
    return tuple(option.policies[at] for option, at in zip(options, chosen, strict=True))


@dataclass(frozen=True)
class _Options:
    """Recomputation policies of a stage: added seconds, lasting bytes, transient bytes."""

    policies: Sequence[RecomputePolicy]
    seconds: Floats
    lasting: Floats
    transient: Floats

    @staticmethod
    def of(stage: RankStage, modes: Sequence[Recompute]) -> _Options:
        used = recomputing(None, modes)
        costs = stage.policies(used)
        allowed = np.flatnonzero(costs.policies.within(modes))
        lasting, transient = stage.bytes_by_policy(used)
        return _Options(
            [costs.policies[number] for number in allowed.tolist()],
            costs.seconds[allowed],
            lasting[allowed],
            transient[allowed],
        )

    def cheapest(self, price: float) -> int:
        """Return the index of the policy with the least seconds + ``price`` · bytes."""
        return int((self.seconds + price * (self.lasting + self.transient)).argmin())
