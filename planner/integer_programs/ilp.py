"""Integer program of a stage: one choice per decision, pairwise costs, a memory limit.

In: decisions with a number of choices each and a cost per choice; couplings (a value that one
decision produces in a layout and other decisions consume in a layout, with the cost of every
conversion); and optionally memory. Out: the cheapest choice of each decision, with the bound.

    min  Σ_d c_d·x_d + Σ_g Σ_sw C_g[s,w]·y_g[s,w]
    s.t. Σ_i x_d[i] = 1,
         Σ_w e_gk[s,w] = Σ_{i lays out s} x[i],  Σ_s e_gk[s,w] = Σ_{i wants w} x[i],
         y_g[s,w] ≥ e_gk[s,w] for every consumer k,  memory(x) ≤ limit,  x binary, e, y ≥ 0

A conversion that several consumers share is paid once (y); with one consumer y is e. Equal rows and
columns of C are classes (``stage.terms.merge_classes``), so there are few e; the bound is not
weaker: this is the local marginal polytope of a pairwise model (Wainwright and Jordan 2008, section
4), Alpa's linearization (Zheng et al. 2022, section 4.2) with fewer variables.

``build`` makes arrays; a ``Solver`` (HiGHS, or another by PuLP) solves them, the LP first and the
integer program only if the LP is fractional; ``invert`` reads the choices back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from ..errors import MachineError, TimeLimitError
from .program import HIGHS, Floats, Ints, Program, Raw, SolveOptions, Solver, Status


@dataclass(frozen=True, slots=True)
class Side:
    """Decision that lays out a value, and the class (layout) of the value for each choice."""

    decision: int
    classes: Ints


@dataclass(frozen=True, slots=True)
class Coupling:
    """Value made by ``source`` and read by ``consumers`` at ``cost[made class, wanted class]``."""

    source: Side
    consumers: tuple[Side, ...]
    cost: Floats


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """Bytes that count once for all decisions that hold them: ``num_bytes[class]``; class −1 holds
    none."""

    holders: tuple[Side, ...]
    num_bytes: Floats


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of an assignment: bytes per choice that add up, shared bytes, and peaks.

    Each of ``peaks`` adds the largest of its alternatives; an alternative is a sum of bytes per
    choice and of shared bytes.
    """

    limit: float
    constant: float
    linear: tuple[Floats, ...]
    shared: tuple[SharedBytes, ...] = ()
    peaks: tuple[tuple[Alternative, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the sums of which a peak is the maximum: bytes by decision, plus shared bytes."""

    linear: tuple[tuple[int, Floats], ...]
    shared: tuple[SharedBytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """Data of an integer program. ``memory_weight`` is a price in units of cost per byte.

    ``constant`` is a cost that is independent of the choices.
    """

    costs: tuple[Floats, ...]
    couplings: tuple[Coupling, ...] = ()
    memory: Memory | None = None
    memory_weight: float = 0.0
    constant: float = 0.0

    @property
    def num_binaries(self) -> int:
        return sum(len(cost) for cost in self.costs if len(cost) > 1)


@dataclass(frozen=True, slots=True)
class Answer:
    """Solution of a problem: choices, cost, proven bound, and the solver's status.

    ``excess_bytes`` is the least excess of memory over its limit (0 if it fits).
    """

    status: Status
    choices: tuple[int, ...]
    objective: float
    bound: float
    lp_integral: bool
    num_variables: int
    excess_bytes: float = 0.0

    @property
    def gap(self) -> float:
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-30)


def build(problem: Problem, *, can_exceed: bool = True) -> Program:
    """Build the program of a problem; its first columns are the choices, in order.

    ``can_exceed``: memory may exceed its limit, at a price above any saving of time.
    """
    program = Program()
    choices = [
        program.columns(cost, "choice", (number,)) for number, cost in enumerate(problem.costs)
    ]
    program.num_binaries = program.num_columns
    for columns in choices:
        program.row(columns, np.ones(len(columns)), 1.0, 1.0)
    for coupling in problem.couplings:
        _add_coupling(program, choices, coupling)
    if problem.memory is not None:
        _add_memory(program, choices, problem, can_exceed=can_exceed)
    return program


def _add_coupling(program: Program, choices: Sequence[Ints], coupling: Coupling) -> None:
    source, sides, cost = coupling.source, coupling.consumers, coupling.cost
    if not cost.any():
        return
    if len(sides) == 1:
        _add_pair(program, choices, source, sides[0], cost, cost)
        return
    decisions = source.decision, *(side.decision for side in sides)
    paid = program.columns(cost, "shared_conversion", decisions).reshape(cost.shape)
    for side in sides:
        pairs = _add_pair(program, choices, source, side, cost, np.zeros_like(cost))
        for row, column in zip(*np.nonzero(cost), strict=True):
            program.row(
                np.array([paid[row, column], pairs[row, column]]),
                np.array([1.0, -1.0]),
                0.0,
                np.inf,
            )


def _add_pair(
    program: Program,
    choices: Sequence[Ints],
    source: Side,
    side: Side,
    shape: Floats,
    cost: Floats,
) -> Ints:
    """Add columns e[s, w], one per pair of classes of the two sides, and rows that tie their sums
    to the choices; return the column numbers as a matrix."""
    decisions = source.decision, side.decision
    pairs = program.columns(cost, "conversion", decisions).reshape(shape.shape)
    for row in range(shape.shape[0]):
        laid_out = choices[source.decision][source.classes == row]
        _tie(program, pairs[row, :], laid_out)
    for column in range(shape.shape[1]):
        wanted = choices[side.decision][side.classes == column]
        _tie(program, pairs[:, column], wanted)
    if source.decision == side.decision:
        for row in range(shape.shape[0]):
            for column in range(shape.shape[1]):
                both = (source.classes == row) & (side.classes == column)
                _tie(program, pairs[row, column : column + 1], choices[side.decision][both])
    return pairs


def _tie(program: Program, pairs: Ints, chosen: Ints) -> None:
    """Add the constraint to the program that the columns ``pairs`` and ``chosen`` have equal
    sums."""
    columns = np.concatenate([pairs, chosen])
    values = np.concatenate([np.ones(len(pairs)), -np.ones(len(chosen))])
    program.row(columns, values, 0.0, 0.0)


UNIT_BYTES = 1e6
"""Bytes per unit in memory constraints: numbers in megabytes suit the solver's tolerances."""


def _add_memory(
    program: Program, choices: Sequence[Ints], problem: Problem, *, can_exceed: bool
) -> None:
    memory = problem.memory
    assert memory is not None
    columns: list[Ints] = []
    values: list[Floats] = []
    for cost, own in zip(memory.linear, choices, strict=True):
        columns.append(own)
        values.append(cost / UNIT_BYTES)
    for shared in memory.shared:
        held, sizes = _shared_columns(program, choices, shared)
        columns.append(held)
        values.append(sizes)
    for alternatives in memory.peaks:
        peak = program.columns(np.zeros(1), "peak_megabytes")
        columns.append(peak)
        values.append(np.ones(1))
        for alternative in alternatives:
            _add_alternative(program, choices, alternative, peak)
    price = np.array([problem.memory_weight * UNIT_BYTES])
    total = program.columns(price, "total_megabytes")
    row, sizes = np.concatenate(columns), np.concatenate(values)
    constant = memory.constant / UNIT_BYTES
    program.row(np.concatenate([row, total]), np.append(sizes, -1.0), -constant, -constant)
    limit = memory.limit / UNIT_BYTES
    if not np.isfinite(limit):
        return
    if not can_exceed:
        program.row(total, np.ones(1), -np.inf, limit)
        return
    excess = program.columns(np.array([EXCESS_COST]), "excess_megabytes")
    program.row(np.concatenate([total, excess]), np.array([1.0, -1.0]), -np.inf, limit)


EXCESS_COST = 1e4
"""Price in seconds per megabyte over the limit, above any saving of time."""


def _add_alternative(
    program: Program, choices: Sequence[Ints], alternative: Alternative, peak: Ints
) -> None:
    columns, values = [peak], [np.ones(1)]
    for decision, sizes in alternative.linear:
        columns.append(choices[decision])
        values.append(-sizes / UNIT_BYTES)
    for shared in alternative.shared:
        held, bytes_held = _shared_columns(program, choices, shared)
        columns.append(held)
        values.append(-bytes_held)
    program.row(np.concatenate(columns), np.concatenate(values), 0.0, np.inf)


def _shared_columns(
    program: Program, choices: Sequence[Ints], shared: SharedBytes
) -> tuple[Ints, Floats]:
    """Add a column per class, at least as large as every holder's choice of the class; return the
    columns and their bytes."""
    decisions = tuple(dict.fromkeys(side.decision for side in shared.holders))
    held = program.columns(np.zeros(len(shared.num_bytes)), "held", decisions)
    for side in shared.holders:
        for index, column in enumerate(held):
            own = choices[side.decision][side.classes == index]
            if len(own):
                program.row(
                    np.concatenate([[column], own]),
                    np.concatenate([[1.0], -np.ones(len(own))]),
                    0.0,
                    np.inf,
                )
    return held, shared.num_bytes / UNIT_BYTES


def invert(problem: Problem, raw: Raw) -> tuple[int, ...]:
    """Return the choice of each decision from the solver's values; ties go to the first choice."""
    choices, start = [], 0
    for cost in problem.costs:
        choices.append(int(np.argmax(raw.values[start : start + len(cost)])))
        start += len(cost)
    return tuple(choices)


def optimize(
    problem: Problem,
    *,
    time_limit_seconds: float = 60.0,
    seed: int = 0,
    gap: float = 0.0,
    cutoff: float = np.inf,
    solver: Solver = HIGHS,
    start: Sequence[int] = (),
) -> Answer:
    """Solve a problem: ``build``, ``solve`` and ``invert``; price the answer again from its
    choices.

    The answer's objective is within a relative ``gap`` of the optimum; if its bound shows that no
    solution is below ``cutoff``, its choices are arbitrary. ``start`` is a known assignment.

    Raises ``TimeLimitError`` (AP701) if nothing was found in time, ``MachineError`` (AP403) if the
    solver fails, ``KeyboardInterrupt`` if it is interrupted.
    """
    scale, normalized = _normalized(problem)
    program = build(normalized)
    raw = solver.solve(
        program,
        SolveOptions(
            time_limit_seconds,
            seed,
            gap,
            (cutoff - problem.constant) * scale,
            _columns_of(problem, start) if start else None,
        ),
    )
    check_solved(raw, solver)
    choices = invert(problem, raw)
    excess = 0.0
    if problem.memory is not None:
        excess = max(0.0, memory_bytes(problem.memory, choices) - problem.memory.limit)
    return Answer(
        raw.status,
        choices,
        cost(problem, choices),
        raw.bound / scale + problem.constant,
        raw.lp_integral,
        program.num_columns,
        excess,
    )


def check_solved(raw: Raw, solver: Solver) -> None:
    """Raise the error that ``optimize`` documents if the solver found no solution."""
    match raw.status:
        case "optimal" | "feasible" | "cutoff":
            return
        case "time_limit":
            raise TimeLimitError(
                "AP701",
                "no layouts were found within the time limit",
                fix="a longer --time-limit",
            )
        case "interrupted":
            raise KeyboardInterrupt
        case "infeasible" | "unbounded":
            raise MachineError(
                "AP403",
                f"the solver {solver.name} says that an integer program is {raw.status}",
                why="every stage has layouts, and memory over its limit only has a price",
                fix="another --solver",
            )
        case "error":
            raise MachineError(
                "AP403",
                f"the solver {solver.name} failed",
                why=raw.detail,
                fix="another --solver",
            )
        case _:
            assert_never(raw.status)


def _columns_of(problem: Problem, choices: Sequence[int]) -> Floats:
    """Return the values of the choice columns for known choices; the inverse of ``invert``."""
    own = [
        np.arange(len(cost)) == choice for cost, choice in zip(problem.costs, choices, strict=True)
    ]
    return np.concatenate(own).astype(np.float64)


def _normalized(problem: Problem) -> tuple[float, Problem]:
    """Return a scale and the scaled problem; costs above 1e3 exceed the solver's tolerances."""
    largest = max((float(np.abs(cost).max(initial=0.0)) for cost in problem.costs), default=0.0)
    for coupling in problem.couplings:
        largest = max(largest, float(np.abs(coupling.cost).max(initial=0.0)))
    if largest <= 0.0:
        return 1.0, problem
    return 1e3 / largest, scaled(problem, 1e3 / largest)


def scaled(problem: Problem, scale: float) -> Problem:
    """Return the problem with costs multiplied by ``scale``, without its constant."""
    return Problem(
        tuple(cost * scale for cost in problem.costs),
        tuple(
            Coupling(item.source, item.consumers, item.cost * scale) for item in problem.couplings
        ),
        problem.memory,
        problem.memory_weight * scale,
    )


def cost(problem: Problem, choices: Sequence[int]) -> float:
    """Return the cost of an assignment, computed from the problem without prices of memory."""
    total = problem.constant
    total += sum(float(own[choice]) for own, choice in zip(problem.costs, choices, strict=True))
    for coupling in problem.couplings:
        laid_out = coupling.source.classes[choices[coupling.source.decision]]
        wanted = {int(side.classes[choices[side.decision]]) for side in coupling.consumers}
        total += sum(float(coupling.cost[laid_out, each]) for each in sorted(wanted))
    return total


def memory_bytes(memory: Memory, choices: Sequence[int]) -> float:
    """Return the bytes that an assignment takes."""
    total = memory.constant + sum(
        float(sizes[choice]) for sizes, choice in zip(memory.linear, choices, strict=True)
    )
    total += sum(_shared_bytes(shared, choices) for shared in memory.shared)
    for alternatives in memory.peaks:
        total += max(
            (
                sum(float(sizes[choices[decision]]) for decision, sizes in item.linear)
                + sum(_shared_bytes(shared, choices) for shared in item.shared)
                for item in alternatives
            ),
            default=0.0,
        )
    return total


def _shared_bytes(shared: SharedBytes, choices: Sequence[int]) -> float:
    classes = {int(side.classes[choices[side.decision]]) for side in shared.holders} - {-1}
    return sum(float(shared.num_bytes[each]) for each in sorted(classes))
