"""What hand-written configurations take: DDP, FSDP, and 3-D parallelism as Megatron-LM has it.

In: a captured graph, a cluster, a plan for it. Out: for each of these three the fastest
configuration that fits, priced by the same cost model as the plan (``planner.configured``).

DDP and FSDP have all devices on one data-parallel axis, with ZeRO 0 and 3; tried are micro-batches
of 1, 2, 4, … samples per device, with no and with full recomputation. Of 3-D parallelism
(Narayanan et al. 2021, arXiv:2104.04473) tried are tensor parallelism within a host with its
sequence-parallel layouts, pipelines of equal stages under 1F1B, ZeRO 1 over the data-parallel axis,
and as little recomputation as fits; the fastest of these also with larger micro-batches and with
interleaved stages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from autoparallel.analysis.configurations import configuration_summary
from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.ops.memory import policy, state_bytes
from autoparallel.planner.configured.configuration import (
    Configuration,
    ConfigurationPricer,
    PricedStep,
)
from autoparallel.planner.configured.layers import find_layers
from autoparallel.planner.errors import AutoparallelError, UsageError
from autoparallel.planner.plan import Plan, Recompute

NUM_REFINED = 3
"""So many of the fastest 3-D configurations are also tried with other micro-batches and chunks."""

LIMIT_SECONDS = 60.0
"""Of the processor, to price the configurations of one kind; the first is always priced."""

GRID_SHARE = 0.7
"""Of this time, what the degrees of 3-D parallelism may take; the rest is for refining the best."""

STATES_SHARE = 0.8
"""Degrees under which a device's even part of parameters, gradients and optimizer states takes more
memory than it has, divided by this, are not priced: they cannot fit."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The fastest configuration of one kind that fits, or the one that exceeds memory least.

    ``configuration`` is "" where none can be priced, which ``reason`` explains. ``num_priced``
    were priced; ``is_cut_short`` says that the time limit left others out.
    """

    name: str
    configuration: str = ""
    step_seconds: float = 0.0
    memory_bytes: float = 0.0
    fits: bool = False
    num_priced: int = 0
    is_cut_short: bool = False
    reason: str = ""


def baselines(
    pricer: ConfigurationPricer, plan: Plan, limit_seconds: float = LIMIT_SECONDS
) -> tuple[Baseline, ...]:
    """DDP, FSDP and 3-D parallelism on the plan's cluster, for its batch and precision."""
    kinds: dict[str, Callable[[_Pricing], None]] = {
        "DDP": partial(_Pricing.data_parallel, zero=0),
        "FSDP": partial(_Pricing.data_parallel, zero=3),
        "3-D (Megatron)": _Pricing.three_dimensional,
    }
    found = []
    for name, price_all in kinds.items():
        pricing = _Pricing(pricer, plan, time.process_time() + limit_seconds)
        price_all(pricing)
        found.append(pricing.answer(name))
    return tuple(found)


def fastest(found: Iterable[Baseline]) -> Baseline | None:
    """The fastest of those that fit."""
    return min((each for each in found if each.fits), key=lambda b: b.step_seconds, default=None)


def sizes(most: int) -> list[int]:
    """
    >>> sizes(8), sizes(5)
    ([1, 2, 4, 8], [1, 2, 4])
    """
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


