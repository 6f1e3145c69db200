"""Request to the planner: the batch, the number format, limits, and forced choices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from ...cost_model.collectives.all_reduce import BY_MESSAGES, LIBRARY
from ...cost_model.ops.memory import GradientDtype, Offload, StateOptions
from ...cost_model.simulator.consistency import Consistency
from ..errors import UsageError
from ..plan import Float32Ops, GradientOrder, Precision, Recompute
from ..schedules.schedules import find_schedule, registered_schedule
from .features import DERIVED_SCHEDULES as DERIVED_SCHEDULES
from .features import Features
from .goal import Goal
from .pins import Pin

if TYPE_CHECKING:
    from ..inter_op.inter_op import Pipeline, Table

SCHEDULES = ("1f1b", "gpipe", "eager-1f1b", "zb-h1", "zb-h2")
"""Schedules with one stage per rank that the search chooses from."""

CHUNKED_SCHEDULES = ("interleaved", "bfs", "zbv", "dualpipev")
"""Schedules with several stages per rank that the search tries (``proposers.interleaved``)."""

MOST_CHUNKS = 8
"""Maximum number of stages per rank that the search tries."""

CHUNKED_NAMES = {name: name for name in CHUNKED_SCHEDULES} | {"interleaved-1f1b": "interleaved"}
"""Names and aliases of the schedules with several stages per rank."""

BASE_SCHEDULE = {"chimera": "1f1b", "terapipe": "gpipe"}
"""Schedule of the pipelines that are searched for each derived schedule."""

ASYNCHRONOUS = ("pipedream", "pipedream-2bw", "ampnet")
"""Schedules whose result differs from one device's: see ``planner.variants.asynchronous``."""

FORCED_SCHEDULES = (
    *SCHEDULES,
    "interleaved-1f1b",
    *CHUNKED_SCHEDULES,
    *DERIVED_SCHEDULES,
    *ASYNCHRONOUS,
)
"""Schedules that a request can force."""

ALL_REDUCES = (LIBRARY, *BY_MESSAGES)
"""Algorithms of gradient all-reduces that a request can force."""

LEAST_ZERO: dict[Offload, int] = {"none": 0, "optimizer": 0, "gradients": 2, "parameters": 3}
"""Least ZeRO stage over ranks that hold the same parameters, by the states in host memory."""


class Placer(Protocol):
    """Function that searches pipelines in place of the dynamic program (``inter_op.pipelines``)."""

    def __call__(
        self,
        table: Table,
        num_microbatches: int,
        stage_numbers: Iterable[int],
        *,
        time_limit_seconds: float,
    ) -> Sequence[Pipeline]:
        """Return the best pipelines found within the time limit, fastest first. ``table`` has the
        seconds of all possible stages, ``stage_numbers`` the allowed numbers of stages."""
        ...


IntraOpMethod = Literal["elimination", "ilp"]


