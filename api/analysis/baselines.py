"""Prices of common configurations: DDP, FSDP, and Megatron-LM's 3-D parallelism.

In: the pricer of a model's configurations, and a plan of the model. Out: for each of the three
kinds the fastest configuration that fits, priced by the same cost model as the plan.

Each kind fixes some degrees; ``configurations`` enumerates the degrees left open. DDP and FSDP put
all devices on one data-parallel axis, with ZeRO 0 and 3. The grid of 3-D parallelism (Narayanan et
al. 2021, arXiv:2104.04473) has tensor parallelism within a host with sequence-parallel layouts,
pipelines of equal stages under 1F1B, ZeRO 1 over the data-parallel axis, and the least
recomputation that fits. Its fastest members are also priced with larger micro-batches and
interleaved stages.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autoparallel.analysis.configurations import (
    PricedConfigurations,
    configuration_summary,
    configurations,
)
from autoparallel.cost_model.ops.memory import policy, state_bytes
from autoparallel.planner.configured.configuration import Configuration, find_layers
from autoparallel.planner.configured.configuration_pricer import ConfigurationPricer
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Forced

NAMED = {
    "ddp": Forced(zero=0),
    "fsdp": Forced(zero=3),
    "zero1": Forced(zero=1),
    "zero2": Forced(zero=2),
    "zero3": Forced(zero=3),
    "3d": Forced(zero=1),
}
"""Degrees of each named baseline. ``3d`` also needs ``tp`` or ``pp`` from the user."""

NUM_REFINED = 3
"""Number of fastest 3-D configurations that are also priced with other micro-batch sizes."""

LIMIT_SECONDS = 60.0
"""CPU seconds for pricing all configurations of DDP, FSDP or 3-D; the first is always priced."""

GRID_SHARE = 0.7
"""Part of ``LIMIT_SECONDS`` for all 3-D degrees; the rest is for variants of the fastest."""

STATES_SHARE = 0.8
"""Safety factor for memory. Degrees are skipped if a device's even part of the model states
(parameters, gradients, optimizer states), times this factor, exceeds its usable memory."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Fastest configuration of DDP, FSDP or 3-D parallelism (``name``) that fits memory; if none
    fits, the configuration that exceeds the memory least.

    ``configuration`` is its summary, "" if none could be priced; ``reason`` then says why.
    ``num_priced`` counts priced configurations; if ``is_cut_short`` the time limit skipped some.
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
    """Price DDP, FSDP and 3-D parallelism on the plan's cluster, for its batch and precision."""

    def priced(until: float) -> PricedConfigurations:
        return PricedConfigurations(pricer, plan.cluster, until)

    found = []
    for name, title in (("ddp", "DDP"), ("fsdp", "FSDP")):
        data_parallel = priced(time.process_time() + limit_seconds)
        list(data_parallel.price(configurations(plan, NAMED[name])))
        found.append(_best(title, data_parallel))
    grid = priced(time.process_time() + GRID_SHARE * limit_seconds)
    _price_grid(grid, plan)
    grid.until += (1 - GRID_SHARE) * limit_seconds
    for best in grid.fitting[:NUM_REFINED]:
        list(grid.price(_refined(best.configuration, plan, len(find_layers(pricer.blocks)))))
    none = "no degrees leave room for the states of the parameters"
    return (*found, _best("3-D (Megatron)", grid, none))


def _best(name: str, priced: PricedConfigurations, none: str = "") -> Baseline:
    """Return the best of ``priced`` as the baseline ``name``. If nothing was priced, its reason is
    the last error or, without an error, ``none``."""
    if not priced.steps:
        return Baseline(name, reason=none if priced.error is None else priced.error.what)
    best, num_layers = priced.best, len(find_layers(priced.pricer.blocks))
    return Baseline(
        name,
        configuration_summary(best.configuration, num_layers),
        best.step_seconds,
        best.peak_bytes,
        best.fits,
        len(priced.steps),
        priced.is_cut_short,
        "" if best.fits else "none fits; this one exceeds the memory least",
    )


def fastest(found: Iterable[Baseline]) -> Baseline | None:
    """Return the fastest baseline that fits memory, None if none fits."""
    return min((each for each in found if each.fits), key=lambda b: b.step_seconds, default=None)


def sizes(most: int) -> list[int]:
    """Return the powers of two up to ``most``.

    >>> sizes(8), sizes(5)
    ([1, 2, 4, 8], [1, 2, 4])
    """
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _price_grid(priced: PricedConfigurations, plan: Plan) -> None:
    """Price all 3-D degrees, each with the least recomputation under which its memory fits."""
    for degrees in _grid(plan, len(find_layers(priced.pricer.blocks))):
        for step in priced.price(configurations(plan, degrees)):
            if step.fits:
                break


def _grid(plan: Plan, num_layers: int) -> Iterator[Forced]:
    """Yield all dp, tp and pp degrees; a micro-batch has a sample per dp rank if possible."""
    cluster, number = plan.cluster, plan.cluster.num_devices
    host = min(each.num_devices for each in cluster.hosts)
    for tp in reversed(sizes(host)):
        for pp in sizes(min(num_layers, number // tp)):
            dp = number // (tp * pp)
            if number % (tp * pp) == 0 and tp * pp > 1 and _may_fit(plan, tp * pp, dp):
                yield Forced(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    zero=1,
                    num_microbatches=max(1, plan.model.global_batch // dp),
                    sequence_parallel=True if tp > 1 else None,
                )


def _may_fit(plan: Plan, parts: int, dp: int) -> bool:
    """Return whether 1/``parts`` of the model's weights and optimizer states, under ZeRO 1 over
    ``dp`` ranks, fit a device."""
    model = plan.model
    rules = policy(model.precision, model.optimizer)
    own = state_bytes(model.num_parameters // parts, rules, 1, dp).total
    return own * STATES_SHARE <= plan.cluster.usable_memory_bytes


def _refined(own: Configuration, plan: Plan, num_layers: int) -> Iterator[Configuration]:
    """Yield variants of ``own`` with larger micro-batches and with interleaved stages."""
    batch = plan.model.global_batch
    for factor in (1, 2, 4):
        rows = own.microbatch_size * factor
        if rows > batch or batch % rows:
            continue
        larger = replace(own, microbatch_size=rows, num_microbatches=batch // rows)
        if factor > 1:
            yield larger
        per_rank = num_layers // own.pp
        if own.pp > 1 and larger.num_microbatches % own.pp == 0:
            for chunks in dict.fromkeys((2, per_rank // 2, per_rank)):
                if chunks > 1 and num_layers >= own.pp * chunks:
                    yield replace(larger, schedule="interleaved", num_chunks=chunks)