class _Pricing:
    """Prices configurations of one kind until a time, and keeps the best of them."""

    def __init__(self, pricer: ConfigurationPricer, plan: Plan, until: float) -> None:
        self._pricer, self._plan, self._until = pricer, plan, until
        self._fitting: list[PricedStep] = []
        self._others: list[PricedStep] = []
        self._is_cut_short = False
        self._reason = ""
        self._layers = len(find_layers(pricer.blocks))

    @property
    def _cluster(self) -> Cluster:
        return self._plan.cluster

    def answer(self, name: str) -> Baseline:
        priced = len(self._fitting) + len(self._others)
        if not priced:
            return Baseline(
                name, reason=self._reason or "no configuration of this kind is possible"
            )
        best = (
            min(self._fitting, key=lambda step: step.step_seconds)
            if self._fitting
            else min(self._others, key=lambda step: step.peak_bytes)
        )
        return Baseline(
            name,
            configuration_summary(best.configuration, self._layers),
            best.step_seconds,
            best.peak_bytes,
            best.fits,
            priced,
            self._is_cut_short,
            "" if best.fits else "none fits; this one exceeds the memory least",
        )

    def data_parallel(self, *, zero: int) -> None:
        """All devices on one axis."""
        number = self._cluster.num_devices
        modes: tuple[Recompute, ...] = ("none", "full")
        for each in sizes(self._plan.model.global_batch):
            for mode in modes:
                self._price(self._configuration(number, 1, 1, zero, each, mode))

    def three_dimensional(self) -> None:
        """Tensor parallelism in a host, pipelines, and the rest of the devices on "dp"."""
        self._reason = "no degrees leave room for the states of the parameters"
        until, self._until = self._until, self._until - (1 - GRID_SHARE) * self._left()
        for tp, pp in self._degrees():
            dp = self._cluster.num_devices // (tp * pp)
            modes: tuple[Recompute, ...] = ("none", "selective", "full")
            for mode in modes:
                step = self._price(self._configuration(dp, tp, pp, 1, 1, mode))
                if step is None or step.fits:
                    break
        self._until = until
        for best in sorted(self._fitting, key=lambda step: step.step_seconds)[:NUM_REFINED]:
            for other in self._refined(best.configuration):
                self._price(other)

    def _degrees(self) -> Iterator[tuple[int, int]]:
        host = min(each.num_devices for each in self._cluster.hosts)
        number = self._cluster.num_devices
        for tp in reversed(sizes(host)):
            for pp in sizes(min(self._layers, number // tp)):
                if number % (tp * pp) == 0 and tp * pp > 1 and self._may_fit(tp, pp):
                    yield tp, pp

    def _left(self) -> float:
        return max(0.0, self._until - time.process_time())

    def _may_fit(self, tp: int, pp: int) -> bool:
        """Tell whether the states of an even part of the parameters fit a device, under ZeRO 1."""
        model, dp = self._plan.model, self._cluster.num_devices // (tp * pp)
        rules = policy(model.precision, model.optimizer)
        own = state_bytes(model.num_parameters // (tp * pp), rules, 1, dp).total
        return own * STATES_SHARE <= self._cluster.usable_memory_bytes

    def _refined(self, own: Configuration) -> Iterator[Configuration]:
        batch = self._plan.model.global_batch
        for factor in (1, 2, 4):
            rows = own.microbatch_size * factor
            if rows > batch or batch % rows:
                continue
            larger = replace(own, microbatch_size=rows, num_microbatches=batch // rows)
            if factor > 1:
                yield larger
            per_rank = self._layers // own.pp
            if own.pp > 1 and larger.num_microbatches % own.pp == 0:
                for chunks in dict.fromkeys((2, per_rank // 2, per_rank)):
                    if chunks > 1 and self._layers >= own.pp * chunks:
                        yield replace(larger, schedule="interleaved", num_chunks=chunks)

    def _configuration(
        self, dp: int, tp: int, pp: int, zero: int, samples: int, mode: Recompute
    ) -> Configuration | None:
        """Return the configuration of micro-batches with ``samples`` per data-parallel rank.

        None where the batch cannot be divided so."""
        model, rows = self._plan.model, dp * samples
        if rows > model.global_batch or model.global_batch % rows:
            self._reason = (
                f"a batch of {model.global_batch:,} samples cannot be divided over dp={dp:,}"
            )
            return None
        return Configuration.like(
            self._plan,
            dp=dp,
            tp=tp,
            pp=pp,
            zero=zero if dp > 1 else 0,
            recompute=mode,
            microbatch_size=rows,
            num_microbatches=model.global_batch // rows,
            sequence_parallel=True if tp > 1 else None,
        )

    def _price(self, configuration: Configuration | None) -> PricedStep | None:
        if configuration is None:
            return None
        if (self._fitting or self._others) and time.process_time() > self._until:
            self._is_cut_short = True
            return None
        try:
            step = self._pricer.price(self._cluster, configuration)
        except UsageError as error:
            self._reason = error.what
            return None
        except AutoparallelError as error:
            self._reason = f"{configuration_summary(configuration, self._layers)}: {error.what}"
            return None
        (self._fitting if step.fits else self._others).append(step)
        return step