def folded_axes(
    ep: int, dp: int, tp: int, cp: int, etp: int | None = None
) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes besides "dp" on which ranks hold different experts if ``ep`` ranks do,
    and the number of data-parallel ranks that do.

    Only data-parallel ranks do if ``dp`` is a multiple of ``ep`` and ``etp`` is not given. Else
    ranks are assigned in Megatron-LM's order: tensor-parallel neighbours, unless each expert is
    split over ``etp`` > 1 of them, context-parallel, data-parallel.

    >>> folded_axes(8, 4, 2, 1), folded_axes(4, 8, 2, 1), folded_axes(8, 1, 2, 4)
    ((('tp',), 4), ((), 4), (('tp', 'cp'), 1))
    """
    if etp is None and dp % ep == 0:
        return (), ep
    found = []
    for name, size in (("tp", tp), ("cp", cp)):
        is_split = name == "tp" and etp not in (None, 1)
        if size > 1 and ep % size == 0 and not is_split:
            found.append(name)
            ep //= size
    return tuple(found), ep


@dataclass(frozen=True, slots=True)
class Forced:
    """Choices of the user, which the search must keep; None leaves a choice to the search.

    ``dp=k``: k ranks split the batch and replicate parameters, except experts. ``tp=k``: a mesh
    axis "tp" of size k that splits no batch, but every parameter of two or more dimensions that k
    divides, and the compute with it. ``pp=k``: k pipeline ranks, each with ``chunks`` stages.
    ``cp=k``: a mesh axis "cp" of size k that splits positions. ``ep=k``: k ranks split the
    weights of experts by expert: neighbouring data-parallel ranks, or others too (``folded_axes``).
    ``etp=k``: each expert is split by its inner width over all "tp" ranks (k of them) or none (1).
    ``sequence_parallel``: whether values between the parameters split by "tp" are split along
    positions. ``slices``: number of equal slices of sequences; with "auto", and with None under a
    sliced schedule, the planner chooses their lengths. ``shard=k``: ZeRO shards states within
    groups of k neighbours among the ranks that hold a parameter whole. ``allreduce``: algorithm of
    every gradient sum (``ALL_REDUCES``); ``gradients``: order of the sums; both exclude ZeRO.
    ``offload``: see ``Plan``; with None, states are offloaded if nothing fits otherwise.
    ``servers``: number of parameter servers, whose ``place`` is on separate ranks or ``beside``
    workers.
    """

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    zero: int | None = None
    shard: int | None = None
    recompute: Recompute | None = None
    schedule: str | None = None
    num_microbatches: int | None = None
    chunks: int | None = None
    slices: int | Literal["auto"] | None = None
    allreduce: str | None = None
    gradients: GradientOrder | None = None
    offload: Offload | None = None
    servers: int | None = None
    consistency: Consistency | None = None
    staleness: int | None = None
    place: Literal["own", "beside"] | None = None
    sequence_parallel: bool | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "etp", "num_microbatches", "chunks", "servers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError("AP120", f"{name}={value} is less than 1")
        if self.slices is not None and self.schedule != "terapipe":
            raise UsageError("AP120", f"slices={self.slices} needs schedule=terapipe")
        if isinstance(self.slices, int) and self.slices < 1:
            raise UsageError("AP120", f"slices={self.slices} is less than 1")
        self._check_servers()
        if self.zero is not None and self.zero not in (0, 1, 2, 3):
            raise UsageError("AP121", f"zero={self.zero} is not one of 0, 1, 2 and 3")
        if self.shard is not None and (self.shard < 2 or self.zero == 0 or self.all_reduces):
            beside = [] if self.zero is None else [f"zero={self.zero}"]
            raise UsageError(
                "AP121",
                " with ".join((f"shard={self.shard}", *beside, *self.all_reduces)),
                why="shard is the number of ranks, 2 or more, over which ZeRO 1 to 3 shards states",
                where="--parallel",
                fix="zero=1, 2 or 3, or leave shard out",
            )
        if self.offload not in (None, *get_args(Offload)):
            raise UsageError(
                "AP190", f"offload={self.offload} is not one of {', '.join(get_args(Offload))}"
            )
        self._check_offload()
        if self.all_reduces and self.zero:
            raise UsageError(
                "AP195",
                f"{' and '.join(self.all_reduces)} with zero={self.zero}",
                why="ZeRO 1 to 3 sum gradients by reduce-scatters, block by block",
                where="--parallel",
                fix="zero=0, or leave allreduce and gradients out",
            )

    def _check_offload(self) -> None:
        if self.offload in (None, "none"):
            return
        wrong, why, fix = "", "", ""
        if self.schedule in ASYNCHRONOUS:
            wrong, fix = f"schedule={self.schedule}", "a synchronous schedule, or no offload"
            why = "it updates weights in the middle of a step, on the device"
        elif self.offload == "parameters" and self.zero not in (None, 3):
            wrong, fix = f"zero={self.zero}", "zero=3, or offload=gradients"
            why = "it is the shards of ZeRO 3 that host memory can hold"
        elif self.offload == "gradients" and self.zero in (0, 1) and self.dp != 1:
            wrong, fix = f"zero={self.zero}", "zero=2 or 3, or offload=optimizer"
            why = "ranks that share the batch would hold whole gradients until the step's end"
        elif self.offload != "optimizer" and self.all_reduces:
            wrong, fix = " and ".join(self.all_reduces), "offload=optimizer, or leave them out"
            why = "they sum gradients on the device, at the end of a step"
        if wrong:
            what = f"offload={self.offload} with {wrong}"
            raise UsageError("AP191", what, why=why, where="--parallel", fix=fix)

    @property
    def decided(self) -> Mapping[str, Any]:
        """Return the choices that are not None, by name."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, others: Forced) -> Forced:
        """Return these choices, with each None replaced by the choice of ``others``.

        >>> Forced(tp=2).over(Forced(tp=4, zero=1)) == Forced(tp=2, zero=1)
        True
        """
        return Forced(**{**others.decided, **self.decided})

    @property
    def row_parts(self) -> int:
        """Return the forced number of ranks that split the batch: ``dp`` (which includes ``ep``),
        else ``ep``, else 1."""
        return self.dp or self.ep or 1

    @property
    def all_reduces(self) -> tuple[str, ...]:
        """Return the forced options that require gradient all-reduces, as texts "name=value"."""
        said = [f"allreduce={self.allreduce}"] if self.allreduce not in (None, LIBRARY) else []
        return (*said, *(["gradients=priority"] if self.gradients == "priority" else []))

    def _check_servers(self) -> None:
        for name in ("consistency", "staleness", "place"):
            value = getattr(self, name)
            if value is not None and self.servers is None:
                raise UsageError("AP120", f"{name}={value} needs servers=")
        if (self.staleness is not None) != (self.consistency == "ssp"):
            raise UsageError(
                "AP957",
                "consistency=ssp and staleness=s belong together",
                why="staleness is how many iterations a worker may be ahead of the slowest",
                where="--parallel",
                fix="consistency=ssp,staleness=2",
            )

    @property
    def least_chunks(self) -> int:
        """Return the forced number of stages per rank, else the forced schedule's minimum or 1."""
        if self.chunks is not None:
            return self.chunks
        own = registered_schedule(self.schedule)
        return own.chunks[0] if own is not None else 2 if self.schedule in CHUNKED_NAMES else 1


