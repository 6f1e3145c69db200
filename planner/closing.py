"""Which ZeRO stages and rungs can still hold a better plan than the one found.

In: a run, its kinds' tables, the memory limit. Out: for every ZeRO stage and rung of the
recompute ladder a lower bound of the objective of what fits in memory,

    max over λ of  Σ_kinds Σ_modes n·min T_kind(mode, λ) − λ·(limit − fixed bytes)

where T are the tables of ``kind_tables`` with a price λ per byte, n the blocks that the rung
runs in that mode, and conversions between kinds count nothing. The integer program need only
be solved where the bound is below the best found, the lowest first (best-first branch and
bound over the few discrete choices outside of the program).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from .elimination import Floats
from .families import Family
from .kind_tables import Rates
from .ladder import Rungs, forced, rungs
from .plan import Recompute
from .structure import Run


def priced(
    num_microbatches: int,
    in_flight: int,
    mode: Recompute,
    zeros: Sequence[int],
    prices: Sequence[float],
) -> Rates:
    """Every ZeRO stage at every price of a byte, stages outermost."""
    states = tuple(float(price) for _ in zeros for price in prices)
    return Rates(
        num_microbatches,
        tuple(zero for zero in zeros for _ in prices),
        mode,
        states,
        tuple(price * in_flight for price in states),
    )


def allowed_rungs(run: Run, recompute: Recompute | None, modes: Sequence[Recompute]) -> Rungs:
    """The rungs of a run in allowed modes, or the only one that a forced recomputation leaves."""
    found = rungs(*run.class_counts)
    if recompute is None:
        own = found.within(modes)
        return Rungs(found.full[own], found.selective[own])
    only = forced(recompute, run.class_counts[0])
    return Rungs(np.array([only.full]), np.array([only.selective]))


def bounds(
    family: Family,
    run: Run,
    ways: Mapping[Recompute, Rates],
    on: Rungs,
    *,
    num_zeros: int,
    free_bytes: float,
) -> Floats:
    """The lower bound ``[zero, rung]``; ``free_bytes`` are the limit's without what is fixed."""
    rates = next(iter(ways.values()))
    prices = np.array(rates.state_prices).reshape(num_zeros, -1)
    total = np.zeros((*prices.shape, len(on.full)))
    _, kinds = run.class_counts
    for kind, tables in family.kinds.items():
        own = np.array([each == kind for each in kinds])
        full, some = on.full @ own, on.selective @ own
        counts: dict[Recompute, Floats] = {
            "full": full, "selective": some, "none": run.counts[kind] - full - some
        }  # fmt: skip
        for mode, way in ways.items():
            table = tables.solve(way).table
            least = table.reshape(table.shape[1], -1).min(axis=1)
            total += (
                np.broadcast_to(least, prices.size).reshape(prices.shape)[..., None] * counts[mode]
            )
    total += family.sync_seconds((run,), rates)[0].reshape(prices.shape)[..., None]
    found: Floats = (total - (prices * free_bytes)[..., None]).max(axis=1)
    return found


def lowest_first(values: Floats) -> Iterator[tuple[float, int, int]]:
    """(bound, zero's number, rung's number), ascending."""
    for flat in np.argsort(values, axis=None, kind="stable").tolist():
        zero, rung = divmod(flat, values.shape[1])
        yield float(values[zero, rung]), zero, rung
