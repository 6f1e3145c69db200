"""Lower bounds by ZeRO stage and recomputation policy, which select the integer programs to solve.

In: a run of blocks, its kinds' tables, the memory limit. Out: for every ZeRO stage and
recomputation policy a lower bound of the objective within the memory limit,

    max over λ of  Σ_kinds Σ_modes n·min T_kind(mode, λ) − λ·(limit − fixed bytes)

where T are the tables of ``kind_tables`` with a price λ per byte and n is the number of blocks that
the policy runs in that mode; conversions between kinds are taken as free. An integer program must
be solved only if its bound is below the incumbent; the lowest bound comes first (best-first branch
and bound over the few discrete choices outside the program).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..kernels.recompute import BLOCK_MODES
from ..plan import Recompute
from ..stage.recompute_policy import Policies, policies, recomputing
from ..stage.structure import Run
from .elimination import Floats
from .families import Family
from .kind_tables import Rates

MOST_PROGRAMS = 2
"""Maximum number of integer programs solved to narrow the gap of a stage."""

WINNERS_PROGRAMS = 256
"""Maximum number of integer programs per stage of the chosen plan, more than usually needed."""

PROGRAM_SECONDS = 1.0
"""Time limit of an integer program; afterwards the bound proven so far is used."""


def priced_rates(
    num_microbatches: int,
    in_flight: int,
    mode: Recompute,
    zeros: Sequence[int],
    prices: Sequence[float],
) -> Rates:
    """Return the weights of seconds and bytes for a batch of problems: all pairs of a ZeRO stage
    and a price in seconds per byte. Kept activations count ``in_flight`` times."""
    states = tuple(float(price) for _ in zeros for price in prices)
    return Rates(
        num_microbatches,
        tuple(zero for zero in zeros for _ in prices),
        mode,
        states,
        tuple(price * in_flight for price in states),
    )


def round_price(price: float) -> float:
    """Round a price per byte to the nearest half power of ten, so that stages with similar prices
    share cost tables.

    >>> [round(round_price(price), 6) for price in (0.9, 0.4, 0.001)]
    [1.0, 0.316228, 0.001]
    """
    return float(10 ** (round(2 * np.log10(price)) / 2))


def allowed_policies(run: Run, forced: Recompute | None, modes: Sequence[Recompute]) -> Policies:
    """Return a stage's recomputation policies (numbers of recomputed blocks) that use only
    ``forced`` or, if it is None, only ``modes``."""
    listed = policies(*run.class_counts, recomputing(forced, modes))
    return Policies(listed.blocks[:, listed.allowed(forced, modes, run.class_counts[0])])


def bounds(
    family: Family,
    run: Run,
    ways: Mapping[Recompute, Rates],
    listed: Policies,
    *,
    num_zeros: int,
    free_bytes: float,
) -> Floats:
    """Return Lagrangian lower bounds of a stage's seconds per micro-batch, ``[zero, policy]``, for
    each recomputation policy of ``listed``. ``ways``: by recomputation mode, weights of seconds and
    bytes; ``free_bytes``: memory limit less fixed bytes."""
    rates = next(iter(ways.values()))
    prices = np.array(rates.state_prices).reshape(num_zeros, -1)
    total = np.zeros((*prices.shape, len(listed)))
    _, kinds = run.class_counts
    for kind, tables in family.kinds.items():
        own = np.array([each == kind for each in kinds])
        again = listed.blocks @ own
        every = zip(BLOCK_MODES, [run.counts[kind] - again.sum(axis=0), *again], strict=True)
        counts: dict[Recompute, Floats] = dict(every)
        for mode, way in ways.items():
            table = tables.solve(way).table
            least = table.reshape(table.shape[1], -1).min(axis=1)
            total += (
                np.broadcast_to(least, prices.size).reshape(prices.shape)[..., None] * counts[mode]
            )
    total += family.sync_seconds((run,), rates)[0].reshape(prices.shape)[..., None]
    found: Floats = (total - (prices * free_bytes)[..., None]).max(axis=1)
    return found


def bound_by_price(
    family: Family,
    run: Run,
    ways: Callable[[Sequence[int], Sequence[float]], Sequence[Rates]],
    zeros: Sequence[int],
    scale: tuple[float, float],
) -> tuple[float, int, list[float]]:
    """Bound the seconds of a stage within the memory limit by trying prices λ of a byte; return the
    bound, its ZeRO stage, and the tried prices around the best λ.

    ``ways`` makes the weights of the problems from ZeRO stages and prices. ``scale``: free bytes,
    and the price at which a device's bytes cost as much as the stage. Raises ``TooWideError``.
    """
    free, unit = scale
    grid = np.geomspace(1e-3, 1e2, 12) * unit
    least = dict.fromkeys(zeros, 0.0)
    for size in (6, 6, 0):
        found = family.bound(run, ways(zeros, grid.tolist()))
        values = found.reshape(len(zeros), -1) - free * grid
        for zero, own in zip(zeros, values.max(axis=1).tolist(), strict=True):
            least[zero] = max(least[zero], own)
        zero = min(zeros, key=least.__getitem__)
        best = int(values[zeros.index(zero)].argmax())
        near = grid[max(best - 1, 0) : best + 2]
        if size:
            zeros = tuple(each for each in zeros if least[each] <= least[zero] * 1.05)
            grid = np.geomspace(near[0], near[-1], size)
    return min(least.values()), zero, near.tolist()


def lowest_first(values: Floats) -> Iterator[tuple[float, int, int]]:
    """Yield (lower bound, index of the ZeRO stage, index of the recomputation policy) of
    ``values[zero, policy]``, ascending."""
    for flat in np.argsort(values, axis=None, kind="stable").tolist():
        zero, policy = divmod(flat, values.shape[1])
        yield float(values[zero, policy]), zero, policy