@dataclass(frozen=True, slots=True)
class Request:
    """Input of the planner.

    ``global_batch`` rows make a step. ``microbatch_size``: rows of a micro-batch on one
    data-parallel rank; None leaves it to the search. ``memory_limit_bytes`` replaces the memory of
    each device. ``top``: number of candidate plans that the simulator ranks. ``gap``: allowed
    relative distance of the plan's step time from a proven lower bound. ``tolerance``: relative
    distance from the fastest plan within which the simplest plan is chosen (0: the fastest).
    ``pins`` are required layouts, ``stage_at`` blocks that must begin stages; ``max_tp`` and
    ``features`` are limits, ``goal`` is the objective. ``target`` and ``settings`` are only copied
    to the plan. ``intra_op`` solves the layouts of stages: cost tables by elimination, or integer
    programs, by the solver that ``solver`` names. ``placer`` searches pipelines;
    with None the dynamic program does.
    """

    global_batch: int
    seq: int | None = None
    precision: Precision = "fp32"
    float32_ops: Float32Ops = "none"
    gradient_dtype: GradientDtype = "master"
    optimizer: str = "adamw"
    offload: Offload = "none"
    memory_limit_bytes: int | None = None
    microbatch_size: int | None = None
    forced: Forced = field(default_factory=Forced)
    time_limit_seconds: float = 60.0
    top: int = 5
    gap: float = 0.01
    tolerance: float = 0.0
    pins: tuple[Pin, ...] = ()
    stage_at: tuple[str, ...] = ()
    max_tp: int | None = None
    features: Features = field(default_factory=Features)
    goal: Goal = field(default_factory=Goal)
    target: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    placer: Placer | None = None
    solver: str = "highs"
    intra_op: IntraOpMethod = "elimination"

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise UsageError("AP123", f"a global batch of {self.global_batch} has no samples")
        check_schedule_name(self.forced.schedule)
        check_allowed(self.forced, self.features, max_tp=self.max_tp, gap=self.gap)
        check_tolerance(self.tolerance)
        rows = self.microbatch_size
        if rows is not None and (rows < 1 or self.global_batch % rows):
            raise UsageError(
                "AP124",
                f"a global batch of {self.global_batch} samples cannot be split into micro-batches "
                f"of {rows}",
                fix=f"a divisor of {self.global_batch}: "
                + ", ".join(str(size) for size in divisors(self.global_batch)),
            )

    @property
    def states(self) -> StateOptions:
        """Format of summed gradients, and the states that are in host memory."""
        return StateOptions(self.gradient_dtype, self.offload)

    @property
    def schedules(self) -> tuple[str, ...]:
        """Return the schedules of one stage per rank for which to search pipelines: all allowed;
        for a forced Chimera or TeraPipe the schedule whose pipelines it takes over."""
        name = self.forced.schedule
        if name is not None and not self.forces_chunks:
            return (BASE_SCHEDULE.get(name, name),)
        allowed = tuple(name for name in SCHEDULES if self.features.allows(name))
        return allowed or SCHEDULES

    @property
    def allows_one_stage(self) -> bool:
        """Return whether the final plan may have one stage per pipeline rank."""
        if self.forced.schedule is not None:
            return not self.forces_chunks and self.forced.schedule not in BASE_SCHEDULE
        return any(map(self.features.allows, SCHEDULES))

    @property
    def chunked_schedules(self) -> tuple[str, ...]:
        """Return the allowed schedules with several stages per rank."""
        if self.forced.schedule is not None:
            name = self.forced.schedule
            return (CHUNKED_NAMES.get(name, name),) if self.forces_chunks else ()
        return tuple(name for name in CHUNKED_SCHEDULES if self.features.allows(name))

    @property
    def forces_chunks(self) -> bool:
        """Return whether the request forces several stages per rank, by schedule or number."""
        return self.forced.schedule is not None and self.forced.least_chunks > 1

    @property
    def arranged_schedules(self) -> tuple[str, ...]:
        """Return the derived schedules (Chimera, TeraPipe) to try: if forced, allowed by name, or
        not denied where the number of stages is forced, so that fewer cannot shorten the bubble."""
        if self.forced.schedule is not None:
            return (self.forced.schedule,) if self.forced.schedule in DERIVED_SCHEDULES else ()
        allows = self.features.allows_change if self.forced.pp is None else self.features.allows
        return tuple(name for name in DERIVED_SCHEDULES if allows(name))

    @property
    def zeros(self) -> tuple[int, ...]:
        """Return the allowed ZeRO stages."""
        if self.forced.all_reduces:
            return (0,)
        least = 1 if self.forced.shard is not None else 0
        least = max(least, LEAST_ZERO[self.offload])
        allowed = tuple(zero for zero in self.features.zeros if zero >= least)
        return allowed if self.forced.zero is None else (self.forced.zero,)

    @property
    def shard_degree(self) -> int:
        """Return the ``CostAssumptions.shard_degree`` that the request allows."""
        return self.forced.shard or int(not self.features.allows("hsdp"))

    @property
    def recompute(self) -> Recompute | None:
        """Return the recomputation mode that the request requires of every block; None if the
        search may choose it."""
        if self.forced.recompute is None and self.features.recompute == ("none",):
            return "none"
        return self.forced.recompute

    @property
    def recomputations(self) -> tuple[Recompute, ...]:
        """Return the allowed recomputation modes, in descending order of kept activations."""
        return self.features.recompute if self.recompute is None else (self.recompute,)


def offloading(request: Request, states: Offload) -> Request:
    """Return the request with these states in host memory. Raises UsageError if it excludes
    them."""
    return replace(request, offload=states, forced=replace(request.forced, offload=states))


def check_allowed(forced: Forced, features: Features, *, max_tp: int | None, gap: float) -> None:
    """Raise UsageError AP186 if a choice is both forced and denied, AP187 if ``gap`` is not between
    0 and 1, AP120 if ``max_tp`` is below 1."""
    if not 0 <= gap < 1:
        raise UsageError("AP187", f"a gap of {gap:g} is not between 0 and 1")
    if max_tp is not None and max_tp < 1:
        raise UsageError("AP120", f"max_tp={max_tp} is less than 1")
    if max_tp is not None and forced.tp is not None and forced.tp > max_tp:
        raise UsageError(
            "AP186",
            f"tp={forced.tp} is fixed, but --max-tp is {max_tp}",
            fix="remove --parallel tp or --max-tp",
        )
    wanted = [name for name in ("dp", "tp", "pp", "cp", "ep") if (getattr(forced, name) or 1) > 1]
    wanted += [f"zero{forced.zero}"] if forced.zero else []
    wanted += ["hsdp"] if forced.shard is not None else []
    wanted += [forced.recompute] if forced.recompute not in (None, "none") else []
    wanted += ["offload"] if forced.offload not in (None, "none") else []
    least = LEAST_ZERO[forced.offload or "none"]
    wanted += [f"zero{least}"] if least > max(features.zeros) else []
    wanted += [forced.schedule] if forced.schedule is not None else []
    wanted += ["servers", forced.consistency or "bsp"] if forced.servers is not None else []
    for name in wanted:
        if not features.allows(name):
            raise UsageError(
                "AP186",
                f"{name} is both fixed and denied",
                fix="remove it from --parallel or --deny, or add it to --allow",
            )


def check_schedule_name(name: str | None) -> None:
    """Raise UsageError AP150 if no schedule has this name, AP122 if a request cannot force it."""
    if name is not None and name not in FORCED_SCHEDULES and not find_schedule(name).is_registered:
        raise UsageError("AP122", f"schedule={name} is not one of {', '.join(FORCED_SCHEDULES)}")


def check_tolerance(tolerance: float) -> None:
    """Raise UsageError AP841 if ``--tolerance`` is not between 0 and 1."""
    if not 0 <= tolerance < 1:
        raise UsageError(
            "AP841",
            f"a tolerance of {tolerance:g} is not between 0 and 1",
            where="--tolerance",
            fix="0.02 treats plans within 2 % of the fastest as equally fast",
        )


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number in ascending order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))
